"""The pages of training runs in a browser: how they look, and what their controls do."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from recorded_runs import lines, make_run, record
from report_pages import SCHEMES, WIDTHS, check_looks, check_page, opened

from fourfold.reports.run_report import write_comparison, write_run_report

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

STEPS = 60
LONG = "a-very-long-name-without-any-space-in-it-" * 3


def whole_run(folder: Path, **changes: Any) -> Path:
    """Make a run with everything that a page can show."""
    records = [
        record(step, loss=2 + 4 / step, step_seconds=60.0, mfu=0.4, expert_load=2.0) for step in range(1, STEPS + 1)
    ]
    for step in range(9, STEPS, 10):
        records[step] |= {"validation_loss": 2.5 + 2 / step}
    canaries = {str(count): {"exact_match": count / 64, "loss": 3.0 - count / 32} for count in (0, 4, 64)}
    return make_run(
        folder,
        [each | changes for each in records],
        sample_txt=LONG * 4,
        summary_json=json.dumps({"parameters": 8030261248, "checkpoint": f"runs/{LONG}/step_60"}),
        memorization_jsonl=lines([{"step": s, "tokens": s * 1000, "by_count": canaries} for s in (20, 40, 60)]),
        tasks_jsonl=lines([{"step": s, "tasks": {"hellaswag": {"acc": s / 100}}} for s in (20, 40, 60)]),
        attempts_jsonl=lines([{"restarts": 0, "first_step": step} for step in (0, 20, 40)]),
    )


@pytest.fixture(scope="module")
def run_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the page of one run."""
    return write_run_report(whole_run(tmp_path_factory.mktemp("runs") / "run"))


def curves(page: Page, number: int = 0) -> dict[str, list[list[float]]]:
    """Return what a chart of curves shows, by the curves' names."""
    found = page.evaluate(
        "number => fourfold.charts[number].drawn.series.map(({id, name, data}) => [id.split(' ')[0], name, data])",
        number,
    )
    return {name if kind == "curve" else f"{kind} {name}": data for kind, name, data in found}


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_nothing_is_cut(browser: Browser, run_page: Path, width: int, scheme: str) -> None:
    with opened(browser, run_page, width, scheme) as page:
        drawn = check_looks(page)
        text = page.inner_text("body")
    for words in ("60 steps recorded", "2.06667", "12.6", "40.0%", "1 h", "20, 40", "resumed from a checkpoint"):
        assert words in text, words  # the last validation loss, 2.5 + 2/59, is a perplexity of 12.6
    assert {"nats per token", "tokens"} <= set(drawn["Loss"].texts)
    assert "% of the canaries" in drawn["Canaries repeated exactly"].texts
    assert {
        "acc",
        "Model FLOPs utilization",
    } <= drawn.keys()


@pytest.mark.slow
def test_nothing_of_a_comparison_is_cut(browser: Browser, tmp_path: Path) -> None:
    runs = [whole_run(tmp_path / name) for name in ("one", LONG[:100])]
    write_comparison(runs, tmp_path / "page.html")
    assert check_page(browser, tmp_path / "page.html").keys() >= {"Loss", "Gradient norm", "Learning rate"}


def test_curves_follow_the_controls(browser: Browser, run_page: Path) -> None:
    with opened(browser, run_page, 1280, "light") as page:
        assert curves(page)["train"][:2] == [[1000, 6], [2000, 4]]
        page.click("[value=steps]")
        assert curves(page)["train"][:2] == [[1, 6], [2, 4]]
        page.click("[value=time]")
        assert curves(page)["train"][-1] == [60, pytest.approx(2.06667)], "minutes"
        page.click("[value=perplexity]")
        assert curves(page)["train"][0][1] == pytest.approx(math.exp(6))
        assert curves(page)["validation"][0][1] == pytest.approx(math.exp(2.5 + 2 / 9), rel=1e-5)
        page.click("[value=log]")
        assert page.evaluate("fourfold.charts.slice(0, 3).map(each => each.drawn.yAxis.type)") == ["log"] * 3
        page.click(".legend button[data-series=validation]")
        assert page.evaluate("fourfold.charts[0].chart.getOption().legend[0].selected.validation") is False


def test_smoothing_is_the_mean_of_neighbors(browser: Browser, run_page: Path) -> None:
    """Weights are exp(−distance/tau), also at both ends. Evaluations and the learning rate are not smoothed."""
    with opened(browser, run_page, 1280, "light") as page:
        page.locator("[data-control=smoothing]").fill("100")
        assert "over 10 % of the run" in page.inner_text(".controls")
        shown, rate = curves(page), curves(page, 2)
    loss, tau = [2 + 4 / step for step in range(1, STEPS + 1)], STEPS / 10
    for at in (0, 30, STEPS - 1):
        weights = [math.exp(-abs(step - at) / tau) for step in range(STEPS)]
        mean = sum(w * y for w, y in zip(weights, loss, strict=True)) / sum(weights)
        assert shown["train"][at][1] == pytest.approx(mean, rel=1e-4)
    assert shown["raw train"][0][1] == 6 and shown["validation"][0][1] == pytest.approx(2.5 + 2 / 9, rel=1e-5)
    assert rate.keys() == {"Learning rate"}


