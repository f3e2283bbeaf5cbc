"""What every process that starts others, or is one of several, needs."""

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
    """Let gloo listen on this machine alone, whose own name may not resolve."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")


def end_with_parent() -> None:
    """Let this worker die when the thread that started it does, even by SIGKILL."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "runs in workers only"
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if not parent.is_alive():  # before the call above
            os._exit(1)
    else:
        threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()
