"""Charts contain their data as JSON. No run name can cut the JSON short, and the browser draws what the data say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from report_pages import WINDOWS, check_looks, opened, points

from fourfold.reports import html
from fourfold.reports.chart import empty_chart, line_chart, to_json

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


def test_what_an_empty_chart_says_is_escaped() -> None:
    assert '<b>"' not in empty_chart("A", EVIL) and "&lt;/script&gt;" in empty_chart("A", EVIL)


@pytest.mark.parametrize(("width", "scheme"), WINDOWS)
def test_charts_are_drawn(browser: Browser, tmp_path: Path, width: int, scheme: str) -> None:
    charts = [
        line_chart(EVIL, {EVIL: [(1, 1.0), (2, 2.0)], "b": [(1, 2.0)]}, x_label=EVIL, y_label="nats"),
        line_chart("Flat", {"a": [(1, 5.0), (2, 5.0), (3, 5.0)]}, x_label="step", y_label="nats"),
    ]
    path = tmp_path / "page.html"
    path.write_text(html.page(EVIL, EVIL, [html.charts(charts[1:], wide=charts[:1])]), encoding="utf-8")
    with opened(browser, path, width, scheme) as page:
        drawn = check_looks(page)
        assert drawn.keys() == {EVIL, "Flat"}
        assert "nats" in drawn[EVIL].texts and EVIL in drawn[EVIL].texts
        assert [text.strip() for text in page.locator(".legend").first.locator("button").all_inner_texts()] == [
            EVIL,
            "b",
        ]
