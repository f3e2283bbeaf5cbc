"""Tests do not depend on the speed of the machine."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from source_files import TESTS, tree

CLOCKS = {"monotonic", "perf_counter", "process_time", "thread_time", "perf_counter_ns", "monotonic_ns"}
WITH_A_CLOCK = {
    "patience.py": "gives up a wait",
    "pool.py": "gives up a wait, and orders the failures of ranks",
    "sampling.py": "starts no test after the time that an option names",
    "test_kill_sweep.py": "kills at a random moment of the start",
    "test_pool.py": "a rank hangs, which the pool must notice",
    "test_stream.py": "a source is dead, which the reader must notice",
    "test_trial_processes.py": "a trial hangs, which the search must notice",
    "test_timeline.py": "the time of recorded steps is inside of the time that their process takes",
}
"""Test files that may read a real clock or set a short time limit, each with the reason. All other tests use a fake
clock, because machines differ in speed."""
SHORTEST_TIMEOUT = 300


def clocks_read(path: Path) -> set[str]:
    """Return where a test file reads a clock or sets a time limit that a busy machine may exceed."""
    found = set()
    for node in (node for node in ast.walk(tree(path)) if isinstance(node, ast.Call)):
        if isinstance(node.func, ast.Attribute) and node.func.attr in CLOCKS:
            found.add(node.func.attr)
        limits = [each.value for each in node.keywords if each.arg == "timeout"]
        if isinstance(node.func, ast.Attribute) and node.func.attr in ("communicate", "wait", "join"):
            limits += node.args
        found.update(
            f"timeout={each.value}"
            for each in limits
            if isinstance(each, ast.Constant) and isinstance(each.value, int | float) and each.value < SHORTEST_TIMEOUT
        )
    return found


@pytest.mark.parametrize(
    "source", ["a = time.perf_counter()", "process.communicate(timeout=30)", "run(a, timeout=1.5)", "event.wait(10)"]
)
def test_every_kind_of_time_limit_is_seen(source: str, tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(source)
    assert clocks_read(tmp_path / "a.py")


def test_tests_do_not_depend_on_the_speed_of_the_machine() -> None:
    found = {path.name: clocks for path in TESTS if (clocks := clocks_read(path))}
    assert found.keys() == WITH_A_CLOCK.keys(), found
