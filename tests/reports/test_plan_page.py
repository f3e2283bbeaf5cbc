"""The page of a plan: its layouts and charts show what the planner found, and work in a browser."""

from __future__ import annotations

import re
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from report_pages import WINDOWS, chart_specs, check_looks, opened, points

from fourfold.planning.plan_record import PlanRecord, plan_request
from fourfold.planning.request import request_from_options
from fourfold.reports import html
from fourfold.reports.plan_report import FASTEST, write_plan_report
from fourfold.reports.plan_terminal import PARTS_NAMED, slower_by, tune_command

if TYPE_CHECKING:
    from playwright.sync_api import Browser

LIMITS = ["pp=4", "cp<=2", "schedule=1F1B,Interleaved1F1B,ZBVZeroBubble"]


def planned(model: str, machine: str, gpus: int, batch: int, limits: list[str]) -> PlanRecord:
    request = request_from_options(model, gpus=gpus, batch=batch)
    return plan_request(request, machine, limits, 10, 1e12, explained=True)


@pytest.fixture(scope="module")
def result() -> PlanRecord:
    return planned("llama3-8b", "dgx-h100", 32, 64, LIMITS)


@pytest.fixture(scope="module")
def page_file(result: PlanRecord, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "plan.html"
    write_plan_report(path, result)
    return path


def test_the_table_has_the_fastest_layouts_and_counts_every_refusal(result: PlanRecord, page_file: Path) -> None:
    text, found = page_file.read_text(encoding="utf-8"), result.plan.found
    rows = re.findall("<tr><td>(.*?)</td><td>(.*?)</td>", text)
    assert [rank for rank, _ in rows[:FASTEST]] == [str(rank + 1) for rank in range(FASTEST)]
    assert rows[0][1] == f"{result.plan.best.seconds:#.4g}"
    for reason, count in found.rejected().items():
        assert (escape(reason), f"{count:,}") in rows


def test_the_waterfall_names_seven_parts_and_loses_none(result: PlanRecord, page_file: Path) -> None:
    drawn = points(page_file.read_text(encoding="utf-8"), "Where a step's time goes")
    parts = [data for name, data in drawn.items() if name != "total"]
    assert len(parts) == PARTS_NAMED and "other" in drawn
    assert sum(data[0] for data in parts) == pytest.approx(result.plan.best.seconds)


def test_the_page_gives_the_command_of_the_trials(result: PlanRecord, page_file: Path) -> None:
    assert html.code(tune_command(result)) in page_file.read_text(encoding="utf-8")


def test_a_neighbor_is_slower_or_faster_or_the_same() -> None:
    shares = {-0.0001: "the same", 0.0001: "the same", 0.0: "the same", -0.002: "0.2% faster", 0.1: "10.0% slower"}
    assert {share: slower_by({"slower": share, "reason": ""}) for share in shares} == shares


@pytest.mark.parametrize(("width", "scheme"), WINDOWS)
def test_the_page_is_legible(result: PlanRecord, page_file: Path, browser: Browser, width: int, scheme: str) -> None:
    best = result.plan.best
    with opened(browser, page_file, width, scheme) as page:
        drawn = check_looks(page)
        assert drawn.keys() == chart_specs(page_file.read_text(encoding="utf-8")).keys() and len(drawn) == 2
        assert page.locator(".facts dt").first.text_content() == "s/step"
        assert page.locator(".facts dd").first.inner_text() == f"{best.seconds:.4g}"
        assert page.locator("table.search tbody tr").first.locator("td").first.inner_text() == "1"
        assert page.locator("table.search thead tr").first.locator("th").nth(1).inner_text() == "s/step"


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