def test_a_box_zooms_all_curves_and_a_button_shows_everything(browser: Browser, run_page: Path) -> None:
    zoom = "number => fourfold.charts[number].chart.getOption().dataZoom[0]"
    with opened(browser, run_page, 1280, "light") as page:
        box = page.locator(".plot").first.bounding_box()
        assert box is not None
        page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 80)
        page.mouse.down()
        page.mouse.move(box["x"] + box["width"] * 0.75, box["y"] + 120, steps=4)
        page.mouse.up()
        for number in (0, 1):
            found = page.evaluate(zoom, number)
            assert (found["start"], found["end"]) == (pytest.approx(49, abs=3), pytest.approx(75, abs=3))
        page.locator(".reset").nth(1).click()
        assert [page.evaluate(zoom, number)["end"] for number in (0, 1)] == [100, 100]
        assert page.locator(".reset").first.is_hidden()


def test_the_pointer_names_the_value_of_every_curve(browser: Browser, run_page: Path) -> None:
    with opened(browser, run_page, 1280, "dark") as page:
        box = page.locator(".plot").first.bounding_box()
        assert box is not None
        page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 100)
        shown = page.locator(".values").first.inner_text().split()
    assert shown[::2] == ["train", "validation"] and all(2 < float(value) < 3 for value in shown[1::2])


def test_runs_may_be_called_like_curves_and_colors(browser: Browser, tmp_path: Path) -> None:
    names = ("x", "x, validation", "--s1", "@bar")
    runs = [make_run(tmp_path / name, [record(1), record(2, validation_loss=2.0)]) for name in names]
    write_comparison(runs, tmp_path / "page.html")
    with opened(browser, tmp_path / "page.html", 1280, "light") as page:
        check_looks(page)
        keys = page.locator(".legend").first.locator("button").all_inner_texts()
        ids = page.evaluate("fourfold.charts[0].chart.getOption().series.map(({id}) => id)")
    assert set(names) <= {key.strip() for key in keys}
    assert len(set(ids)) == len(ids) == 2 * len(names)


def test_one_bad_chart_does_not_hide_other_charts(browser: Browser, run_page: Path, tmp_path: Path) -> None:
    text = run_page.read_text(encoding="utf-8")
    start = text.index('{"curves"', text.index("<b>Gradient norm</b>"))
    for bad in ('{"option":null,"zoom":"x"}', "not JSON"):
        path = tmp_path / "bad.html"
        path.write_text(text[:start] + bad + text[text.index("</script>", start) :], encoding="utf-8")
        context = browser.new_context(viewport={"width": 1280, "height": 900})
        page, errors = context.new_page(), []
        page.on("console", lambda message, errors=errors: errors.append(message.text))
        page.goto(path.as_uri())
        drawn = check_looks(page)
        assert "Gradient norm" not in drawn and {"Loss", "Learning rate", "acc"} <= drawn.keys()
        assert page.locator("figure", has_text="Gradient norm").locator(".empty").inner_text().startswith("This chart")
        assert len(errors) == 1
        page.click("[value=steps]")
        assert curves(page)["train"][0][0] == 1
        context.close()


def test_the_sentence_of_an_empty_chart_is_in_its_middle(browser: Browser, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", [record(1, loss=None)])
    with opened(browser, write_run_report(run), 1920, "light") as page:
        figure = page.locator(".wide figure")
        inside, outside = figure.locator(".empty").bounding_box(), figure.bounding_box()
    assert inside is not None and outside is not None and inside["width"] > 0.9 * outside["width"]


def test_a_loss_between_two_that_are_not_finite_is_a_dot(browser: Browser, tmp_path: Path) -> None:
    losses = [3.0, 2.9, None, 2.8, None, 2.7, 2.6]
    run = make_run(tmp_path / "run", [record(step, loss=loss) for step, loss in enumerate(losses, start=1)])
    with opened(browser, write_run_report(run), 1280, "light") as page:
        assert curves(page)["alone train"] == [[4000, 2.8]]
        page.click("[value=log]")
        assert curves(page)["alone train"] == [[4000, 2.8]]
        assert "alone Gradient norm" not in curves(page, 1)


def test_the_thirteenth_run_has_a_color_and_a_dash_of_its_own(browser: Browser, tmp_path: Path) -> None:
    runs = [make_run(tmp_path / f"run{number}", [record(1), record(2)]) for number in range(13)]
    write_comparison(runs, tmp_path / "page.html")
    with opened(browser, tmp_path / "page.html", 1280, "light") as page:
        looks = page.evaluate("fourfold.charts[0].drawn.series.map(({color, lineStyle}) => [color, lineStyle.type])")
        swatches = page.evaluate("[...document.querySelector('.legend').querySelectorAll('i')].map(i => i.className)")
    assert looks[0] == [looks[12][0], "solid"] and looks[12][1] == "dotted" and looks[12][0]
    assert swatches == [""] * 12 + ["dotted"]


def test_a_long_name_without_a_hyphen_fits_a_narrow_window(browser: Browser, tmp_path: Path) -> None:
    runs = [make_run(tmp_path / name, [record(1), record(2)]) for name in ("one", "W" * 88)]
    write_comparison(runs, tmp_path / "page.html")
    with opened(browser, tmp_path / "page.html", 400, "light") as page:
        check_looks(page)
        cell = page.locator(".rows td").first.bounding_box()
        assert cell is not None and 0.3 * 400 < cell["width"] <= 0.41 * 400
