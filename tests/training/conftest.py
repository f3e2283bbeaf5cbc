"""Fixtures of tests with real processes."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

import pytest
from train_processes import FOURFOLD, ONE_THREAD, Start, heed_hangup


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts ``fourfold train`` in a process group of its own, which a Ctrl-C reaches as a whole."""
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
