"""Optimizers in the planner equal closed formulas and the trace: states, FLOPs, bytes sent, and workspace."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from exact_collectives import collective_lines
from exact_parameters import stored_bytes
from test_bytes import ONE_LINK, PLAIN
from tiny_runs import tiny_run
from torch.utils.flop_counter import FlopCounterMode

from fourfold.checkpoints.disk_space import checkpoint_bytes
from fourfold.config.parameter_counts import num_parameters
from fourfold.config.run import RunConfig
from fourfold.errors import UserError
from fourfold.planning.cost.memory import stage_memory
from fourfold.planning.cost.optimizer_cost import (
    Matrices,
    lion_workspace,
    moved_bytes,
    muon_seconds,
    muon_workspace,
    saved_bytes,
)
from fourfold.planning.planned_run import write_run
from fourfold.planning.request import request_from_options
from fourfold.planning.run_workload import workload_of
from fourfold.planning.search.plan import predict
from fourfold.run_file.load import load_run
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
def test_states_equal_the_closed_formula(model: dict[str, Any], grid: dict[str, Any], name: str) -> None:
    """The planner may also count the temporary tensors of Lion and Muon, if they do not fit into the memory that the
    activations free."""
    run = run_of(model, grid, name)
    work, stored = workload_of(run), stored_bytes(run)[2]
    planned = float(stage_memory(work, ONE_LINK, 0)["optimizer"])
    layers, table = work.model.num_hidden_layers, work.model.padded_vocab_size * work.model.hidden_size
    made = float(lion_workspace(work, layers, table) + muon_workspace(work, layers))
    assert 0.975 * stored < planned < 1.025 * stored + made


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize(
    ("model", "grid", "training", "optimizer"),
    [
        ({}, {"x": 2, "dp": 2, "zero": 1}, {}, {}),
        ({}, {"pp": 2, "z": 2}, {}, {"name": "lion"}),
        ({"num_experts": 4, "num_experts_per_tok": 2}, {"z": 2, "ep": 2}, {}, {"name": "muon"}),
        ({}, {"z": 2}, {"master_weights": "bf16"}, {"stochastic_rounding": True}),
        ({}, {"dp": 2, "zero": 3}, {"master_weights": "bf16"}, {}),
    ],
    ids=str,
)
def test_averages_of_the_weights_equal_the_trace(
    model: dict[str, Any], grid: dict[str, Any], training: dict[str, Any], optimizer: dict[str, Any]
) -> None:
    """Averages take 4 bytes per weight and are sharded like the weights. The trace counts the same bytes, and the
    planner includes them in its peak."""
    ranks = grid.get("z", 1) * grid.get("dp", 1)
    training = {"precision": "bf16", "global_batch_size": 4 * ranks} | training
    tables = {"training": training, "optimizer": optimizer}
    model = {"preset": "llama-tiny", "num_hidden_layers": 4, "hidden_size": 256} | model
    without, run = tiny_run(model, grid, **tables), tiny_run(model, grid, ema={"decay": 0.99}, **tables)
    assert stored_bytes(run)[2] == trace(run, whole=True).memory.optimizer
    held, before = (stage_memory(workload_of(each), ONE_LINK, 0) for each in (run, without))
    assert float(held["optimizer"]) == pytest.approx(stored_bytes(run)[2], rel=0.025)
    assert float(held["optimizer"] - before["optimizer"]) == pytest.approx(stored_bytes(run)[0] * 4 / (
        2 if "master_weights" in training else 4), rel=0.025)  # fmt: skip
    assert moved_bytes(workload_of(run)) > moved_bytes(workload_of(without))


@pytest.mark.parametrize("optimizer", [{}, {"name": "lion"}, {"name": "muon"}], ids=str)
@pytest.mark.parametrize("more", [{}, {"ema": {"decay": 0.99}}], ids=str)
def test_a_checkpoint_is_as_large_as_the_room_that_a_run_wants(optimizer: dict[str, Any], more: dict[str, Any]) -> None:
    for model in (LLAMA, MIXTRAL):
        run = tiny_run(model, {}, optimizer=optimizer, **more)
        saved = saved_bytes(workload_of(run), num_parameters(run.model))
        assert float(saved) == pytest.approx(checkpoint_bytes(run), rel=1e-3)


def test_the_command_line_chooses_an_optimizer_and_writes_it(tmp_path: Path) -> None:
    plain, lion = (request_from_options("llama3-8b", None, [], 8, 2048, 64, optimizer=name) for name in (None, "lion"))
    memory = [stage_memory(request.base, ONE_LINK, 0)["optimizer"] for request in (plain, lion)]
    assert memory[1] == memory[0] / 2
    write_run(tmp_path / "run.toml", lion, predict(lion.base.but(dp=8, global_batch_size=64), ONE_LINK, PLAIN))
    assert load_run(tmp_path / "run.toml").optimizer.name == "lion"
    with pytest.raises(UserError, match="--optimizer sgd is unknown; choose from adamw, muon, lion"):
        request_from_options("llama3-8b", None, [], 8, optimizer="sgd")


@pytest.mark.parametrize(("rows", "columns"), [(64, 64), (48, 128), (128, 48)])
def test_flops_equal_the_flops_of_the_matmuls(rows: int, columns: int) -> None:
    with FlopCounterMode(display=False) as counted:
        orthogonalize(torch.ones(3, rows, columns))
    assert counted.get_total_flops() == 3 * Matrices(1, min(rows, columns), max(rows, columns)).flops


@pytest.mark.parametrize("grid", [{"dp": 4}, {"dp": 4, "zero": 1}, {"x": 2, "y": 2}, {"z": 4}], ids=str)
def test_seconds_are_of_the_bytes_that_are_sent(grid: dict[str, Any]) -> None:
    """On this machine, each byte takes a second. The first of four ranks sends as much as every other rank."""
    run = run_of(LLAMA, grid, "muon")
    sent = sum(line.bytes for line in collective_lines(run) if line.purpose.startswith("optimizer: "))
    seconds = muon_seconds(workload_of(run), replace(ONE_LINK, achieved=1e40), PLAIN)
    assert float(seconds) == pytest.approx(3 / 4 * sent, rel=0.01)
    assert muon_seconds(workload_of(run_of(LLAMA, grid, "adamw")), ONE_LINK, PLAIN) == 0


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("grid", [{}, {"x": 2, "dp": 2, "zero": 1}, {"dp": 4}], ids=str)
def test_the_workspace_equals_the_trace(grid: dict[str, Any]) -> None:
    """With few tokens, the workspace is larger than the activations."""
    model = {"preset": "llama-tiny", "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 4}
    run = run_of(model, grid, "muon", seq_length=8)
    planned = muon_workspace(workload_of(run), run.model.num_hidden_layers)
    assert float(planned) == pytest.approx(trace(run, whole=True).memory.activations_peak, rel=0.1)
