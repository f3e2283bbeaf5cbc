"""The planner gives the map of (x, y) in docs/second_axis.md."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
sys.path.append(str(DOCS))

import second_axis  # noqa: E402 (found through the path added above)


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("machine", second_axis.MACHINES)
def test_a_row_of_the_map_is_the_planners(machine: str) -> None:
    """If this fails, run `python docs/second_axis.py` to write the map again."""
    cells = [second_axis.of_degree(machine, 64, degree).text for degree in second_axis.DEGREES]
    assert f"| {machine} | 64 | {' | '.join(cells)} |" in (DOCS / "second_axis.md").read_text(encoding="utf-8")
