"""Helpers for benchmarks with one process: open its process group, and measure the times and the memory of its
device."""

from __future__ import annotations

import contextlib
import gc
import statistics
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch

from benchmarks.options import write_figures
from fourfold.environment import Place
from fourfold.parallel.grid.process_group import end_process_group, start_process_group


def device_of(name: str) -> torch.device:
    """Return the device that ``--device`` names: the first GPU, or the CPU."""
    return torch.device("cuda", 0) if name == "cuda" else torch.device(name)


def name_of(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def write_rows(path: str | None, device: torch.device, rows: list[dict[str, Any]]) -> None:
    """Write the rows that a benchmark has measured so far to a file, with a description of the device."""
    write_figures(path, {"torch": torch.__version__, "device": name_of(device), "rows": rows})


@contextlib.contextmanager
def process_group(device: torch.device) -> Iterator[None]:
    """Open the default process group with one process. On a GPU, this is NCCL with the settings that fourfold uses in
    training. When the context ends, the memory is freed."""
    start_process_group(Place(0, 0, 1, 1, launcher="local"), None, device, timedelta(minutes=5))
    try:
        yield
    finally:
        end_process_group(failed=False)
        free_memory(device)


def free_memory(device: torch.device) -> None:
    """Free the memory of objects that are no longer used. This needs a garbage collection, because jobs contain
    circular references."""
    torch._dynamo.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def seconds_of(work: Callable[[], Any], device: torch.device, rounds: int = 10, repeats: int = 1) -> float:
    """Return the median seconds of ``work`` over ``rounds``, after two untimed rounds.

    On a GPU, each round measures the time between a CUDA event before and an event after ``repeats`` calls. So the time
    that the host needs to launch the calls hardly counts.
    """
    return statistics.median([round_seconds(work, device, repeats) for _ in range(rounds + 2)][2:])


def round_seconds(work: Callable[[], Any], device: torch.device, repeats: int = 1) -> float:
    """Return the seconds of one call, measured in one round of ``repeats`` calls."""
    if device.type != "cuda":
        begin = time.perf_counter()
        for _ in range(repeats):
            work()
        return (time.perf_counter() - begin) / repeats
    begin_event, end_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize(device)
    begin_event.record()
    for _ in range(repeats):
        work()
    end_event.record()
    end_event.synchronize()
    return begin_event.elapsed_time(end_event) / 1e3 / repeats


def memory_gib(device: torch.device) -> dict[str, float]:
    """Return memory on a GPU in GiB: the peak of torch's tensors, the peak that torch's allocator holds, and the memory
    outside torch.

    The memory outside torch belongs to the CUDA context, to NCCL's buffers, to libraries, and to other processes.
    """
    if device.type != "cuda":
        return {}
    free, total = torch.cuda.mem_get_info(device)
    reserved = torch.cuda.memory_reserved(device)
    peaks = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device), total - free - reserved
    return dict(zip(("peak_gib", "reserved_gib", "outside_torch_gib"), (peak / 2**30 for peak in peaks), strict=True))
