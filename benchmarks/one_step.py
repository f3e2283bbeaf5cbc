"""Examine one training step: its compiled graphs, its waits for the device, and its memory compared with the trace.

    python -m benchmarks.one_step [--device cpu] [--sequence 4096] [--json FILE]

The model has the blocks of Llama 3 8B. For each recompute mode, the table shows how many graphs torch.compile makes of
a model with two blocks and with four blocks, and how often the host waits for the device in the third step. On a GPU,
it also shows the peak of the allocated memory, and this peak divided by the peak that ``fourfold trace`` predicts. The
JSON file also has the lines of code that wait, the memory that the allocator holds, and the memory outside torch. If a
step fails, its row shows the error.
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

import torch
from torch._dynamo.utils import counters

from benchmarks.host_waits import host_waits
from benchmarks.one_gpu import device_of, free_memory, memory_gib, process_group, write_rows
from benchmarks.options import add_device, failure_in
from benchmarks.ranks import draw_quickly
from benchmarks.train_gpu import LLAMA3_8B, TINY
from fourfold.config.run import RunConfig
from fourfold.parallel.grid.grid import Grid
from fourfold.run_file.load import make_run
from fourfold.training.job import Job
from fourfold.verification.batches import random_micro_batches
from fourfold.verification.trace import trace

MATMUL_WORKSPACES = 2 * 32 * 2**20
"""Bytes of the workspaces that torch allocates for cuBLAS on an NVIDIA GPU. The forward and the backward pass run in
different threads, and each thread has a workspace of 32 MiB (``CUBLAS_WORKSPACE_CONFIG``). The trace does not count the
workspaces, because they belong to the process and not to the step. The planner counts them as part of ``reserve``."""

MODES: dict[str, dict[str, Any]] = {
    "none": {"mode": "none"},
    "selective": {"mode": "selective"},
    "full": {"mode": "full"},
    "full, offloaded": {"mode": "full", "offload": True},
}


def main() -> int:
    arguments = _arguments()
    device = device_of(arguments.device)
    if arguments.tiny:
        torch.compile = partial(torch.compile, backend="aot_eager")
    rows: list[dict[str, Any]] = []
    print(
        f"{'recompute':17}{'compiled':>9}{'graphs of 2':>13}{'of 4':>7}{'waits':>7}{'peak GiB':>10}{'over trace':>12}"
    )
    for name, mode in MODES.items() if not arguments.tiny else [("selective", MODES["selective"])]:
        for compiled in (False, True):
            row: dict[str, Any] = {"recompute": name, "compiled": compiled}
            with failure_in(row):
                row |= step_of(run_of(arguments, mode, compiled, layers=2), device)
                if compiled:
                    row["graphs_of_4"] = step_of(run_of(arguments, mode, compiled, layers=4), device)["graphs"]
            free_memory(device)
            rows.append(row)
            _print(row)
            write_rows(arguments.json, device, rows)
    return 1 if all("error" in row for row in rows) else 0


def _print(row: dict[str, Any]) -> None:
    begin = f"{row['recompute']:17}{row['compiled']!s:>9}"
    if "error" in row:
        print(f"{begin}  failed: {row['error'].splitlines()[0][:120]}", flush=True)
        return
    memory = f"{row['peak_gib']:10.2f}{row['over_trace']:12.3f}" if "peak_gib" in row else f"{'-':>10}{'-':>12}"
    waits = sum(row["waits"].values())
    print(f"{begin}{row['graphs']:13}{row.get('graphs_of_4', 0):7}{waits:7}{memory}", flush=True)
    for line, count in row["waits"].items():
        print(f"{'':26}  {count} × {line}", flush=True)


def step_of(run: RunConfig, device: torch.device) -> dict[str, Any]:
    """Train three steps on one device. Return the number of graphs, and the waits and the memory of the third step."""
    expected = trace(run).memory.total_peak + (MATMUL_WORKSPACES if device.type == "cuda" else 0)
    torch._dynamo.reset()
    counters.clear()
    with process_group(device):
        job = Job(run, Grid(run.parallel, device.type), device)
        draw_quickly(job)
        for step in range(2):
            job.train_step(random_micro_batches(run, step, job.grid, device), step)
        batches = random_micro_batches(run, 2, job.grid, device)
        if device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        waits = host_waits(device, lambda: job.train_step(batches, 2))
        memory = memory_gib(device)
    figures = {"graphs": int(counters["stats"]["unique_graphs"]), "waits": dict(waits.most_common()), **memory}
    over = {"over_trace": memory["peak_gib"] * 2**30 / expected} if memory else {}
    return {**figures, "trace_gib": expected / 2**30, **over}


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
    parser.add_argument("--sequence", type=int, default=4096)
    add_device(parser)
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
