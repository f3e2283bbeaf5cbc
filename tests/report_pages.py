"""Check report pages: read the data of their charts, and check how they look in a headless Chromium."""

from __future__ import annotations

import html
import itertools
import json
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

WIDTHS = (400, 1280, 1920)
SCHEMES = ("light", "dark")
WINDOWS = [
    pytest.param(width, scheme, marks=() if (width, scheme) in ((400, "dark"), (1280, "light")) else pytest.mark.slow)
    for width, scheme in itertools.product(WIDTHS, SCHEMES)
]
"""Window widths and color schemes. The slow tests try every combination. The fast tests try one narrow dark window and
one wide light window."""
FIGURE = re.compile(r'<figcaption><b>([^<]*)</b>[^\n]*?</figcaption><div class="plot"[^<]*</div><script[^>]*>([^<]*)<')
LOOKS = """() => fourfold.charts.map(({chart, figure}) => {
  const svg = figure.querySelector(".plot svg"), frame = svg.getBoundingClientRect();
  const texts = [...svg.querySelectorAll("text")].filter(text => text.textContent.trim());
  return {
    title: figure.querySelector("figcaption b").textContent,
    shapes: svg.querySelectorAll("path, rect, circle").length,
    texts: texts.map(text => text.textContent),
    cut: texts.filter(text => {
      const box = text.getBoundingClientRect();
      return box.left < frame.left - 1 || box.right > frame.right + 1 || box.top < frame.top - 1
        || box.bottom > frame.bottom + 1;
    }).map(text => text.textContent),
  };
})"""


TOO_WIDE = """() => [...document.querySelectorAll("body *")]
  .filter(each => !each.closest(".scroll > *, pre, .plot") && each.getBoundingClientRect().right > innerWidth + 1)
  .map(each => each.outerHTML.slice(0, 80))"""


def without_scripts(page: str) -> str:
    """Return an HTML page without the library that draws its charts, and without their data."""
    return re.sub(r"<script.*?</script>", "", page, flags=re.DOTALL)


def chart_specs(page: str) -> dict[str, dict[str, Any]]:
    """Return the data of every chart of an HTML page, by the chart's title."""
    return {html.unescape(title): json.loads(text) for title, text in FIGURE.findall(page)}


def points(page: str, title: str) -> dict[str, list[Any]]:
    """Return the data of every series of one chart, by the series' name."""
    spec = chart_specs(page)[title]
    if "curves" in spec:
        return {curve["name"]: curve["points"] for curve in spec["curves"]}
    return {series["name"]: series["data"] for series in spec["option"]["series"]}


@contextmanager
def chromium() -> Iterator[Browser]:
    """Start a headless Chromium of this machine. Skip the test if there is none."""
    playwright = pytest.importorskip("playwright.sync_api")
    names = ("chromium", "chromium-browser", "google-chrome")
    path = next(filter(None, map(shutil.which, names)), None)
    if path is None:
        pytest.skip("no Chromium on this machine")
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@contextmanager
def opened(browser: Browser, path: Path, width: int, scheme: str, height: int = 900) -> Iterator[Page]:
    """Open a page in a window of this size, in light or dark colors. Check that the page reports no error and sends no
    requests."""
    context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)  # type: ignore[arg-type]
    page = context.new_page()
    problems: list[str] = []
    page.on("console", lambda message: problems.append(f"{message.type}: {message.text}"))
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("request", lambda request: problems.append(request.url) if request.url != path.as_uri() else None)
    page.goto(path.as_uri())
    yield page
    assert problems == []
    context.close()


@dataclass(frozen=True)
class Drawn:
    """A chart that the browser has drawn: the numbers of lines, areas, and dots, and the texts."""

    shapes: int
    texts: list[str]


def check_looks(page: Page) -> dict[str, Drawn]:
    """Check that nothing is wider than the window or cut off, and that every chart is drawn. Return the charts."""
    width, window = page.evaluate("[document.documentElement.scrollWidth, window.innerWidth]")
    assert width <= window
    assert page.evaluate(TOO_WIDE) == []
    charts = page.evaluate(LOOKS)
    assert len(charts) == page.locator(".plot").count()
    for chart in charts:
        assert chart["shapes"] >= 3 and chart["cut"] == [], chart
    return {chart["title"]: Drawn(chart["shapes"], chart["texts"]) for chart in charts}


def check_page(
    browser: Browser, path: Path, widths: Sequence[int] = WIDTHS, schemes: Sequence[str] = SCHEMES
) -> dict[str, Drawn]:
    """Check how a page looks in windows of these widths, light and dark. Return its charts in the last window."""
    drawn: dict[str, Drawn] = {}
    for width, scheme in itertools.product(widths, schemes):
        with opened(browser, path, width, scheme) as page:
            drawn = check_looks(page)
    return drawn
