"""The trace of a mixture of experts equals closed formulas for every collective, the real run, and torch's memory
tracker."""

from __future__ import annotations

from typing import Any

import pytest
from pool import Pool
from test_memory_tracker import check_against_tracker
from test_trace import by_line, recorded_body
from tiny_runs import DEEPSEEK, MIXTURE, QWEN_MOE, tiny_run

from fourfold.config.run import RunConfig
from fourfold.verification.trace import trace

Lines = dict[tuple[str, str, str], int]

EVEN = [1.0] * 4
UNEVEN = [5.0, 2.0, 1.0, 0.0]
UNBIASED = DEEPSEEK | {"router_bias": False}
DENSE_FIRST = DEEPSEEK | {"first_k_dense_replace": 3, "moe_intermediate_size": 512}
"""A model without the router's bias, because torch's tracker does not know frozen parameters."""
FOUR_EXPERTS = MIXTURE | {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
GATED = {"shared_expert_intermediate_size": 40, "shared_expert_gate": True}


def expected(run: RunConfig, load: list[float]) -> Lines:
    """Return the bytes of one layer's experts and one micro-batch, on the first rank."""
    model, grid = run.model, run.parallel
    hidden, width, experts = model.hidden_size // grid.y, model.moe_intermediate_size // grid.x, model.num_experts
    tokens = run.training.micro_batch_size * run.training.seq_length // (grid.cp * grid.x)
    rows = tokens * model.num_experts_per_tok
    sent = [round(rows * share / sum(load)) for share in load]
    if run.moe.capacity_factor:
        sent = [min(each, -int(-run.moe.capacity_factor * rows // experts)) for each in sent]
    received = grid.ep * sum(sent[: experts // grid.ep])
    there, gathered, kept = sum(sent) * hidden * 4, grid.x * received * hidden * 4, received * hidden * 4
    lines = {
        ("ep", "all_to_all", "experts: counts of rows"): 8 * experts,
        ("ep", "all_to_all", "experts: dispatch"): there + kept,
        ("ep", "all_to_all", "experts: combine"): there + kept,
        ("x", "all_gather", "experts: counts of rows"): 8 * experts * grid.x,
        ("x", "all_to_all", "experts: tokens"): 2 * gathered,
        ("x", "all_to_all", "experts: outputs"): 2 * gathered,
        ("x", "all_gather", "router: chosen experts"): 4 * rows * grid.x if run.moe.capacity_factor else 0,
        ("cp", "all_gather", "router: chosen experts"): 4 * rows * grid.x * grid.cp if run.moe.capacity_factor else 0,
        ("y", "all_reduce", "shared expert: gate"): 4 * tokens if model.shared_expert_gate else 0,
        ("y", "all_reduce", "shared expert: gate's gradient"): 4 * tokens if model.shared_expert_gate else 0,
        ("y", "all_reduce", "router: logits"): 4 * tokens * experts,
        ("y", "all_reduce", "router: weights' gradient"): 4 * rows,
        ("y", "all_reduce", "experts: outputs of up"): 2 * grid.x * received * width * 4,
        ("y", "all_reduce", "experts: input gradient of down"): grid.x * received * width * 4,
    }
    return {line: size for line, size in lines.items() if getattr(grid, line[0]) > 1 and size}


@pytest.mark.fast_cases(4)
@pytest.mark.parametrize("load", [EVEN, UNEVEN], ids=["even", "uneven"])
@pytest.mark.parametrize(
    ("model", "grid", "moe"),
    [
        ({}, {"dp": 2, "ep": 2}, {}),
        ({}, {"z": 4, "ep": 4}, {}),
        ({}, {"x": 2, "dp": 2, "ep": 2}, {}),
        ({}, {"x": 2, "y": 2, "z": 2, "ep": 2}, {"capacity_factor": 1.0}),
        ({}, {"y": 2, "dp": 4, "ep": 2}, {"load_balancing_loss": 0.1}),
        ({}, {"cp": 2, "ep": 2}, {}),
        ({}, {"x": 2, "cp": 2, "ep": 2}, {"capacity_factor": 0.75}),
        (GATED, {"x": 2, "y": 2, "cp": 2, "ep": 2}, {"capacity_factor": 1.0}),
    ],
    ids=str,
)
def test_a_layer_sends_what_the_formulas_say(
    model: dict[str, Any], grid: dict[str, int], moe: dict[str, float], load: list[float]
) -> None:
    """A layer's bytes are the difference between two models whose numbers of layers differ by one."""
    batch = {"global_batch_size": 2 * grid.get("z", 1) * grid.get("dp", 1)}
    runs = [tiny_run(FOUR_EXPERTS | model | {"num_hidden_layers": n}, grid, training=batch, moe=moe) for n in (1, 2)]
    one, two = (by_line(trace(run, whole=True, expert_load=load)) for run in runs)
    purposes = ("experts", "router", "shared expert")
    found = {line: two[line] - one[line] for line in two if line[2].startswith(purposes)}
    assert found == expected(runs[0], load)


@pytest.mark.parametrize(
    ("model", "grid", "sections"),
    [
        (MIXTURE, {"dp": 2, "ep": 2}, {}),
        pytest.param(QWEN_MOE, {"x": 2, "y": 2, "z": 2, "ep": 2}, {}, marks=pytest.mark.slow),
        pytest.param(UNBIASED, {"z": 2, "dp": 2, "ep": 4}, {}, marks=pytest.mark.slow),
        pytest.param(
            MIXTURE, {"dp": 4, "ep": 2, "zero": 3}, {"activation_checkpoint": {"mode": "full"}}, marks=pytest.mark.slow
        ),
        pytest.param(
            MIXTURE, {"z": 2, "ep": 2}, {"activation_checkpoint": {"mode": "selective"}}, marks=pytest.mark.slow
        ),
    ],
    ids=str,
)
def test_the_trace_is_within_three_percent_of_torchs_tracker(
    model: dict[str, Any], grid: dict[str, int], sections: dict[str, Any]
) -> None:
    check_against_tracker(model, grid, sections)


@pytest.mark.parametrize(
    ("model", "grid", "sections"),
    [
        pytest.param(MIXTURE, {"dp": 2, "ep": 2}, {}, marks=pytest.mark.slow),
        pytest.param(DEEPSEEK, {"z": 4, "ep": 2}, {"activation_checkpoint": {"mode": "full"}}, marks=pytest.mark.slow),
        pytest.param(QWEN_MOE, {"x": 2, "dp": 2, "ep": 2, "zero": 3}, {}, marks=pytest.mark.slow),
        pytest.param(MIXTURE, {"z": 2, "dp": 2, "ep": 2, "zero": 2}, {}, marks=pytest.mark.slow),
        (DENSE_FIRST, {"z": 4, "ep": 4}, {"training": {"global_batch_size": 16}}),
        pytest.param(DENSE_FIRST, {"dp": 2, "ep": 2}, {"training": {"global_batch_size": 4}}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_continuing_from_few_layers_is_exact(
    model: dict[str, Any], grid: dict[str, int], sections: dict[str, Any]
) -> None:
    ranks = grid.get("z", 1) * grid.get("dp", 1)
    training = {"global_batch_size": 2 * ranks * 5, "seq_length": 16} | sections.get("training", {})
    layers = max(7, 6 + model.get("first_k_dense_replace", 0))
    run = tiny_run(model | {"num_hidden_layers": layers}, grid, **(sections | {"training": training}))
    assert trace(run) == trace(run, whole=True)


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("grid", [{"z": 2, "dp": 2, "ep": 2}, {"x": 2, "dp": 2, "ep": 2, "zero": 1}], ids=str)
@pytest.mark.parametrize(
    "data", [{"source": "python-stdlib"}, {"format": "sft", "train": [{"path": "nowhere"}]}], ids=["text", "sft"]
)
def test_a_real_run_sends_what_the_trace_says(pool: Pool, data: dict[str, Any], grid: dict[str, int]) -> None:
    """Every token chooses all experts, so the load is even. If the data has padding, a run also exchanges the number of
    real tokens."""
    run = tiny_run(MIXTURE | {"num_experts_per_tok": 4}, grid, data=data, training={"device": "cpu"})
    traced = trace(run)
    for collectives, parameters in pool.run(4, recorded_body, run):
        assert collectives == by_line(traced)
        assert parameters == traced.memory.parameters
