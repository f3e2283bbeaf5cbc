"""Examine the disk that runs are written to."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from fourfold.doctor.finding import Finding, error, ok, warning
from fourfold.training.console import format_bytes

LEAST_ROOM = 10 * 2**30
"""Warn if fewer bytes than this are free. A checkpoint of a billion parameters (16 GB with its moments) does not fit
into less space."""


def examine_disk(folder: Path) -> Iterator[Finding]:
    """Examine the folder, or its nearest parent that exists."""
    place = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.is_dir())
    yield room(place, shutil.disk_usage(place).free)
    try:
        with tempfile.TemporaryFile(dir=place):
            pass
    except OSError as failure:
        yield error("disk", f"cannot write in {place}: {failure.strerror}", "choose another output_dir")


def room(place: Path, free: int) -> Finding:
    """Check that the disk has enough free space for checkpoints."""
    text = f"{format_bytes(free)} free in {place}"
    if free < LEAST_ROOM:
        advice = "make room, choose another output_dir, or keep fewer checkpoints (checkpoint.keep_latest_k)"
        return warning("disk space", text, advice, free=free)
    return ok("disk space", text, free=free)
