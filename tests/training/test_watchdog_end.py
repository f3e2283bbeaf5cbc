"""The watchdog ends with its job."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from patience import not_forever
from tiny_runs import tiny_run
from train_processes import children_of

from fourfold.environment import Place
from fourfold.launch import watchdog as module


def test_a_stopped_watchdog_does_not_keep_a_finished_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LEAVE_SECONDS", 0.5)
    before = set(children_of(os.getpid()))
    with not_forever(), module.watchdog(tmp_path, Place(0, 0, 1, 1, "local"), tiny_run().fault_tolerance):
        (own,) = set(children_of(os.getpid())) - before
        os.kill(own, signal.SIGSTOP)
    assert set(children_of(os.getpid())) <= before
