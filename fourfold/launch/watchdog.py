"""Start a watchdog for each process of a job. A watchdog ends a job that hangs, and names the rank that went silent.

A watchdog is a separate process (`watchdog_process`). It reads the heartbeats of its training process, which are
signs of life in shared memory. It also reads which signals the training process receives. The training process cannot
watch itself: it may be stopped, or it may wait forever inside a collective. Python runs signal handlers only between
two bytecode instructions. Waiting for a collective is one instruction, so no handler runs during the wait.
"""

import contextlib
import faulthandler
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

from fourfold import heartbeat
from fourfold.config.fault_tolerance import FaultToleranceConfig
from fourfold.environment import Place
from fourfold.heartbeat import SIZE, Heartbeat
from fourfold.launch.stop_signals import held_stop_signals
from fourfold.launch.watchdog_process import DONE, STACK_SIGNAL, Watch

LEAVE_SECONDS = 30.0
"""Longest time in seconds to wait for the watchdog to exit when the job is done."""


@contextlib.contextmanager
def watchdog(folder: Path, place: Place, limits: FaultToleranceConfig) -> Iterator[None]:
    """Watch this process while the `with` block runs. If it hangs, end it with the exit code `exit_codes.HANG`.

    Args:
        folder: Folder for the reports about a hang. It must be the same on all ranks, and new for each start of the
            job.
        place: The rank of this process, and the size of the job.
        limits: The section [fault_tolerance] of the run file. If `timeout` is 0 there, no watchdog is started.
    """
    if not limits.timeout:
        yield
        return
    with contextlib.ExitStack() as stack:
        shared, stacks = (stack.enter_context(tempfile.TemporaryFile(dir=_memory())) for _ in range(2))
        shared.truncate(SIZE)
        process, signals = _start_watching(folder, place, limits, shared.fileno(), stacks.fileno())
        faulthandler.register(STACK_SIGNAL, file=stacks, all_threads=True)
        os.set_blocking(signals, False)
        before = signal.set_wakeup_fd(signals, warn_on_full_buffer=False)
        heartbeat.send_signs_to(Heartbeat(shared.fileno()))
        try:
            yield
        finally:
            heartbeat.send_signs_to(None)
            signal.set_wakeup_fd(before)
            faulthandler.unregister(STACK_SIGNAL)
            with contextlib.suppress(BrokenPipeError):  # Another process has killed the watchdog.
                os.write(signals, bytes([DONE]))
            try:
                process.wait(LEAVE_SECONDS)
            except subprocess.TimeoutExpired:  # Another process has stopped the watchdog.
                process.kill()
                process.wait()
            os.close(signals)


def _start_watching(
    folder: Path, place: Place, limits: FaultToleranceConfig, shared: int, stacks: int
) -> tuple[subprocess.Popen[bytes], int]:
    """Start the watchdog process.

    Returns:
        The watchdog process, and the pipe through which this process tells the watchdog about received signals.
    """
    alive, signals = os.pipe()
    ended, told = os.pipe()
    watch = Watch(
        heartbeat=shared,
        stacks=stacks,
        signals=alive,
        tell=told,
        process=os.getpid(),
        rank=place.rank,
        world_size=place.world_size,
        folder=str(folder),
        timeout=limits.timeout,
        startup_timeout=limits.startup_timeout,
        grace=limits.grace_period,
        forces=place.launcher != "local" or place.world_size == 1,
    )
    command = [sys.executable, "-m", "fourfold.launch.watchdog_process", json.dumps(watch._asdict())]
    inherited = (watch.heartbeat, watch.stacks, watch.signals, watch.tell)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    # The watchdog inherits the blocked stop signals. If a signal is sent to both processes, only the training process
    # reacts to it.
    with held_stop_signals():
        process = subprocess.Popen(command, pass_fds=inherited, env=environment, stdin=subprocess.DEVNULL)
    for descriptor in (alive, told):
        os.close(descriptor)
    threading.Thread(target=_leave_when_told, args=(ended,), daemon=True, name="fourfold-watchdog").start()
    return process, signals


def _memory() -> str | None:
    """Return a folder whose files are in memory, or None if the machine has no such folder."""
    return "/dev/shm" if os.path.isdir("/dev/shm") else None


def _leave_when_told(ended: int) -> None:
    """Wait for an exit code from the watchdog, and exit with it. This runs in a thread, because the main thread may be
    stuck in a collective."""
    code = os.read(ended, 1)
    os.close(ended)
    if code:
        os._exit(code[0])
