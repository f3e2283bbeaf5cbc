"""The trace tells which collectives the computation of a step can hide."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from tiny_runs import GPT, LLAMA, tiny_run

from fourfold.planning.calibration.machine_constants import constants_for
from fourfold.planning.cost.attention_time import attention_seconds
from fourfold.planning.cost.block_time import block_time
from fourfold.planning.cost.rates import Rates
from fourfold.planning.machines.machine import Machine, load_machine
from fourfold.planning.run_workload import workload_of
from fourfold.planning.search.plan import predict
from fourfold.run_file.load import make_run
from fourfold.verification.durations import PICOSECOND, Durations
from fourfold.verification.exposure import Flights
from fourfold.verification.trace import trace

LINE = ("x", "all_gather", "tokens")


def exposed_of(model: dict[str, Any], grid: dict[str, Any], whole: bool = False, **sections: Any) -> dict[str, float]:
    """Return the exposed fraction of each collective's bytes, by axis and purpose, by default for one micro-batch."""
    sections = {"training": {"global_batch_size": 2}} | sections
    report = trace(tiny_run(model, grid, **sections), whole)
    return {f"{c.axis} {c.op} {c.purpose}": c.exposed_bytes / c.bytes for c in report.collectives}


def test_a_collective_is_exposed_unless_a_product_comes_before_the_wait() -> None:
    flights = Flights()
    flights.issue(1, LINE, 10)
    flights.land(1)
    assert flights.exposed == {LINE: 10}
    flights.issue(1, LINE, 5)
    flights.compute()
    flights.issue(2, LINE, 7)
    flights.land(1)
    flights.land(1)
    assert flights.exposed == {LINE: 10}
    flights.move(2, 3)
    flights.land_all()
    assert flights.exposed == {LINE: 17}


def test_sums_of_input_gradients_hide_behind_weight_gradients() -> None:
    sums = [
        "x reduce_scatter qkv: input gradient",
        "y reduce_scatter o_proj: input gradient",
        "x reduce_scatter up: input gradient",
        "y all_reduce down: input gradient",
    ]
    grid = {"x": 2, "y": 2}
    shares, without = exposed_of(LLAMA, grid), exposed_of(LLAMA, grid, overlap={"input_gradients": False})
    assert [shares[name] for name in sums] == [0, 0, 0, 0]
    assert [without[name] for name in sums] == [1, 1, 1, 1]
    assert {name: share for name, share in shares.items() if name not in sums} == {
        name: share for name, share in without.items() if name not in sums
    }


def test_the_sum_of_gate_hides_behind_the_product_of_up() -> None:
    name = "y all_reduce up: outputs"
    assert exposed_of(LLAMA, {"y": 2})[name] == 0.5
    assert exposed_of(LLAMA, {"y": 2}, overlap={"gate_sum": False})[name] == 1
    assert exposed_of(GPT, {"y": 2})[name] == 1


IN_PARTS = [
    "x all_gather qkv: tokens",
    "x reduce_scatter o_proj: outputs",
    "x all_gather up: tokens",
    "x reduce_scatter down: outputs",
]
"""Collectives of a block, in order. No matmul lies between the sum of one layer and the gather of the next."""


