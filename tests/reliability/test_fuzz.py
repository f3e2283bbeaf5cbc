"""Damaged input ends with exit code 0, or with 2 and one sentence: no traceback, no hang, no file outside the
run's folder.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from guarded import finding, listing, same_kind
from hypothesis import HealthCheck, Phase, given, seed, settings
from inputs import KINDS, Changes, Kind

CASES = 250
"""Number of cases per seed."""

pytest.importorskip("transformers")


class Workplace:
    """A folder with a good input, inside folders that must not change."""

    def __init__(self, root: Path, kind: Kind) -> None:
        self.root, self.kind, self.folder = root, kind, root / "a" / "b" / "work"
        self.folder.mkdir(parents=True)
        os.chdir(self.folder)
        kind.make(self.folder)
        shutil.rmtree(self.folder / "runs", ignore_errors=True)
        self.before = listing(root)

    def finding(self, changes: Changes) -> str | None:
        """Run the command with changed files, and restore the files."""
        good = {name: (self.folder / name).read_bytes() for name in changes}
        manifests = {path: path.read_bytes() for path in (self.folder / "step_1").glob("manifest-*.json")}
        try:
            for name, content in changes.items():
                self._replace(self.folder / name, content)
            self.kind.finish(self.folder)
            found = finding(self.kind.command, self.kind.codes)
            runs = str(self.folder / "runs")
            manifest = str(self.folder / "step_1" / "manifest-")
            new = {p for p in listing(self.root) - self.before if not p.startswith((runs, manifest))}
            return found or (f"wrote {sorted(new)[:3]}" if new else None)
        finally:
            for path in (self.folder / "step_1").glob("manifest-*.json"):
                path.unlink()
            for path, content in (manifests | {self.folder / name: content for name, content in good.items()}).items():
                self._replace(path, content)
            shutil.rmtree(self.folder / "runs", ignore_errors=True)

    @staticmethod
    def _replace(path: Path, content: bytes) -> None:
        # Remove the old file, because overwriting it would change what is mapped into memory.
        path.unlink(missing_ok=True)
        path.write_bytes(content)


@pytest.fixture(scope="module")
def workplaces(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Workplace]]:
    """Return an empty table of workplaces, which ``workplace`` fills, and restore the working directory at the end."""
    before = Path.cwd()
    yield {}
    os.chdir(before)


def workplace(made: dict[str, Workplace], name: str, factory: pytest.TempPathFactory) -> Workplace:
    if name not in made:
        made[name] = Workplace(factory.mktemp("fuzz"), KINDS[name])
    os.chdir(made[name].folder)
    return made[name]


def fuzz(place: Workplace, cases: int, number: int) -> dict[str, tuple[str, Changes]]:
    """Try `cases` damaged inputs. Return the findings, one of each kind."""
    found: dict[str, tuple[str, Changes]] = {}

    @seed(number)
    @settings(max_examples=cases, deadline=None, database=None, phases=[Phase.generate],
              suppress_health_check=list(HealthCheck))  # fmt: skip
    @given(place.kind.damage(place.folder))
    def attempt(changes: Changes) -> None:
        what = place.finding(changes)
        if what is not None:
            found.setdefault(same_kind(what), (what, changes))

    attempt()
    return found


def report(found: dict[str, tuple[str, Changes]]) -> str:
    return "\n".join(
        f"{what}\n      {[(name, content[:600]) for name, content in changes.items()]}"
        for what, changes in found.values()
    )


@pytest.mark.parametrize("name", KINDS)
def test_a_few(name: str, workplaces: dict[str, Workplace], tmp_path_factory: pytest.TempPathFactory) -> None:
    place = workplace(workplaces, name, tmp_path_factory)
    found = fuzz(place, place.kind.fast, 0)
    assert not found, report(found)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "number"), [(name, n) for name, kind in KINDS.items() for n in range(kind.seeds)])
def test_ten_thousand(
    name: str, number: int, workplaces: dict[str, Workplace], tmp_path_factory: pytest.TempPathFactory
) -> None:
    found = fuzz(workplace(workplaces, name, tmp_path_factory), CASES, 1 + number)
    assert not found, report(found)
