"""The search space has every legal layout, and the planner and the run file agree on what is legal."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from exact_collectives import collective_lines
from exact_parameters import stages_of_rank, stored_bytes

from fourfold.config.model import ModelConfig
from fourfold.config.presets import PRESETS
from fourfold.errors import UserError
from fourfold.planning.array_fields import unique_rows
from fourfold.planning.cost.memory import peak_memory
from fourfold.planning.cost.stage_split import split_of
from fourfold.planning.cost.step import step_seconds
from fourfold.planning.machines.constants import prior_constants
from fourfold.planning.machines.machine import load_machine
from fourfold.planning.planned_run import write_run
from fourfold.planning.request import request_from_options
from fourfold.planning.run_workload import workload_of, workload_of_model
from fourfold.planning.search.explain import neighbors
from fourfold.planning.search.fastest import RANKED, TIED, SearchScores, evaluate, ranking, search
from fourfold.planning.search.limits import parse_limits
from fourfold.planning.search.plan import make_plan, predict
from fourfold.planning.search.space import (
    BATCH_PARTS,
    OUT_OF_MEMORY,
    PIPELINES,
    REASONS,
    RECOMPUTES,
    SearchLimits,
    all_grids,
    choices_of,
    factorisations,
    rejections,
    with_recomputes,
)
from fourfold.planning.workload import SCHEDULES, Workload
from fourfold.run_file.load import load_run, make_run
from fourfold.verification.trace import trace


def all_layouts(base: Workload, gpus: int, limits: SearchLimits) -> Workload:
    """Return ``base`` with every choice of the search, but with only the first number of batch parts."""
    return with_recomputes(choices_of(base, all_grids(base, gpus, limits), limits), limits)


def base(preset: str, seq: int, batch: int, **changes: object) -> Workload:
    return workload_of_model(ModelConfig(**PRESETS[preset])).but(seq_length=seq, global_batch_size=batch, **changes)


def test_memory_in_a_search_is_the_memory_of_each_layout() -> None:
    """The search computes a block only once for all layouts that have the same block. With a split backward, a block
    stores more."""
    work, machine = all_layouts(base("gpt2", 1024, 64), 8, parse_limits(["pp=2,4"])), load_machine("dgx-h100")
    assert np.unique(np.broadcast_to(work.layout.split_backward, np.shape(work.layout.x))).tolist() == [False, True]
    memory, _, _ = evaluate(work, machine, prior_constants())
    assert memory == pytest.approx(peak_memory(work, machine), rel=1e-12)


@pytest.mark.parametrize("number", [1, 7, 12, 96, 512])
def test_factorisations_are_all_and_different(number: int) -> None:
    rows = factorisations(number, 6)
    assert (rows.prod(axis=1) == number).all()
    assert len({tuple(row) for row in rows.tolist()}) == len(rows)
    expected, rest = 1, number
    for prime in (p for p in range(2, number + 1) if all(p % q for q in range(2, p))):
        power = 0
        while rest % prime == 0:
            rest, power = rest // prime, power + 1
        expected *= math.comb(power + 5, 5)
    assert len(rows) == expected


def run_of(preset: str, point: Workload, **sizes: int) -> dict[str, Any]:
    """Return the tables of a point's run file."""
    record = predict(point, load_machine("dgx-h100"), prior_constants()).record()
    return {
        "model": {"preset": preset, **sizes},
        "data": {"source": "python-stdlib"},
        "parallel": record["parallel"],
        "training": {
            "global_batch_size": int(point.step.global_batch_size),
            "seq_length": int(point.step.seq_length),
            "train_steps": 1,
            "micro_batch_size": int(point.layout.micro_batch_size),
            **({"precision": "bf16", "float8": "tensorwise"} if point.step.bits == 8 else {}),
        },
        "overlap": {"batch_parts": record["batch_parts"]},
        "activation_checkpoint": {
            "mode": record["activation_checkpoint"],
            "every": record["activation_checkpoint_every"],
            "offload": record["activation_checkpoint_offload"],
        },
    }


