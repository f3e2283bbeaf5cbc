"""One training step: graphs that are compiled, waits for the device, and memory against the trace.

    python -m benchmarks.one_step [--device cpu] [--sequence 4096] [--json FILE]

Blocks as wide as Llama 3 8B's. For each way to recompute: graphs with two blocks and with four; how often the host
waits for the device in the third step; on a GPU the largest allocated memory, over the trace's.
"""

from __future__ import annotations

import argparse
import gc
import json
import tempfile
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.options import add_tiny
from benchmarks.train_gpu import LLAMA3_8B, TINY
from fourfold.config.run import RunConfig
from fourfold.parallel.grid import Grid
from fourfold.run_file.load import make_run
from fourfold.training.job import Job
from fourfold.verification.batches import random_micro_batches
from fourfold.verification.trace import trace

MODES: dict[str, dict[str, Any]] = {
    "none": {"mode": "none"},
    "selective": {"mode": "selective"},
    "full": {"mode": "full"},
}
WAITS = ("_local_scalar_dense",)
"""Operations that wait for the device, where it is a CPU and torch cannot say."""


class Waits(TorchDispatchMode):
    """Counts operations that make the host wait for a device."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func._overloadpacket.__name__ in WAITS
        return func(*args, **(kwargs or {}))


def main() -> int:
    arguments = _arguments()
    device = torch.device(arguments.device)
    if arguments.tiny:
        torch.compile = partial(torch.compile, backend="aot_eager")  # type: ignore[assignment]
    rows = []
    print(
        f"{'recompute':11}{'compiled':>9}{'graphs of 2':>13}{'of 4':>7}{'waits':>7}{'peak GiB':>10}{'over trace':>12}"
    )
    with tempfile.TemporaryDirectory() as folder:
        backend = "nccl" if device.type == "cuda" else "gloo"
        for name, mode in MODES.items() if not arguments.tiny else [("selective", MODES["selective"])]:
            for compiled in (False, True):
                row = {"recompute": name, "compiled": compiled}
                row |= step_of(run_of(arguments, mode, compiled, layers=2), device, backend, f"{folder}/{len(rows)}a")
                if compiled:
                    four = step_of(
                        run_of(arguments, mode, compiled, layers=4), device, backend, f"{folder}/{len(rows)}b"
                    )
                    row["graphs_of_4"] = four["graphs"]
                rows.append(row)
                print(
                    f"{name:11}{compiled!s:>9}{row['graphs']:13}{row.get('graphs_of_4', 0):7}{row['waits']:7}"
                    + (
                        f"{row['peak'] / 2**30:10.2f}{row['over_trace']:12.3f}"
                        if row["peak"]
                        else f"{'-':>10}{'-':>12}"
                    ),
                    flush=True,
                )
    if arguments.json:
        record = {"torch": torch.__version__, "device": arguments.device, "rows": rows}
        Path(arguments.json).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return 0


def step_of(run: RunConfig, device: torch.device, backend: str, meeting_point: str) -> dict[str, Any]:
    """Graphs, waits and memory of the third step of a run on one device."""
    expected = trace(run).memory.total_peak
    torch._dynamo.reset()
    counters.clear()
    dist.init_process_group(backend, init_method=f"file://{meeting_point}", rank=0, world_size=1)
    try:
        job = Job(run, Grid(run.parallel, device.type), device)
        job.initialize(0)
        for step in range(2):
            job.train_step(random_micro_batches(run, step, job.grid, device), step)
        batches = random_micro_batches(run, 2, job.grid, device)
        if device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            waits = _waits_on_a_gpu(lambda: job.train_step(batches, 2))
            peak = torch.cuda.max_memory_allocated()
        else:
            with Waits() as counted:
                job.train_step(batches, 2)
            waits, peak = counted.count, None
    finally:
        dist.destroy_process_group()
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    graphs = int(counters["stats"]["unique_graphs"])
    over = peak / expected if peak else None
    return {"graphs": graphs, "waits": waits, "peak": peak, "trace": expected, "over_trace": over}


def _waits_on_a_gpu(step: Any) -> int:
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchroniz" in str(warning.message) for warning in caught)


def run_of(arguments: argparse.Namespace, mode: dict[str, Any], compiled: bool, layers: int) -> RunConfig:
    model = TINY if arguments.tiny else LLAMA3_8B
    return make_run(
        {
            "model": {**model, "num_hidden_layers": layers},
            "data": {"source": "python-stdlib"},
            "training": {
                "micro_batch_size": 1,
                "global_batch_size": 1,
                "seq_length": 64 if arguments.tiny else arguments.sequence,
                "train_steps": 10,
                "precision": "bf16",
                "compile": compiled,
                "device": arguments.device,
            },
            "activation_checkpoint": mode,
        }
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--sequence", type=int, default=4096)
    parser.add_argument("--json", metavar="FILE", help="also write the table there")
    add_tiny(parser)
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
