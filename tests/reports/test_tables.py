"""Tables of the terminal, wide and narrow."""

from __future__ import annotations

import pytest

from fourfold.reports.tables import in_unit, print_table

HEADER = ("layout", "s/step", "tokens/s/GPU", "why")
ROWS = [["dp 64 × z 2, selective recompute", "7.194", "9,110", "it fits [1]"], ["pp 2", "12.5", "810", ""]]


@pytest.mark.parametrize("width", [120, 60, 48])
def test_lines_break_between_words(width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    print_table("Layouts [best first]", HEADER, ROWS, words=["why"])
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= width
    assert all(word in printed for row in (HEADER, *ROWS) for cell in row for word in cell.split())
    assert printed.startswith("Layouts [best first]")
    numbers = [line for line in printed.splitlines() if "7.194" in line or "12.5" in line]
    assert len({line.index("7.194") + 5 if "7.194" in line else line.index("12.5") + 4 for line in numbers}) == 1


@pytest.mark.parametrize("width", [80, 40, 28])
def test_no_number_wraps(width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    """A table that is too wide is printed in parts, each with the first column."""
    monkeypatch.setenv("COLUMNS", str(width))
    header = ("", "s/step", "interval", "tokens/s/GPU", "of 85.0", "P(OOM)")
    rows = [
        ["yours, on 1 GPU", "1,038", "872–1,560", "9,110", "390%", "100.0%"],
        ["1", "34.0", "1–2", "8", "9%", "0.2%"],
    ]
    print_table("Layouts", header, rows)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= width and all(any(cell in line for line in lines) for cell in (*rows[0][1:], "0.2%"))
    assert any("continued" in line for line in lines) == (width < 50)
    assert sum("yours" in line for line in lines) == (1 if width == 80 else 2 if width == 40 else 3)


def test_a_table_without_rows_and_a_terminal_without_room(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    print_table("None", HEADER, [])
    capsys.readouterr()
    cells = ["y" * 60 + " z", "1", "/a/path/" + "q" * 40, "[w]"]
    print_table("Facts", ("left out", "", "[b]", ""), [cells])
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= 20
    assert all(printed.count(letter) >= sum(cell.count(letter) for cell in cells) for letter in "yz1q/w[")


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0"), (2**29, "0.500"), (3 * 2**40, "3,072.000"), (2**21, "0.00195"), (4, "3.73e-09")]
)
def test_bytes_in_a_column_of_gib_never_vanish(size: int, text: str) -> None:
    assert in_unit(size, 2**30) == text
