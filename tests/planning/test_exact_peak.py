"""The planner's memory peak is close to the trace's peak, also in a step with one micro-batch, whose gradients are
allocated late."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
from planned_memory import planned_peak

from fourfold.config.run import RunConfig
from fourfold.run_file.load import make_run
from fourfold.verification.trace import trace

LAYOUTS = {
    "z": {"z": 4},
    "x z": {"x": 2, "z": 2},
    "dp z": {"dp": 2, "z": 2},
    "zero 0": {"dp": 4},
    "zero 1": {"dp": 4, "zero": 1},
    "zero 2": {"dp": 4, "zero": 2},
    "zero 3": {"dp": 4, "zero": 3},
}
OFTEN = {("zero 0", "full", 1), ("zero 2", "none", 2)}
"""Cases of the fast tests. All other cases are slow tests."""


@pytest.mark.parametrize(
    ("layout", "recompute", "micro_batches"),
    [
        pytest.param(*case, marks=() if case in OFTEN else pytest.mark.slow)
        for case in product(LAYOUTS, ("none", "full"), (1, 2))
    ],
)
def test_the_peak_equals_the_trace(layout: str, recompute: str, micro_batches: int) -> None:
    run = run_of(LAYOUTS[layout], recompute, micro_batches)
    assert planned_peak(run) == pytest.approx(trace(run).memory.total_peak, rel=0.005)


@pytest.mark.parametrize(
    ("model", "layout", "others"),
    [
        pytest.param("llama3-8b", "zero 0", {"optimizer": {"name": "lion"}, "seq": 1024}, id="lion"),
        pytest.param("gpt-5b", "z", {"seq": 2048}, id="gpt"),
        pytest.param("gemma2-2b", "z", {}, id="gemma", marks=pytest.mark.slow),
        pytest.param("gemma2-2b", "zero 1", {}, id="gemma zero 1", marks=pytest.mark.slow),
        pytest.param("llama3-8b", "z", {"seq": 512}, id="short", marks=pytest.mark.slow),
        pytest.param("qwen3-30b-a3b", "z", {}, id="mixture", marks=pytest.mark.slow),
    ],
)
def test_the_peak_of_other_models_is_near_the_traces(model: str, layout: str, others: dict[str, Any]) -> None:
    run = run_of(LAYOUTS[layout], "full", 1, layers=4, model=model, **others)
    assert planned_peak(run) == pytest.approx(trace(run).memory.total_peak, rel=0.01)


@pytest.mark.parametrize(
    ("model", "parallel", "recompute", "micro_batches"),
    [
        ("qwen3.5-9b", {"x": 2, "y": 2}, "full", 2),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                *product(
                    ["qwen3.5-9b"], ({"z": 4}, {"y": 2, "z": 2}, {"dp": 4, "zero": 1}), ("none", "selective"), [2]
                ),
                *product(["qwen3.5-9b"], ({"z": 4},), ("full",), [1]),
                *product(["qwen3-next-80b-a3b"], ({"z": 4, "ep": 4},), ("none", "full"), [1, 2]),
            )
        ),
    ],
    ids=str,
)
def test_the_peak_of_hybrids_equals_the_trace(
    model: str, parallel: dict[str, int], recompute: str, micro_batches: int
) -> None:
    run = run_of(parallel, recompute, micro_batches, layers=4, model=model)
    assert planned_peak(run) == pytest.approx(trace(run).memory.total_peak, rel=0.01)


@pytest.mark.slow
def test_the_peak_of_pipelines_counts_the_sums_of_the_embedding() -> None:
    """Each pipeline rank has few blocks, so the embedding's gradients are a large part of the first rank's peak."""
    grid = {"pp": 2, "y": 2, "z": 2, "dp": 2, "zero": 3, "ep": 4}
    run = run_of(grid, "full", 2, layers=4, model="deepseek-v3", seq=1024)
    few = {"num_experts": 16, "first_k_dense_replace": 1}
    run = run.model_copy(update={"model": run.model.model_copy(update=few)})
    for rank, told in enumerate(trace(run, whole=True).pipeline):
        assert planned_peak(run, rank) == pytest.approx(told.memory.total_peak, rel=0.01), rank


@pytest.mark.parametrize(
    ("model", "parallel", "recompute", "micro_batches"),
    [
        ("gpt2", {"z": 2}, "full", 2),
        pytest.param("llama3-8b", {"z": 2}, "none", 4, marks=pytest.mark.slow),
        pytest.param("llama3-8b", {"dp": 2, "zero": 1}, "none", 4, marks=pytest.mark.slow),
        pytest.param("llama3-8b", {"dp": 2, "zero": 3}, "full", 2, marks=pytest.mark.slow),
        pytest.param("llama3-8b", {}, "full", 4, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_the_peak_of_ranks_with_two_stages_equals_the_trace(
    model: str, parallel: dict[str, int], recompute: str, micro_batches: int
) -> None:
    """The stages of a rank share the buffer for sums of gradients."""
    grid = {**parallel, "pp": 2, "schedule": "Interleaved1F1B", "stages_per_rank": 2}
    run = run_of(grid, recompute, micro_batches, layers=4, model=model, seq=512)
    for rank, found in enumerate(trace(run, whole=True).pipeline):
        assert planned_peak(run, rank) == pytest.approx(found.memory.total_peak, rel=0.01), rank


def test_the_peak_of_few_blocks_with_experts_equals_the_trace() -> None:
    """With ``zero`` 3, experts that no other rank shards are freed after use. The optimizer steps without gathered
    weights."""
    run = run_of({"dp": 4, "zero": 3, "ep": 4}, "selective", 1, layers=2, model="gpt-oss-20b", seq=1024)
    assert planned_peak(run) == pytest.approx(trace(run, whole=True).memory.total_peak, rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_the_peak_with_dense_first_layers_is_near_the_traces(recompute: str, micro_batches: int) -> None:
    """No other rank shards the experts of a rank, because z = ep."""
    run = run_of({"z": 4, "ep": 4}, recompute, micro_batches, layers=8, model="deepseek-v3")
    assert planned_peak(run) == pytest.approx(trace(run).memory.total_peak, rel=0.025)


@pytest.mark.parametrize(
    ("parallel", "seq", "training", "within"),
    [
        pytest.param({}, 4096, {"reduce_dtype": "bf16"}, 0.001, id="sums in bf16"),
        pytest.param({}, 4096, {"precision": "fp32"}, 0.001, id="fp32"),
        pytest.param({}, 64, {"reduce_dtype": "bf16"}, 0.035, id="sums in bf16, few tokens", marks=pytest.mark.slow),
        pytest.param({}, 64, {"precision": "fp32"}, 0.001, id="fp32, few tokens", marks=pytest.mark.slow),
        pytest.param({"dp": 2}, 4096, {"reduce_dtype": "bf16"}, 0.001, id="sums in bf16, dp", marks=pytest.mark.slow),
    ],
)
def test_the_peak_of_whole_weights_in_other_dtypes(
    parallel: dict[str, int], seq: int, training: dict[str, str], within: float
) -> None:
    run = run_of(parallel, "none", 2, layers=2, seq=seq, training=training)
    assert planned_peak(run) == pytest.approx(trace(run).memory.total_peak, rel=within)


def test_a_second_micro_batch_adds_only_the_gradients_of_shards() -> None:
    one, two = (trace(run_of({"z": 4}, "none", number, layers=2)).memory for number in (1, 2))
    assert two.total_peak - one.total_peak == pytest.approx(one.gradients, rel=0.01)


def run_of(
    parallel: dict[str, Any],
    recompute: str,
    micro_batches: int,
    layers: int = 8,
    model: str = "llama3-8b",
    seq: int = 4096,
    training: dict[str, str] | None = None,
    **sections: dict[str, Any],
) -> RunConfig:
    return make_run(
        {
            "model": {"preset": model, "num_hidden_layers": layers},
            "data": {"source": "python-stdlib"},
            "training": {
                "seq_length": seq,
                "micro_batch_size": 1,
                "global_batch_size": 4 // parallel.get("x", 1) * micro_batches,
                "train_steps": 1,
                "precision": "bf16",
                **(training or {}),
            },
            "parallel": parallel,
            "activation_checkpoint": {"mode": recompute},
            **sections,
        }
    )
