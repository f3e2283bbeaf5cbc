"""Mixtures of experts in the planner equal closed formulas: weights, FLOPs, bytes sent, and rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from exact_parameters import stages_of_rank

from fourfold.config.run import RunConfig
from fourfold.planning.array_fields import stack
from fourfold.planning.calibration.machine_constants import constants_for
from fourfold.planning.cost.expert_sizes import rows_of, states_of_experts
from fourfold.planning.cost.memory import peak_memory, stage_memory
from fourfold.planning.cost.stage_split import blocks_of
from fourfold.planning.cost.step import step_parts
from fourfold.planning.machines.constants import prior_constants
from fourfold.planning.machines.machine import load_machine
from fourfold.planning.model_shape import ModelShape
from fourfold.planning.run_workload import workload_of
from fourfold.planning.search.fastest import search
from fourfold.planning.search.plan import predict
from fourfold.planning.search.space import SearchLimits
from fourfold.planning.workload import Step, Workload
from fourfold.run_file.load import make_run

H100 = load_machine("dgx-h100")
ONE_LINK = replace(
    H100, gpus_per_node=1 << 20, domain=1 << 20, intra2=1.0, intra4=1.0, intra8=1.0, intra_far=1.0, base=0.0,
    intra_hop=0.0, inter_hop=0.0,
)  # fmt: skip
PLAIN = replace(prior_constants(), intra=1.0, latency=0.0, dispersion=0.0, exposed=1.0)
HIDDEN, INNER, EXPERTS, CHOSEN, LAYERS, SEQ = 256, 384, 8, 2, 3, 512
MODEL = {
    "vocab_size": 1024, "hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "num_attention_heads": 8,
    "intermediate_size": 640, "num_experts": EXPERTS, "num_experts_per_tok": CHOSEN, "moe_intermediate_size": INNER,
}  # fmt: skip


def work_of(grid: dict[str, int], model: dict[str, Any] | None = None, **tables: Any) -> Workload:
    return workload_of(run_of(grid, model, **tables))


def run_of(grid: dict[str, Any], model: dict[str, Any] | None = None, sequences: int = 4, **tables: Any) -> RunConfig:
    ranks = grid.get("z", 1) * grid.get("dp", 1)
    return make_run({
        "model": MODEL | (model or {}), "data": {"source": "python-stdlib"}, "parallel": grid,
        "training": {"precision": "bf16", "global_batch_size": sequences * ranks, "micro_batch_size": 2,
                     "seq_length": SEQ, "train_steps": 1},
    } | tables)  # fmt: skip


GRIDS: list[dict[str, int]] = [
    {"dp": 4, "ep": 2},
    {"z": 4, "ep": 4},
    {"z": 2, "dp": 2, "ep": 4},
    {"z": 4, "dp": 2, "ep": 2},
    {"x": 2, "z": 2, "ep": 2},
    {"y": 2, "cp": 2, "ep": 2},
    {"x": 2, "y": 2, "dp": 2, "ep": 2},
]


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_exchanges_send_a_row_for_every_chosen_expert(grid: dict[str, int], again: bool) -> None:
    """There are two exchanges in the forward, two in the backward, and two more with full recompute. A token is sent to
    K experts, so each exchange sends K rows per token, with 2 bytes per entry."""
    mode = {"activation_checkpoint": {"mode": "full" if again else "none"}}
    work = work_of(grid, **mode)
    seconds = step_parts(work, ONE_LINK, PLAIN)["ep"]
    tokens = 2 * SEQ / grid.get("cp", 1) / grid.get("x", 1)
    one = 2 * tokens * CHOSEN * HIDDEN / grid.get("y", 1) * (grid["ep"] - 1) / grid["ep"]
    exchanges = 6 if again else 4
    assert float(seconds) == pytest.approx(exchanges * one * LAYERS * 2, rel=1e-12)  # two micro-batches


def test_rows_are_gathered_and_summed_over_x_and_y() -> None:
    """Compared with the dense MLP, K times as many tokens move over x. Over y, the outputs of gate and up are summed
    for K times as many tokens."""
    for axis, size in (("x", 2), ("y", 2)):
        work = work_of({axis: size})
        attention = work_of({axis: size}, {"num_experts": 0, "moe_intermediate_size": 0}).but(
            intermediate_size=0, gate_up=0
        )
        never = {"overlap_x": np.bool_(False), "gate_first": np.bool_(False)}
        whole, rest = (step_parts(w.but(**never), ONE_LINK, PLAIN)[axis] for w in (work, attention))
        rows, share, times = CHOSEN * 2 * SEQ, (size - 1) / size, LAYERS * 2
        if axis == "x":
            assert float(whole - rest) == pytest.approx(4 * 2 * rows * HIDDEN * share * times)
        else:
            scores, weights = 4 * 2 * SEQ * EXPERTS, 4 * rows
            sums = 2 * share * (scores + weights + 3 * 2 * rows * INNER)
            assert float(whole - rest) == pytest.approx(sums * times)


@pytest.mark.parametrize("zero", [0, 1, 3])
@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_weights_of_a_rank(grid: dict[str, int], zero: int) -> None:
    """Weights are stored in 4 bytes. Everything but experts is divided over x, y, and the shards. Experts are divided
    over x, y, ep, and the shards with the same experts."""
    work = work_of(grid | {"zero": zero})
    sizes = {axis: grid.get(axis, 1) for axis in ("x", "y", "z", "dp", "cp", "ep")}
    tensor, copies = sizes["x"] * sizes["y"], sizes["dp"] * sizes["cp"]
    shards = sizes["z"] * (copies if zero else 1)
    own = max(sizes["z"] // sizes["ep"], 1) if zero == 0 else sizes["z"] * copies // sizes["ep"]
    attention = 4 * HIDDEN * HIDDEN
    every = LAYERS * (attention + EXPERTS * HIDDEN) + 2 * 1024 * HIDDEN
    experts = LAYERS * EXPERTS * 3 * HIDDEN * INNER
    stored = 4 * (every / (tensor * shards) + experts / (tensor * sizes["ep"] * own))
    assert float(stage_memory(work, H100, 0)["parameters"]) == pytest.approx(stored)


def test_gradients_of_experts_are_summed_over_those_with_the_same() -> None:
    work = work_of({"dp": 8, "ep": 4}).but(overlap_dp=np.bool_(False))
    dense = LAYERS * (4 * HIDDEN * HIDDEN + EXPERTS * HIDDEN) + 2 * 1024 * HIDDEN
    experts = LAYERS * EXPERTS * 3 * HIDDEN * INNER / 4
    sent = 4 * (2 * 7 / 8 * dense + 2 * 1 / 2 * experts)
    assert float(step_parts(work, ONE_LINK, PLAIN)["dp"]) == pytest.approx(sent)


def test_flops_count_only_active_experts() -> None:
    work = work_of({})
    attention, router, experts = 4 * HIDDEN**2, HIDDEN * EXPERTS, CHOSEN * 3 * HIDDEN * INNER
    weights = LAYERS * (attention + router + experts) + 1024 * HIDDEN
    tokens = 4 * SEQ
    assert work.model_flops() == pytest.approx(tokens * (6 * weights + 6 * LAYERS * SEQ * HIDDEN))


def test_dense_first_layers_and_shared_experts_count_once() -> None:
    model = {"first_k_dense_replace": 1, "shared_expert_intermediate_size": 128}
    shape = work_of({}, model).model
    every = shape.num_hidden_layers * (shape.block_weights + shape.expert_weights)
    attention, mlp, shared = 4 * HIDDEN**2, 3 * HIDDEN * 640, 3 * HIDDEN * 128
    sparse = HIDDEN * EXPERTS + EXPERTS * 3 * HIDDEN * INNER + shared
    assert every == pytest.approx(LAYERS * attention + mlp + 2 * sparse)


@pytest.mark.parametrize(
    ("schedule", "more"),
    [
        ("1F1B", {}),
        ("1F1B", {"zero": 3}),
        ("Interleaved1F1B", {"z": 2, "zero": 1}),
        ("GPipe", {"zero": 3}),
        ("ZBVZeroBubble", {"zero": 1}),
        ("DualPipeV", {}),
    ],
    ids=str,
)
def test_the_fullest_rank_of_a_pipeline_with_dense_first_layers(schedule: str, more: dict[str, int]) -> None:
    """Any rank may need the most memory. Each rank has the blocks that the run file says."""
    cases, peaks = [], []
    for pp, layers, dense, vocab in (
        (2, 8, 1, 512),
        (4, 16, 3, 512),
        (4, 19, 5, 512),
        (4, 16, 3, 65536),
        (3, 12, 6, 512),
    ):
        model = {"num_hidden_layers": layers, "first_k_dense_replace": dense, "vocab_size": vocab}
        run = run_of({"pp": pp, "dp": 2, "ep": 2, "schedule": schedule} | more, model, sequences=16)
        work = workload_of(run)
        stages = [stages_of_rank(run, rank) for rank in range(pp)]
        counts = tuple((sum(s.layers for s in each), sum(s.dense for s in each)) for each in stages)
        assert tuple(blocks[:2] for blocks in blocks_of(work)) == counts
        held = [sum(map(float, stage_memory(work, H100, rank).values())) for rank in range(pp)]
        assert float(peak_memory(work, H100)) == pytest.approx(max(held), rel=1e-9)
        cases.append(work)
        peaks.append(max(held))
    together = peak_memory(stack(cases), stack([H100] * len(cases)))
    assert together == pytest.approx(np.array(peaks), rel=1e-9)


def test_a_middle_rank_is_the_fullest_if_the_first_rank_has_the_dense_layers() -> None:
    model = {"num_hidden_layers": 16, "first_k_dense_replace": 3, "vocab_size": 512}
    work = workload_of(run_of({"pp": 4, "dp": 2, "ep": 2}, model))
    first, second = (stage_memory(work, H100, rank) for rank in range(2))
    assert sum(second.values()) == peak_memory(work, H100)
    assert second["parameters"] > 1.5 * first["parameters"]


def test_rows_of_a_rank() -> None:
    """With an even load, a rank has the mean number of rows. If the load is uneven, the rank with the most rows counts,
    up to the capacity."""
    work = work_of({"dp": 4, "ep": 4})
    rows = rows_of(work)
    assert rows.on_rank == rows.sent == 2 * SEQ * CHOSEN and rows.experts == 2 and rows.each == SEQ * CHOSEN
    assert rows_of(work.but(imbalance=1.5)).on_rank == 1.5 * rows.on_rank
    assert rows_of(work.but(imbalance=1.5, capacity=1.25)).on_rank == 1.25 * rows.on_rank
    uneven, even = (float(step_parts(w, H100, PLAIN)["compute"]) for w in (work.but(imbalance=4.0), work))
    assert uneven > even


def test_a_mixture_of_one_expert_equals_a_dense_mlp() -> None:
    """Both have the same matmuls, the same sums over x, and the same weights."""
    dense = work_of({"x": 2}, {"num_experts": 0, "moe_intermediate_size": 0, "intermediate_size": INNER})
    one = work_of({"x": 2}, {"num_experts": 1, "num_experts_per_tok": 1})
    assert step_parts(one, ONE_LINK, PLAIN)["x"] == pytest.approx(step_parts(dense, ONE_LINK, PLAIN)["x"], rel=0.3)
    shape = one.model
    # The router adds HIDDEN weights.
    assert shape.block_weights + shape.expert_weights == dense.model.block_weights + HIDDEN
    assert one.model_flops() == pytest.approx(dense.model_flops(), rel=0.01)


def test_states_keep_the_micro_batches() -> None:
    work = work_of({"z": 2, "dp": 2, "ep": 4})
    experts = states_of_experts(work)
    assert experts.micro_batches == work.micro_batches
    assert experts.model.block_weights == work.model.expert_weights


MIXTURE = ModelShape(
    num_hidden_layers=16, hidden_size=2048, queries=2048, keys=512, head_dim=128, intermediate_size=0, gate_up=0,
    padded_vocab_size=32768, tie_word_embeddings=False, num_experts=16, num_experts_per_tok=4,
    moe_intermediate_size=1024, sparse=1.0,
)  # fmt: skip
SMALL = SearchLimits(micro_batches=(1, 2), zeros=(0, 1), pipelines=(("1F1B", 1),), batch_parts=(1,))


def test_the_search_divides_experts_in_every_legal_way() -> None:
    base = Workload(MIXTURE, step=Step(seq_length=4096, global_batch_size=64))
    found = search(base, H100, constants_for(H100), 16, SMALL)
    layouts = [found.point(int(index)).layout for index in found.order]
    assert {layout.ep for layout in layouts} == {1, 2, 4, 8, 16}
    assert all(layout.dp * layout.cp * layout.z % layout.ep == 0 for layout in layouts)
    best = predict(found.point(int(found.order[0])), H100, constants_for(H100))
    assert best.record()["parallel"]["ep"] == best.work.layout.ep
    few = search(base, H100, constants_for(H100), 16, replace(SMALL, at_most=(("ep", 2),)))
    assert {found.point(int(i)).layout.ep for i in few.order[:3]} and max(few.work.layout.ep) == 2


def test_a_step_with_experts_in_a_stack_of_dense_ones_is_the_same() -> None:
    """The planner predicts steps with and without experts in one call, and each step gets the same result as alone."""
    mixture, dense = work_of({"dp": 4, "ep": 2}), work_of({"dp": 4}, {"num_experts": 0, "moe_intermediate_size": 0})
    machine, constants = stack([H100, H100]), constants_for(H100)
    together = step_parts(stack([mixture, dense]), machine, constants)
    for place, work in enumerate((mixture, dense)):
        alone = step_parts(work, H100, constants)
        assert {name: np.broadcast_to(together[name], 2)[place] for name in alone} == alone
