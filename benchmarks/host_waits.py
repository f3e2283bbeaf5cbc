"""Find the lines of a program that make the host wait for the GPU."""

from __future__ import annotations

import sys
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

ROOT = Path(__file__).parents[1]
WAITING = ("_local_scalar_dense", "nonzero", "equal")
"""Operators that would make the host wait for a GPU. On a CPU, where nothing waits, calls of these operators are
counted."""


def host_waits(device: torch.device, work: Callable[[], object]) -> Counter[str]:
    """Run ``work``, and count how often each line of this repository makes the host wait for the device.

    Copies from pageable memory count too. The host waits until the data has been copied to pinned memory.
    """
    lines: Counter[str] = Counter()
    if device.type != "cuda":
        with _WaitingOperators(lines):
            work()
        return lines
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("always")

            def note(message: Warning | str, *arguments: Any, **options: Any) -> None:
                if "synchroniz" in str(message):
                    lines[_line_here()] += 1

            warnings.showwarning = note
            work()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return lines


class _WaitingOperators(TorchDispatchMode):
    def __init__(self, lines: Counter[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.lines = lines

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._overloadpacket.__name__ in WAITING:
            self.lines[_line_here()] += 1
        return func(*args, **(kwargs or {}))


def _line_here() -> str:
    """Return the line of this repository that is innermost in the call stack, except lines of this file."""
    for frame, number in traceback.walk_stack(sys._getframe(1)):
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(ROOT) and path != Path(__file__) and ".venv" not in path.parts:
            return f"{path.relative_to(ROOT)}:{number}"
    return "outside the repository"
