"""The planner's search counts the time of all bytes that a run sends. The machines in these tests send one byte per
second, and no computation hides the transfers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from exact_collectives import collective_lines

from fourfold.planning.cost.step import step_parts
from fourfold.planning.machines.constants import prior_constants
from fourfold.planning.machines.machine import load_machine
from fourfold.planning.run_workload import workload_of
from fourfold.run_file.load import make_run

ONE_LINK = replace(
    load_machine("dgx-h100"), gpus_per_node=1 << 20, domain=1 << 20, intra2=1.0, intra4=1.0, intra8=1.0, intra_far=1.0,
    base=0.0, intra_hop=0.0, inter_hop=0.0,
)  # fmt: skip
PLAIN = replace(prior_constants(), intra=1.0, latency=0.0, dispersion=0.0, exposed=1.0)

CASES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("llama3-8b", {"z": 2, "zero": 0}, {"mode": "full"}),
    ("gpt-5b", {"z": 4, "dp": 2, "zero": 0}, {}),
    ("llama3-8b", {"dp": 4, "zero": 0}, {}),
    ("llama3-8b", {"dp": 4, "zero": 1}, {}),
    ("gpt-5b", {"dp": 2, "zero": 2}, {}),
    ("llama3-8b", {"z": 2, "dp": 4, "zero": 2}, {}),
    ("llama3-8b", {"z": 2, "dp": 2, "zero": 1, "x": 2}, {}),
    ("gpt-5b", {"dp": 4, "zero": 3}, {"mode": "selective"}),
    ("llama3-8b", {"x": 2, "y": 4}, {}),
    ("gpt-5b", {"x": 4}, {"mode": "full"}),
    ("llama3-8b", {"x": 2}, {"mode": "selective", "modules": ["mlp", "gathers"]}),
    ("gpt-5b", {"cp": 2, "cp_method": "ring", "zero": 0}, {"mode": "selective", "modules": ["attention"]}),
    ("llama3-8b", {"cp": 4, "cp_method": "ulysses", "z": 2}, {"mode": "selective", "modules": ["mlp"]}),
    ("gpt-5b", {"cp": 2, "cp_method": "ulysses", "dp": 2, "zero": 1}, {"mode": "full"}),
    ("gpt-5b", {"pp": 2, "dp": 2, "zero": 1}, {"mode": "full"}),
    ("llama3-8b", {"pp": 2, "x": 2, "dp": 2, "zero": 0}, {}),
]


@pytest.mark.parametrize(("model", "grid", "recompute"), CASES, ids=str)
def test_seconds_are_of_the_bytes_of_the_collectives(
    model: str, grid: dict[str, Any], recompute: dict[str, Any]
) -> None:
    ranks = grid.get("z", 1) * grid.get("dp", 1)
    run = make_run({
        "model": {"preset": model}, "data": {"source": "python-stdlib"}, "parallel": grid,
        "training": {"precision": "bf16", "global_batch_size": 8 * ranks, "micro_batch_size": 2, "seq_length": 2048,
                     "train_steps": 1},
        "activation_checkpoint": recompute,
    })  # fmt: skip
    never = dict.fromkeys(("overlap_x", "overlap_forward", "overlap_z", "overlap_dp"), np.bool_(False))
    parts = step_parts(workload_of(run).but(**never), ONE_LINK, PLAIN)
    told = {"x": parts["x"], "y": parts["y"], "attention": parts["cp"], "states": parts["z"] + parts["dp"],
            "pp": parts["pp"]}  # fmt: skip
    sent = dict.fromkeys(told, 0.0)
    places = grid.get("pp", 1)
    for line in [line for place in range(places) for line in collective_lines(run, place)]:
        size = np.prod([grid[axis] for axis in line.axis.split("_") if axis in grid])
        kind = "attention" if "attention: " in line.purpose and "cp" in line.axis else line.axis
        kind = "states" if line.purpose in ("weights", "gradients") else kind
        if kind in sent:
            share = 1 if line.op == "send" else (size - 1) / size
            # For these collectives, the planner counts sent bytes and received bytes.
            both_ways = line.op == "all_reduce" or kind == "pp"
            sent[kind] += (2 if both_ways else 1) * share * line.bytes / places
    for kind, seconds in told.items():
        assert float(seconds) == pytest.approx(sent[kind], rel=0.025), kind