ALL_SCHEDULES = (*PIPELINES, ("GPipe", 1), ("LoopedBFS", 2), ("DualPipeV", 2))


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize(
    ("preset", "bits"), [("llama-tiny", 16), ("gpt-tiny", 16), ("llama-12m", 16), ("llama-12m", 8)]
)
@pytest.mark.parametrize("limits", [
    SearchLimits(fixed=(("cp", 1), ("pp", 1)), zeros=(0,), recomputes=RECOMPUTES[:1]),
    SearchLimits(fixed=(("pp", 1),), at_most=(("y", 4),), recomputes=RECOMPUTES[:1], batch_parts=(4,)),
    SearchLimits(at_most=(("x", 2), ("y", 2), ("cp", 2)), pipelines=ALL_SCHEDULES, batch_parts=(2,)),
], ids=["x, y, z, dp", "cp", "pp"])  # fmt: skip
def test_the_planner_and_the_run_file_agree_on_legality(preset: str, bits: int, limits: SearchLimits) -> None:
    gpus = 24
    work = all_layouts(base(preset, 96, 48).but(bits=bits), gpus, limits)
    reasons = rejections(work, load_machine("dgx-h100"))
    random = np.random.default_rng(0)
    legal, illegal = (random.permutation(np.flatnonzero(found))[:60] for found in (reasons == 0, reasons > 0))
    assert len(legal) > 10 and len(illegal) > 10
    for index in legal:
        make_run(run_of(preset, work.take(np.array(index))))
    for index in illegal:
        with pytest.raises(UserError):
            make_run(run_of(preset, work.take(np.array(index))))


@pytest.mark.parametrize("schedule", [*PIPELINES, ("LoopedBFS", 2), ("DualPipeV", 2)], ids=str)
def test_the_planner_splits_layers_as_the_run_file_does(schedule: tuple[str, int]) -> None:
    for pp, layers in ((2, 16), (4, 37), (3, 29)):
        work = base("llama-12m", 96, 48).but(num_hidden_layers=layers, pp=pp, schedule=SCHEDULES.index(schedule[0]),
                       stages_per_rank=schedule[1])  # fmt: skip
        run = make_run(run_of("llama-12m", work, num_hidden_layers=layers))
        ranks = [sum(s.layers for s in stages_of_rank(run, rank)) for rank in range(pp)]
        split = split_of(workload_of(run))
        assert split == split_of(work)
        found = split.first[:2], split.last[:2], split.most  # blocks, and dense blocks of an MoE model
        assert found == ((ranks[0], 0), (ranks[-1], 0), max(ranks))
        assert [(rank, blocks.number) for rank, blocks in split.between] == [
            (rank, n) for rank, n in enumerate(ranks[:-1]) if rank and n > max(ranks[:rank])
        ]


@pytest.mark.slow
def test_random_legal_points_are_run_files_that_train(tmp_path: Path) -> None:
    """Write, load, and trace the run files. They send and store what the planner's formulas say."""
    machine = load_machine("dgx-h100")
    found = search(base("llama-tiny", 64, 32), machine, prior_constants(), 8, SearchLimits(micro_batches=(1, 2)))
    for index in np.random.default_rng(1).permutation(found.order)[:24]:
        asked = request_from_options("llama-tiny", None, [], 8, 64, 32, None)
        write_run(tmp_path / "RUN.toml", asked, predict(found.point(index), machine, prior_constants()))
        run = load_run(tmp_path / "RUN.toml")
        traced = trace(run, whole=True)
        for place, told in enumerate(traced.pipeline or [traced]):
            counted = {(c.axis, c.op, c.purpose): (c.count, c.bytes) for c in told.collectives}
            assert {(c.axis, c.op, c.purpose): (c.count, c.bytes) for c in collective_lines(run, place)} == counted
            assert stored_bytes(run, place)[0] == told.memory.parameters


