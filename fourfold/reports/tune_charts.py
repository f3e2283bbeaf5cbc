"""Charts of a search: its history, parallel coordinates of its trials, memory against speed, and sensitivity."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from fourfold.reports.numbers import format_number
from fourfold.reports.svg import figure

HEIGHT, WIDTH, SIDE, HEAD = 300, 1072, 60, 26


@dataclass(frozen=True)
class Line:
    """One line through all coordinates. values: a number or word of each; strength: 0 (faint) to 1; text: tooltip."""

    values: Mapping[str, str | float]
    strength: float
    text: str
    failed: bool = False
    best: bool = False


def parallel_coordinates(title: str, paths: Sequence[Line]) -> str:
    """Draw a vertical axis for every coordinate, whose values are evenly spaced in order, and a line for each path.

    The best path is drawn last and orange, failed ones dashed.
    """
    names = list(paths[0].values) if paths else []
    if len(names) < 2:
        return figure(title, [], '<p class="empty">nothing to compare</p>')
    places = {name: SIDE + i * (WIDTH - 2 * SIDE) / (len(names) - 1) for i, name in enumerate(names)}
    values = {name: _ordered({path.values[name] for path in paths}) for name in names}

    def height(name: str, value: str | float) -> float:
        among = values[name]
        share = among.index(value) / (len(among) - 1) if len(among) > 1 else 0.5
        return round(HEIGHT - 16 - share * (HEIGHT - 16 - HEAD - 10), 1)

    axes = "".join(
        f'<line class="axis" x1="{x:g}" x2="{x:g}" y1="{HEAD + 4}" y2="{HEIGHT - 10}"/>'
        f'<text class="strong" x="{x:g}" y="{HEAD - 10}" text-anchor="middle">{escape(name)}</text>'
        + "".join(
            f'<text x="{x + 6:g}" y="{height(name, value) + 4:g}">{escape(_label(value))}</text>'
            for value in _thinned(values[name])
        )
        for name, x in places.items()
    )
    lines = "".join(_line(path, places, height) for path in sorted(paths, key=lambda path: (path.best, path.strength)))
    svg = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">{lines}{axes}</svg>'
    return figure(title, [], svg)


def _line(path: Line, places: Mapping[str, float], height: object) -> str:
    assert callable(height)
    points = " ".join(f"{x:g},{height(name, path.values[name]):g}" for name, x in places.items())
    color = "s1" if path.best else "s6" if path.failed else "s0"
    dashes = ' stroke-dasharray="4 4"' if path.failed else ""
    return (
        f'<polyline class="line {color}" points="{points}" stroke-opacity="{0.2 + 0.8 * path.strength:.2f}"'
        f'{dashes} stroke-width="{3 if path.best else 1.5}"><title>{escape(path.text)}</title></polyline>'
    )


def _ordered(values: set[str | float]) -> list[str | float]:
    return sorted(values, key=lambda value: (isinstance(value, str), value))


def _thinned(values: Sequence[str | float], most: int = 12) -> Sequence[str | float]:
    """At most so many of the values, the ends included."""
    if len(values) <= most:
        return values
    return [values[round(i * (len(values) - 1) / (most - 1))] for i in range(most)]


def _label(value: str | float) -> str:
    return value if isinstance(value, str) else format_number(value, 3)
