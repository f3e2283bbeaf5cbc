"""Check the numbers in docs/memorization.md that follow from formulas."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
from markdown import REPOSITORY, tables_of
from test_doc_commands import is_run, run_page

from fourfold.memorization.goldfish_laws import exact_match_law

DOCS = REPOSITORY / "docs"
TABLES = tables_of(DOCS / "memorization.md") | tables_of(DOCS / "memorization-measured.md")


def test_the_law_of_exact_matches() -> None:
    header = "k | S = 50 | S = 100 | S = 500"
    for k, *cells in TABLES[header]:
        for cell, suffix in zip(cells, (50, 100, 500), strict=True):
            number = float(cell.strip(" %")) / (100 if "%" in cell else 1)
            assert exact_match_law(int(k), suffix) == pytest.approx(number, rel=0.15)


def test_the_tables_are_what_was_measured() -> None:
    """The tutorial's arms have a separate table, because they use another model and corpus."""
    results = json.loads((REPOSITORY / "docs" / "figures" / "memorization.json").read_text(encoding="utf-8"))
    protocol = script(REPOSITORY / "examples" / "memorization" / "protocol.py")
    arms = [arm for arm in protocol.ARMS if arm.name in results]
    for first, tutorial in (("arm", False), ("arm of the tutorial", True)):
        (rows,) = (rows for header, rows in TABLES.items() if header.startswith(f"{first} | seeds"))
        expected = [protocol.row_of(arm, results[arm.name]) for arm in arms if (arm.corpus == "tutorial") == tutorial]
        assert [[cell.strip() for cell in row.strip("|").split("|")] for row in expected] == rows
    assert len(arms) == len(results)


def test_the_table_of_the_tutorial_is_what_was_measured() -> None:
    results = json.loads((REPOSITORY / "docs" / "figures" / "memorization.json").read_text(encoding="utf-8"))
    arms = {"plain": "tutorial", "goldfish, k 4, h 13": "tutorial4", "goldfish, k 50, h 50": "tutorial50"}
    expected = [
        [
            loss,
            f"**{row['exact_match']:.0%}** of {row['documents']}",
            ", ".join(f"{16 * each:g}" for each in row["exact_match_each"]),
            f"{row['median_longest_span']:g}",
            f"{row['token_agreement']:.0%}",
        ]
        for loss, row in ((loss, results[arm]) for loss, arm in arms.items())
    ]
    assert TABLES["loss | passages repeated exactly | by seed, of 16 | longest span | agreement"] == expected
    assert all(results[arm]["control_exact_match"] == 0 for arm in arms.values())


def test_the_figure_is_what_its_script_draws(tmp_path: Path) -> None:
    folder = REPOSITORY / "docs" / "figures"
    figure = script(folder / "memorization.py")
    figure.draw(json.loads(figure.DATA.read_text(encoding="utf-8")), tmp_path / "drawn.svg")
    assert (tmp_path / "drawn.svg").read_bytes() == (folder / "memorization.svg").read_bytes()


@pytest.mark.slow
def test_the_tutorial_shows_the_effect(workplace: Path) -> None:
    """Run the tutorial's commands. As the page says, one model repeats nearly all passages, and the other repeats
    almost none."""
    run_page(DOCS / "memorization.md", workplace, is_run)
    plain, goldfish = (
        json.loads((workplace / "runs" / name / "audit" / "audit.json").read_text(encoding="utf-8"))
        for name in ("plain", "goldfish")
    )
    assert plain["documents"] == goldfish["documents"] == 16
    assert plain["exact_match"] >= 0.8 and goldfish["exact_match"] <= 0.2  # at least 13 of 16, and at most 3
    assert plain["longest_span"]["median"] > 3 * goldfish["longest_span"]["median"]
    assert goldfish["mask_replay"]["suffix_kept_whole"] == 0
    assert plain["control"]["exact_match"] == goldfish["control"]["exact_match"] == 0
    audited = (workplace / "runs" / "audited" / "memorization.jsonl").read_text(encoding="utf-8")
    assert [json.loads(line)["step"] for line in audited.splitlines()] == [20, 40]


def test_the_table_of_near_verbatim_leaks_is_what_was_measured() -> None:
    results = json.loads((REPOSITORY / "docs" / "figures" / "near_verbatim.json").read_text(encoding="utf-8"))
    study = script(REPOSITORY / "examples" / "memorization" / "near_verbatim.py")
    (rows,) = tables_of(DOCS / "goldfish-near-verbatim.md").values()
    expected = [study.row_of(arm, results[arm.name]) for arm in study.ARMS if arm.name in results]
    assert [[cell.strip() for cell in row.strip("|").split("|")] for row in expected] == rows
    assert len(expected) == len(results)


def script(path: Path) -> ModuleType:
    """Import a module outside the package, which imports modules in its own folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(path.parent))
        spec = importlib.util.spec_from_file_location(path.stem, path)
        module = importlib.util.module_from_spec(spec)
        patch.setitem(sys.modules, path.stem, module)  # dataclasses look up their module here
        spec.loader.exec_module(module)
    return module
