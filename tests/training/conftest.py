"""Define fixtures for full jobs: an uninterrupted run to compare with, and real processes."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

import pytest
from small_jobs import make, train
from train_processes import FOURFOLD, ONE_THREAD, Start, heed_hangup

from fourfold.config.run import RunConfig
from fourfold.training.outcome import Outcome


@pytest.fixture(scope="module")
def finished(prefix: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[RunConfig, Outcome]:
    """Train a run without interruption. Tests compare other runs with it."""
    folder = tmp_path_factory.mktemp("finished")
    changes = {"validation__interval": 4, "validation__steps": 2, "checkpoint__interval": 2, "sample__prompt": "the "}
    run = make(folder, prefix, **changes, sample__max_new_tokens=12)
    return run, train(run)


@pytest.fixture
def start() -> Iterator[Start]:
    """Start ``fourfold train`` in a process group of its own, so that a Ctrl-C reaches all of its processes."""
    started: list[subprocess.Popen[str]] = []

    def start(
        path: Path, command: list[str] = FOURFOLD, environ: Mapping[str, str] = MappingProxyType({})
    ) -> subprocess.Popen[str]:
        started.append(
            subprocess.Popen(
                [*command, "train", str(path)],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env={**ONE_THREAD, **environ},
                start_new_session=True,
                preexec_fn=heed_hangup,
            )
        )
        return started[-1]

    yield start
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
