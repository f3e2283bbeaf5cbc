"""Keep the ledger of a search, an append-only file of JSON lines. A search that was killed resumes from its ledger."""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fourfold.data.atomic_files import writing
from fourfold.errors import UserError
from fourfold.parsing import parse_json
from fourfold.tuning.trial_result import Trial, TrialResult

LEDGER = "ledger.jsonl"
"""Name of the ledger in a search's folder."""


class Ledger:
    """The trials of one search: which candidates were started, and how each trial ended."""

    def __init__(self, folder: Path, what: Mapping[str, str]) -> None:
        """Open the ledger of a search's folder, or create it.

        Args:
            folder: The search's folder.
            what: Texts that identify the search, by name. If the folder has a ledger, these texts must equal the texts
                in the ledger.

        Raises:
            UserError: The ledger is damaged, or belongs to another search.
        """
        self.file = folder / LEDGER
        self._begun: dict[int, tuple[int, str]] = {}
        self._results: dict[int, TrialResult] = {}
        try:
            search, *entries = [parse_json(line) for line in _whole_lines(self.file)] or [{"search": None}]
            before = search["search"]
            assert before is None or isinstance(before, dict)
            for entry in entries:
                self._take(entry)
        except (AssertionError, KeyError, TypeError, ValueError):
            problem = f"{self.file} is not a ledger, or is damaged; choose another --out, or remove the file"
            raise UserError(problem) from None
        if before is None:
            self._append({"search": dict(what)})
        elif differing := [name for name, text in what.items() if before.get(name) != text]:
            raise UserError(
                f"{folder} holds the trials of another search, with another {' and '.join(differing)}; choose another "
                "--out, or remove the folder"
            )

    def trials(self) -> list[Trial]:
        """Return every trial that has a result, in order of their numbers."""
        return [Trial(self._begun[number][0], self._results[number], number) for number in sorted(self._results)]

    def reason(self, number: int) -> str:
        """Return the reason why the trial with this number was proposed, in words."""
        return self._begun[number][1]

    def unfinished(self) -> list[tuple[int, int]]:
        """Return the number and the candidate index of every trial that was started but has no result.

        A search that was killed leaves such trials.
        """
        return [(number, index) for number, (index, _) in self._begun.items() if number not in self._results]

    def begin(self, index: int, why: str) -> int:
        """Record that a trial of candidate ``index`` begins, and why. Return the number of the trial."""
        number = len(self._begun)
        self._append({"begin": number, "index": index, "why": why})
        return number

    def end(self, number: int, result: TrialResult) -> None:
        """Record a trial's result."""
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
            self._results[entry["end"]] = TrialResult(**entry["result"])
            assert entry["end"] in self._begun


def _whole_lines(file: Path) -> list[bytes]:
    """Return the complete lines of a ledger. If the last line is incomplete because its writer was killed, remove it
    from the file first."""
    if not file.exists():
        return []
    with writing(file):
        content = file.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        if len(whole) < len(content):
            os.truncate(file, len(whole))
    return whole.splitlines()
