"""Heat maps as inline SVG: one cell per row and column, darker where the value is larger."""

from collections.abc import Sequence
from html import escape

from fourfold.reports.numbers import format_number

_WIDTH, _LEFT, _TOP, _BOTTOM, _RIGHT = 520, 44, 8, 40, 92
_STEPS = 24  # of the color bar


def heat_map(
    title: str,
    values: Sequence[Sequence[float]],
    *,
    row_label: str,
    column_label: str,
    limits: tuple[float, float],
    row_names: Sequence[str] | None = None,
    column_names: Sequence[str] | None = None,
) -> str:
    """Draw an HTML figure of a matrix; `limits` are the values of the palest and the darkest cell.

    Give maps that are to be compared the same limits. A cell's value appears under the pointer. Rows and columns
    without names are numbered from 0.
    """
    rows, columns = len(values), len(values[0])
    row_names = row_names or [str(row) for row in range(rows)]
    column_names = column_names or [str(column) for column in range(columns)]
    cell = (_WIDTH - _LEFT - _RIGHT) / columns
    tall = max(5.0, min(cell, 320 / rows, 28.0))
    height = round(_TOP + tall * rows + _BOTTOM)
    cells = "".join(
        f'<rect class="cell" x="{_LEFT + column * cell:.1f}" y="{_TOP + row * tall:.1f}" width="{cell:.1f}" '
        f'height="{tall:.1f}" fill-opacity="{_shade(value, limits):.3f}">'
        f"<title>{escape(f'{row_label} {name}, {column_label} {column_name}: {format_number(value)}')}</title></rect>"
        for row, (name, of_row) in enumerate(zip(row_names, values, strict=True))
        for column, (column_name, value) in enumerate(zip(column_names, of_row, strict=True))
    )
    foot = _TOP + tall * rows
    marks = "".join(
        f'<text x="{_LEFT - 7}" y="{_TOP + (row + 0.5) * tall + 4:.1f}" text-anchor="end">'
        f"{escape(row_names[row])}</text>"
        for row in range(0, rows, _stride(rows, 12))
    ) + "".join(
        f'<text x="{_LEFT + (column + 0.5) * cell:.1f}" y="{foot + 15:.1f}" text-anchor="middle">'
        f"{escape(column_names[column])}</text>"
        for column in range(0, columns, _stride(columns, 16 if max(map(len, column_names)) <= 2 else 8))
    )
    names = (
        f'<text x="{_LEFT + cell * columns / 2:.1f}" y="{foot + 33:.1f}" text-anchor="middle">{escape(column_label)}'
        f'</text><text transform="translate(12 {_TOP + tall * rows / 2:.1f}) rotate(-90)" text-anchor="middle">'
        f"{escape(row_label)}</text>"
    )
    svg = (
        f'<svg viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="{escape(title)}">{cells}{marks}{names}'
        f"{_bar(foot, limits)}</svg>"
    )
    return f'<figure class="chart"><figcaption><b>{escape(title)}</b></figcaption>{svg}</figure>'


def _shade(value: float, limits: tuple[float, float]) -> float:
    low, high = limits
    share = (value - low) / (high - low) if high > low else 1.0
    return 0.06 + 0.94 * min(max(share, 0.0), 1.0)


def _stride(count: int, most: int) -> int:
    """Return the step between labels at which at most about `most` of `count` are shown."""
    return next(step for step in (1, 2, 4, 5, 8, 10, 16, 20, 32, 50, 100, 1000) if count / step <= most)


def _bar(foot: float, limits: tuple[float, float]) -> str:
    """Draw the color bar on the right, the largest value on top."""
    left, step = _WIDTH - _RIGHT + 18, (foot - _TOP) / _STEPS
    low, high = limits
    boxes = "".join(
        f'<rect class="cell" x="{left}" y="{_TOP + i * step:.1f}" width="12" height="{step + 0.3:.1f}" '
        f'fill-opacity="{_shade(high - (high - low) * (i + 0.5) / _STEPS, limits):.3f}"/>'
        for i in range(_STEPS)
    )
    return (
        f'{boxes}<text x="{left + 18}" y="{_TOP + 9}">{format_number(high)}</text>'
        f'<text x="{left + 18}" y="{foot:.1f}">{format_number(low)}</text>'
    )
