"""Set up worker processes (cores, file limit, network interface, output), and end them together with their parent
process."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import gc
import io
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any, TextIO

from fourfold.errors import UserError

PR_SET_PDEATHSIG = 1

LEAST_FILES, ENOUGH_FILES = 64, 4096
"""Limits for the number of open files. The first lets two local processes connect, and the second is enough for a large
job.

In a large job, rank 0 has a connection to every rank, and NCCL has several connections to each peer.
"""


def available_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def time_of_start() -> float:
    """Return the Unix time when this process was started. On systems other than Linux, return the current time."""
    if not sys.platform.startswith("linux"):
        return time.time()
    with open("/proc/self/stat", encoding="ascii", errors="replace") as stat:
        ticks = int(stat.read().rpartition(")")[2].split()[19])  # Start of this process, in clock ticks since boot.
    return time.time() - (time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Pause garbage collection while large libraries are imported.

    Garbage collection would take a fifth of the import time, and would find no garbage.
    """
    collected = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collected:
            gc.enable()


def raise_file_limit() -> None:
    """Let this process and its children open as many files as the system allows, but at most `ENOUGH_FILES`.

    Raises:
        UserError: The limit is too low even for two processes to connect to each other.
    """
    import resource  # The resource module exists only on POSIX, but this module is also imported on other systems.

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = ENOUGH_FILES if hard == resource.RLIM_INFINITY else min(hard, ENOUGH_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    if most < LEAST_FILES:
        raise UserError(
            f"this process may open {most} files, but a job needs {LEAST_FILES} or more; raise the limit, for example "
            f"with: ulimit -n {ENOUGH_FILES}"
        )


def keep_gloo_local() -> None:
    """Make gloo use the loopback interface, because the machine's host name may not resolve."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")


def prepare_environment(world_size: int) -> None:
    """Set environment variables that give this process an equal share of the cores and make gloo use the loopback
    interface. Variables that the user has set stay unchanged. Call this before importing torch."""
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, available_cores() // world_size)))
    keep_gloo_local()


class _LossyFile(io.FileIO):
    """A file that silently discards output that it cannot write.

    Args:
        descriptor: The file's descriptor.
        errors: The error numbers (errno) to ignore. None ignores all errors.
    """

    def __init__(self, descriptor: int, errors: frozenset[int] | None) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self._errors = errors

    def write(self, content: Any) -> int:
        try:
            return super().write(content)
        except OSError as error:
            if self._errors is not None and error.errno not in self._errors:
                raise
            return memoryview(content).nbytes


@contextlib.contextmanager
def lossy_output(any_error: bool = False) -> Iterator[None]:
    """During the block, discard this process's output if the reader of the output, such as `head` or a terminal, is
    gone.

    Args:
        any_error: Whether to also discard output that cannot be written for any other reason, such as a full disk. If
            False, such an error is raised.
    """
    before = sys.stdout, sys.stderr
    errors = None if any_error else frozenset((errno.EPIPE, errno.EIO, errno.EBADF))
    sys.stdout, sys.stderr = (_lossy(stream, errors) for stream in before)
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            # Flushing fails if the disk is full or the block has closed the stream.
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        sys.stdout, sys.stderr = before


def _lossy(stream: TextIO | None, errors: frozenset[int] | None) -> TextIO:
    """Return a new stream that writes to the file of ``stream``, and discards output that cannot be written.

    Return the given stream itself if it is not an ordinary file stream, or if it must still report the error of an
    earlier write.
    """
    if stream is None:  # The shell has closed this file.
        return open(os.devnull, "w")
    if not isinstance(stream, io.TextIOWrapper):
        return stream
    try:
        raw = _LossyFile(stream.fileno(), errors)
    except OSError:
        return stream
    try:
        stream.flush()
    except OSError as error:
        # The buffer held earlier output, such as a warning, and writing this output failed.
        if errors is not None and error.errno not in errors:
            return stream
    return io.TextIOWrapper(
        io.BufferedWriter(raw),
        stream.encoding,
        "replace" if stream.errors == "strict" else stream.errors,  # The terminal's encoding may lack a character.
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


def end_with_starter() -> None:
    """Make the kernel kill this process when the thread that started it ends.

    Does nothing on systems other than Linux.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def end_with_parent() -> None:
    """End this worker process when its parent ends, even if the parent is killed with SIGKILL. On Linux, the
    worker ends as soon as the parent's thread that started the worker ends."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "runs in workers only"
    if sys.platform == "linux":
        end_with_starter()
        if not parent.is_alive():  # The parent ended before this point.
            os._exit(1)
    else:
        threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()
