"""Charts are well-formed, put points where they belong, and escape what they are given."""

import json
import re
import xml.etree.ElementTree as ET

import pytest

from fourfold.reports.style import CSS
from fourfold.reports.svg import COLORS, Series, line_chart, stacked_bars


def readout(chart: ET.Element) -> list[list[tuple[float, float, str, str]]]:
    return json.loads(chart.find("svg").get("data-points"))


def test_points_stand_where_their_values_are():
    chart = ET.fromstring(line_chart("Loss", [Series("train", [0, 50, 100], [0.0, 5.0, 10.0])], x_label="tokens"))
    (left, bottom, _, _), (middle, center, _, _), (right, top, x_text, y_text) = readout(chart)[0]
    assert middle == pytest.approx((left + right) / 2, abs=0.1)
    assert center == pytest.approx((bottom + top) / 2, abs=0.1)
    assert top < bottom  # SVG counts downwards
    assert (x_text, y_text) == ("100", "10")
    path = chart.find(".//path").get("d")
    assert path == f"M{left:g},{bottom:g}L{middle:g},{center:g}L{right:g},{top:g}"


def test_a_logarithmic_axis_gives_equal_room_to_equal_ratios():
    series = Series("norm", [1, 2, 3], [1.0, 10.0, 100.0])
    markup = line_chart("Norm", [series], x_label="step", log_y=True)
    one, ten, hundred = (point[1] for point in readout(ET.fromstring(markup))[0])
    assert one - ten == pytest.approx(ten - hundred, abs=0.2)
    assert "log scale" in markup


def test_a_logarithmic_axis_is_dropped_for_zero():
    markup = line_chart("Norm", [Series("norm", [1, 2], [0.0, 10.0])], x_label="step", log_y=True)
    assert "log scale" not in markup


def test_a_gap_breaks_the_line_and_a_lone_point_is_a_dot():
    series = Series("a", [1, 2, 3, 4, 5, 6], [1.0, 2.0, None, 3.0, None, 4.0])
    chart = ET.fromstring(line_chart("A", [series], x_label="step"))
    assert chart.find(".//path").get("d").count("M") == 1
    assert len(chart.findall(".//circle[@class='dot s0']")) == 2
    assert len(readout(chart)[0]) == 4


@pytest.mark.parametrize("y", [[5.0], [5.0, 5.0], [0.0, 0.0], [-1.0, -1.0], [1e-38, 1e38]])
def test_degenerate_ranges_have_axes(y):
    for log_y in (False, True):
        chart = ET.fromstring(line_chart("A", [Series("a", list(range(len(y))), y)], x_label="step", log_y=log_y))
        assert len(chart.findall(".//text")) >= 3


@pytest.mark.parametrize(
    ("y", "labels"),
    [
        ([0.0, 0.0, 0.0], ["0", "0.2", "0.4", "0.6", "0.8", "1"]),
        ([0.25, 0.25], ["0.15", "0.2", "0.25", "0.3", "0.35"]),
        ([0.01, 10.0], ["0", "5", "10"]),
        ([-4.0, 0.0], ["−4", "−3", "−2", "−1", "0"]),
        ([-4.0, -4.0], ["−6", "−5", "−4", "−3", "−2"]),
    ],
)
@pytest.mark.parametrize("from_zero", [False, True])
def test_an_axis_stays_on_the_side_of_zero_of_its_values(y, labels, from_zero):
    chart = ET.fromstring(line_chart("A", [Series("a", [1, 2, 3][: len(y)], y)], x_label="step", from_zero=from_zero))
    ticks = [text.text for text in chart.findall(".//text[@text-anchor='end']")]
    assert ticks == labels if not from_zero else "0" in ticks
    assert all(tick.startswith("−") == (min(y) < 0) for tick in ticks if tick != "0")


def test_nothing_to_show_is_said():
    assert "nothing recorded" in line_chart("A", [Series("a", [1], [None])], x_label="step")
    assert "nothing recorded" in stacked_bars("A", {})


def test_text_is_escaped_everywhere():
    evil = "<b>\"'&"
    chart = line_chart(evil, [Series(evil, [1], [1.0]), Series("b", [1], [2.0])], x_label=evil)
    bars = stacked_bars(evil, {evil: {evil: 1.0, "b": 2.0}})
    for markup in (chart, bars):
        assert '<b>"' not in markup
        figure = ET.fromstring(markup)  # well-formed, and the text survives
        assert evil in "".join(figure.itertext())
        assert figure.find("svg").get("aria-label") == evil


def test_bars_are_stacked_in_proportion():
    bars = {"predicted": {"weights": 10.0, "activations": 30.0}, "measured": {"measured": 20.0}}
    chart = ET.fromstring(stacked_bars("Memory, GiB", bars))
    first, second, measured = chart.findall(".//rect")
    assert float(second.get("width")) == pytest.approx(3 * float(first.get("width")), abs=0.3)
    assert float(second.get("x")) == pytest.approx(float(first.get("x")) + float(first.get("width")), abs=0.1)
    assert float(measured.get("width")) == pytest.approx(2 * float(first.get("width")), abs=0.3)
    assert first.find("title").text == "weights: 10"
    assert [text.text for text in chart.findall(".//text[@class='strong']")] == ["40", "20"]


def test_every_series_color_is_defined_in_light_and_dark():
    for index in range(COLORS):
        assert len(re.findall(rf"--s{index}: #", CSS)) == 2
        assert f".s{index} {{ color: var(--s{index}); }}" in CSS