IN_PARTS = [
    ("gpt-5b", 2048, 48, "frontier", 24, {}),
    ("llama3-8b", 8192, 32, "dgx-a100", 32, {}),
    ("gpt-20b", 2048, 96, "alps", 48, {"at_most": (("z", 2), ("dp", 2))}),
    ("llama3-70b", 4096, 64, "dgx-h100", 64, {"fixed": (("pp", 1),)}),
    ("llama3-8b", 4096, 16, "perlmutter", 64, {}),
    ("gpt-80b", 2048, 64, "gb200", 64, {"fixed": (("dp", 1),)}),
]


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(("preset", "seq", "batch", "name", "gpus", "limits"), IN_PARTS)
def test_the_fastest_layouts_are_the_fastest_with_any_batch_parts(
    preset: str, seq: int, batch: int, name: str, gpus: int, limits: dict[str, Any]
) -> None:
    machine, work = load_machine(name), base(preset, seq, batch)
    found = search(work, machine, prior_constants(), gpus, SearchLimits(**limits))
    each = [
        search(work, machine, prior_constants(), gpus, SearchLimits(**limits, batch_parts=(parts,)))
        for parts in BATCH_PARTS
    ]
    several = [one.order[np.asarray(one.work.active_parts)[one.order] > 1] for one in each]
    assert all(map(len, several[1:]))
    of_all = [(each[0], each[0].order), *zip(each[1:], several[1:], strict=True)]
    seconds, p_oom = (np.concatenate([getattr(one, name)[at] for one, at in of_all]) for name in ("seconds", "p_oom"))
    legal = np.zeros(len(seconds), dtype=np.uint8)
    ranked = ranking(SearchScores(seconds, seconds, np.zeros(len(seconds)), p_oom, legal))[:RANKED]
    assert np.array_equal(found.seconds[found.order[:RANKED]], seconds[ranked])
    assert len(found.seconds) - found.first_round < found.evaluated * 0.3