@pytest.mark.parametrize("parts", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_parts_of_a_micro_batch_hide_collectives_of_other_parts(parts: int) -> None:
    training = {"micro_batch_size": 4, "global_batch_size": 4}
    sections = {"training": training, "overlap": {"batch_parts": parts}}
    grid, blocks = {"x": 2, "y": 2}, ("qkv", "o_proj", "up", "down")
    computed_once = exposed_of(GPT, grid, **sections)
    recomputed = exposed_of(GPT, grid, **sections, activation_checkpoint={"mode": "full"})
    for name, share in computed_once.items():
        if name.split()[2].rstrip(":") in blocks:
            exposed = name in IN_PARTS or name == "x all_gather down: output gradient"
            assert share == (1 / parts if exposed else 0), name
    # Recomputing a block hides the all-gather of its output gradient, even though recompute skips the block's last
    # matmul.
    assert recomputed["x all_gather down: output gradient"] == 0
    assert recomputed["y all_reduce up: outputs"] == 1 / parts / 2
    for name in IN_PARTS:
        assert recomputed[name] == 1 / parts


@pytest.mark.parametrize(("mode", "blocks"), [("none", 1), pytest.param("full", 2, marks=pytest.mark.slow)])
def test_three_parts_over_x_alone_run_ahead(mode: str, blocks: int) -> None:
    """Nothing hides the first gather. With full recompute, each block has such a gather. Without it, only the first
    block has one."""
    sections = {"training": {"micro_batch_size": 3, "global_batch_size": 3}, "overlap": {"batch_parts": 3}}
    shares = exposed_of(GPT, {"x": 2}, **sections, activation_checkpoint={"mode": mode})
    assert [shares[name] for name in IN_PARTS] == [1 / 3 * blocks / 2, 0, 0, 1 / 3 * blocks / 2]


AROUND_ATTENTION = ["y reduce_scatter qkv: outputs", "y all_gather o_proj: inputs", "y all_gather qkv: output gradient"]
"""Collectives around attention, which waits for the tokens of all parts."""


@pytest.mark.slow
def test_parts_of_a_sequence_hide_collectives_of_other_parts() -> None:
    training = {"micro_batch_size": 1, "global_batch_size": 1}
    sections = {"training": training, "overlap": {"batch_parts": 4}}
    for mode in ("none", "full"):
        shares = exposed_of(GPT, {"x": 2, "y": 2}, **sections, activation_checkpoint={"mode": mode})
        for name in (*IN_PARTS, *AROUND_ATTENTION):
            assert shares[name] == 1 / 4, name
        assert shares["x all_gather down: output gradient"] == (1 / 4 if mode == "none" else 0)
        for name in ("o_proj: output gradient", "qkv: input gradient", "up: input gradient"):
            assert all(share == 0 for line, share in shares.items() if line.endswith(name)), name


def test_parts_need_no_more_memory_than_the_whole() -> None:
    def peak(parts: int) -> int:
        training = {"micro_batch_size": 4, "global_batch_size": 4}
        sections = {"training": training, "overlap": {"batch_parts": parts}}
        run = tiny_run(GPT, {"x": 2, "y": 2}, activation_checkpoint={"mode": "full"}, **sections)
        return trace(run, whole=True).memory.total_peak

    assert peak(4) <= peak(2) <= peak(1)


def test_weights_are_gathered_behind_the_layer_before() -> None:
    deep = {**LLAMA, "num_hidden_layers": 12}
    ahead, late = (
        exposed_of(deep, {"z": 2}, training={"global_batch_size": 4}, overlap={"weight_prefetch": layers})
        for layers in (1, 0)
    )
    assert ahead["z all_gather weights"] < 0.2 < 0.4 < late["z all_gather weights"]
    assert ahead["z reduce_scatter gradients"] < 0.2


@pytest.mark.slow
def test_both_levels_are_hidden_if_one_level_would_be() -> None:
    deep, training = {**LLAMA, "num_hidden_layers": 12}, {"global_batch_size": 8}
    one, two = (
        exposed_of(deep, {"z": 4}, training=training, overlap={"shards_per_node": per_node}) for per_node in (1, 2)
    )
    for line in ("all_gather weights", "reduce_scatter gradients"):
        assert two[f"z inside nodes {line}"] == two[f"z across nodes {line}"] == one[f"z {line}"]


def test_two_levels_of_a_gather_land_together() -> None:
    flights, inside = Flights(), ("z inside nodes", "all_gather", "weights")
    flights.issue(1, LINE, 5)
    flights.issue(1, inside, 10)
    flights.compute()
    flights.land(1)
    assert not flights.exposed
    flights.issue(1, LINE, 5)
    flights.issue(1, inside, 10)
    flights.land(1)
    assert flights.exposed == {LINE: 5, inside: 10}


def test_the_levels_of_a_sum_take_turns() -> None:
    """Each level has its own collective, with its own line in the trace, as in FSDP2's sums."""
    flights = Flights()
    for line in (("z inside nodes", "reduce_scatter", "gradients"), ("z across nodes", "reduce_scatter", "gradients")):
        flights.issue(line, line, 8, 10)
    flights.land_all()
    assert sum(flights.waited.values()) == 20


def test_the_ring_hides_all_but_its_last_gradients() -> None:
    shares = exposed_of(LLAMA, {"cp": 4, "cp_method": "ring"})
    assert shares["cp send attention: keys and values"] == 0
    assert 0 < shares["cp send attention: keys' and values' gradients"] <= 0.25
    assert exposed_of(LLAMA, {"cp": 2})["cp all_to_all attention: inputs"] == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "grid", [{"x": 2, "y": 2, "z": 2}, {"pp": 2, "dp": 2}, {"z": 2, "dp": 2}, {"cp": 2, "y": 2}], ids=str
)
def test_continuing_from_few_layers_is_exact(grid: dict[str, Any]) -> None:
    deep = {**LLAMA, "num_hidden_layers": 9}
    training = {"global_batch_size": 24, "micro_batch_size": 2}
    assert exposed_of(deep, grid, training=training) == exposed_of(deep, grid, whole=True, training=training)


