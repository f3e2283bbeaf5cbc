"""Draw heat maps: one cell per row and column, darker for larger values, with its number if there is room."""

from collections.abc import Sequence

from fourfold.reports.chart import chart
from fourfold.reports.numbers import format_number

MOST_ROWS = 48
"""Largest number of rows and columns for which cells show their numbers."""


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
    """Draw an HTML figure of a matrix. ``limits`` are the values of the palest and the darkest cell.

    Give maps the same limits if readers should compare them. Rows and columns without names are numbered from 0.
    """
    rows, columns = len(values), len(values[0])
    names = {
        "x": column_names or [str(column) for column in range(columns)],
        "y": row_names or [str(row) for row in range(rows)],
    }
    cells = [[column, row, value] for row, of_row in enumerate(values) for column, value in enumerate(of_row)]
    low, high = limits
    option = {
        "xAxis": {"type": "category", "data": names["x"], "name": column_label},
        "yAxis": {"type": "category", "data": names["y"], "name": row_label, "inverse": True},
        "visualMap": {"min": low, "max": high, "text": [format_number(high), format_number(low)]},
        "series": [{"type": "heatmap", "name": title, "data": cells}],
    }
    of_row = 26 if rows <= 16 else 19 if rows <= MOST_ROWS else 480 / rows
    return chart(title, option, height=round(max(170, 80 + of_row * rows)))
