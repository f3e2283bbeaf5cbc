"""The trace equals closed formulas and the real run, and a trace continued from a few layers equals the whole trace."""

from __future__ import annotations

import resource
from dataclasses import replace
from typing import Any

import pytest
import torch
from pool import Pool
from tiny_runs import DEEPSEEK, GEMMA2, GPT, HYBRID, LLAMA, QWEN, tiny_run

from fourfold.config.parameter_counts import num_parameters
from fourfold.config.run import RunConfig
from fourfold.parallel.grid.grid import Grid
from fourfold.run_file.load import make_run
from fourfold.training.job import Job
from fourfold.verification.batches import random_micro_batches
from fourfold.verification.continuation import layers_of_rank, run_at, small_points
from fourfold.verification.recorder import Recorder
from fourfold.verification.trace import TraceReport, trace

GRIDS = [
    {"x": 2},
    {"y": 2},
    {"x": 4},
    {"y": 4},
    {"x": 2, "y": 2},
    {"x": 4, "y": 2},
    {"x": 2, "y": 2, "z": 2},
    {"x": 2, "y": 2, "z": 2, "dp": 2},
    {"x": 2, "y": 4, "z": 2},
    {"x": 4, "y": 2, "dp": 4},
    {"x": 2, "z": 4, "dp": 2},
    {"y": 2, "z": 4},
]


def block_bytes(run: RunConfig) -> dict[tuple[str, str, str], int]:
    """Return the bytes of the collectives of one block and one micro-batch, forward and backward, by the 4D layer's
    table.

    Bytes count the full tensor, as gathered or before the reduction.
    """
    model, grid = run.model, run.parallel
    tokens = run.training.micro_batch_size * run.training.seq_length
    size = 4 if run.training.precision == "fp32" else 2
    queries, keys = model.num_attention_heads * model.head_dim, model.num_key_value_heads * model.head_dim
    ups = (2 if model.gated_mlp else 1) * model.intermediate_size
    residual = tokens * model.hidden_size // grid.y * size
    vectors = 2 if model.norm == "rmsnorm" else 6
    # Bytes per token. RMSNorm sums squares in float32. LayerNorm has two sums, in float64 forward and in float32
    # backward.
    forward_sums, backward_sums = (4, 4) if model.norm == "rmsnorm" else (16, 8)
    over_x = {
        ("x", "all_gather", "qkv: tokens"): residual,
        ("x", "reduce_scatter", "o_proj: outputs"): residual,
        ("x", "all_gather", "up: tokens"): residual,
        ("x", "reduce_scatter", "down: outputs"): residual,
        ("x", "all_gather", "down: output gradient"): residual,
        ("x", "reduce_scatter", "up: input gradient"): residual,
        ("x", "all_gather", "o_proj: output gradient"): residual,
        ("x", "reduce_scatter", "qkv: input gradient"): residual,
        # Once per step, the gradients of this rank's shards are summed: the weights (and biases) of two norms, and the
        # biases of two projections.
        ("x", "all_reduce", "gradients of norms and biases"): vectors * model.hidden_size // grid.y // grid.z * 4,
    }
    over_y = {
        ("y", "reduce_scatter", "qkv: outputs"): tokens * (queries + 2 * keys) // grid.x * size,
        ("y", "all_gather", "o_proj: inputs"): tokens * queries // grid.x * size,
        ("y", "all_reduce", "up: outputs"): tokens * ups // grid.x * size,
        ("y", "all_reduce", "down: input gradient"): tokens * model.intermediate_size // grid.x * size,
        ("y", "reduce_scatter", "o_proj: input gradient"): tokens * queries // grid.x * size,
        ("y", "all_gather", "qkv: output gradient"): tokens * (queries + 2 * keys) // grid.x * size,
        ("y", "all_reduce", "norm: statistics"): 2 * tokens // grid.x * forward_sums,
        ("y", "all_reduce", "norm: statistics' gradient"): 2 * tokens // grid.x * backward_sums,
    }
    return (over_x if grid.x > 1 else {}) | (over_y if grid.y > 1 else {})


def by_line(report: TraceReport) -> dict[tuple[str, str, str], int]:
    return {(line.axis, line.op, line.purpose): line.bytes for line in report.collectives}


FORMULA_CASES = [
    pytest.param(model, grid, marks=[pytest.mark.slow] if i not in (0, 1, 4, 6) else [])
    for i, grid in enumerate(GRIDS)
    for model in (LLAMA | {"num_key_value_heads": 8}, GPT | {"num_attention_heads": 8})
    if i < 2 or (i % 2 == 0) == (model["preset"] == "llama-tiny")
]


