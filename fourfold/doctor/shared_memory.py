"""Examine the free space in /dev/shm, through which NCCL and worker processes pass data."""

import shutil
from collections.abc import Iterator
from pathlib import Path

from fourfold.doctor.finding import Finding, error, ok, warning
from fourfold.training.console import format_bytes

FOLDER = Path("/dev/shm")
LEAST, ENOUGH = 32 * 2**20, 2**30
"""Free space in bytes. Below the first size, NCCL fails between GPUs of one machine. Below the second size, shared
memory may run out. (Containers often have 64 MiB, and a few GPUs need more.)"""
ADVICE = "start the container with --shm-size=16g or --ipc=host, or remove old files there"


def examine_shared_memory() -> Iterator[Finding]:
    """Examine the size and the free space of /dev/shm."""
    if FOLDER.is_dir():
        size, _, free = shutil.disk_usage(FOLDER)
        yield shared_memory(size, free)
    else:
        yield warning("shared memory", f"there is no {FOLDER}", "mount a tmpfs there: NCCL needs it between GPUs")


def shared_memory(size: int, free: int) -> Finding:
    """Judge whether the free space in /dev/shm is enough. Both arguments are in bytes."""
    text, figures = f"{format_bytes(free)} free of {format_bytes(size)} in {FOLDER}", {"size": size, "free": free}
    if free < LEAST:
        return error("shared memory", text, ADVICE, **figures)
    if free < ENOUGH:
        return warning("shared memory", text, ADVICE, **figures)
    return ok("shared memory", text, **figures)
