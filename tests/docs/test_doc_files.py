"""Generated files are not stale, and every example loads."""

from __future__ import annotations

import importlib.util
import re
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest
from markdown import REPOSITORY, tables_of

import fourfold
from fourfold.config.run import RunConfig
from fourfold.run_file.load import NAMES_ELSEWHERE, load_run
from fourfold.verification.parity_report import LIMIT

DOCS = REPOSITORY / "docs"


def script(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


reference = script(DOCS / "run_file.py").reference


def test_the_reference_matches_the_schema() -> None:
    written = (DOCS / "run-file.md").read_text(encoding="utf-8")
    assert written == reference(), "run: python docs/run_file.py"


def test_the_reference_describes_every_key() -> None:
    rows = [row for row in reference().splitlines() if row.startswith("| `") and row.count("|") == 5]
    assert not [row for row in rows if row.endswith(("| |", "|  |"))]
    for name in RunConfig.model_fields:
        assert f"`{name}`" in reference() or f"## [{name}]" in reference()


@pytest.mark.parametrize("path", sorted((REPOSITORY / "examples").glob("*.toml")), ids=lambda path: path.name)
def test_an_example_loads(path: Path) -> None:
    run = load_run(path)
    gpus = re.search(r"(\d+)gpus", path.name)
    assert gpus is None or run.parallel.world_size == int(gpus[1])


def test_the_parity_page_is_complete_and_within_its_limits() -> None:
    table = script(DOCS / "parity_table.py")
    tables = tables_of(DOCS / "parity.md")
    rows = tables[" | ".join(("grid", *table.QUANTITIES.values()))]
    assert [row[0] for row in rows] == [table.name_of(grid) for grid in table.GRIDS]
    assert all(float(ratio) <= LIMIT for row in rows for ratio in row[1:])
    faults = tables["fault | file | grid | detected in"]
    assert [row[0] for row in faults] == [mutant.fault for mutant in table.FAULTS]
    assert not [row for row in faults if row[-1] == table.SURVIVED]


def test_the_rows_of_the_parity_table_load() -> None:
    table = script(DOCS / "parity_table.py")
    for grid in table.GRIDS:
        for sizes in table.MODELS.values():
            load_run(table.RUN_FILE, [f"{key}={value}" for key, value in table.overrides(sizes, grid).items()])


def test_the_figures_are_what_their_scripts_draw(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make = script(DOCS / "figures" / "make.py")
    make.HERE = tmp_path
    make.block()
    make.grid()
    monkeypatch.setitem(sys.modules, "make", make)
    schedules = script(DOCS / "figures" / "schedules.py")
    schedules.schedules()
    assert schedules.table() in (DOCS / "pipeline.md").read_text(encoding="utf-8")
    for drawn in tmp_path.glob("*.svg"):
        stored = (DOCS / "figures" / drawn.name).read_bytes()
        assert drawn.read_bytes() == stored, "run: python docs/figures/make.py && python docs/figures/schedules.py"


@pytest.mark.parametrize("path", [REPOSITORY / "README.md", DOCS / "benchmarks.md"], ids=lambda path: path.stem)
def test_a_summary_of_benchmarks_quotes_measured_rows(path: Path) -> None:
    header = "fourfold with | compared with | speed ratio"
    measured = [row[:3] for row in tables_of(DOCS / "benchmarks-measured.md")[f"{header} | limit | goal"]]
    rows = tables_of(path)[header]
    assert rows and all(row in measured for row in rows)


def test_the_glossary_names_keys_as_the_loader_does() -> None:
    for keys, name in tables_of(DOCS / "glossary.md")["key in another program | key in fourfold"]:
        assert set(re.findall(r"`(\w+)`", keys)) <= set(NAMES_ELSEWHERE[name]), keys


def test_workflows_and_templates_name_what_exists() -> None:
    """The files are valid YAML, and the make targets, paths, and Python versions in them exist."""
    yaml = pytest.importorskip("yaml")
    files = [
        *(REPOSITORY / ".github").rglob("*.yml"),
        *REPOSITORY.glob("*.cff"),
        REPOSITORY / ".pre-commit-config.yaml",
    ]
    parsed = {path.name: yaml.safe_load(path.read_text(encoding="utf-8")) for path in files}
    targets = re.findall(r"^([\w-]+):", (REPOSITORY / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    for path in files:
        text = path.read_text(encoding="utf-8")
        assert set(re.findall(r"run: make ([\w-]+)", text)) <= set(targets), path.name
        assert all((REPOSITORY / name).exists() for name in re.findall(r"\bexamples/[\w./-]+", text)), path.name
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    pythons = parsed["tests.yml"]["jobs"]["tests"]["strategy"]["matrix"]["python"]
    assert project["requires-python"] == f">={pythons[0]}"
    assert parsed["CITATION.cff"]["version"] == fourfold.__version__
    assert f"## {fourfold.__version__}" in (REPOSITORY / "CHANGELOG.md").read_text(encoding="utf-8")