@pytest.mark.parametrize(("model", "grid"), FORMULA_CASES, ids=str)
def test_a_block_sends_what_the_formulas_say(model: dict[str, Any], grid: dict[str, int]) -> None:
    """A block's bytes are the difference between two models whose numbers of layers differ by one."""
    batch = {"global_batch_size": 2 * grid.get("z", 1) * grid.get("dp", 1)}
    runs = [tiny_run(model | {"num_hidden_layers": n}, grid, training=batch) for n in (1, 2)]
    one, two = (by_line(trace(run, whole=True)) for run in runs)
    block = {line: two[line] - one[line] for line in two if line[0] in "xy" and two[line] != one[line]}
    assert block == block_bytes(runs[0])


FULL = {"activation_checkpoint": {"mode": "full"}}
THIRDS = GEMMA2 | {"layer_types": ["sliding_attention", "sliding_attention", "full_attention"]}
CONTINUED = [
    pytest.param(THIRDS, {"x": 2}, {"training": {"global_batch_size": 2}} | FULL, marks=pytest.mark.slow),
    pytest.param(LLAMA, {"x": 2, "y": 2, "z": 2}, {}, marks=pytest.mark.slow),
    pytest.param(GPT, {"y": 2, "z": 2, "dp": 2}, FULL, marks=pytest.mark.slow),
    pytest.param(QWEN, {"x": 2, "dp": 2, "zero": 1}, {"training": {"precision": "bf16"}}, marks=pytest.mark.slow),
    pytest.param(LLAMA, {"z": 2, "dp": 2, "zero": 2}, {"overlap": {"weight_prefetch": 2}}, marks=pytest.mark.slow),
    pytest.param(LLAMA, {"z": 4, "zero": 3}, {"activation_checkpoint": {"mode": "selective"}}, marks=pytest.mark.slow),
    pytest.param(GPT, {"z": 4, "dp": 2, "zero": 2}, {"overlap": {"shards_per_node": 2}}, marks=pytest.mark.slow),
    pytest.param(LLAMA, {}, {}, marks=pytest.mark.slow),
    (LLAMA, {"x": 2}, {"activation_checkpoint": {"mode": "full", "every": 2}, "training": {"global_batch_size": 4}}),
    pytest.param(GPT, {"z": 2}, {"activation_checkpoint": {"mode": "selective", "every": 3}}, marks=pytest.mark.slow),
    (LLAMA, {"x": 2}, {"training": {"global_batch_size": 2}}),
    (HYBRID, {"x": 2}, {"training": {"global_batch_size": 2}}),
    (LLAMA | {"num_nextn_predict_layers": 1}, {"x": 2}, {"training": {"global_batch_size": 2}}),
    pytest.param(HYBRID, {"y": 2, "z": 2, "zero": 3}, FULL, marks=pytest.mark.slow),
    pytest.param(GPT, {"z": 2}, {"training": {"global_batch_size": 4}} | FULL, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("model", "grid", "sections"), CONTINUED)
def test_continuing_from_few_layers_is_exact(
    model: dict[str, Any], grid: dict[str, int], sections: dict[str, Any]
) -> None:
    ranks = grid.get("z", 1) * grid.get("dp", 1)
    training = {"global_batch_size": 2 * ranks * 5, "seq_length": 16, **sections.get("training", {})}
    every = sections.get("activation_checkpoint", {}).get("every", 1)
    layers = 6 + every if "layer_types" not in model else 5 + 2 * len(model["layer_types"])
    run = tiny_run(model | {"num_hidden_layers": layers}, grid, **(sections | {"training": training}))
    assert trace(run) == trace(run, whole=True)


PIPELINES = [
    (LLAMA, {"pp": 6}),
    (THIRDS, {"pp": 6}),
    (DEEPSEEK | {"num_hidden_layers": 12, "first_k_dense_replace": 3}, {"pp": 6}),
    (LLAMA | {"num_hidden_layers": 32}, {"pp": 2, "x": 2}),
    (HYBRID | {"num_hidden_layers": 12}, {"pp": 3, "x": 2}),
    (LLAMA | {"num_nextn_predict_layers": 1}, {"pp": 6}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("model", "grid"), PIPELINES)
def test_continuing_from_short_pipelines_is_exact(model: dict[str, Any], grid: dict[str, int]) -> None:
    training = {"global_batch_size": 9, "micro_batch_size": 1, "seq_length": 16}
    run = tiny_run({"num_hidden_layers": 12} | model, grid, training=training)
    assert trace(run) == trace(run, whole=True)


@pytest.mark.parametrize("schedule", ["1F1B", "Interleaved1F1B", "ZBVZeroBubble"])
@pytest.mark.parametrize("pp", [2, 6])
def test_small_pipelines_have_layers_of_the_same_kinds(pp: int, schedule: str) -> None:
    """Each stage of the traced rank begins with the same kinds of layers in the small pipeline as in the whole
    pipeline."""
    kinds = THIRDS | DEEPSEEK | {"num_hidden_layers": 72, "first_k_dense_replace": 3}
    run = tiny_run(kinds, {"pp": pp, "schedule": schedule}, training={"global_batch_size": 96, "micro_batch_size": 1})
    for pp_rank in range(pp):
        points = small_points(run, pp_rank)
        for point in points:
            small = run_at(run, point)
            stages = zip(layers_of_rank(run, pp_rank), layers_of_rank(small, point.pp_rank), strict=True)
            for true, traced in stages:
                assert len(traced) == point.layers and kinds_of(small, traced) == kinds_of(run, true[: point.layers])


def kinds_of(run: RunConfig, layers: range) -> list[tuple[bool, bool]]:
    return [(run.model.type_of(layer), run.model.is_sparse(layer)) for layer in layers]


def recorded_body(rank: int, world_size: int, run: RunConfig) -> tuple[dict[tuple[str, str, str], int], int]:
    grid, device = Grid(run.parallel, "cpu"), torch.device("cpu")
    job = Job(run, grid, device)
    job.initialize(0)
    # The trace assumes no padding. Batches of text do not even have a padding mask.
    masks = run.model.num_experts > 0 and run.data.format != "text"
    micro_batches = [
        replace(batch, is_data=torch.ones_like(batch.tokens, dtype=torch.bool) if masks else None)
        for batch in random_micro_batches(run, 0, grid, device)
    ]
    with Recorder(grid) as recorder:
        recorder.own(job)
        recorder.start()
        job.train_step(micro_batches, 0)
    return {line: size for line, (_, size) in recorder.collectives.items()}, recorder.parameters


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(
    ("model", "grid"),
    [
        (LLAMA, {"x": 2, "y": 2}),
        (LLAMA, {"y": 2, "z": 2, "zero": 3}),
        (LLAMA, {"z": 2, "dp": 2}),
        (HYBRID, {"x": 2, "y": 2}),
        (HYBRID, {"x": 2, "cp": 2}),
        (HYBRID, {"y": 2, "z": 2, "zero": 3}),
        (HYBRID | {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 8}, {"x": 2, "y": 2}),
        (LLAMA | {"num_nextn_predict_layers": 2}, {"x": 2, "y": 2}),
        (LLAMA | {"num_nextn_predict_layers": 1}, {"x": 2, "cp": 2}),
        (LLAMA | {"num_nextn_predict_layers": 1}, {"z": 2, "dp": 2, "zero": 3}),
    ],
    ids=str,
)
def test_a_real_run_sends_what_the_trace_says(pool: Pool, model: dict[str, Any], grid: dict[str, int]) -> None:
    run = tiny_run(model, grid, training={"device": "cpu"})
    traced = trace(run)
    for collectives, parameters in pool.run(4, recorded_body, run):
        assert collectives == by_line(traced)
        assert parameters == traced.memory.parameters


def test_memory_of_states_is_what_the_sizes_say() -> None:
    run = tiny_run(QWEN, {"x": 2, "y": 2, "z": 2}, training={"precision": "bf16", "global_batch_size": 4})
    memory = trace(run).memory
    norms_over_y, head_norms = (2 * 2 + 1) * 64, 2 * 2 * 8
    matrices = num_parameters(run.model) - norms_over_y - head_norms
    held = matrices // 8 + norms_over_y // 4 + head_norms // 2
    assert memory.parameters == 4 * held
    assert memory.gradients == 4 * held
    assert memory.optimizer == 2 * 4 * held


def test_recomputed_blocks_store_their_inputs_only() -> None:
    """Under full recompute, the activations of a block are its input, [b, s/x, H/y]."""
    grid = {"x": 2, "y": 2}
    peaks = [
        trace(
            tiny_run(
                LLAMA | {"num_hidden_layers": layers},
                grid,
                training={"global_batch_size": 2},
                activation_checkpoint={"mode": "full"},
            ),
            whole=True,
        ).memory.activations_peak
        for layers in (2, 3)
    ]
    assert peaks[1] - peaks[0] == 2 * (32 // 2) * (64 // 2) * 4


def wire_bytes(report: TraceReport, run: RunConfig) -> float:
    """Return the bytes that a rank sends with ring algorithms: (n − 1)/n of a full tensor, and twice that for an
    all-reduce."""
    grid = run.parallel
    sizes = {axis: getattr(grid, axis) for axis in ("x", "y", "z", "dp")}
    sizes |= {"dp_z": grid.dp * grid.z, "y_x": grid.y * grid.x, "world": grid.world_size}
    total = 0.0
    for line in report.collectives:
        share = (sizes[line.axis] - 1) / sizes[line.axis]
        total += line.bytes * share * (2 if line.op == "all_reduce" else 1)
    return total


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [4, 8, 16])
def test_the_best_grid_never_sends_more_than_one_tensor_axis_with_fsdp(ranks: int) -> None:
    """The batch is small compared with the weights. Otherwise a tensor-parallel axis would save no traffic."""
    model = LLAMA | {"num_key_value_heads": 8, "hidden_size": 128, "head_dim": 16, "intermediate_size": 512}
    sent: dict[tuple[int, int, int], float] = {}
    for x in (1, 2, 4, 8):
        for y in (1, 2, 4, 8):
            if ranks % (x * y) or x * y > 8:
                continue
            z = ranks // (x * y)
            run = tiny_run(
                model, {"x": x, "y": y, "z": z}, training={"global_batch_size": 16, "micro_batch_size": 16 // z}
            )
            sent[x, y, z] = wire_bytes(trace(run), run)
    best = min(sent.values())
    assert best <= min(size for (_, y, _), size in sent.items() if y == 1)
    two_dimensional = min(size for (x, y, _), size in sent.items() if x > 1 and y > 1)
    assert two_dimensional < sent[1, min(8, ranks), max(1, ranks // 8)], "two axes send less than one long one"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("preset", "grid", "batch"),
    [
        ("gpt-320b", {"x": 8, "y": 4, "z": 64, "dp": 16}, 8192),
        ("frontier-1t", {"x": 8, "y": 8, "z": 48}, 3072),
    ],
)
def test_the_largest_models_are_traced_in_8_gib(preset: str, grid: dict[str, int], batch: int) -> None:
    run = make_run(
        {
            "model": {"preset": preset},
            "data": {"source": "python-stdlib"},
            "parallel": grid,
            "training": {"global_batch_size": batch, "seq_length": 2048, "train_steps": 1, "precision": "bf16"},
            "activation_checkpoint": {"mode": "full"},
        }
    )
    report = trace(run)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 8 * 2**20  # in KiB
    share = num_parameters(run.model) / (run.parallel.world_size // run.parallel.dp)
    assert share * 4 <= report.memory.parameters < share * 4 * 1.01


@pytest.mark.slow
def test_a_pipeline_of_175b_has_the_memory_that_was_measured() -> None:
    """The run trains 175B parameters on 128 GPUs of 64 GB: 4-way tensor parallel, 16 pipeline stages, ZeRO-1 over 2
    ranks, fp16, micro-batches of one sequence, and full recompute.

    Megatron-DeepSpeed on Frontier measured 28 to 34 GB for each of these GPUs.
    """
    run = make_run(
        {
            "model": {"preset": "frontier-175b"},
            "data": {"source": "python-stdlib"},
            "parallel": {"x": 4, "pp": 16, "dp": 2, "zero": 1},
            "training": {
                "global_batch_size": 640,
                "seq_length": 2048,
                "train_steps": 1,
                "precision": "fp16",
                "reduce_dtype": "fp16",
                "device": "cuda",
            },
            "activation_checkpoint": {"mode": "full"},
        }
    )
    report = trace(run)
    assert len(report.pipeline) == 16
    for rank in report.pipeline:
        memory = rank.memory
        assert 28e9 < memory.total_peak < 34e9
        # A parameter takes 12 bytes for its fp32 weight and AdamW's two moments. ZeRO-1 shards these over 2 ranks. Each
        # rank also has the full fp16 weight and its gradient, with 2 bytes each.
        parameters = memory.parameters / 4 * 2
        assert memory.optimizer == 2 * memory.parameters
        assert memory.total_peak == pytest.approx((12 / 2 + 2 + 2) * parameters + memory.activations_peak, rel=0.06)
