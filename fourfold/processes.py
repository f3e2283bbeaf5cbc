"""Settings of processes: cores, gloo's network interface, and their end with the process that started them."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import threading

PR_SET_PDEATHSIG = 1


def available_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def keep_gloo_local() -> None:
    """Have gloo use the loopback interface: this machine's name may not resolve."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")


def end_with_starter() -> None:
    """Have the kernel end this process when the thread that started it ends; without effect but on Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def end_with_parent() -> None:
    """End this worker when the thread that started it ends, even by SIGKILL."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "runs in workers only"
    if sys.platform == "linux":
        end_with_starter()
        if not parent.is_alive():  # it ended before the call above
            os._exit(1)
    else:
        threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()
