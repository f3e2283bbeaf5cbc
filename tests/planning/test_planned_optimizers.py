"""Optimizers in the planner equal closed formulas and the trace: states, FLOPs, bytes sent, workspace."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from exact_collectives import collective_lines
from exact_parameters import stored_bytes
from test_bytes import ONE_LINK, PLAIN
from tiny_runs import tiny_run
from torch.utils.flop_counter import FlopCounterMode

from fourfold.config.run import RunConfig
from fourfold.planning.cost.memory import stage_memory
from fourfold.planning.cost.optimizer_cost import Matrices, muon_seconds, muon_workspace
from fourfold.planning.run_workload import workload_of
from fourfold.training.newton_schulz import orthogonalize
from fourfold.verification.trace import trace

LLAMA, MIXTRAL = {"preset": "llama3-8b", "num_hidden_layers": 8}, {"preset": "mixtral-8x7b", "num_hidden_layers": 4}


def run_of(model: dict[str, Any], grid: dict[str, Any], name: str, seq_length: int = 2048) -> RunConfig:
    ranks = grid.get("z", 1) * grid.get("dp", 1)
    training = {"precision": "bf16", "micro_batch_size": 1, "global_batch_size": ranks, "seq_length": seq_length}
    return tiny_run(model, grid, training=training, optimizer={"name": name})


@pytest.mark.parametrize("name", ["adamw", "muon", "lion"])
@pytest.mark.parametrize(
    ("model", "grid"),
    [
        (LLAMA, {"x": 2, "dp": 2, "zero": 1}),
        (LLAMA, {"z": 2, "pp": 2}),
        (MIXTRAL, {"z": 2, "dp": 2, "ep": 2}),
        (MIXTRAL, {"dp": 4, "ep": 4}),
    ],
    ids=str,
)
def test_states_are_those_of_the_closed_formula(model: dict[str, Any], grid: dict[str, Any], name: str) -> None:
    run = run_of(model, grid, name)
    planned = stage_memory(workload_of(run), ONE_LINK, 0)["optimizer"]
    assert float(planned) == pytest.approx(stored_bytes(run)[2], rel=0.025)


@pytest.mark.parametrize(("rows", "columns"), [(64, 64), (48, 128), (128, 48)])
def test_flops_are_those_of_the_products(rows: int, columns: int) -> None:
    with FlopCounterMode(display=False) as counted:
        orthogonalize(torch.ones(3, rows, columns))
    assert counted.get_total_flops() == 3 * Matrices(1, min(rows, columns), max(rows, columns)).flops


@pytest.mark.parametrize("grid", [{"dp": 4}, {"dp": 4, "zero": 1}, {"x": 2, "y": 2}, {"z": 4}], ids=str)
def test_seconds_are_of_the_bytes_that_are_sent(grid: dict[str, Any]) -> None:
    """At a byte a second; the first of four ranks sends as much as the others."""
    run = run_of(LLAMA, grid, "muon")
    sent = sum(line.bytes for line in collective_lines(run) if line.purpose.startswith("optimizer: "))
    seconds = muon_seconds(workload_of(run), replace(ONE_LINK, achieved=1e40), PLAIN)
    assert float(seconds) == pytest.approx(3 / 4 * sent, rel=0.01)
    assert muon_seconds(workload_of(run_of(LLAMA, grid, "adamw")), ONE_LINK, PLAIN) == 0


@pytest.mark.parametrize("grid", [{}, {"dp": 4}, {"x": 2, "dp": 2, "zero": 1}], ids=str)
def test_the_workspace_is_that_of_the_trace(grid: dict[str, Any]) -> None:
    """With few tokens it is more than the activations."""
    model = {"preset": "llama-tiny", "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 4}
    run = run_of(model, grid, "muon", seq_length=8)
    planned = muon_workspace(workload_of(run), run.model.num_hidden_layers)
    assert float(planned) == pytest.approx(trace(run, whole=True).memory.activations_peak, rel=0.1)
