"""Print tables that stay readable in a narrow terminal."""

from collections.abc import Iterable, Mapping, Sequence

from rich.box import HEAVY_HEAD, SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

LONGEST_WORD = 24
"""Words of at most this length are never broken. Longer words, such as paths, can be broken."""


def print_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]], words: Sequence[str] = ()) -> None:
    """Print a table that fits into the terminal.

    The first column, columns without a name, and columns named in ``words`` are text. All other columns are numbers,
    aligned right. Text wraps between words, and numbers never wrap. If the table is too wide, it is printed without
    lines and padding. If it is still too wide, it is split into several tables that all repeat the first column.

    Args:
        title: The title.
        header: Names of the columns.
        rows: The cells of each row.
        words: Names of more columns that are text.
    """
    console = Console()
    columns = [[name, *(row[number] for row in rows)] for number, name in enumerate(header)]
    is_text = [number == 0 or not name or name in words for number, name in enumerate(header)]
    fewest = [_longest_word(cells) if text else _unbroken(cells) for cells, text in zip(columns, is_text, strict=True)]
    count = max(2, *(n for n in range(len(header) + 1) if sum(fewest[:n]) + n - 1 <= console.width), 0)
    if count < len(header):
        print_table(title, header[:count], [row[:count] for row in rows], words)
        others = [[row[0], *row[count:]] for row in rows]
        print_table(f"{title}, continued", [header[0], *header[count:]], others, words)
        return
    # Width that is left for text, without the gaps between the columns.
    room = console.width - len(header) + 1
    edges = int(sum(fewest) + 2 * len(header) + 2 <= room)
    whole = [_unbroken(cells) for cells in columns]
    widths = _fitted([_longest(cells) for cells in columns], (whole, fewest), room - edges * (2 * len(header) + 2))
    table = Table(
        title=Text(title),
        title_justify="left",
        show_header=any(header),
        padding=(0, edges),
        box=HEAVY_HEAD if edges else SIMPLE_HEAD,
        show_edge=bool(edges),
    )
    for name, width, text in zip(header, widths, is_text, strict=True):
        table.add_column(Text(name), justify="left" if text else "right", width=width, overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    console.print(table)


def least_width(columns: Mapping[str, Sequence[str]], words: Sequence[str] = ()) -> int:
    """Return the smallest table width, in characters, that breaks no number across lines. Headers and the columns in
    ``words`` may have line breaks."""
    widths = [(_longest_word if name in words else _unbroken)([name, *cells]) for name, cells in columns.items()]
    return sum(widths) + len(widths) - 1


def in_unit(size: float, unit: int) -> str:
    """Format a number of bytes as a multiple of ``unit`` (in bytes), with three decimals. A value below 0.1 gets three
    significant digits."""
    if size == 0:
        return "0"
    return f"{size / unit:,.3f}" if size / unit >= 0.1 else f"{size / unit:.3g}"


def _longest(texts: Iterable[str]) -> int:
    return max(map(cell_len, texts), default=0)


def _unbroken(column: Sequence[str]) -> int:
    """Return the smallest column width that breaks no number across lines. The header (the first cell) and
    cells with more than ``LONGEST_WORD`` characters may have line breaks between words."""
    return max(
        _longest_word(column[:1]),
        *(_longest_word([c]) if cell_len(c) > LONGEST_WORD else cell_len(c) for c in column[1:]),
        0,
    )


def _longest_word(cells: Iterable[str]) -> int:
    return min(LONGEST_WORD, _longest(word for cell in cells for word in cell.split()))


def _fitted(widths: list[int], stages: Sequence[Sequence[int]], room: int) -> list[int]:
    """Shrink the widest columns until all columns together have at most ``room`` characters.

    Args:
        widths: The width of each column.
        stages: Lists of minimum widths of the columns. The function tries one list after another, until the columns
            fit. If they fit with none of the lists, columns shrink to one character.
        room: Number of characters that are available.
    """
    for least in (*stages, [1] * len(widths)):
        while sum(widths) > room and any(width > low for width, low in zip(widths, least, strict=True)):
            widest = max((width, number) for number, width in enumerate(widths) if width > least[number])[1]
            widths[widest] -= 1
    return widths
