"""The planner predicts the runs that SimuMax's authors measured as well as docs/simumax.md says."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

DOCS = Path(__file__).parents[2] / "docs"
sys.path.append(str(DOCS))

import simumax  # noqa: E402 (found through the path added above)


def test_the_page_has_the_planners_errors() -> None:
    text = (DOCS / "simumax.md").read_text(encoding="utf-8")
    assert "\n".join(simumax.errors_table()) in text, "run: python docs/simumax.py"


def test_the_errors_are_small() -> None:
    rows = simumax.runs()
    found = simumax.errors(rows)
    assert len(rows) == 43
    assert np.abs(found.fourfold).mean() <= 0.08 and np.abs(found.fourfold_memory).mean() <= 0.02
    quoted = [f"{np.abs(each).mean():.1%}" for each in (found.fourfold, found.fourfold_memory)]
    text = (DOCS / "planner.md").read_text(encoding="utf-8")
    assert f"the mean error is {quoted[0]} for step times and {quoted[1]} for memory" in text
    # SimuMax's summary states the errors of its own predictions.
    assert round(np.abs(found.simumax).mean(), 3) == 0.056 and round(np.abs(found.simumax_memory).mean(), 4) == 0.0046
