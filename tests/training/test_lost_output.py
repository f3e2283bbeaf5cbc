"""If nothing reads a job's output anymore, training continues, and all other commands end silently."""

from __future__ import annotations

import io
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from command_line import exit_code
from python_start import run_at_start
from tiny_corpus import run_file
from train_processes import FOURFOLD, steps_of

from fourfold.exit_codes import DONE, REFUSED
from fourfold.launch import worker_processes
from fourfold.processes import lossy_output


@pytest.fixture
def nobody_reads() -> Iterator[int]:
    """Yield the end of a pipe whose other end is closed."""
    theirs, ours = os.pipe()
    os.close(theirs)
    yield ours
    os.close(ours)


@pytest.mark.parametrize("processes", [1, 2])
def test_a_job_whose_output_nobody_reads_trains_to_its_end(
    tmp_path: Path, prefix: str, monkeypatch: pytest.MonkeyPatch, nobody_reads: int, processes: int
) -> None:
    path = run_file(tmp_path, prefix, parallel__x=processes, metrics__log_interval=1)
    # Each process prints this warning at its start. Nobody reads the output, so the warning stays in a buffer.
    warning = "import sys\ntry: print('a warning', file=sys.stderr)\nexcept OSError: pass"
    monkeypatch.setenv("PYTHONPATH", run_at_start(tmp_path, warning)["PYTHONPATH"])
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)  # With it, streams have no buffer.
    # Do not use the fork server, because it outlives this test. All later tests would fork from a process whose output
    # nobody reads.
    monkeypatch.setattr(worker_processes, "STARTED_BY", multiprocessing.get_context("spawn"))
    before = [os.dup(1), os.dup(2)]  # local workers inherit these
    try:
        for descriptor, name in ((1, "stdout"), (2, "stderr")):
            os.dup2(nobody_reads, descriptor)
            monkeypatch.setattr(sys, name, io.TextIOWrapper(io.FileIO(nobody_reads, "w", closefd=False)))
        assert exit_code("train", path) == DONE
    finally:
        monkeypatch.undo()
        for descriptor, saved in enumerate(before, start=1):
            os.dup2(saved, descriptor)
            os.close(saved)
    assert steps_of(path) == 8
    attempts = (tmp_path / "runs" / "run" / "attempts.jsonl").read_text().splitlines()
    assert len(attempts) == 2, "it was started again"


def test_a_warning_that_nobody_read_does_not_end_the_job(nobody_reads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.TextIOWrapper(io.BufferedWriter(io.FileIO(nobody_reads, "w", closefd=False)))
    stream.write("a warning")
    with pytest.raises(BrokenPipeError):
        stream.flush()
    monkeypatch.setattr(sys, "stdout", stream)
    with lossy_output(any_error=True):
        print("more", flush=True)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), nobody_reads)
        stream.close()


def test_a_command_ends_without_a_word(nobody_reads: int) -> None:
    done = subprocess.run([*FOURFOLD, "--version"], stdout=nobody_reads, stderr=subprocess.PIPE)
    assert (done.returncode, done.stderr) == (DONE, b"")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the kernel has no device that is always full")
def test_a_full_disk_loses_no_output_without_a_word() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run([*FOURFOLD, "--version"], stdout=full, stderr=subprocess.PIPE)
    assert done.returncode == REFUSED
    assert done.stderr == b"fourfold: cannot write the output: No space left on device\n"


def test_output_comes_whole_and_in_order(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with open(tmp_path / "log", "w") as log:
        monkeypatch.setattr(sys, "stdout", log)
        print("before")
        with lossy_output(), lossy_output(any_error=True):
            print("inside")
        print("after")
    assert (tmp_path / "log").read_text() == "before\ninside\nafter\n"


def test_a_stream_that_is_not_a_file_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    text = io.StringIO()
    monkeypatch.setattr(sys, "stdout", text)
    with lossy_output():
        print("inside")
    assert text.getvalue() == "inside\n"
