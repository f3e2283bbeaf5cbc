"""The hang report names the rank that all other ranks wait for."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from pool import Pool
from tiny_corpus import run_file

from fourfold import heartbeat
from fourfold.config.run import RunConfig
from fourfold.environment import Place
from fourfold.heartbeat import GROUPS, SIZE, Beat, Heartbeat
from fourfold.launch.watchdog_process import HangingRank, describe, find_awaited
from fourfold.run_file.load import load_run
from fourfold.training import trainer


def report(rank: int, last_sign: float, **more: Any) -> HangingRank:
    values: dict[str, Any] = {"host": "host", "state": "S", "silent_seconds": 60.0, "steps_begun": 7, **more}
    doing = "layers.0.mlp.up: output (over y)"
    return HangingRank(rank=rank, process=100 + rank, step=7, doing=doing, last_sign=last_sign, stacks=[], **values)


def heart() -> Heartbeat:
    descriptor = os.memfd_create("heartbeat")
    os.truncate(descriptor, SIZE)
    return Heartbeat(descriptor)


def test_without_a_difference_the_first_that_fell_silent_is_named(tmp_path: Path) -> None:
    reports = [report(0, 50.0), report(1, 40.0), report(2, 45.0)]
    assert describe(reports, 3, tmp_path).startswith("hang: rank 1 of 3 (process 101 on host) went silent 60 s ago")
    assert "last action: layers.0.mlp.up: output (over y)" in describe(reports, 3, tmp_path)
    reports[2] = report(2, 45.0, state="D")
    assert describe(reports, 3, tmp_path).startswith("hang: rank 1 of 3")
    reports[2] = report(2, 45.0, state="T")
    assert describe(reports, 3, tmp_path).startswith("hang: rank 2 of 3")
    assert "no report from ranks 3, 4" in describe(reports, 5, tmp_path)


def test_a_rank_that_has_not_entered_a_collective_is_named_although_its_sign_is_newer() -> None:
    ahead, behind = {"x of 0-1": 5, "dp of 0-2": 1}, {"x of 0-1": 4, "dp of 1-3": 1}
    assert find_awaited([report(0, 40.0, entered=ahead), report(1, 41.0, entered=behind)]).rank == 1


def test_a_waiting_rank_is_not_named_even_if_a_rank_waits_for_it() -> None:
    """Rank 2 waits for rank 0 on another axis, and rank 0 waits for rank 1."""
    reports = [
        report(0, 40.0, entered={"x of 0-1": 5, "dp of 0-2": 1}),
        report(1, 41.0, entered={"x of 0-1": 4, "dp of 1-3": 1}),
        report(2, 39.0, entered={"x of 2-3": 9, "dp of 0-2": 2}),
        report(3, 39.0, entered={"x of 2-3": 9, "dp of 1-3": 2}),
    ]
    assert find_awaited(reports).rank == 1


def test_a_receiver_waits_for_the_sender_and_not_the_sender_for_it() -> None:
    """Stage 1 waits for the third activation. Stage 1 has also sent its second gradient, but stage 0 has not received
    it yet."""
    forward, backward = "pp of 0-1 from 0", "pp of 0-1 from 1"
    reports = [report(0, 41.0, entered={forward: 2, backward: 2}), report(1, 40.0, entered={forward: 3, backward: 2})]
    assert find_awaited(reports).rank == 0


def test_a_rank_in_an_earlier_step_is_named() -> None:
    reports = [report(0, 40.0, entered={"x of 0-1": 1}), report(1, 41.0, entered={"x of 0-1": 1}, steps_begun=6)]
    assert find_awaited(reports).rank == 1


def test_two_that_wait_for_each_other_leave_it_to_the_clock() -> None:
    reports = [report(0, 41.0, entered={"a": 1, "b": 2}), report(1, 40.0, entered={"a": 2, "b": 1})]
    assert find_awaited(reports).rank == 1


def test_clocks_of_two_machines_are_not_compared() -> None:
    """The clock of machine b is an hour behind."""
    reports = [
        report(0, 4000.0, silent_seconds=60.0),
        report(1, 4001.0, silent_seconds=59.0),
        report(2, 401.0, host="b", silent_seconds=58.0),
    ]
    assert find_awaited(reports).rank == 0


def test_the_watchdog_reads_what_each_rank_has_entered() -> None:
    memory = heart()
    memory.join("y of 0-2")
    memory.begin_step(4)
    for count in range(3):
        memory.beat(f"loss {count} (over x)", "x of 0-1")
    beat = memory.read()
    assert beat == Beat(4, 1, 0, 5, beat.time, "loss 2 (over x)", {"y of 0-2": 0, "x of 0-1": 3})


def test_more_groups_than_the_memory_has_room_for_are_left_out_of_the_report() -> None:
    memory = heart()
    names = [f"group {number}" for number in range(GROUPS + 3)]
    for name in names:
        memory.beat("loss (over x)", name)
        memory.beat("loss (over x)", name)
    assert memory.read().entered == dict.fromkeys(names[:GROUPS], 2)


def entered(rank: int, world_size: int, run: RunConfig) -> dict[str, int]:
    """Train, and return how many collectives this rank entered, by group."""
    memory = heart()
    heartbeat.send_signs_to(memory)
    try:
        trainer.train(Place(rank, rank, world_size, world_size, "local"), run)
    finally:
        heartbeat.send_signs_to(None)
    return memory.read().entered


EXPERTS = {
    "model__num_experts": 4,
    "model__num_experts_per_tok": 2,
    "model__moe_intermediate_size": 48,
    "parallel__ep": 2,
    "parallel__dp": 2,
}


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(
    "changes",
    [
        {"parallel__z": 2, "checkpoint__async_mode": "async"},
        {"parallel__pp": 2, "parallel__x": 2, "model__tie_word_embeddings": True},
        {"parallel__x": 2, "parallel__y": 2, "checks__replay_interval": 2},
        {"parallel__cp": 2, "parallel__dp": 2, "parallel__zero": 3},
        {"parallel__pp": 4, "parallel__schedule": "GPipe", "model__num_hidden_layers": 4},
        EXPERTS,
        EXPERTS | {"parallel__pp": 2, "model__num_hidden_layers": 4, "model__first_k_dense_replace": 1},
    ],
    ids=lambda changes: " ".join(f"{key.partition('__')[2]} {value}" for key, value in changes.items()),
)
def test_ranks_of_a_group_enter_equally_many_collectives(
    tmp_path: Path, prefix: str, pool: Pool, changes: dict[str, Any]
) -> None:
    """The hang report compares these counts. So without a hang, they must be equal."""
    checks = {"validation__interval": 2, "validation__steps": 1, "checkpoint__interval": 2}
    steps = {"training__train_steps": 4, "training__micro_batch_size": 1, "fault_tolerance__timeout": 0}
    run = load_run(run_file(tmp_path, prefix, **checks, **steps, **changes))
    ranks = pool.run(run.parallel.world_size, entered, run)
    counts: dict[str, set[int]] = {}
    for groups in ranks:
        for group, count in groups.items():
            counts.setdefault(group, set()).add(count)
    assert all(len(found) == 1 for found in counts.values()), counts
    assert max(max(found) for found in counts.values()) > 4
