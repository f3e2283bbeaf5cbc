"""Find the fastest memory layouts for the matmuls of the GPT presets, and measure how much time they save.

    python -m benchmarks.products [--device cpu] [--json FILE] [--threads 1]

The matmuls are as large as on one rank of a typical grid for the model, with two sequences of 2,048 tokens. On a CPU,
the benchmark divides the tokens by cp = 8 and batch_parts = 4, so that it takes only minutes. If the fastest layout is
not the default, the benchmark measures the layer's three matmuls again, in new rounds that run both layouts.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.options import add_tiny
from fourfold.config.layout import MatmulSizes, matmul_sizes
from fourfold.config.run import RunConfig
from fourfold.matmul_tuning.matmul_choice import layer_records
from fourfold.matmul_tuning.matmul_table import machine_of
from fourfold.matmul_tuning.matmul_times import (
    COPIES_TO_TRY,
    MOST_ROUNDS,
    Candidate,
    matmul_calls,
    seconds_in_rounds,
    tune_layer,
)
from fourfold.models.dtypes import DTYPES
from fourfold.parallel.tensor.matmul_layouts import LayerLayout
from fourfold.reports.tables import print_table
from fourfold.reports.tuned_matmul_table import HEADER, matmul_rows
from fourfold.run_file.load import make_run

GRIDS = {
    "gpt-5b": {"x": 8},
    "gpt-10b": {"x": 8},
    "gpt-20b": {"x": 8, "y": 2},
    "gpt-40b": {"x": 8, "y": 2},
    "gpt-80b": {"x": 8, "y": 4},
    "gpt-320b": {"x": 16, "y": 4},
}
"""For each preset, a typical grid. The matmuls are as large as on one rank of this grid. GPT-60B has the same layers as
GPT-40B, and GPT-160B has the same layers as GPT-80B, so GPT-60B and GPT-160B are left out."""


def main() -> int:
    arguments = _arguments()
    device = torch.device(arguments.device)
    torch.set_num_threads(arguments.threads)
    grids = {"gpt-tiny": {"x": 2}} if arguments.tiny else GRIDS
    found = []
    for preset, precision in itertools.product(grids, ("fp32", "bf16")):
        found.append(tuned(preset, precision, device))
        # Write the file after every preset, because all presets together take an hour on a slow machine.
        if arguments.json:
            record = {"machine": machine_of(device), "runs": found}
            Path(arguments.json).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(machine_of(device))
    return 0


def tuned(preset: str, precision: str, device: torch.device) -> dict[str, Any]:
    """Find the fastest layouts for the layers of a preset on its grid, and print them."""
    names = matmul_sizes(run_of(preset, device))
    layers = {sizes: tune_layer(sizes, DTYPES[precision], device) for sizes in dict.fromkeys(names.values())}
    records = layer_records(names, layers)
    for record, (sizes, layer) in zip(records, layers.items(), strict=True):
        if layer.layout != LayerLayout():
            record["again"] = layer_ratios(layer.layout, sizes, DTYPES[precision], device)
    words = ("tokens × out × in", "product", "layout")
    print_table(f"{preset} on {GRIDS.get(preset)}, {precision}", HEADER, matmul_rows(records), words)
    for record in (each for each in records if "again" in each):
        low, median, high = statistics.quantiles(record["again"], n=4)
        print(f"{', '.join(record['layers'])}, whole layer again: {median:.3f} ({low:.3f} to {high:.3f})", flush=True)
    return {"preset": preset, "grid": GRIDS.get(preset), "precision": precision, "layers": records}


def layer_ratios(layout: LayerLayout, sizes: MatmulSizes, dtype: torch.dtype, device: torch.device) -> list[float]:
    """Return, for each round, the time of a layer's three matmuls with the default layout, divided by their time with
    ``layout``."""

    def whole_layer(layout: LayerLayout) -> Callable[[], object]:
        own = {matmul: Candidate(layout.turned, getattr(layout, matmul)) for matmul in COPIES_TO_TRY}
        calls = [matmul_calls(matmul, [each], sizes, dtype, device)[each] for matmul, each in own.items()]
        return lambda: [call() for call in calls]

    times = seconds_in_rounds({each: whole_layer(each) for each in (LayerLayout(), layout)}, MOST_ROUNDS, device)
    return [base / own for base, own in zip(times[LayerLayout()], times[layout], strict=True)]


def run_of(preset: str, device: torch.device) -> RunConfig:
    """Return a run file that trains the preset on its grid."""
    grid = GRIDS.get(preset, {"x": 2})
    cp, parts = (8, 4) if device.type == "cpu" else (1, 1)
    return make_run(
        {
            "model": {"preset": preset},
            "data": {"source": "python-stdlib"},
            "parallel": {**grid, "cp": cp},
            "overlap": {"batch_parts": parts},
            "training": {
                "global_batch_size": 2,
                "micro_batch_size": 2,
                "seq_length": 64 if preset == "gpt-tiny" else 2048,
                "train_steps": 1,
            },
        }
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1, help="number of CPU threads")
    parser.add_argument("--json", help="also write the results to this file")
    add_tiny(parser)
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