def test_collectives_of_one_axis_run_in_turn_and_axes_run_concurrently() -> None:
    flights, other = Flights(), ("y", "all_gather", "tokens")
    flights.issue(1, LINE, 1, 100)
    flights.issue(2, LINE, 1, 100)
    flights.issue(3, other, 1, 100)
    flights.compute(150)
    flights.land(1)
    flights.land(3)
    assert not +flights.waited
    # The second collective began only when the first one on its axis was done.
    flights.land(2)
    assert +flights.waited == {LINE: 50}
    flights.issue(1, other, 1, 70)
    flights.land(1)
    assert flights.waited == {LINE: 50, other: 70} and flights.taken == {LINE: 200, other: 170}


def test_a_hidden_collective_slows_the_concurrent_computation() -> None:
    flights = Flights(slowed=0.1)
    flights.issue(1, LINE, 1, 100)
    flights.compute(60)
    flights.land(1)
    assert flights.waited == {LINE: 40 + 6}


def seconds_of(
    machine: Machine, model: dict[str, Any], grid: dict[str, Any], whole: bool = False, **sections: Any
) -> Any:
    report = trace(tiny_run(model, grid, **sections), whole, machine)
    lines = [line for rank in (report.pipeline or [report]) for line in rank.collectives]
    return [(line.axis, line.op, line.purpose, line.seconds, line.exposed_seconds) for line in lines]


