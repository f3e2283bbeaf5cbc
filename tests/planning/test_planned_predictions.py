"""The planner counts what prediction layers (multi-token prediction) add to a step."""

from __future__ import annotations

from typing import Any

import pytest
from planned_memory import planned_peak
from tiny_runs import DEEPSEEK_V3, HYBRID, LLAMA, tiny_run

from fourfold.config.layout import check_layout
from fourfold.config.parameter_counts import num_parameters
from fourfold.config.run import RunConfig
from fourfold.config.stages import rank_of_stage, stage_layers
from fourfold.errors import UserError
from fourfold.planning.cost.memory import stage_memory
from fourfold.planning.cost.stage_split import blocks_of
from fourfold.planning.cost.step import step_parts
from fourfold.planning.machines.constants import prior_constants
from fourfold.planning.machines.machine import load_machine
from fourfold.planning.run_workload import workload_of
from fourfold.planning.search.space import refusal
from fourfold.verification.trace import trace

TWO = {"num_nextn_predict_layers": 2}


def run_of(model: dict[str, Any], grid: dict[str, Any], layers: int = 8) -> RunConfig:
    return tiny_run(model | {"num_hidden_layers": layers}, grid, training={"global_batch_size": 8})


@pytest.mark.parametrize("layers", [8, 10])
@pytest.mark.parametrize("model", [LLAMA, DEEPSEEK_V3, HYBRID], ids=["llama", "deepseek", "hybrid"])
@pytest.mark.parametrize(
    "grid",
    [
        {"pp": 2},
        {"pp": 4},
        {"pp": 2, "schedule": "Interleaved1F1B", "stages_per_rank": 2},
        {"pp": 2, "schedule": "ZBVZeroBubble"},
        {"pp": 2, "layers_per_stage": []},
    ],
    ids=str,
)
def test_the_last_stage_has_the_prediction_layers(model: dict[str, Any], grid: dict[str, Any], layers: int) -> None:
    if "layers_per_stage" in grid:
        grid = grid | {"layers_per_stage": [layers - 2, 2]}  # The numbers depend on the number of layers.
    run = run_of(model | TWO, grid, layers)
    stages, kinds = stage_layers(run.model, run.parallel), run.model.type_of
    numbers, linear = [0] * run.parallel.pp, [0] * run.parallel.pp
    for stage, of_stage in enumerate(stages):
        rank = rank_of_stage(stage, run.parallel)
        found = [*of_stage, *[of_stage[-1]] * (2 if of_stage is stages[-1] else 0)]
        numbers[rank] += len(found)
        linear[rank] += sum(kinds(layer) == "linear_attention" for layer in found)
    planned = blocks_of(workload_of(run))
    assert [each.number for each in planned] == numbers
    assert [each.linear for each in planned] == linear


def test_the_step_has_two_more_blocks_and_calls_the_head_three_times() -> None:
    machine = load_machine("dgx-h100")
    model = {"preset": "llama3-8b", "vocab_size": 128256}

    def parts_of(more: dict[str, Any], layers: int) -> dict[str, float]:
        run = tiny_run(model | more | {"num_hidden_layers": layers}, {}, training={"seq_length": 4096})
        return {
            name: float(seconds) for name, seconds in step_parts(workload_of(run), machine, prior_constants()).items()
        }

    plain, longer, ahead = parts_of({}, 8), parts_of({}, 10), parts_of(TWO, 8)
    assert ahead["compute"] == pytest.approx(longer["compute"], rel=1e-6)
    # Four projections [H, H] have 3 % of the head's entries for each call.
    assert 3 * 0.9 < ahead["logits"] / plain["logits"] < 3 * 1.05
    assert ahead["optimizer"] > longer["optimizer"]


@pytest.mark.parametrize("grid", [{}, {"pp": 2}, {"pp": 2, "schedule": "ZBVZeroBubble"}], ids=str)
def test_the_ranks_store_every_weight_and_the_copy_of_the_embedding(grid: dict[str, Any]) -> None:
    run = run_of(LLAMA | TWO | {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 2048}, grid)
    work, machine = workload_of(run), load_machine("dgx-h100")
    stored = sum(float(stage_memory(work, machine, rank)["parameters"]) for rank in range(run.parallel.pp))
    copy = run.model.padded_vocab_size * run.model.hidden_size * (run.parallel.pp > 1)
    # The planner leaves norms and biases out.
    assert stored / 4 == pytest.approx(num_parameters(run.model) + copy, rel=0.01)


def test_gathers_over_z_include_the_embedding_and_the_projections() -> None:
    def planned_z(more: dict[str, Any], layers: int) -> float:
        run = tiny_run(
            {"preset": "llama3-8b", "num_hidden_layers": layers} | more,
            {"z": 8},
            training={"seq_length": 64, "global_batch_size": 16},
        )
        return float(step_parts(workload_of(run), load_machine("dgx-h100"), prior_constants())["z"])

    # The planner computes these times from a machine file. With few tokens, computation hides almost nothing.
    # Two layers of the same size have no table to gather.
    assert planned_z(TWO, 8) > 1.1 * planned_z({}, 10)


@pytest.mark.parametrize(
    ("model", "seq", "works"),
    [({"tie_word_embeddings": True}, 32, False), ({}, 2, False), ({}, 32, True)],
    ids=["tied", "short", "legal"],
)
def test_the_planner_and_the_run_file_refuse_the_same(model: dict[str, Any], seq: int, works: bool) -> None:
    run = run_of(LLAMA | TWO | model, {})
    work = workload_of(run).but(pp=2, seq_length=seq, global_batch_size=8)
    assert (refusal(work, load_machine("dgx-h100")) == "") == works
    if not works:
        with pytest.raises(UserError, match="num_nextn_predict_layers = 2 does not work with"):
            check_layout(tiny_run(LLAMA | TWO | model, {"pp": 2}, training={"seq_length": seq, "global_batch_size": 8}))


@pytest.mark.parametrize("model", [{"num_nextn_predict_layers": 1}, {"tie_word_embeddings": True}], ids=str)
def test_two_copies_of_the_embedding_need_a_buffer_for_the_other_gradient(model: dict[str, Any]) -> None:
    big = {"hidden_size": 512, "intermediate_size": 512, "vocab_size": 65536}
    run = run_of(LLAMA | big | model, {"pp": 2}, layers=2)
    for rank, told in enumerate(trace(run, whole=True).pipeline):
        assert planned_peak(run, rank) == pytest.approx(told.memory.total_peak, rel=0.01), rank
