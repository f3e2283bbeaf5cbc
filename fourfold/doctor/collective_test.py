"""Run an all-reduce over all devices of the job. Check that the sum is exact, and measure latency and bandwidth."""

import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist

from fourfold.doctor.finding import Finding, error, ok, warning
from fourfold.environment import Place
from fourfold.errors import UserError
from fourfold.launch.job_processes import run_on_grid

TIMEOUT = timedelta(seconds=60)
REPETITIONS = 5
BYTES = {"gloo": 16 * 2**20, "nccl": 256 * 2**20}
ADVICE = (
    "look at the findings above; for details, run `fourfold machine doctor` again with NCCL_DEBUG=INFO (or "
    "TORCH_DISTRIBUTED_DEBUG=DETAIL with gloo)"
)


@dataclass(frozen=True)
class AllReduceTimes:
    """The result of the all-reduce test. ``seconds`` is the shortest time of a large all-reduce of ``size`` bytes.
    ``latency`` is the shortest time of an all-reduce of one element, in seconds. ``wrong`` has the ranks with wrong
    sums."""

    backend: str
    world_size: int
    size: int
    seconds: float
    latency: float
    wrong: tuple[int, ...]

    @property
    def bandwidth(self) -> float:
        """Return the bytes per second that each rank sends in a ring all-reduce (called bus bandwidth in
        nccl-tests)."""
        return 2 * (self.world_size - 1) / self.world_size * self.size / self.seconds


def examine_collective(place: Place | None) -> Iterator[Finding]:
    """Run an all-reduce over the launcher's processes. Without a launcher, run it over all GPUs of this machine, or
    over two processes if the machine has no GPU."""
    world_size = place.world_size if place is not None else torch.cuda.device_count() or 2
    with TemporaryDirectory(prefix="fourfold-") as folder:
        log = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET", "NCCL_DEBUG_FILE": f"{folder}/nccl.%h.%p"}
        if "NCCL_DEBUG" not in os.environ:
            os.environ.update(log)
        try:
            measured = run_on_grid(f"{__name__}:measure", [], world_size, timeout=TIMEOUT)
        except (UserError, RuntimeError) as failure:  # WorkerFailed and torch's errors are subclasses of RuntimeError.
            lines = str(failure).strip().splitlines() or [type(failure).__name__]
            yield error("all-reduce", f"over {world_size} processes failed: {lines[-1]}", ADVICE)
            return
        yield all_reduce(measured)
        several_machines = place is not None and place.world_size > place.local_world_size
        text = "".join(path.read_text(errors="replace") for path in sorted(Path(folder).iterdir()))
        yield from nccl_network(text, several_machines)


def measure(place: Place) -> AllReduceTimes:
    """Time all-reduces of integers over all processes of the job, and compare their results with the exact sums. Every
    process calls this, and the doctor uses the result of rank 0."""
    backend = dist.get_backend()
    device = torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else torch.device("cpu")
    pattern = torch.arange(BYTES[backend] // 8, device=device) % 8191
    expected = pattern * (place.world_size * (place.world_size + 1) // 2)
    wrong = torch.zeros(place.world_size, dtype=torch.int64, device=device)
    few, many = torch.ones(1, device=device), torch.empty_like(pattern)
    latencies, seconds = [], []
    for _ in range(REPETITIONS + 1):
        latencies.append(_timed(few))
        torch.mul(pattern, place.rank + 1, out=many)
        seconds.append(_timed(many))
        wrong[place.rank] += int(not torch.equal(many, expected))
    dist.all_reduce(wrong)
    ranks = tuple(rank for rank, times in enumerate(wrong.tolist()) if times)
    return AllReduceTimes(backend, place.world_size, BYTES[backend], min(seconds), min(latencies), ranks)


def _timed(tensor: torch.Tensor) -> float:
    _wait(tensor)
    start = time.perf_counter()
    dist.all_reduce(tensor)
    _wait(tensor)
    return time.perf_counter() - start


def _wait(tensor: torch.Tensor) -> None:
    if tensor.is_cuda:
        torch.cuda.synchronize()


def all_reduce(measured: AllReduceTimes) -> Finding:
    """Return an error if a sum is wrong. Otherwise report the all-reduce's bandwidth and latency."""
    over = f"{measured.backend} over {measured.world_size} process{'es' * (measured.world_size > 1)}"
    if measured.wrong:
        ranks = ", ".join(map(str, measured.wrong))
        return error(
            "all-reduce",
            f"{over}: wrong sums on rank {ranks}",
            "remove these devices from the job, and test each of them alone",
        )
    if measured.world_size == 1:
        return ok("all-reduce", f"{over}: exact; one device sends nothing")
    text = f"{over}: exact; {measured.bandwidth / 1e9:,.2f} GB/s, latency {measured.latency * 1e6:,.0f} µs"
    return ok("all-reduce", text, bandwidth=measured.bandwidth, latency=measured.latency, size=measured.size)


def nccl_network(log: str, several_machines: bool) -> Iterator[Finding]:
    """Find the name of the network in NCCL's own log, and yield a finding about this network."""
    networks = sorted(set(re.findall(r"Using network (.+)", log)))
    if not networks:
        return
    text = f"NCCL uses the network {', '.join(networks)}"
    if several_machines and "Socket" in networks:
        advice = "load the plugin or driver of the fast network (the site's documentation names it); TCP is far slower"
        yield warning("nccl network", text, advice)
    else:
        yield ok("nccl network", text)
