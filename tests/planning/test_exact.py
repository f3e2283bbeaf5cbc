"""Compare closed formulas with the trace. The bytes of every collective and of all states must be equal, and
activations must be close."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
from exact_collectives import collective_lines
from exact_parameters import stored_bytes
from planned_memory import planned_peak
from tiny_runs import DENSE, LLAMA, tiny_run

from fourfold.config.run import RunConfig
from fourfold.planning.run_workload import workload_of
from fourfold.verification.trace import TraceReport, trace

MODELS = DENSE | {
    "wide": LLAMA | {"intermediate_size": 704},
    "heavy": LLAMA | {"intermediate_size": 2816, "vocab_size": 128},
    "uneven": LLAMA | {"num_attention_heads": 12, "num_key_value_heads": 6, "head_dim": 8},
}
FAST = [
    ("llama", {"x": 2, "y": 2, "z": 2, "dp": 2}, "none"),
    ("gemma", {"x": 2, "z": 2}, "none"),
    ("gpt", {"z": 2, "dp": 2, "zero": 1}, "none"),
    ("llama", {"dp": 4, "zero": 3}, "none"),
    ("qwen", {"x": 4, "dp": 2, "zero": 1}, "none"),
    ("uneven", {"x": 4}, "none"),
    ("olmo", {"x": 2, "y": 2}, "none"),
    ("sliding", {}, "none"),
    ("olmo2", {"x": 2, "y": 2}, "none"),
    ("gemma2", {"y": 2}, "selective attention"),
    ("gemma3", {"x": 2, "z": 2}, "full"),
]
GRIDS: list[dict[str, int]] = [
    {},
    {"x": 2},
    {"y": 2},
    {"x": 4},
    {"y": 4},
    {"z": 4},
    {"dp": 4},
    {"zero": 1},
    {"x": 2, "dp": 2},
    {"x": 2, "y": 2},
    {"x": 4, "y": 2},
    {"x": 2, "y": 4},
    {"z": 2, "dp": 2},
    {"dp": 2, "zero": 1},
    {"dp": 2, "zero": 2},
    {"dp": 2, "zero": 3},
    {"z": 2, "dp": 3, "zero": 1},
    {"z": 2, "dp": 2, "zero": 2},
    {"z": 2, "dp": 2, "zero": 3},
    {"z": 2, "zero": 1},
    {"z": 2, "zero": 2},
    {"x": 2, "z": 3},
    {"x": 2, "y": 2, "z": 2, "dp": 2, "zero": 2},
    {"x": 2, "y": 2, "dp": 2, "zero": 1},
]
MODES = ("none", "selective attention", "selective mlp gathers", "selective attention mlp gathers", "full")
Case = tuple[str, dict[str, int], str]


def models_on(grid: dict[str, int]) -> list[str]:
    return list(MODELS) if len(grid) <= 2 else ["llama", "gpt", "qwen", "wide"]


EVERY = [(model, grid, mode) for grid in GRIDS for model in models_on(grid) for mode in MODES]


def in_some_pair(case: Case) -> bool:
    """Return whether a case belongs to the covering set.

    In this set, every pair of a model and a grid, of a model and a mode, and of a grid and a mode occurs in some case.
    From one grid or model to the next, the mode changes. If a grid has fewer models than there are modes, its last
    model has two modes.
    """
    model, grid, mode = case
    models = models_on(grid)
    ahead = (MODES.index(mode) - GRIDS.index(grid) - models.index(model)) % len(MODES)
    return ahead == 0 or (ahead == 1 and len(models) < len(MODES) and model == models[-1])


IN_PAIRS = [case for case in EVERY if in_some_pair(case)]
MORE = random.Random(0).sample([case for case in EVERY if case not in IN_PAIRS], 60)
SLOW = [pytest.param(*case, marks=pytest.mark.slow) for case in [*IN_PAIRS, *MORE] if case not in FAST]


def run_of(model: str, grid: dict[str, Any], mode: str, layers: int = 3, every: int = 1, **training: Any) -> RunConfig:
    """Return a run. ``mode`` is the mode of recompute, followed by the names of the modules to recompute."""
    mode, *modules = mode.split()
    ranks = grid.get("z", 1) * grid.get("dp", 1)
    return tiny_run(
        MODELS[model] | {"num_hidden_layers": layers},
        grid,
        training={"precision": "bf16", "global_batch_size": 4 * ranks} | training,
        activation_checkpoint={"mode": mode, "modules": modules, "every": every},
    )


def assert_equal_to_the_trace(run: RunConfig) -> TraceReport:
    """Compare everything that a rank sends and stores, for one rank of every pp position."""
    traced = trace(run, whole=True)
    for place, told in enumerate(traced.pipeline or [traced]):
        counted = {(c.axis, c.op, c.purpose): (c.count, c.bytes) for c in told.collectives}
        assert {(c.axis, c.op, c.purpose): (c.count, c.bytes) for c in collective_lines(run, place)} == counted, place
        memory = told.memory
        assert stored_bytes(run, place) == (memory.parameters, memory.gradients, memory.optimizer), place
    return traced


def assert_activations_too(run: RunConfig, within: float | None = None) -> None:
    """Compare everything, also the peak of all memory.

    In such small models, memory peaks in or near the head. The planner counts no norms and biases, and up to 20 % more
    activations than the trace if attention caps its scores.
    """
    peak = assert_equal_to_the_trace(run).memory.total_peak
    assert planned_peak(run) == pytest.approx(peak, rel=within or (0.2 if run.model.attn_logit_softcapping else 0.06))


def test_every_pair_of_model_grid_and_mode_is_in_some_case() -> None:
    for one, other in itertools.combinations(range(3), 2):
        pairs, covered = ({f"{case[one]} {case[other]}" for case in cases} for cases in (EVERY, IN_PAIRS))
        assert covered == pairs


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize(("model", "grid", "mode"), [*FAST, *SLOW], ids=str)
def test_formulas_equal_the_trace(model: str, grid: dict[str, int], mode: str) -> None:
    assert_activations_too(run_of(model, grid, mode))


@pytest.mark.parametrize(
    ("model", "grid", "training"),
    [
        ("llama", {"z": 2}, {"global_batch_size": 4}),
        ("heavy", {"z": 2}, {"micro_batch_size": 1}),
        pytest.param("heavy", {"zero": 1}, {"micro_batch_size": 1}, marks=pytest.mark.slow),
        pytest.param("llama", {"z": 2, "dp": 2}, {"global_batch_size": 24}, marks=pytest.mark.slow),
        pytest.param("gpt", {"x": 2, "y": 2}, {"precision": "fp32"}, marks=pytest.mark.slow),
        pytest.param("llama", {"x": 2, "dp": 2}, {"reduce_dtype": "bf16"}, marks=pytest.mark.slow),
        pytest.param("gpt", {"z": 2}, {"master_weights": "bf16"}, marks=pytest.mark.slow),
        pytest.param("qwen", {"x": 2, "y": 2}, {"micro_batch_size": 4, "seq_length": 128}, marks=pytest.mark.slow),
        pytest.param("llama", {}, {"micro_batch_size": 1, "seq_length": 256}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_formulas_equal_the_trace_with_other_steps(model: str, grid: dict[str, int], training: dict[str, Any]) -> None:
    assert_activations_too(run_of(model, grid, "none", **training))


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("mode", ["full", "none", "selective attention mlp gathers"])
@pytest.mark.parametrize("grid", [{"x": 2, "y": 2}, {"y": 4}, {"x": 2, "z": 2}, {"x": 2, "cp": 2}], ids=str)
@pytest.mark.parametrize(
    ("model", "parts", "sequences"), [("llama", 2, 4), ("gpt", 4, 4), ("uneven", 2, 4), ("llama", 2, 1), ("gpt", 4, 2)]
)
def test_formulas_equal_the_trace_of_parts_in_turn(
    model: str, parts: int, sequences: int, grid: dict[str, int], mode: str
) -> None:
    """The formulas count the backward of a full block, but the backward of one batch part needs less memory."""
    run = run_of(model, grid, mode, micro_batch_size=sequences)
    run = run.model_copy(update={"overlap": run.overlap.model_copy(update={"batch_parts": parts})})
    assert 0.9 < planned_peak(run) / assert_equal_to_the_trace(run).memory.total_peak < 1.2


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize(
    ("name", "model", "grid"),
    [
        ("muon", "llama", {"x": 2, "y": 2, "z": 2, "dp": 2}),
        ("lion", "gpt", {"z": 2, "dp": 2, "zero": 1}),
        ("muon", "uneven", {"pp": 2, "z": 2, "dp": 2, "zero": 2, "schedule": "Interleaved1F1B"}),
        ("muon", "qwen", {}),
        ("muon", "gpt", {"z": 3, "x": 2}),
        ("muon", "wide", {"dp": 4}),
        ("muon", "llama", {"dp": 2, "cp": 2, "z": 2}),
        ("muon", "heavy", {"dp": 4, "x": 2, "zero": 3}),
        ("muon", "gemma", {"pp": 2, "x": 2, "dp": 2}),
        ("muon", "llama", {"pp": 2, "x": 2}),
        ("lion", "llama", {"x": 2, "y": 2}),
    ],
    ids=str,
)
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_formulas_equal_the_trace_of_other_optimizers(
    name: str, model: str, grid: dict[str, Any], precision: str
) -> None:
    run = run_of(model, grid, "none", layers=6, precision=precision)
    optimizer = run.optimizer.model_copy(update={"name": name})
    assert_equal_to_the_trace(run.model_copy(update={"optimizer": optimizer}))


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("grid", [{"x": 2, "z": 2}, {}, {"y": 2}, {"z": 2, "dp": 2, "zero": 2}], ids=str)
@pytest.mark.parametrize("model", ["llama", "gpt"])
def test_formulas_equal_the_trace_with_inputs_on_the_cpu(model: str, grid: dict[str, int], every: int) -> None:
    run = run_of(model, grid, "full", layers=4, every=every)
    recompute = run.activation_checkpoint.model_copy(update={"offload": True})
    # For this case, the planner's estimate is 3 % above the trace.
    within = 0.03 if (model, grid, every) == ("llama", {"x": 2, "z": 2}, 1) else 0.02
    assert_activations_too(run.model_copy(update={"activation_checkpoint": recompute}), within)


@pytest.mark.parametrize("offload", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_formulas_equal_the_trace_of_wide_recomputed_blocks(offload: bool) -> None:
    """The planner counts 0.9 % too much, because it assumes that gradients of the MLP's weights exist before the
    activations of the MLP are freed."""
    run = run_of("llama", {"x": 2}, "full", micro_batch_size=1, seq_length=512)
    wide = {"hidden_size": 2048, "intermediate_size": 7168, "num_attention_heads": 16, "head_dim": 128}
    recompute = run.activation_checkpoint.model_copy(update={"offload": offload})
    changed = {"model": run.model.model_copy(update=wide), "activation_checkpoint": recompute}
    assert_activations_too(run.model_copy(update=changed), within=0.01)


def test_formulas_equal_the_trace_if_queries_are_split_and_share_keys() -> None:
    """Under a mask, key-value heads are repeated."""
    assert_activations_too(run_of("uneven", {"y": 8}, "none", micro_batch_size=1, seq_length=256))


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(
    ("grid", "per_node"),
    [
        ({"z": 4, "dp": 2, "zero": 2}, 2),
        ({"z": 4}, 2),
        ({"dp": 8, "zero": 3}, 4),
        ({"x": 2, "z": 4, "zero": 1}, 2),
        ({"z": 2, "dp": 4, "zero": 1}, 4),
        ({"z": 6, "cp": 2}, 3),
        ({"pp": 2, "z": 4, "dp": 2, "zero": 2, "schedule": "Interleaved1F1B"}, 2),
    ],
    ids=str,
)
@pytest.mark.parametrize("model", ["llama", "gpt"])
def test_formulas_equal_the_trace_in_nodes(model: str, grid: dict[str, Any], per_node: int) -> None:
    run = run_of(model, grid, "none", layers=4)
    run = run.model_copy(update={"overlap": run.overlap.model_copy(update={"shards_per_node": per_node})})
    assert_equal_to_the_trace(run)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["none", "selective", "full"])
@pytest.mark.parametrize("grid", [{"x": 4}, {"x": 2, "y": 2}, {"y": 4}, {"z": 4, "dp": 2, "zero": 2}], ids=str)
def test_formulas_equal_the_trace_of_a_large_model(grid: dict[str, int], mode: str) -> None:
    ranks = grid.get("z", 1) * grid.get("dp", 1)
    assert_activations_too(
        tiny_run(
            {"preset": "llama3-8b", "num_hidden_layers": 6},
            grid,
            training={
                "precision": "bf16",
                "micro_batch_size": 1,
                "global_batch_size": 2 * ranks,
                "seq_length": 4096,
            },
            activation_checkpoint={"mode": mode},
        )
    )


ZERO_BUBBLE = {"pp": 2, "schedule": "InterleavedZeroBubble"}
PIPELINES_AND_CONTEXTS: list[tuple[str, dict[str, Any], str, dict[str, Any]]] = [
    ("llama", {"cp": 2, "dp": 2, "zero": 1}, "none", {}),
    ("qwen", {"pp": 2, "z": 2, "dp": 2, "zero": 2, "schedule": "Interleaved1F1B"}, "none", {"layers": 4}),
]
MORE_OF_THEM: list[tuple[str, dict[str, Any], str, dict[str, Any]]] = [
    ("qwen", {"pp": 2, "z": 2, "dp": 2, "zero": 2, "schedule": "Interleaved1F1B"}, "none", {"layers": 6}),
    ("gpt", {"pp": 2, "dp": 2, "schedule": "ZBVZeroBubble"}, "none", {"layers": 5}),
    ("llama", {"pp": 3, "x": 2, "z": 2}, "full", {"layers": 7, "every": 2}),
    ("llama", {"cp": 2}, "none", {}),
    ("llama", {"cp": 2, "cp_method": "ring"}, "selective attention", {}),
    ("qwen", {"cp": 4, "x": 2}, "none", {}),
    ("llama", {"cp": 2, "y": 4}, "full", {}),
    ("qwen", {"y": 4, "x": 2, "cp": 2}, "none", {"micro_batch_size": 4}),
    ("gpt", {"cp": 2, "x": 2, "y": 2, "dp": 2}, "none", {}),
    ("qwen", {"cp": 2, "dp": 2, "z": 2, "zero": 2}, "none", {}),
    ("llama", {"cp": 2, "z": 2}, "none", {}),
    ("llama", {"cp": 2, "zero": 3}, "full", {}),
    ("gpt", {"pp": 2}, "none", {"layers": 5}),
    ("llama", {"pp": 2, "z": 2}, "none", {"layers": 5}),
    ("llama", {"pp": 2, "dp": 2, "zero": 1}, "none", {"layers": 5}),
    ("gpt", {"pp": 2, "dp": 2, "zero": 2}, "none", {"layers": 5, "global_batch_size": 16}),
    ("llama", {"pp": 3, "dp": 2, "z": 2, "zero": 1}, "full", {"layers": 6, "global_batch_size": 32}),
    ("llama", {"pp": 2, "cp": 2, "z": 2}, "none", {"layers": 5}),
    ("llama", {"pp": 2, "cp": 2, "x": 2, "y": 2, "cp_method": "ring"}, "none", {"layers": 4}),
    ("llama", {"pp": 2, "dp": 2, "zero": 3, "schedule": "GPipe"}, "none", {"layers": 6}),
    ("heavy", {"pp": 2, "x": 2, "schedule": "GPipe"}, "none", {"layers": 4, "global_batch_size": 16}),
    ("llama", {"pp": 4, "schedule": "ZBVZeroBubble"}, "none", {"layers": 16, "global_batch_size": 10}),
    ("llama", {"pp": 4, "schedule": "Interleaved1F1B"}, "none", {"layers": 16, "global_batch_size": 14}),
    ("llama", {"pp": 4, "schedule": "InterleavedZeroBubble"}, "none", {"layers": 16, "global_batch_size": 12}),
    ("llama", {"pp": 2, "dp": 2, "z": 2, "zero": 2, "schedule": "LoopedBFS"}, "none", {"layers": 6}),
    ("gpt", {"pp": 2, "z": 2, "schedule": "Interleaved1F1B"}, "none", {"layers": 8, "global_batch_size": 16}),
    ("llama", {"pp": 2, "z": 2, "dp": 2, "zero": 3, "schedule": "Interleaved1F1B"}, "none", {"layers": 8}),
    ("llama", {"dp": 2, "x": 2, **ZERO_BUBBLE}, "none", {"layers": 6}),
    ("llama", {"dp": 2, "zero": 1, **ZERO_BUBBLE}, "none", {"layers": 6, "global_batch_size": 16}),
    ("qwen", {"pp": 2, "dp": 2, "zero": 1, "schedule": "ZBVZeroBubble"}, "none", {"layers": 6}),
    ("gpt", {"pp": 2, "dp": 2, "schedule": "DualPipeV"}, "none", {"layers": 5, "global_batch_size": 16}),
    ("llama", {"z": 2}, "full", {"every": 2}),
]


@pytest.mark.parametrize(
    ("model", "grid", "mode", "more"),
    [*PIPELINES_AND_CONTEXTS, *(pytest.param(*case, marks=pytest.mark.slow) for case in MORE_OF_THEM)],
    ids=str,
)
def test_pipelines_and_contexts_equal_the_trace(
    model: str, grid: dict[str, Any], mode: str, more: dict[str, Any]
) -> None:
    run = run_of(model, grid, mode, **more)
    traced, work = assert_equal_to_the_trace(run), workload_of(run)
    places = [told.memory.total_peak for told in traced.pipeline or [traced]]
    told = [planned_peak(run, rank) for rank in range(len(places))]
    # The planner makes two simplifications. All stages of a rank count as equal, even if some have more blocks. All
    # ranks of a zero-bubble schedule count as equal, although later ranks free some memory with the input gradients. On
    # the first rank of a small interleaved pipeline, the estimate is 7 % below the trace.
    alike = work.layout.stages_per_rank > 1 or grid.get("schedule") == "InterleavedZeroBubble"
    assert max(told) == pytest.approx(max(places), rel=0.1 if alike else 0.05)
