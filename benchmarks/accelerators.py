"""Emulate accelerators in a benchmark: make each matmul take as long as on a device with a given number of FLOP/s."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

ATEN = torch.ops.aten
# torch's flop_registry has no entry for addmm_.
FLOPS: dict[Any, Callable[..., int]] = flop_registry | {ATEN.addmm_: flop_registry[ATEN.addmm]}


class Accelerators(TorchDispatchMode):
    """Compute every matmul, and then sleep until a device with ``flops_per_second`` would have finished the matmul.

    While the process sleeps, its CPU core can send and receive data, as the host can while a GPU computes. The results
    of the matmuls do not change.
    """

    def __init__(self, flops_per_second: float) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's has no annotations
        self.flops_per_second = flops_per_second

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        begin = time.perf_counter()
        result = operator(*args, **(kwargs or {}))
        flops = FLOPS.get(operator._overloadpacket)
        if flops is not None:
            end = begin + flops(*args, **(kwargs or {}), out_val=result) / self.flops_per_second
            time.sleep(max(0.0, end - time.perf_counter()))
        return result


def accelerators(gflops_per_second: float) -> AbstractContextManager[object]:
    """Return a context that emulates devices with ``gflops_per_second`` GFLOP/s. If it is 0, matmuls run at the
    CPU's own speed."""
    return Accelerators(gflops_per_second * 1e9) if gflops_per_second else nullcontext()