def thin_links() -> Machine:
    """Return a machine that takes about as long for a tiny model's collectives as for its matmuls."""
    machine = load_machine("dgx-h100")
    slow = {name: getattr(machine, name) / 20 for name in ("achieved_fp32", "attention", "memory_bandwidth")}
    return replace(machine, units=1, base=1e-9, intra_hop=1e-9, inter_hop=1e-9, **slow)


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(
    ("grid", "sections"),
    [
        ({"x": 2, "y": 2, "z": 2}, {}),
        ({"dp": 4}, {}),
        ({"pp": 2, "x": 2}, {}),
        ({"x": 2, "y": 2}, {"overlap": {"batch_parts": 2}, "activation_checkpoint": {"mode": "full"}}),
        ({"z": 2, "dp": 2, "zero": 3}, {}),
        ({"cp": 2, "cp_method": "ring", "y": 2}, {}),
        ({"z": 4}, {"overlap": {"weight_prefetch": 2}}),
    ],
    ids=str,
)
@pytest.mark.parametrize("faster", [1, 4])
def test_seconds_extrapolated_from_few_layers_equal_a_full_trace(
    grid: dict[str, Any], sections: dict[str, Any], faster: int
) -> None:
    machine = thin_links()
    links = {name: getattr(machine, name) * faster for name in ("intra2", "intra4", "intra8", "intra_far", "node")}
    deep, micro_batches = {**LLAMA, "num_hidden_layers": 6}, 6 if "pp" in grid or "zero" in grid else 1
    ranks = grid.get("z", 1) * grid.get("dp", 1)
    training = {"global_batch_size": 2 * ranks * micro_batches, "micro_batch_size": 2}
    few, whole = (
        seconds_of(replace(machine, **links), deep, grid, all_layers, training=training, **sections)
        for all_layers in (False, True)
    )
    assert len(few) == len(whole)
    for line, exact in zip(sorted(few), sorted(whole), strict=True):
        assert line[:3] == exact[:3]
        assert line[3:] == pytest.approx(exact[3:], rel=1e-6, abs=1e-11), line[:3]


def test_durations_of_collectives_equal_the_planners() -> None:
    machine, grid = load_machine("dgx-a100"), {"x": 4, "y": 2}
    run = tiny_run(GPT, grid, training={"global_batch_size": 2})
    report = trace(run, True, machine)
    block = block_time(workload_of(run), machine, constants_for(machine))
    seconds = Counter[str]()
    for line in report.collectives:
        assert line.seconds is not None and line.exposed_seconds is not None
        if line.purpose.split(":")[0] in ("qkv", "o_proj", "up", "down"):
            seconds[line.axis] += line.seconds
    layers, both = run.model.num_hidden_layers, block.x_forward + block.x_backward
    assert seconds["x"] == pytest.approx(layers * float(both), rel=1e-6)


AGREEMENT = {
    "x8": ({"x": 8}, 2, 1, "none"),
    "y4": ({"y": 4}, 2, 1, "none"),
    "x4 y2": ({"x": 4, "y": 2}, 2, 1, "none"),
    "x4 y2 selective": ({"x": 4, "y": 2}, 2, 1, "selective"),
    "x8 y2 recomputed": ({"x": 8, "y": 2}, 2, 1, "full"),
    "z16": ({"z": 16}, 1, 1, "none"),
    "dp16 zero 3": ({"dp": 16, "zero": 3}, 1, 1, "none"),
    "x8 z4": ({"x": 8, "z": 4}, 1, 1, "none"),
    "x4 y2 z8 recomputed": ({"x": 4, "y": 2, "z": 8}, 1, 1, "full"),
    "x2 y4 z4": ({"x": 2, "y": 4, "z": 4}, 1, 1, "none"),
    "x8 in parts": ({"x": 8}, 2, 2, "none"),
    "x8 in three parts": ({"x": 8}, 3, 3, "selective"),
    "x8 recomputed in four parts": ({"x": 8}, 4, 4, "full"),
    "x8 in parts of tokens": ({"x": 8}, 1, 4, "none"),
    "x8 recomputed in parts of tokens": ({"x": 8}, 1, 4, "full"),
    "y4 in four parts": ({"y": 4}, 4, 4, "none"),
    "x4 y2 recomputed in parts": ({"x": 4, "y": 2}, 2, 2, "full"),
    "x4 y2 selective in four parts": ({"x": 4, "y": 2}, 4, 4, "selective"),
    "x4 y2 recomputed in parts of tokens": ({"x": 4, "y": 2}, 1, 4, "full"),
    "x8 y2 recomputed in four parts": ({"x": 8, "y": 2}, 4, 4, "full"),
}
"""Grid, number of sequences in a micro-batch, number of its parts, and recompute."""
GPT_20B = {"preset": "gpt-20b", "num_hidden_layers": 16}


