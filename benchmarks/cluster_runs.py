"""Define the runs of the benchmarks on the emulated cluster, and their options."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.options import add_tiny
from benchmarks.ranks import one_micro_batch_run
from fourfold.config.run import RunConfig
from fourfold.errors import UserError

CPU = torch.device("cpu")
NONE = {"input_gradients": False, "gate_sum": False, "weight_prefetch": 0, "batch_parts": 1, "shards_per_node": 1}
ALL = NONE | {"input_gradients": True, "gate_sum": True, "weight_prefetch": 1, "batch_parts": 4}


@dataclass(frozen=True)
class Size:
    """Sizes of a Llama and its batch. ``width`` is the width of the residual stream."""

    layers: int
    width: int
    batch: int
    seq_length: int


TINY = Size(1, 64, 8, 64)


def size_of(arguments: argparse.Namespace) -> Size:
    """Return the sizes that the user has set with a benchmark's options."""
    return TINY if arguments.tiny else Size(arguments.layers, arguments.width, arguments.batch, 256)


def cluster_run(size: Size, grid: dict[str, int], overlap: dict[str, Any]) -> RunConfig:
    """Return a run with one micro-batch per step. If ``batch_parts`` is larger than the number of sequences of a
    process, it is reduced to this number."""
    model = {
        "preset": "llama-tiny",
        "vocab_size": 512,
        "hidden_size": size.width,
        "intermediate_size": 3 * size.width,
        "num_hidden_layers": size.layers,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
    }
    sequences = size.batch // (grid.get("dp", 1) * grid.get("z", 1))
    overlap = {**overlap, "batch_parts": min(overlap["batch_parts"], sequences)}
    return one_micro_batch_run(grid, size.batch, size.seq_length, model, overlap)


def grid_of(text: str) -> dict[str, int]:
    """Parse the sizes of axes, such as ``x=2,z=2``. Raise ``UserError`` for anything else."""
    sizes = dict(part.partition("=")[::2] for part in text.split(","))
    if not set(sizes) <= {"x", "y", "z", "dp"} or not all(size.isdigit() for size in sizes.values()):
        raise UserError(f"--grid {text}: sizes of x, y, z and dp are needed, as in x=2,z=2")
    return {axis: int(size) for axis, size in sizes.items()}


def add_cluster(parser: argparse.ArgumentParser) -> None:
    """Add the options that all benchmarks on the emulated cluster share."""
    parser.add_argument("--layers", type=int, default=4, help="number of layers of the model")
    parser.add_argument("--width", type=int, default=512, help="width of the model's residual stream")
    parser.add_argument("--batch", type=int, default=8, help="number of sequences in a step, with 256 tokens each")
    parser.add_argument("--rounds", type=int, default=5, help="number of timed steps of every variant")
    parser.add_argument("--gflops", type=float, default=0, help="emulate accelerators that run matmuls at this rate")
    parser.add_argument("--rate", default="", help="rate of a link, to print above the table")
    parser.add_argument("--json", metavar="FILE", help="also write the table to this file")
    add_tiny(parser)


def products(arguments: argparse.Namespace) -> str:
    """Return a text with the matmul rate of an emulated accelerator, for the line above the table."""
    return f", products at {arguments.gflops:g} GFLOP/s" if arguments.gflops else ""
