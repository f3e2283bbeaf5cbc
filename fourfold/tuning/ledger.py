"""The ledger of a search: a file of JSON lines that only grows, so that a search that was killed continues from it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fourfold.data.files import writing
from fourfold.errors import UserError
from fourfold.parsing import parse_json
from fourfold.tuning.result import Result, Trial

LEDGER, EARLIER = "ledger.jsonl", "ledger.journal"
"""The file in the folder of a search, and the file of versions that kept an Optuna study."""


class Ledger:
    """The trials of one search: what was begun, and what became of it."""

    def __init__(self, folder: Path, what: Mapping[str, str]) -> None:
        """Open the ledger of a folder, or begin it; raises ``UserError`` for the ledger of another search.

        what: texts in which two searches differ whose trials must not be mixed, by name.
        """
        self.file = folder / LEDGER
        self._begun: dict[int, tuple[int, str]] = {}
        self._results: dict[int, Result] = {}
        if not self.file.exists() and (folder / EARLIER).exists():
            raise UserError(f"{folder} holds a search of an earlier version; choose another --out, or remove it")
        try:
            search, *entries = [parse_json(line) for line in _whole_lines(self.file)] or [{"search": None}]
            before = search["search"]
            assert before is None or isinstance(before, dict)
            for entry in entries:
                self._take(entry)
        except (AssertionError, KeyError, TypeError, ValueError):
            problem = f"{self.file} is damaged, or no ledger; choose another --out, or remove the file"
            raise UserError(problem) from None
        if before is None:
            self._append({"search": dict(what)})
        elif differing := [name for name, text in what.items() if before.get(name) != text]:
            raise UserError(
                f"{folder} holds the trials of another search, with another {' and '.join(differing)}; choose another "
                "--out, or remove the folder"
            )

    def trials(self) -> list[Trial]:
        """Every trial that ran and ended, by number."""
        return [Trial(self._begun[number][0], self._results[number], number) for number in sorted(self._results)]

    def reason(self, number: int) -> str:
        """Why a trial was proposed."""
        return self._begun[number][1]

    def unfinished(self) -> list[tuple[int, int]]:
        """Number and candidate of every trial that was begun and has no result: of a search that was killed."""
        return [(number, index) for number, (index, _) in self._begun.items() if number not in self._results]

    def begin(self, index: int, why: str) -> int:
        """Note that a candidate is tried, and why; returns the trial's number."""
        number = len(self._begun)
        self._append({"begin": number, "index": index, "why": why})
        return number

    def end(self, number: int, result: Result) -> None:
        """Note a trial's result."""
        self._append({"end": number, "result": asdict(result)})

    def _append(self, entry: dict[str, Any]) -> None:
        with writing(self.file), self.file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")
        if "search" not in entry:
            self._take(entry)

    def _take(self, entry: dict[str, Any]) -> None:
        if "begin" in entry:
            self._begun[entry["begin"]] = entry["index"], entry["why"]
        else:
            self._results[entry["end"]] = Result(**entry["result"])
            assert entry["end"] in self._begun


def _whole_lines(file: Path) -> list[bytes]:
    """The lines of a ledger, after removing the end of one whose writer was killed."""
    if not file.exists():
        return []
    with writing(file):
        content = file.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        if len(whole) < len(content):
            os.truncate(file, len(whole))
    return whole.splitlines()
