"""Every axis of the grid computes what one process computes: over NCCL with one GPU per process, and over gloo on a
CPU."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

ONE = "training.micro_batch_size=1"
ROOT = Path(__file__).parents[2]
MIXTURE = ["model.num_experts=4", "model.num_experts_per_tok=2", "model.moe_intermediate_size=48"]
PACKED = ["data.mask_documents=true"]
GRIDS: dict[str, tuple[dict[str, int], list[str]]] = {
    "x": ({"x": 2}, []),
    "y": ({"y": 2}, []),
    "z": ({"z": 2}, PACKED),
    "dp": ({"dp": 2}, []),
    "dp zero 3": ({"dp": 2, "zero": 3}, PACKED),
    "pp": ({"pp": 2}, [ONE]),
    "cp ring": ({"cp": 2}, [*PACKED, 'parallel.cp_method="ring"']),
    "cp ulysses": ({"cp": 2}, ['parallel.cp_method="ulysses"']),
    "ep": ({"dp": 2, "ep": 2}, MIXTURE),
    "x, experts": ({"x": 2}, MIXTURE),
    "x y": ({"x": 2, "y": 2}, PACKED),
    "pp dp zero bubble": (
        {"pp": 2, "dp": 2},
        [ONE, "model.num_hidden_layers=4", 'parallel.schedule="ZBVZeroBubble"'],
    ),
    "x z dp": ({"x": 2, "z": 2, "dp": 2}, []),
    "x y cp": ({"x": 2, "y": 2, "cp": 2}, []),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", GRIDS)
def test_a_grid_computes_what_one_process_does(
    name: str, command: Callable[..., str], device: torch.device, record_property: Callable[[str, object], None]
) -> None:
    sizes, settings = GRIDS[name]
    processes = 1
    for axis in ("x", "y", "z", "dp", "pp", "cp"):
        processes *= sizes.get(axis, 1)
    if device.type == "cuda" and torch.cuda.device_count() < processes:
        pytest.skip(f"needs {processes} GPUs, but torch sees {torch.cuda.device_count()}")
    grid = {"x": 1, "y": 1} | sizes
    words = [f"parallel.{key}={value}" for key, value in grid.items()] + [f"training.device={device.type}", *settings]
    output = command("parity", ROOT / "examples/parity.toml", *(f"--set={word}" for word in words), "--json")
    record = json.loads(output)
    record_property("parity", record)
    assert record["ok"], record
