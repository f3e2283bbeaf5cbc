"""Draw curves of training runs. On the page, the reader chooses the x axis (tokens, steps, or time) and the
smoothing."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from fourfold.reports.chart import NOTHING, asset, empty_chart, figure
from fourfold.reports.numbers import bucket_means, downsample

BUCKETS = 1000
"""Number of buckets that a long curve is divided into. Each bucket keeps two points, and one mean for the smoothing."""

CONTROLS = asset("curve_controls.html").strip()
"""HTML of the controls for the x axis and the smoothing. They apply to all curves of a page."""


class StepPositions(NamedTuple):
    """Where the end of a step is on each of the three x axes. ``tokens`` and ``seconds`` count from the run's start."""

    step: int
    tokens: float
    seconds: float


@dataclass(frozen=True)
class Curve:
    """One curve. A value of None is a gap in the curve. ``color`` is an index into the page's list of colors. A
    ``marked`` curve has few points, such as evaluations. So each point has a dot, and the curve is never smoothed."""

    name: str
    points: Sequence[tuple[StepPositions, float | None]]
    color: int
    marked: bool = False


def curve_chart(
    title: str,
    curves: Sequence[Curve],
    *,
    unit: str,
    marks: Sequence[tuple[StepPositions, int]] = (),
    is_loss: bool = False,
    smooth: bool = True,
    from_zero: bool = False,
    height: int = 260,
) -> str:
    """Return a figure with curves that follow the page's ``CONTROLS``.

    If the reader zooms one figure by dragging, all figures with curves zoom to the same part of the run.

    Args:
        title: The chart's title.
        curves: The curves.
        unit: The unit of the values.
        marks: The positions at which runs were resumed, each with the color of its mark.
        is_loss: Whether the values are losses in nats. The exponential of such a value is a perplexity.
        smooth: Whether the page's smoothing slider applies to the curves.
        from_zero: Whether the y axis starts at 0 if it is linear.
        height: Height in pixels.
    """
    shown = [curve for curve in curves if any(value is not None for _, value in curve.points)]
    if not shown:
        return empty_chart(title, "no finite value recorded" if any(curve.points for curve in curves) else NOTHING)
    spec = {
        "curves": [_data(curve, smooth and not curve.marked) for curve in shown],
        "marks": [{"place": place, "color": color} for place, color in marks],
        "unit": unit,
        "isLoss": is_loss,
        "fromZero": from_zero,
    }
    ends = [(curve.name, [value for _, value in curve.points if value is not None]) for curve in shown]
    said = ", ".join(f"{name}: from {values[0]:.4g} to {values[-1]:.4g} {unit}".rstrip() for name, values in ends)
    return figure(title, spec, height, zoom="x", values=said)


def _data(curve: Curve, smooth: bool) -> dict[str, object]:
    """Return a curve's data for the page's script: its name, color, and flags, and its points as [step, tokens,
    seconds, value]. If there are many points, only the lowest and the highest point of each bucket are kept, and the
    smoothing uses the means of the buckets."""
    values = [value for _, value in curve.points]
    kept = downsample(values, BUCKETS)
    is_thinned = len(kept) < len(values)
    return {
        "name": curve.name,
        "color": curve.color,
        "marked": curve.marked,
        "smooth": smooth,
        "points": [_row(*curve.points[index]) for index in kept],
        "means": [_row(curve.points[index][0], mean) for index, mean in bucket_means(values, BUCKETS)]
        if is_thinned and smooth
        else None,
    }


def _row(place: StepPositions, value: float | None) -> list[float | None]:
    return [place.step, place.tokens, float(f"{place.seconds:.6g}"), None if value is None else float(f"{value:.6g}")]
