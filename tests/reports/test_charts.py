"""Charts contain their data as JSON. No run name can cut the JSON short, and the browser draws what the data say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from report_pages import WINDOWS, check_looks, opened, points

from fourfold.reports import html
from fourfold.reports.basic_charts import line_chart, stacked_bars
from fourfold.reports.chart import asset, empty_chart, to_json

if TYPE_CHECKING:
    from playwright.sync_api import Browser

EVIL = "</script><b>\"'&"


def test_data_stays_inside_its_script() -> None:
    text = to_json({EVIL: [1.5, float("nan"), float("-inf"), None, (EVIL,)]})
    assert "<" not in text
    assert json.loads(text) == {EVIL: [1.5, None, None, None, [EVIL]]}


def test_a_line_has_its_points() -> None:
    page = line_chart("A", {"a": [(1, 1.0), (3, 3.0)], "b": [(2, 0.5)]}, x_label="step", y_label="nats")
    assert points(page, "A") == {"a": [[1, 1.0], [3, 3.0]], "b": [[2, 0.5]]}


def test_nothing_to_show_is_said() -> None:
    assert "nothing recorded" in line_chart("A", {}, x_label="step", y_label="nats")
    assert "nothing recorded" in stacked_bars("A", {}, x_label="s")


def test_what_an_empty_chart_says_is_escaped() -> None:
    assert '<b>"' not in empty_chart("A", EVIL) and "&lt;/script&gt;" in empty_chart("A", EVIL)


def test_a_page_has_the_scripts_of_what_it_says_that_it_has() -> None:
    """The scripts depend only on what the page contains, not on the text of the page."""
    scripts = {name: f"<script>{asset(name)}</script>" for name in ("charts.js", "table.js")}
    text = '<p class="rows search">"keep"</p>'
    plain, whole = html.page("A", "B", [text]), html.page("A", "B", [], has_search=True)
    assert [name for name, script in scripts.items() if script in plain] == ["charts.js"]
    assert all(script in whole for script in scripts.values())


def test_bars_end_with_their_sums() -> None:
    bars = {"predicted": {"weights": 10.0, "activations": 30.0}, "measured": {"measured": 20.0}}
    found = points(stacked_bars("Memory", bars, x_label="GiB"), "Memory")
    assert found["weights"] == [10.0, 0.0] and found["measured"] == [0.0, 20.0]
    assert [total["text"] for total in found["total"]] == ["40", "20"]


@pytest.mark.parametrize(("width", "scheme"), WINDOWS)
def test_charts_are_drawn(browser: Browser, tmp_path: Path, width: int, scheme: str) -> None:
    charts = [
        line_chart(EVIL, {EVIL: [(1, 1.0), (2, 2.0)], "b": [(1, 2.0)]}, x_label=EVIL, y_label="nats"),
        line_chart("Flat", {"a": [(1, 5.0), (2, 5.0), (3, 5.0)]}, x_label="step", y_label="nats"),
        stacked_bars("Bars", {EVIL: {EVIL: 1.0, "b": 2.5}}, x_label="seconds"),
    ]
    path = tmp_path / "page.html"
    path.write_text(html.page(EVIL, EVIL, [html.charts(charts[1:], wide=charts[:1])]), encoding="utf-8")
    with opened(browser, path, width, scheme) as page:
        drawn = check_looks(page)
        assert drawn.keys() == {EVIL, "Flat", "Bars"}
        assert "nats" in drawn[EVIL].texts and EVIL in drawn[EVIL].texts and "3.5" in drawn["Bars"].texts
        assert [text.strip() for text in page.locator(".legend").first.locator("button").all_inner_texts()] == [
            EVIL,
            "b",
        ]
