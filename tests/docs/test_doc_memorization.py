"""The numbers of the page on memorization that follow from formulas."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
from markdown import REPOSITORY, tables_of

from fourfold.memorization.goldfish_laws import exact_match_law

TABLES = tables_of(REPOSITORY / "docs" / "memorization.md")


def test_the_law_of_exact_matches() -> None:
    header = "k | S = 50 | S = 100 | S = 500"
    for k, *cells in TABLES[header]:
        for cell, suffix in zip(cells, (50, 100, 500), strict=True):
            number = float(cell.strip(" %")) / (100 if "%" in cell else 1)
            assert exact_match_law(int(k), suffix) == pytest.approx(number, rel=0.15)


def test_the_table_is_what_was_measured() -> None:
    results = json.loads((REPOSITORY / "docs" / "figures" / "memorization.json").read_text(encoding="utf-8"))
    protocol = script(REPOSITORY / "examples" / "memorization" / "protocol.py")
    titles = {arm.name: arm for arm in protocol.ARMS}
    expected = [protocol.row_of(titles[name], row) for name, row in results.items()]
    page = (REPOSITORY / "docs" / "memorization.md").read_text(encoding="utf-8")
    assert [line for line in page.splitlines() if line in expected] == expected


def test_the_figure_is_what_its_script_draws(tmp_path: Path) -> None:
    folder = REPOSITORY / "docs" / "figures"
    figure = script(folder / "memorization.py")
    figure.draw(json.loads(figure.DATA.read_text(encoding="utf-8")), tmp_path / "drawn.svg")
    assert (tmp_path / "drawn.svg").read_bytes() == (folder / "memorization.svg").read_bytes()


def script(path: Path) -> ModuleType:
    """A module outside the package, which imports its neighbors."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(path.parent))
        spec = importlib.util.spec_from_file_location(path.stem, path)
        module = importlib.util.module_from_spec(spec)
        patch.setitem(sys.modules, path.stem, module)  # dataclasses look their module up
        spec.loader.exec_module(module)
    return module