def test_batch_parts_are_a_choice_if_x_or_y_splits_something(tmp_path: Path) -> None:
    asked = request_from_options("gpt-20b", None, [], 16, 2048, 64, None)
    limits = SearchLimits(fixed=(("x", 8), ("y", 2)))
    plan = make_plan(asked.base, load_machine("frontier"), prior_constants(), 16, 5, limits)
    slower = make_plan(
        asked.base, load_machine("frontier"), prior_constants(), 16, 5, replace(limits, batch_parts=(1,))
    )
    assert plan.best.seconds < slower.best.seconds
    parts = int(plan.best.work.active_parts)
    assert parts > 1 and plan.best.describe().endswith(f" in {parts} parts")
    assert plan.best.record()["batch_parts"] == parts
    write_run(tmp_path / "RUN.toml", asked, plan.best)
    run = load_run(tmp_path / "RUN.toml")
    assert run.overlap.batch_parts == parts
    assert predict(workload_of(run), plan.machine, plan.constants).seconds == pytest.approx(plan.best.seconds)
    changes = {n.change: n.slower for n in neighbors(plan)}
    beside = [changes[f"batch_parts {parts} → {other}"] for other in (parts // 2, parts * 2) if other in BATCH_PARTS]
    assert beside and all(slower is None or slower > 0 for slower in beside)
    assert parse_limits(["batch_parts=2"]).batch_parts == (2,)
    alone = make_plan(
        asked.base,
        load_machine("frontier"),
        prior_constants(),
        16,
        5,
        SearchLimits(fixed=(("x", 1), ("y", 1)), batch_parts=(2,)),
    )
    assert {int(p.work.layout.batch_parts) for p in alone.ranked} == {1}


def test_every_rejected_point_keeps_its_reason() -> None:
    found = search(base("llama3-70b", 8192, 512), load_machine("dgx-h100"), prior_constants(), 64)
    assert sum(found.rejected().values()) + len(found.order) == found.evaluated
    assert (found.reason[found.order] == 0).all()
    assert set(found.rejected()) <= set(REASONS[1:])
    seconds = found.seconds[found.order]
    # Layouts may be out of order only if they are tied.
    assert (np.maximum.accumulate(seconds) <= TIED * (1 + 1e-12) * seconds).all()


def test_of_layouts_with_tied_times_the_one_less_likely_to_run_out_of_memory_is_first() -> None:
    """Without this rule, a plan of a 7B model on A100s ranked one layout first because it was 0.06 % faster than the
    second layout, although it was twice as likely to run out of memory."""
    seconds, p_oom = np.array([33.72, 33.74, 33.73, 34.5, 34.6, 30.0]), np.array([0.046, 0.02, 0.0203, 0.04, 0, 0.3])
    reason = np.array([0, 0, 0, 0, 0, OUT_OF_MEMORY], dtype=np.uint8)
    scores = SearchScores(seconds, seconds, np.zeros(6), p_oom, reason)
    assert ranking(scores).tolist() == [2, 1, 0, 4, 3]
    refused = SearchScores(seconds, seconds, np.zeros(6), p_oom, np.ones(6, dtype=np.uint8))
    assert ranking(refused).tolist() == []


@pytest.mark.parametrize(("model", "gpus"), [("llama3-70b", 96), ("qwen3-30b-a3b", 24)])
def test_grids_that_are_illegal_with_any_other_choice_are_counted_and_no_points(model: str, gpus: int) -> None:
    work, machine = base(model, 8192, gpus), load_machine("dgx-h100")
    limits = SearchLimits(pipelines=ALL_SCHEDULES, batch_parts=(1,), micro_batches=(1, 3, 4))
    done: list[tuple[int, int]] = []
    found = search(work, machine, prior_constants(), gpus, limits, lambda *numbers: done.append(numbers))
    every = all_layouts(work, gpus, limits)
    reasons = rejections(every, machine)
    counts = {REASONS[i]: int(n) for i, n in enumerate(np.bincount(reasons)) if n and i}
    refused = {reason: n for reason, n in found.rejected().items() if reason != REASONS[-1]}
    assert found.evaluated == len(reasons) and refused == counts
    assert 2 * found.first_round < len(reasons)
    assert done[-1] == (found.first_round, found.first_round) and done == sorted(done)


def test_a_neighbor_that_is_no_point_has_its_reason() -> None:
    plan = make_plan(base("llama3-8b", 8192, 32), load_machine("dgx-h100"), prior_constants(), 32)
    reasons = {n.reason for n in neighbors(plan) if n.slower is None}
    assert reasons & set(REASONS[1:]) and "not searched" not in reasons


@pytest.mark.slow
def test_a_point_of_the_search_is_the_point_alone() -> None:
    machine, constants = load_machine("frontier"), prior_constants()
    found = search(base("gpt-80b", 2048, 4096), machine, constants, 1024)
    for index in found.order[:: max(1, len(found.order) // 50)]:
        alone = step_seconds(found.point(index), machine, constants)
        assert found.seconds[index] == pytest.approx(float(alone), rel=1e-9)


@pytest.mark.slow
def test_the_space_of_175b_on_512_gpus_is_large() -> None:
    """benchmarks/plan_search.py measures how long this search takes."""
    found = search(base("frontier-175b", 2048, 1536), load_machine("dgx-a100"), prior_constants(), 512)
    assert found.evaluated > 500_000


def test_rows_are_unique_whose_numbers_together_exceed_64_bits() -> None:
    largest = 2**22 - 1
    columns = [np.array(column) for column in ([0, 2**20, largest, 0], [0, 0, largest, 0], [0, 0, largest, 0])]
    first, back = unique_rows(columns)
    assert len(first) == 3 and [first[row] for row in back] == [0, 1, 2, 0]


def test_limits_leave_out_what_they_say() -> None:
    limits = SearchLimits(at_most=(("x", 4),), fixed=(("pp", 2),), zeros=(1,), recomputes=((2, 1, False),))
    found = search(base("llama3-8b", 8192, 256), load_machine("dgx-h100"), prior_constants(), 32, limits)
    work = found.work
    layout = work.layout
    assert (layout.x <= 4).all() and (layout.pp == 2).all() and (layout.zero == 1).all()
    assert (layout.recompute == 2).all()
