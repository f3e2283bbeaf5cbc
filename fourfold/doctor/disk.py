"""Examine the free space and the speed of the disk that runs are written to."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from fourfold.doctor.finding import Finding, error, ok, warning
from fourfold.training.console import format_bytes

BLOCK = 4 * 2**20
MOST_BYTES, MOST_SECONDS = 256 * 2**20, 5.0
"""Limits on the size and the time of the test file. The first limit that is reached ends the test."""
LEAST_ROOM, LEAST_SPEED = 10 * 2**30, 100e6
"""Warn below this free space in bytes, or below this write speed in bytes per second. With less space, a checkpoint of
a billion parameters (16 GB with its moments) does not fit. With less speed, saving it takes minutes."""


class Speed(NamedTuple):
    """Disk speed for writing and reading, in bytes per second."""

    written: float
    read: float


def examine_disk(folder: Path) -> Iterator[Finding]:
    """Examine the folder, or its nearest parent that exists. The test file is removed afterwards."""
    place = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.is_dir())
    yield room(place, shutil.disk_usage(place).free)
    try:
        with tempfile.TemporaryFile(dir=place, buffering=0) as file:
            yield speed(place, measure(file.fileno()))
    except OSError as failure:
        yield error("disk speed", f"cannot write in {place}: {failure.strerror}", "choose another output_dir")


def room(place: Path, free: int) -> Finding:
    """Check that the disk has enough free space for checkpoints."""
    text = f"{format_bytes(free)} free in {place}"
    if free < LEAST_ROOM:
        advice = "make room, choose another output_dir, or keep fewer checkpoints (checkpoint.keep_latest_k)"
        return warning("disk space", text, advice, free=free)
    return ok("disk space", text, free=free)


def speed(place: Path, measured: Speed | None) -> Finding:
    """Judge the disk's speed. ``measured`` is None if the disk returned other data than the test wrote."""
    if measured is None:
        return error("disk speed", f"{place} returns other bytes than were written", "use another disk; this one fails")
    text = f"{measured.written / 1e6:,.0f} MB/s written, {measured.read / 1e6:,.0f} MB/s read, by one process"
    if measured.written < LEAST_SPEED:
        advice = "write to a local disk or the cluster's parallel file system, or set checkpoint.async_mode = 'async'"
        return warning("disk speed", text, advice, **measured._asdict())
    return ok("disk speed", text, **measured._asdict())


def measure(descriptor: int) -> Speed | None:
    """Write blocks, flush them to disk, and read them again. Reading bypasses the kernel's cache if the kernel allows
    it. Return None if other bytes come back."""
    block = os.urandom(BLOCK)  # Use random bytes, because some disks compress their data.
    start, size = time.perf_counter(), 0
    while size < MOST_BYTES and time.perf_counter() - start < MOST_SECONDS:
        _write_whole(descriptor, block)
        size += BLOCK
    os.fsync(descriptor)
    written = size / (time.perf_counter() - start)
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    start = time.perf_counter()
    same = all(os.pread(descriptor, BLOCK, place) == block for place in range(0, size, BLOCK))
    return Speed(written, size / (time.perf_counter() - start)) if same else None


def _write_whole(descriptor: int, block: bytes) -> None:
    left = memoryview(block)
    while left:
        left = left[os.write(descriptor, left) :]
