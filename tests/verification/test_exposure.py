"""Which collectives a step's computation can hide, by the trace."""

from __future__ import annotations

from typing import Any

import pytest
from tiny_runs import GPT, LLAMA, tiny_run

from fourfold.verification.exposure import Flights
from fourfold.verification.trace import trace

LINE = ("x", "all_gather", "tokens")


def exposed_of(model: dict[str, Any], grid: dict[str, Any], whole: bool = False, **sections: Any) -> dict[str, float]:
    """The exposed share of the bytes of each collective, by axis and purpose."""
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
"""Between the sum of one layer and the gather of the next lies no product: what one part starts last is not hidden."""


@pytest.mark.parametrize("parts", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_parts_of_a_micro_batch_hide_each_others_collectives(parts: int) -> None:
    sections = {"training": {"micro_batch_size": 4}, "overlap": {"batch_parts": parts}}
    grid, blocks = {"x": 2, "y": 2}, ("qkv", "o_proj", "up", "down")
    computed_once = exposed_of(GPT, grid, **sections)
    recomputed = exposed_of(GPT, grid, **sections, activation_checkpoint={"mode": "full"})
    for name, share in computed_once.items():
        if name.split()[2].rstrip(":") in blocks:
            exposed = name in IN_PARTS or name == "x all_gather down: output gradient"
            assert share == (1 / parts if exposed else 0), name
    # The recomputation of a block hides the gathering of its output's gradient, and ends before its last product.
    assert recomputed["x all_gather down: output gradient"] == 0
    assert recomputed["y all_reduce up: outputs"] == 1 / parts / 2
    for name in IN_PARTS:
        assert recomputed[name] == 1 / parts


AROUND_ATTENTION = ["y reduce_scatter qkv: outputs", "y all_gather o_proj: inputs", "y all_gather qkv: output gradient"]
"""Attention waits for the tokens of all parts."""


def test_parts_of_a_sequence_hide_each_others_collectives() -> None:
    sections = {"training": {"micro_batch_size": 1}, "overlap": {"batch_parts": 4}}
    for mode in ("none", "full"):
        shares = exposed_of(GPT, {"x": 2, "y": 2}, **sections, activation_checkpoint={"mode": mode})
        for name in (*IN_PARTS, *AROUND_ATTENTION):
            assert shares[name] == 1 / 4, name
        assert shares["x all_gather down: output gradient"] == (1 / 4 if mode == "none" else 0)
        for name in ("o_proj: output gradient", "qkv: input gradient", "up: input gradient"):
            assert all(share == 0 for line, share in shares.items() if line.endswith(name)), name


def test_parts_need_no_more_memory_than_the_whole() -> None:
    def peak(parts: int) -> int:
        sections = {"training": {"micro_batch_size": 4}, "overlap": {"batch_parts": parts}}
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


def test_the_ring_hides_all_but_its_last_gradients() -> None:
    shares = exposed_of(LLAMA, {"cp": 4, "cp_method": "ring"})
    assert shares["cp send attention: keys and values"] == 0
    assert 0 < shares["cp send attention: keys' and values' gradients"] <= 0.25
    assert exposed_of(LLAMA, {"cp": 2})["cp all_to_all attention: heads for tokens"] == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "grid", [{"x": 2, "y": 2, "z": 2}, {"pp": 2, "dp": 2}, {"z": 2, "dp": 2}, {"cp": 2, "y": 2}], ids=str
)
def test_continuing_from_few_layers_is_exact(grid: dict[str, Any]) -> None:
    deep = {**LLAMA, "num_hidden_layers": 9}
    training = {"global_batch_size": 24, "micro_batch_size": 2}
    assert exposed_of(deep, grid, training=training) == exposed_of(deep, grid, whole=True, training=training)
