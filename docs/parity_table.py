"""Run `fourfold parity` on many grids and write docs/parity.md: python docs/parity_table.py"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from fourfold.config.run import AXES

HERE = Path(__file__).parent
RUN_FILE = HERE.parent / "examples" / "parity.toml"
FOURFOLD = Path(sys.executable).with_name("fourfold")

MODELS = {
    "Llama": {"model.preset": "llama-tiny", "model.num_hidden_layers": 4},
    "GPT": {"model.preset": "gpt-tiny", "model.vocab_size": 301, "model.num_hidden_layers": 4},
}
"""Llama: grouped-query attention 8/4, RMSNorm, SwiGLU, untied, vocabulary 257. GPT: LayerNorm, learned positions,
biases, tied, 4 heads, vocabulary 301."""

GRIDS: list[dict[str, int | str]] = [
    {"x": 2},
    {"y": 2},
    {"z": 2},
    {"dp": 2},
    {"x": 4},
    {"y": 4},
    {"z": 4},
    {"x": 2, "y": 2},
    {"x": 2, "z": 2},
    {"y": 2, "z": 2, "recompute": "full"},
    {"z": 2, "dp": 2, "zero": 1},
    {"z": 2, "dp": 2, "zero": 2},
    {"x": 2, "dp": 2, "zero": 3},
    {"x": 4, "y": 2},
    {"x": 2, "y": 2, "z": 2, "recompute": "selective"},
    {"cp": 2},
    {"cp": 4},
    {"pp": 2},
    {"pp": 4},
    {"pp": 2, "schedule": "Interleaved1F1B"},
    {"pp": 2, "schedule": "ZBVZeroBubble"},
    {"pp": 2, "dp": 2, "zero": 1},
    {"pp": 2, "x": 2, "z": 2},
    {"pp": 2, "cp": 2, "y": 2},
    {"x": 2, "y": 2, "z": 2, "dp": 2},
]
QUANTITIES = ("loss", "gradients", "grad_norm", "weights", "resumed")


def main() -> None:
    rows, failed = [], 0
    for grid in GRIDS:
        for model, sizes in MODELS.items():
            result = parity(overrides(sizes, grid))
            failed += not result["ok"]
            cells = [name_of(grid), model, *(f"{result[name]:.1e}" for name in QUANTITIES)]
            rows.append(f"| {' | '.join(cells)} |")
            print(rows[-1], flush=True)
    (HERE / "parity.md").write_text(page(rows), encoding="utf-8")
    sys.exit(f"{failed} of {len(rows)} differ by more than rounding explains" if failed else 0)


def overrides(sizes: dict[str, int | str], grid: dict[str, int | str]) -> dict[str, int | str]:
    """What a row of the table sets in the run file."""
    axes = {f"parallel.{key}": value for key, value in {"x": 1, "y": 1, **grid}.items() if key != "recompute"}
    return {**sizes, **axes, "activation_checkpoint.mode": grid.get("recompute", "none")}


def parity(keys: dict[str, int | str]) -> dict[str, bool | float]:
    """What the command prints as JSON; exit code 1 says only that something differs."""
    with tempfile.TemporaryDirectory() as folder:
        settings = [f"--set={key}={value}" for key, value in {**keys, "output_dir": folder}.items()]
        done = subprocess.run([FOURFOLD, "parity", RUN_FILE, "--json", *settings], stdout=subprocess.PIPE, text=True)
    if done.returncode not in (0, 1) or not done.stdout:
        sys.exit(f"fourfold parity left with {done.returncode} for {keys}")
    return json.loads(done.stdout)


def name_of(grid: dict[str, int | str]) -> str:
    axes = " × ".join(f"{axis} {grid[axis]}" for axis in AXES if axis in grid)
    schedule = f", {grid['schedule']}" if "schedule" in grid else ""
    zero = f", zero {grid['zero']}" if "zero" in grid else ""
    recompute = f", {grid['recompute']} recompute" if "recompute" in grid else ""
    return axes + schedule + zero + recompute


def page(rows: list[str]) -> str:
    return "\n".join(
        [
            "# Parity",
            "",
            "<!-- Written by docs/parity_table.py. -->",
            "",
            "Each row is one `fourfold parity examples/parity.toml --set …`: the model is trained for three steps on",
            "the grid and on one process (plain PyTorch with its own loss, clipping and AdamW), in float32, from the",
            "same weights and on the same random batches, whose labels are masked unevenly: of some sequences none, of",
            "others 95 %. The numbers are the largest relative differences.",
            "",
            "- *loss*, *gradient norm* (before clipping): over all steps; limit 1e-5.",
            "- *gradients*: of every parameter in the first step, each by its own largest value; limit 1e-5.",
            "- *weights*: after three steps of AdamW; limit 1e-4.",
            "- *resumed*: saved, loaded on another grid of as many processes, one more step; limit 1e-4.",
            "",
            "Llama: grouped-query attention with 8 heads on 4 key-value heads, RMSNorm, SwiGLU, rotary positions,",
            "untied, a vocabulary of 257. GPT: LayerNorm, GELU, learned positions, biases, tied, 4 heads, a",
            "vocabulary of 301. Both have 4 layers of width 64. Eight sequences a step in micro-batches of two, so",
            "that every grid with z·dp below 4 accumulates gradients.",
            "",
            f"torch {torch.__version__} (gloo), Python {platform.python_version()}, a CPU with {os.cpu_count()} cores.",
            "",
            "| grid | model | loss | gradients | gradient norm | weights | resumed |",
            "|---|---|---|---|---|---|---|",
            *rows,
            "",
            "Make it again with:",
            "",
            "```sh",
            "# not run by the tests: it takes many minutes",
            "python docs/parity_table.py",
            "```",
            "",
        ]
    )


if __name__ == "__main__":
    main()
