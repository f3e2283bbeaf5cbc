"""The page of a plan: its layouts, charts and timeline say what the planner found, and work in a browser."""

from __future__ import annotations

import json
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from report_pages import WINDOWS, chart_specs, check_looks, opened, points

from fourfold.planning.plan_record import REFUSED_EACH, PlanRecord, plan_request
from fourfold.planning.request import request_from_options
from fourfold.planning.search.limits import parse_limits
from fourfold.planning.search.refused import refused_sample
from fourfold.planning.search.space import OUT_OF_MEMORY, REASONS, rejections
from fourfold.reports.layout_sample import FASTEST, shown_layouts
from fourfold.reports.plan_report import write_plan_report
from fourfold.reports.plan_terminal import PARTS_NAMED, slower_by, tune_command
from fourfold.reports.timeline_chart import REST, timeline_bars

if TYPE_CHECKING:
    from playwright.sync_api import Browser

LIMITS = ["pp=4", "cp<=2", "schedule=1F1B,Interleaved1F1B,ZBVZeroBubble"]


def planned(model: str, machine: str, gpus: int, batch: int, limits: list[str]) -> PlanRecord:
    request = request_from_options(model, gpus=gpus, batch=batch)
    return plan_request(request, machine, limits, 10, 1e12, explained=True, for_page=True)


@pytest.fixture(scope="module")
def result() -> PlanRecord:
    return planned("llama3-8b", "dgx-h100", 32, 64, LIMITS)


