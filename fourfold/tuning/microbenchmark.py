"""Measure the rates for a machine file on this job's devices: matmuls, memory, attention, kernel launches, and
collectives."""

import math
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from fourfold.environment import Place, read_environment
from fourfold.launch.job_processes import run_on_grid
from fourfold.matmul_tuning.matmul_times import gpu_seconds

SECONDS_PER_POINT = 0.4
"""Seconds for which each measurement is repeated. The fastest repetition counts, because other programs on the machine
can only slow a repetition down."""


@dataclass
class MeasuredRates:
    """Measured rates in SI units: bytes, FLOP/s, bytes per second, and seconds."""

    device: str
    ranks: int
    gpus_per_node: int
    nodes: int
    memory: float
    """Bytes of the GPU's memory. On a CPU, bytes of the host's memory divided by the job's processes on this host."""
    units: int
    """Number of the GPU's multiprocessors. 1 on a CPU."""
    matmuls: dict[str, dict[str, float]] = field(default_factory=dict)
    """FLOP/s by shape (m×n×k), and by memory layout of the two operands (N: as stored, T: transposed)."""
    fp32_matmul: float = 0.0
    memory_bandwidth: float = 0.0
    attention: float = 0.0
    """FLOP/s of the forward and backward pass of causal attention."""
    launch: float = 0.0
    """Seconds of host time for one small operation."""
    all_reduce: dict[int, dict[int, float]] = field(default_factory=dict)
    """Seconds of an all-reduce, by number of ranks and then by number of bytes."""
    all_gather: dict[int, dict[int, float]] = field(default_factory=dict)
    """Seconds of an all-gather, by number of ranks and then by number of bytes of the gathered tensor."""


def microbenchmark(processes: int | None) -> dict[str, Any] | None:
    """Run the microbenchmark on the processes of a launcher, or on local processes if there is no launcher.

    Args:
        processes: Number of local processes. Default: one per GPU, or 2 without GPUs.

    Returns:
        The measured rates. Under a launcher, None on every process except the first.
    """
    place = read_environment(os.environ)
    count = place.world_size if place is not None else processes or torch.cuda.device_count() or 2
    measured = run_on_grid(f"{__name__}:measure", [], count)
    return asdict(measured) if place is None or place.rank == 0 else None


def measure(place: Place) -> MeasuredRates:
    """Measure the rates. Every process of the job calls this after torch.distributed's default group is initialized.
    Only rank 0's result is used."""
    on_gpu = torch.cuda.is_available() and dist.get_backend() == "nccl"
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    dtype = torch.bfloat16 if on_gpu else torch.float32
    properties = torch.cuda.get_device_properties(device) if on_gpu else None
    found = MeasuredRates(
        device=properties.name if properties else "cpu",
        ranks=place.world_size,
        gpus_per_node=place.local_world_size,
        nodes=math.ceil(place.world_size / place.local_world_size),
        memory=float(properties.total_memory) if properties else _host_memory(place),
        units=properties.multi_processor_count if properties else 1,
    )
    sizes = (2048, 4096, 8192) if on_gpu else (256, 512, 1024)
    for m in sizes[:2]:
        for n in sizes[1:]:
            k = sizes[1]
            found.matmuls[f"{m}x{n}x{k}"] = {kind: _matmul(m, n, k, kind, dtype, device) for kind in ("NN", "NT", "TN")}
    found.fp32_matmul = _matmul(sizes[1], sizes[1], sizes[1], "NN", torch.float32, device)
    found.memory_bandwidth = _copy(1 << (30 if on_gpu else 27), device)
    found.attention = _attention(sizes[1] // (1 if on_gpu else 2), dtype, device)
    found.launch = _launch(device)
    if place.world_size > 1:
        _collectives(found, place, device, on_gpu)
    return found


def _fastest(run: Callable[[], object], device: torch.device, times: int | None = None) -> float:
    """Run ``times`` repetitions, and return the seconds of the fastest one. Without ``times``, repeat for
    ``SECONDS_PER_POINT`` seconds.

    Collectives need ``times``, because all ranks must call a collective equally often.
    """
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    best, done, begin = math.inf, 0, time.perf_counter()
    while done < times if times is not None else time.perf_counter() - begin < SECONDS_PER_POINT:
        best, done = min(best, _seconds(run, device)), done + 1
    return best


def _seconds(run: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of one call of ``run``."""
    if device.type == "cuda":
        return gpu_seconds(run, 1)
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def _matmul(m: int, n: int, k: int, kind: str, dtype: torch.dtype, device: torch.device) -> float:
    left = torch.randn((m, k) if kind[0] == "N" else (k, m), dtype=dtype, device=device)
    right = torch.randn((k, n) if kind[1] == "N" else (n, k), dtype=dtype, device=device)
    left, right = (left if kind[0] == "N" else left.T), (right if kind[1] == "N" else right.T)
    return 2 * m * n * k / _fastest(lambda: left @ right, device)


def _copy(size: int, device: torch.device) -> float:
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / _fastest(lambda: target.copy_(source), device)


def _attention(seq: int, dtype: torch.dtype, device: torch.device) -> float:
    # On a GPU, use the sizes of an 8B model's layer. Fewer heads would leave the GPU partly idle.
    heads, head_dim = 32 if device.type == "cuda" else 8, 128
    q, k, v = (torch.randn(1, heads, seq, head_dim, dtype=dtype, device=device, requires_grad=True) for _ in range(3))
    gradient = torch.ones_like(q)

    def both() -> None:
        torch.autograd.grad(F.scaled_dot_product_attention(q, k, v, is_causal=True), (q, k, v), gradient)

    return 3.5 * 4 * heads * seq * seq * head_dim / 2 / _fastest(both, device)


def _launch(device: torch.device) -> float:
    """Return the seconds that the host needs for one small operation with autograd."""
    x = torch.ones(16, device=device, requires_grad=True)

    def many() -> None:
        y = x
        for _ in range(200):
            y = y * 1.0

    return _fastest(many, device) / 200


def _collectives(found: MeasuredRates, place: Place, device: torch.device, on_gpu: bool) -> None:
    """Measure all-reduce and all-gather at three sizes over the first 2, 4, … ranks, and over all ranks."""
    counts = [n for n in (2, 4, 8) if n < min(place.world_size, place.local_world_size)]
    counts += sorted({min(place.world_size, place.local_world_size), place.world_size} - {1})
    sizes = (1 << 12, 1 << 22, 1 << (28 if on_gpu else 24))
    for count in counts:
        group = dist.new_group(list(range(count)))
        if place.rank < count:
            for size in sizes:
                tensor = torch.ones(size // 4 // count * count, device=device)
                part = tensor[: tensor.numel() // count].clone()
                repetitions = 20 if size < 1 << 22 else 5
                reduce = partial(dist.all_reduce, tensor, group=group)
                gather = partial(dist.all_gather_into_tensor, tensor, part, group=group)
                found.all_reduce.setdefault(count, {})[size] = _fastest(reduce, device, repetitions)
                found.all_gather.setdefault(count, {})[size] = _fastest(gather, device, repetitions)
        dist.barrier()


def _host_memory(place: Place) -> float:
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")) / place.local_world_size
