"""Start real processes of ``fourfold train``, and read what they have written so far."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from patience import wait_until
from python_start import run_at_start
from tiny_corpus import run_file

FOURFOLD = [sys.executable, "-c", "import sys; from fourfold.cli.app import main; sys.argv[0] = 'fourfold'; main()"]
WHEN_IMPORTED = """
import importlib.abc, importlib.util, sys

class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != {module!r}:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module
        spec.loader.exec_module = lambda module: (execute(module), change(module))
        return spec

sys.meta_path.insert(0, Finder())
"""


def with_change(folder: Path, module: str, change: str) -> dict[str, str]:
    """Return an environment for processes. When a process imports ``module``, it calls the function ``change`` on the
    module. The argument ``change`` is the source code that defines this function."""
    return run_at_start(folder, WHEN_IMPORTED.format(module=module) + change)


ONE_THREAD = os.environ | {"OMP_NUM_THREADS": "1"}
"""An environment with one thread, because threads that wait for each other are slow on busy cores."""
Start = Callable[..., subprocess.Popen[str]]


def heed_hangup() -> None:
    """React to SIGHUP again, in case the tests run under nohup."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def steps_of(path: Path) -> int:
    """Return how many steps of a run file are in its metrics."""
    metrics = path.parent / "runs" / "run" / "metrics.jsonl"
    return metrics.read_text().count("\n") if metrics.is_file() else 0


def wait_for_steps(path: Path, steps: int, process: subprocess.Popen[str]) -> None:
    wait_until(lambda: steps_of(path) >= steps, process)


def checkpoint_steps(folder: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in (folder / "runs" / "run" / "checkpoints").glob("step_*"))


def endless(folder: Path, prefix: str, **changes: object) -> Path:
    return run_file(folder, prefix, training__train_steps=100_000, lr_scheduler__decay_style="constant", **changes)


def children_of(process_id: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{process_id}/task/{process_id}/children").read_text().split()]


def workers_of(process_id: int) -> list[int]:
    """Return the local workers of a job, by rank: the children of their starter, in the order of their start."""
    return [worker for child in children_of(process_id) for worker in children_of(child)]
