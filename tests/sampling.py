"""Choose which tests run: only a few cases of long parameter lists, and a sample of the slow tests that depends on a
seed."""

from __future__ import annotations

import hashlib
import re
import time
from collections import defaultdict

import pytest


def add_options(parser: pytest.Parser) -> None:
    """Add ``--sample SEED`` and ``--minutes N``."""
    group = parser.getgroup("sampling")
    group.addoption("--sample", metavar="SEED", help="Run the selected tests in an order that SEED decides.")
    group.addoption("--minutes", type=float, default=None, help="Start no test after this time.")


def wants_gpus(markers: str) -> bool:
    """Return whether ``-m`` selects the tests that need a GPU. All other tests run on CPUs, with gloo, on any
    machine."""
    return re.search(r"(?<!not )\bgpu\b", markers) is not None


def mark_long_matrices(items: list[pytest.Item]) -> None:
    """If a test has the mark ``fast_cases(n)``, keep n cases, spread evenly over its list of cases, and mark all other
    cases as slow. Cases for a GPU are not marked, because machines with a GPU are fast.
    """
    cases: dict[tuple[str, str], list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("fast_cases") and not {"slow", "gpu"} & {mark.name for mark in item.iter_markers()}:
            cases[str(item.path), item.name.partition("[")[0]].append(item)
    for group in cases.values():
        fast = next(group[0].iter_markers("fast_cases")).args[0]
        kept = {round((i + 0.5) * len(group) / fast - 0.5) for i in range(fast)}
        for number, item in enumerate(group):
            if number not in kept:
                item.add_marker(pytest.mark.slow)


class Sampling:
    """Runs tests in an order that depends on the seed (by a hash of seed and name), and starts no test after the
    deadline."""

    def __init__(self, seed: str | None, minutes: float | None) -> None:
        self.seed = seed
        self.deadline = float("inf") if minutes is None else time.monotonic() + 60 * minutes
        self.selected = self.started = 0

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Order ``items`` in place."""
        self.selected = len(items)
        if self.seed is not None:
            items.sort(key=lambda item: hashlib.sha256(f"{self.seed} {item.nodeid}".encode()).digest())

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> bool | None:
        """Return True when the time is up. pytest then skips the test."""
        if time.monotonic() > self.deadline:
            return True
        self.started += 1
        return None

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print how many of the selected tests ran."""
        terminalreporter.write_line(f"ran {self.started} of {self.selected} selected tests (--sample {self.seed})")