@pytest.fixture(scope="module")
def page_file(result: PlanRecord, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "plan.html"
    write_plan_report(path, result)
    return path


def test_refused_layouts_are_illegal_for_the_reason_that_is_said(result: PlanRecord) -> None:
    machine = result.plan.machine
    sample = refused_sample(result.request.base, machine, result.plan.constants, 32, parse_limits(LIMITS), REFUSED_EACH)
    assert np.array_equal(rejections(sample.work, machine), sample.reason)
    counts = np.bincount(sample.reason, minlength=len(REASONS))
    rejected = result.plan.found.rejected()
    assert {REASONS[i] for i in np.flatnonzero(counts)} == rejected.keys() - {REASONS[OUT_OF_MEMORY]}
    assert all(n == min(REFUSED_EACH, rejected[REASONS[i]]) for i, n in enumerate(counts) if n)


def test_the_fastest_layouts_are_shown_with_their_ranks(result: PlanRecord) -> None:
    layouts, found = shown_layouts(result), result.plan.found
    first = [layout for layout in layouts if not layout.refused][:FASTEST]
    assert [layout.label for layout in first] == [str(rank + 1) for rank in range(FASTEST)]
    assert [layout.seconds for layout in first] == found.seconds[found.order[:FASTEST]].tolist()
    ranked = [layout for layout in layouts if layout.label]
    assert len(ranked) > FASTEST and ranked[-1].label == str(len(found.order))  # the sample has the slowest too
    for layout in layouts:
        cells = layout.cells(result)
        assert cells["refused"] == layout.refused and (cells["s/step"] != "") == layout.is_legal


def test_the_scatter_counts_and_explains_every_refusal(result: PlanRecord, page_file: Path) -> None:
    drawn = points(page_file.read_text(encoding="utf-8"), "Step time against memory")
    found = result.plan.found
    for reason, count in {"fits": len(found.order), **found.rejected()}.items():
        name = next(name for name in drawn if name.startswith(f"{reason} ("))
        assert name.endswith(f" of {count:,})") and f"({len(drawn[name]):,} of" in name
        if reason != "fits":
            assert all(f"refused: {reason}" in point["text"] for point in drawn[name])
    best = result.plan.best
    assert drawn["best"][0]["value"] == [best.memory_bytes / 1e9, pytest.approx(best.seconds)]


def test_the_waterfall_names_seven_parts_and_loses_none(result: PlanRecord, page_file: Path) -> None:
    drawn = points(page_file.read_text(encoding="utf-8"), "Where a step's time goes")
    parts = [data for name, data in drawn.items() if name != "total"]
    assert len(parts) == PARTS_NAMED and "other" in drawn
    assert sum(data[0] for data in parts) == pytest.approx(result.plan.best.seconds)


def test_the_page_gives_the_command_of_the_trials(result: PlanRecord, page_file: Path) -> None:
    assert f"<pre>{escape(tune_command(result))}</pre>" in page_file.read_text(encoding="utf-8")


def test_a_neighbor_is_slower_or_faster_or_the_same() -> None:
    shares = {-0.0001: "the same", 0.0001: "the same", 0.0: "the same", -0.002: "0.2% faster", 0.1: "10.0% slower"}
    assert {share: slower_by({"slower": share, "reason": ""}) for share in shares} == shares


@pytest.mark.parametrize(
    ("model", "machine", "gpus", "batch", "limits"),
    [
        ("llama3-8b", "dgx-h100", 32, 64, ["pp=4", "schedule=ZBVZeroBubble", "z=1", "zero=0,1"]),
        ("llama3-8b", "dgx-h100", 32, 64, ["pp=4", "schedule=Interleaved1F1B"]),
        ("gpt2", "laptop", 2, 16, []),
        ("llama3-70b", "dgx-h100", 256, 4096, ["pp=32", "schedule=1F1B"]),
    ],
)
def test_the_timeline_is_the_step(model: str, machine: str, gpus: int, batch: int, limits: list[str]) -> None:
    best = plan_request(request_from_options(model, gpus=gpus, batch=batch), machine, limits, 1, None, False).plan.best
    bars, cut = timeline_bars(best)
    pp, count = int(best.work.layout.pp), int(best.work.micro_batches)
    assert (cut == "") == (pp < 32)
    by_rank: dict[int, list[Any]] = {}
    for bar in sorted(bars, key=lambda bar: bar.begin):
        assert bar.begin < bar.end
        assert not by_rank.get(bar.rank) or bar.begin >= by_rank[bar.rank][-1].end - 1e-9
        by_rank.setdefault(bar.rank, []).append(bar)
    for rank_bars in by_rank.values():
        work = [bar for bar in rank_bars if bar.kind != REST]
        shown = len({bar.micro_batch for bar in work})
        busy = sum(bar.end - bar.begin for bar in work)
        assert busy == pytest.approx(shown * best.micro_batch_seconds)
        assert (shown == count) == (cut == "")
        if cut == "":
            assert rank_bars[-1].kind == REST and rank_bars[-1].end == pytest.approx(best.seconds)


@pytest.mark.parametrize(("width", "scheme"), WINDOWS)
def test_the_page_is_legible(result: PlanRecord, page_file: Path, browser: Browser, width: int, scheme: str) -> None:
    best = result.plan.best
    with opened(browser, page_file, width, scheme) as page:
        drawn = check_looks(page)
        assert drawn.keys() == chart_specs(page_file.read_text(encoding="utf-8")).keys() and len(drawn) == 6
        assert {"GB of the fullest rank", "seconds a step (log)"} <= set(drawn["Step time against memory"].texts)
        lines = next(chart for title, chart in drawn.items() if title.startswith("What layouts choose"))
        assert {"dp", "z", "x", "zero", "recompute", "s/step"} <= set(lines.texts)
        assert page.locator(".facts dd").first.inner_text() == f"{best.seconds:.4g} s"
        assert page.locator("table.search tbody tr").first.locator("td").first.inner_text() == "1"
        assert page.locator("table.search thead tr").first.locator("th").nth(1).inner_text() == "s/step"
        for title, name in (("Step time against memory", "GB"), ("Timeline of a step", "seconds")):
            chart = next(chart for begin, chart in drawn.items() if begin.startswith(title))
            numbers = [text for text in chart.texts if text.replace(".", "", 1).isdecimal()]
            assert numbers and max(map(len, numbers)) <= 5, (name, chart.texts)


def test_rows_are_kept_and_sorted(page_file: Path, browser: Browser) -> None:
    with opened(browser, page_file, 1280, "light") as page:
        table = page.locator("table.search")
        headers = table.locator("thead tr").first.locator("th").all_inner_texts()

        def column(name: str) -> list[str]:
            cells = table.locator(f"tbody tr:not([hidden]) td:nth-child({headers.index(name) + 1})")
            return cells.all_inner_texts()

        everything = len(column("zero"))
        table.get_by_label("keep rows by zero").fill("1,2")
        kept = column("zero")
        assert set(kept) == {"1", "2"} and len(kept) < everything
        table.get_by_label("keep rows by GB").fill("<=60")
        sizes = [float(size) for size in column("GB")]
        assert sizes and max(sizes) <= 60
        assert page.locator("p.subtitle").nth(1).inner_text() == f"{len(sizes)} of {everything} rows"
        table.get_by_role("button", name="GB", exact=True).click()
        assert [float(size) for size in column("GB")] == sorted(sizes)
        table.get_by_role("button", name="GB", exact=True).click()
        assert [float(size) for size in column("GB")] == sorted(sizes, reverse=True)
        for name in ("GB", "zero"):
            table.get_by_label(f"keep rows by {name}").fill("")
        rates, field = column("tokens/s/GPU"), table.get_by_label("keep rows by tokens/s/GPU")
        rate = next(each for each in rates if "," in each)
        for text in (rate, rate.replace(",", ""), f"{rate}-{rate}"):
            field.fill(text)
            assert set(column("tokens/s/GPU")) == {rate}
        field.fill("")
        for text in ("≤2", "0-2"):
            table.get_by_label("keep rows by zero").fill(text)
            assert set(column("zero")) == {"0", "1", "2"}
        table.get_by_label("keep rows by zero").fill("")
        table.get_by_label("keep rows by refused").fill("global batch")
        assert all("global batch" in reason for reason in column("refused")) and column("s/step")[0] == ""


def test_a_brush_keeps_the_same_layouts_in_the_table(page_file: Path, browser: Browser) -> None:
    with opened(browser, page_file, 1280, "light") as page:
        figure = page.locator("figure.chart", has_text="What layouts choose")
        figure.scroll_into_view_if_needed()
        box = figure.locator(".plot").bounding_box()
        label = figure.locator("svg text", has_text="s/step").bounding_box()
        assert box is not None and label is not None
        x = label["x"] + label["width"] / 2
        page.mouse.move(x, box["y"] + box["height"] - 40)
        page.mouse.down()
        page.mouse.move(x, box["y"] + box["height"] - 140, steps=5)
        page.mouse.up()
        page.wait_for_timeout(100)
        shown = page.locator("table.search tbody tr:not([hidden])")
        ranks = shown.locator("td:first-child").all_inner_texts()
        assert 0 < len(ranks) < 300 and ranks[0] == "1" and all(ranks)


def test_the_timeline_is_saved_for_perfetto(
    result: PlanRecord, page_file: Path, browser: Browser, tmp_path: Path
) -> None:
    with opened(browser, page_file, 1280, "light") as page:
        with page.expect_download() as download:
            page.locator("button.trace").click()
        download.value.save_as(tmp_path / "trace.json")
    trace = json.loads((tmp_path / "trace.json").read_text(encoding="utf-8"))
    bars, _ = timeline_bars(result.plan.best)
    spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert len(spans) == len(bars)
    assert sorted((e["tid"], e["ts"], e["dur"]) for e in spans) == [
        pytest.approx(each) for each in sorted((b.rank, 1e6 * b.begin, 1e6 * (b.end - b.begin)) for b in bars)
    ]
    names = [event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "thread_name"]
    assert sorted(names) == [f"rank {rank} of pp" for rank in range(4)]
