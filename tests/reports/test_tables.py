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