def assert_agreement(
    model: dict[str, Any], grid: dict[str, int], sequences: int, parts: int, mode: str, machine: Machine, bound: float
) -> None:
    """Check the planner's exposed seconds against the trace. ``bound`` is the largest relative difference."""
    training = {"micro_batch_size": sequences, "global_batch_size": sequences * grid.get("z", 1) * grid.get("dp", 1),
                "seq_length": 2048, "train_steps": 1, "precision": "bf16"}  # fmt: skip
    run = make_run({
        "model": model, "data": {"source": "python-stdlib"},
        "parallel": grid, "training": training, "overlap": {"batch_parts": parts},
        "activation_checkpoint": {"mode": mode},
    })  # fmt: skip
    exposed = Counter[str]()
    for line in trace(run, machine=machine).collectives:
        assert line.exposed_seconds is not None
        if not line.purpose.startswith("embed"):  # the planner counts the embedding with the logits
            exposed[line.axis if line.axis in "xy" else "z"] += line.exposed_seconds
    predicted = predict(workload_of(run), machine, constants_for(machine)).parts
    for axis, seconds in {"x": predicted["x"], "y": predicted["y"], "z": predicted["z"] + predicted["dp"]}.items():
        assert seconds == pytest.approx(exposed[axis], rel=bound, abs=2e-4), axis


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("machine_name", ["dgx-a100", "frontier"])
@pytest.mark.parametrize("name", AGREEMENT)
def test_exposed_seconds_of_the_planner_equal_the_trace(name: str, machine_name: str) -> None:
    grid, sequences, parts, mode = AGREEMENT[name]
    assert_agreement(GPT_20B, grid, sequences, parts, mode, load_machine(machine_name), 0.10)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["none", "selective", "full"])
@pytest.mark.parametrize(("grid", "parts"), [({"x": 8}, 4), ({"x": 4, "y": 2}, 4), ({"x": 2, "y": 4}, 2)], ids=str)
@pytest.mark.parametrize(
    "model", [{}, {"norm_placement": "after"}, {"norm_placement": "around"}, {"parallel_residual": True}], ids=str
)
def test_parts_of_other_blocks_take_the_planners_time(
    model: dict[str, Any], grid: dict[str, int], parts: int, mode: str
) -> None:
    llama = {"preset": "llama3-8b", "num_hidden_layers": 8, **model}
    assert_agreement(llama, grid, 4, parts, mode, load_machine("frontier"), 0.10)


@pytest.mark.parametrize("cap", [0.0, 30.0])
def test_attention_takes_the_planners_time(cap: float) -> None:
    """If scores are capped, attention consists of single operations, which take longer than a fused kernel."""
    run = tiny_run(LLAMA | {"attn_logit_softcapping": cap}, {})
    machine, work = load_machine("dgx-a100"), workload_of(run)
    durations = Durations(run, machine)
    sizes = run.training.micro_batch_size, run.training.seq_length, run.model.num_attention_heads, run.model.head_dim
    heads_BSND = torch.empty(sizes, device="meta")
    planned = attention_seconds(work, Rates(work, machine, constants_for(machine)), machine)
    forward = durations.operation("attend_documents", [heads_BSND] * 3)
    backward = durations.operation("attend_documents_backward", [heads_BSND] * 4)
    assert [forward, backward] == pytest.approx([float(seconds) / PICOSECOND for seconds in planned], rel=1e-3)


def test_a_product_added_to_a_sum_takes_a_products_time() -> None:
    """The weight gradient of the head in float32 is computed in this way, a chunk of logits at a time."""
    durations = Durations(tiny_run(LLAMA, {}), load_machine("dgx-a100"))
    total, left, right = (torch.empty(sizes, device="meta") for sizes in ((64, 32), (64, 128), (128, 32)))
    assert durations.operation("addmm_", [total, left, right]) == durations.operation("mm", [left, right]) > 0
