"""A watchdog beside each process of a job: it ends a job that hangs, and names the rank that fell silent.

The watchdog is a process of its own (``watchdog_process``), so that it also sees a process that was stopped, or that
waits inside a library. It reads the heartbeat, and the signals that arrive, which Python handles only between two
instructions and so not in a collective that never ends.
"""

from __future__ import annotations

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
"""Time for the watchdog to leave when the job is done."""


@contextlib.contextmanager
def watchdog(folder: Path, place: Place, limits: FaultToleranceConfig) -> Iterator[None]:
    """Have this process watched while the block runs. folder: of this start's reports; all ranks give the same.

    A process that hangs leaves with ``exit_codes.HANG``.
    """
    if not limits.timeout:
        yield
        return
    with contextlib.ExitStack() as stack:
        shared, stacks = (stack.enter_context(tempfile.TemporaryFile(dir=_memory())) for _ in range(2))
        shared.truncate(SIZE)
        alive, signals = os.pipe()
        ended, told = os.pipe()
        watch = Watch(
            heartbeat=shared.fileno(),
            stacks=stacks.fileno(),
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
        with held_stop_signals():  # they mean this process, and the watchdog inherits the block
            process = subprocess.Popen(command, pass_fds=inherited, env=environment, stdin=subprocess.DEVNULL)
        for descriptor in (alive, told):
            os.close(descriptor)
        threading.Thread(target=_leave_when_told, args=(ended,), daemon=True, name="fourfold-watchdog").start()
        faulthandler.register(STACK_SIGNAL, file=stacks, all_threads=True)
        os.set_blocking(signals, False)
        before = signal.set_wakeup_fd(signals, warn_on_full_buffer=False)
        heartbeat.watched(Heartbeat(shared.fileno()))
        try:
            yield
        finally:
            heartbeat.watched(None)
            signal.set_wakeup_fd(before)
            faulthandler.unregister(STACK_SIGNAL)
            with contextlib.suppress(BrokenPipeError):  # where something has killed the watchdog
                os.write(signals, bytes([DONE]))
            try:
                process.wait(LEAVE_SECONDS)
            except subprocess.TimeoutExpired:  # something has stopped it
                process.kill()
                process.wait()
            os.close(signals)


def _memory() -> str | None:
    """A folder in memory, where the machine has one."""
    return "/dev/shm" if os.path.isdir("/dev/shm") else None


def _leave_when_told(ended: int) -> None:
    """Leave with the exit code that the watchdog sends; the main thread may wait in a collective forever."""
    code = os.read(ended, 1)
    os.close(ended)
    if code:
        os._exit(code[0])
