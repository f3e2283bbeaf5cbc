"""The numbers of the page on memorisation that follow from formulas."""

from __future__ import annotations

import pytest
from markdown import REPOSITORY, tables_of

from fourfold.memorization.laws import exact_match_law

TABLES = tables_of(REPOSITORY / "docs" / "memorization.md")


def test_the_law_of_exact_matches() -> None:
    header = "k | S = 50 | S = 100 | S = 500"
    for k, *cells in TABLES[header]:
        for cell, suffix in zip(cells, (50, 100, 500), strict=True):
            number = float(cell.strip(" %")) / (100 if "%" in cell else 1)
            assert exact_match_law(int(k), suffix) == pytest.approx(number, rel=0.15)
