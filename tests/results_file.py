"""Write each test result to a file immediately, so that no results are lost if the session is killed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest


class ResultsFile:
    """Appends a JSON line for every test, with its name, outcome, seconds, recorded properties, and the end of its
    error."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.write_text("")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Write the result of a test's call. Write the result of its setup or teardown only if it did not pass."""
        if report.when != "call" and report.passed:
            return
        record = {"test": report.nodeid, "outcome": report.outcome, "seconds": round(report.duration, 2)}
        record |= dict(report.user_properties)
        if report.skipped and isinstance(report.longrepr, tuple):
            record["reason"] = report.longrepr[2]
        elif report.failed:
            record["error"] = report.longreprtext[-3000:]
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record, default=str) + "\n")
