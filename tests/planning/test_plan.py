"""Check plans: which layout is best, what the plan says about it, and what it says if no layout fits."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from exact_parameters import stored_bytes
from report_pages import chart_specs

from fourfold.config.model import ModelConfig
from fourfold.config.presets import PRESETS
from fourfold.errors import UserError
from fourfold.planning import plan_record
from fourfold.planning.array_fields import stack
from fourfold.planning.cost.memory import CATEGORIES, peak_memory, stage_memory
from fourfold.planning.cost.out_of_memory import CACHED, UNUSABLE, p_out_of_memory, runtime_bytes
from fourfold.planning.cost.stage_split import in_flight
from fourfold.planning.cost.step import PARTS, step_seconds
from fourfold.planning.machines.constants import Constants, prior_constants
from fourfold.planning.machines.machine import Machine, load_machine
from fourfold.planning.planned_run import write_run
from fourfold.planning.request import request_from_options
from fourfold.planning.run_workload import workload_of, workload_of_model
from fourfold.planning.scaling import scaling_curve, sizes_of
from fourfold.planning.search.explain import explain, in_nodes, runner_up
from fourfold.planning.search.fastest import TIED
from fourfold.planning.search.limits import parse_limits
from fourfold.planning.search.plan import Plan, describe_layout, make_plan, predict
from fourfold.planning.search.space import AXES, SearchLimits
from fourfold.planning.search.within_error import layouts_within_error
from fourfold.planning.workload import RECOMPUTE, Workload
from fourfold.reports.plan_report import write_plan_report
from fourfold.run_file.dump import to_toml
from fourfold.run_file.load import load_run, make_run

H100 = load_machine("dgx-h100")
PRIOR = prior_constants()
GPUS = 32


def base(preset: str, seq: int, batch: int) -> Workload:
    return workload_of_model(ModelConfig(**PRESETS[preset])).but(seq_length=seq, global_batch_size=batch)


@pytest.fixture(scope="module")
def plan() -> Plan:
    return make_plan(base("llama3-70b", 8192, 256), H100, PRIOR, GPUS)


def test_the_best_is_first_and_fits(plan: Plan) -> None:
    legal = np.flatnonzero(np.isfinite(plan.found.seconds))
    for index in np.random.default_rng(0).choice(legal, 200, replace=False):
        other = predict(plan.found.point(index), H100, PRIOR)
        assert TIED * other.seconds > plan.best.seconds or other.p_oom > 0.05, other.describe()
    assert plan.best is plan.ranked[0]
    assert all(first.seconds < TIED * second.seconds for first, second in pairwise(plan.ranked))
    assert all(p.p_oom <= 0.05 and p.memory_bytes < H100.memory for p in plan.ranked)
    record = plan.best.record()
    assert np.prod([record["parallel"][axis] for axis in AXES]) == GPUS
    assert record["step_seconds"] == pytest.approx(plan.found.seconds[plan.found.order[0]])
    assert min(record["parts"][part] for part in PARTS) >= 0 and set(record["parts"]) == set(PARTS)
    assert record["mfu"] <= record["hfu"] < 0.8
    assert record["tokens_per_second_per_gpu"] == pytest.approx(256 * 8192 / record["step_seconds"] / GPUS)


def test_memory_is_the_memory_of_the_fullest_stage(plan: Plan) -> None:
    work = plan.best.work
    totals = [sum(float(stage_memory(work, H100, s)[c]) for c in CATEGORIES) for s in range(int(work.layout.pp))]
    assert plan.best.memory_bytes == pytest.approx(max(totals))


@pytest.mark.parametrize("layers_per_stage", [(1, 2, 9, 10, 10), (2, 2, 13, 14, 1), (8, 8, 8, 4, 4)])
def test_memory_of_a_split_that_a_run_file_says(layers_per_stage: tuple[int, ...]) -> None:
    """Any rank may be the one that needs the most memory."""
    work = base("llama3-8b", 8192, 256).but(x=8, pp=5, micro_batch_size=4, layers_per_stage=layers_per_stage)
    told = predict(work, H100, PRIOR)
    assert told.memory_bytes == pytest.approx(max(sum(stage.values()) for stage in told.stages))


@pytest.mark.parametrize("master_weights", ["fp32", "bf16"])
def test_states_equal_the_exact_formulas(master_weights: str) -> None:
    """The difference is at most 0.1 %. It comes from norms and from the rounding of shards."""
    training = {"train_steps": 1, "precision": "bf16", "global_batch_size": 8, "seq_length": 512}
    table = {
        "name": "run",
        "model": {"preset": "llama3-8b"},
        "data": {"source": "python-stdlib"},
        "parallel": {"x": 2, "z": 4},
        "training": training | {"master_weights": master_weights},
    }
    run = make_run(table, "test")
    held = stage_memory(workload_of(run), H100, 0)
    told = tuple(float(held[name]) for name in ("parameters", "gradients", "optimizer"))
    assert told == pytest.approx(stored_bytes(run, 0), rel=1e-3)


def test_a_run_is_checked_in_the_precision_that_was_asked(tmp_path: Path) -> None:
    keys = {"train_steps": 1, "precision": "bf16", "master_weights": "bf16", "global_batch_size": 8, "seq_length": 512}
    path = tmp_path / "run.toml"
    run = make_run({"model": {"preset": "gpt2"}, "data": {"source": "python-stdlib"}, "training": keys}, "test")
    path.write_text(to_toml(run))
    with pytest.raises(UserError, match=r"needs training\.precision = 'bf16', but it is 'fp32'"):
        request_from_options(run_file=path, precision="fp32")
    step = request_from_options(run_file=path, overrides=["training.master_weights=fp32"], precision="fp32").base.step
    assert (step.bits, step.weight_bytes, step.moment_bytes) == (32, 4, 4)
    assert request_from_options(run_file=path, precision="fp8").base.step.bits == 8


def test_a_plan_is_written_in_the_precision_that_was_asked(tmp_path: Path) -> None:
    for precision, kept in {
        "fp8": ("bf16", "tensorwise", 8),
        "fp32": ("fp32", "none", 32),
        None: ("bf16", "none", 16),
    }.items():
        asked = request_from_options("gpt2", None, [], 2, 1024, 8, precision)
        best = make_plan(asked.base, H100, PRIOR, 2).best
        write_run(tmp_path / "run.toml", asked, best)
        run = load_run(tmp_path / "run.toml")
        assert (run.training.precision, run.training.float8, workload_of(run).step.bits) == kept


def test_a_plan_is_written_with_the_checkpoint_interval_that_it_recommends(tmp_path: Path) -> None:
    """If the run file already has an interval, the written file keeps this interval."""
    asked = request_from_options("gpt2", None, [], 8, 1024, 8)
    found = plan_record.plan_request(asked, "dgx-h100", ["pp=1"], 1, 1e9, False)
    assert found.costs is not None and found.costs.checkpoint_interval_seconds is not None
    steps = found.costs.checkpoint_interval_seconds / found.plan.best.seconds
    write_run(tmp_path / "run.toml", asked, found.plan.best)
    assert load_run(tmp_path / "run.toml").checkpoint.interval == round(steps) > 1
    again = request_from_options(None, tmp_path / "run.toml", ["checkpoint.interval=7"])
    write_run(tmp_path / "again.toml", again, found.plan.best)
    assert load_run(tmp_path / "again.toml").checkpoint.interval == 7


def test_a_plan_is_written_with_the_steps_for_its_tokens(tmp_path: Path) -> None:
    asked = request_from_options("gpt2", None, [], 8, 1024, 8)
    best = make_plan(asked.base, H100, PRIOR, 8).best
    for tokens, steps in ((1e9, 122_070), (100.0, 1)):
        write_run(tmp_path / "run.toml", asked, best, tokens)
        assert load_run(tmp_path / "run.toml").training.train_steps == steps  # 8,192 tokens per step


def test_a_much_slower_layout_of_the_run_file_is_in_no_chart(tmp_path: Path) -> None:
    """In a chart, such a layout would make all other layouts look the same. The table still shows this layout."""
    path = tmp_path / "run.toml"
    for gpus, drawn in ((8, True), (1, False)):
        asked = request_from_options("gpt2", None, [], gpus, 1024, 64)
        write_run(path, asked, make_plan(asked.base, H100, PRIOR, gpus).best)
        found = plan_record.plan_request(request_from_options(None, path, [], 8), "dgx-h100", ["pp=1"], 2, None, True)
        write_plan_report(tmp_path / "plan.html", found)
        text = (tmp_path / "plan.html").read_text(encoding="utf-8")
        specs = chart_specs(text)
        bars = specs["Where a step's time goes"]["option"]["yAxis"]["data"]
        assert ("yours" in bars) == drawn == found.is_own_drawn
        assert ("too long for the charts" in text) != drawn and found.own_label in text


def test_stages_of_1f1b_hold_fewer_micro_batches_towards_the_end() -> None:
    work = base("llama3-70b", 8192, 256).but(pp=8, dp=2)
    assert [int(in_flight(work, stage)) for stage in range(8)] == [8, 7, 6, 5, 4, 3, 2, 1]
    assert float(in_flight(work.but(stages_per_rank=2), 0)) == (8 + 2 * 8 - 1) / 2
    assert float(in_flight(work.but(global_batch_size=6), 0)) == 3


def test_p_out_of_memory_is_a_distribution() -> None:
    """If a step needs exactly the device's memory, the probability is one half. The allocator may reserve more than the
    step needs and still fit, because it frees cached blocks."""
    work = base("llama3-8b", 8192, 8)
    runtime = float(runtime_bytes(work, H100))

    def p(needed: float) -> float:
        told = runtime + (needed - runtime) * (1 + CACHED) / (1 + UNUSABLE)
        return float(p_out_of_memory(told, work, H100))

    room = H100.memory
    assert p(room) == pytest.approx(0.5, abs=1e-6)
    assert p(room / 2) < 1e-6 < 1 - 1e-6 < p(2 * room)
    assert p(0.9 * room) == pytest.approx(1 - p(room / 0.9), abs=1e-6)
    assert p_out_of_memory(room, work, H100) < 0.5


@pytest.mark.parametrize("change", [{"z": 8}, {"dp": 8, "zero": 3}, {"recompute": 2}, {"x": 8}])
def test_every_memory_saving_option_saves_memory(change: dict[str, int]) -> None:
    work = base("llama3-8b", 8192, 64).but(dp=8)
    other = work.but(**({"dp": 1} | change if "x" in change or "z" in change else change))
    assert float(peak_memory(other, H100)) < float(peak_memory(work, H100))


def test_the_explanation_adds_up(plan: Plan) -> None:
    explanation = explain(plan, 1.19, own=plan.ranked[3])
    columns = list(zip(*explanation["waterfall"]["seconds"].values(), strict=True))
    assert [sum(c) for c in columns] == pytest.approx(
        [plan.best.seconds, runner_up(plan).seconds, plan.ranked[3].seconds]
    )
    assert explanation["neighbors"] and any(n["slower"] is not None for n in explanation["neighbors"])
    assert all(n["slower"] is None or n["slower"] >= 0 for n in explanation["neighbors"])
    slower = [n["slower"] for n in explanation["neighbors"] if n["slower"] is not None]
    near = sum(share < 0.19 for share in slower)
    assert explanation["basin"].startswith(
        f"{near} of the {len(slower)} changed layouts that fit are less than 19% slower"
    )


def test_several_machines_and_constants_at_once_are_each_alone(plan: Plan) -> None:
    """Some layouts have batch parts, and some recompute only a fraction of their blocks."""
    work = plan.found.work.take(plan.found.order[:40]).but(
        batch_parts=np.tile([1, 2, 2, 4], 10),
        recompute=np.tile([0, 1, 2, 1], 10),
        recompute_every=np.tile([1, 1, 2], 14)[:40],
    )
    cases = [work.take(np.array([i])) for i in range(40)]
    machines = [replace(H100, node=H100.node * factor) for factor in np.geomspace(0.1, 4, 40)]
    constants = [replace(PRIOR, exposed=exposed, matmul=0.8 + exposed) for exposed in np.geomspace(0.01, 0.2, 40)]
    alone = [step_seconds(*case)[0] for case in zip(cases, machines, constants, strict=True)]
    assert step_seconds(work, stack(machines), stack(constants)) == pytest.approx(alone, rel=1e-12)
    assert len(set(alone)) > 20


@pytest.mark.slow
def test_more_recompute_is_a_neighbor_that_fits() -> None:
    best = make_plan(base("llama3-8b", 8192, 128), H100, PRIOR, 16)
    told = {n["change"]: n["slower"] for n in explain(best, 1.19)["neighbors"]}
    here = int(best.best.work.layout.recompute)
    assert here < 2 and any(
        change.startswith(f"recompute {RECOMPUTE[here]} → {RECOMPUTE[here + 1]}") and slower
        for change, slower in told.items()
    )


def test_two_levels_are_explained_if_they_change_something(plan: Plan) -> None:
    def explained(**layout: int) -> dict[str, float | None]:
        best = predict(base("gpt-5b", 2048, 4096).but(**layout), H100, PRIOR)
        return {each.change: each.slower for each in in_nodes(replace(plan, best=best))}

    assert explained(z=2048)["overlap.shards_per_node 1 → 8"] < 0
    assert explained(z=64)["overlap.shards_per_node 1 → 8"] > 0
    assert set(explained(x=2, z=2048)) == {"overlap.shards_per_node 1 → 4"}
    assert set(explained(z=2048, shards_per_node=8)) == {"overlap.shards_per_node 8 → 1"}
    assert explained(z=8) == explained(dp=2048) == explained(x=8, z=64) == {}


def test_layouts_that_are_too_close_are_all_in_the_proposed_search(plan: Plan) -> None:
    """The proposed limits include the fastest of these layouts, in the same order, and few other layouts."""
    close = layouts_within_error(plan, 1.1)
    seconds = plan.found.seconds[plan.found.order]
    assert close.count == (seconds < 1.1 * seconds[0]).sum() > 1 and close.ranked == min(close.count, len(plan.ranked))
    again = make_plan(base("llama3-70b", 8192, 256), H100, PRIOR, GPUS, limits=parse_limits(close.space))
    within = [p.describe() for p in plan.ranked[: close.count]]
    assert set(within) <= {describe_layout(again.found.point(i)) for i in again.found.order}
    assert again.best.describe() == plan.best.describe() and len(again.found.order) < len(plan.found.order) / 5
    assert 1 <= layouts_within_error(plan, 1.0).count < close.count


def test_nothing_fits_says_what_would() -> None:
    with pytest.raises(UserError, match=r"nothing fits: .*; 128 GPUs would be enough"):
        make_plan(base("llama3-405b", 8192, 8), H100, PRIOR, 64)
    with pytest.raises(
        UserError, match=r"nothing fits: .* needs the least memory, [\d.]+ GB, but a .* GPU has 85 GB.* GPUs"
    ):
        make_plan(base("llama3-405b", 8192, 64), H100, PRIOR, 8)
    with pytest.raises(UserError, match="no layout of 7 GPUs is legal"):
        make_plan(base("gpt2", 1024, 8), H100, PRIOR, 7, limits=SearchLimits(fixed=(("pp", 1),)))


def test_sizes_double_to_the_last() -> None:
    assert sizes_of("1:16777216")[-1] == 1 << 24 and sizes_of("8:100") == [8, 16, 32, 64] and sizes_of("3:3") == [3]


@pytest.mark.slow
def test_scaling_replans_at_each_size() -> None:
    points = scaling_curve(base("llama3-8b", 8192, 128), H100, PRIOR, sizes_of("8:32"), weak=False)
    assert [p.gpus for p in points] == [8, 16, 32]
    assert points[0].efficiency == 1 and 0.5 < points[-1].efficiency < 1.3
    weak = scaling_curve(base("llama3-8b", 8192, 128), H100, PRIOR, [8, 32], weak=True)
    assert weak[1].best.work.step.global_batch_size == 512
    none = scaling_curve(base("llama3-405b", 8192, 64), H100, PRIOR, [8], weak=False)
    assert none[0].best is None and "nothing fits" in none[0].why_not
    with pytest.raises(UserError, match="--gpus 8-16"):
        sizes_of("8-16")


def test_a_layout_gets_the_same_prediction_alone_and_in_an_array() -> None:
    work = base("llama3-8b", 8192, 64).but(x=2, z=4)
    alone = predict(work, H100, PRIOR).seconds
    assert alone == pytest.approx(make_plan(
        base("llama3-8b", 8192, 64), H100, PRIOR, 8,
        limits=SearchLimits(fixed=(("x", 2), ("z", 4)), zeros=(0,), recomputes=((0, 1, False),), micro_batches=(1,)),
    ).best.seconds)  # fmt: skip


def test_limits_of_schedule_and_stages_all_hold() -> None:
    """A later limit does not silently undo an earlier one."""
    assert parse_limits(["schedule=Interleaved1F1B", "stages_per_rank=2"]).pipelines == (("Interleaved1F1B", 2),)
    assert parse_limits(["stages_per_rank=2", "schedule=Interleaved1F1B"]).pipelines == (("Interleaved1F1B", 2),)
    assert parse_limits(["stages_per_rank=2", "schedule=LoopedBFS"]).pipelines == (("LoopedBFS", 2),)
    assert parse_limits(["stages_per_rank=1"]).pipelines == (("1F1B", 1),)


def test_an_explained_plan_searches_once(monkeypatch: pytest.MonkeyPatch) -> None:
    searched: list[int] = []

    def counted(work: Workload, machine: Machine, constants: Constants, gpus: int, *more: Any) -> Plan:
        searched.append(gpus)
        return make_plan(work, machine, constants, gpus, *more)

    monkeypatch.setattr(plan_record, "make_plan", counted)
    request = request_from_options("llama3-8b", None, [], 16, 8192, 64, None, None)
    limits = ["micro_batch_size=1", "pp=1", "cp=1"]
    shown = plan_record.plan_request(request, "dgx-h100", limits, 1, None, True)
    assert searched == [16] and shown.explanation is not None
