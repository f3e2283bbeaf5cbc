"""The space is whole, its legality is that of the run file, and looking at all of it is fast."""

from __future__ import annotations

import math
import time
from dataclasses import replace

import numpy as np
import pytest

from fourfold.config.load import make_run
from fourfold.config.model import ModelConfig
from fourfold.config.presets import PRESETS
from fourfold.errors import UserError
from fourfold.planning.constants import prior_constants
from fourfold.planning.from_run import workload_of_model
from fourfold.planning.machine import load_machine
from fourfold.planning.search import search
from fourfold.planning.space import REASONS, Limits, all_layouts, factorisations, rejections
from fourfold.planning.step_time import step_seconds
from fourfold.planning.workload import Workload


def base(preset: str, seq: int, batch: int, **changes: object) -> Workload:
    return replace(workload_of_model(ModelConfig(**PRESETS[preset])), seq=seq, batch=batch, **changes)


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


@pytest.mark.parametrize("preset", ["llama-tiny", "gpt-tiny", "llama-12m"])
def test_legality_is_that_of_the_run_file(preset: str) -> None:
    work = all_layouts(base(preset, 96, 24), 24, Limits(fixed=(("cp", 1), ("pp", 1)), zeros=(0,), recomputes=(0,)))
    reasons = rejections(work)
    picked = np.random.default_rng(0).permutation(len(reasons))[:150]
    legal = 0
    for index in picked:
        point = work.take(np.array(index))
        table = {
            "model": {"preset": preset},
            "data": {"source": "python-stdlib"},
            "parallel": {axis: int(getattr(point, axis)) for axis in ("x", "y", "z", "dp")},
            "training": {"global_batch_size": 24, "seq_length": 96, "train_steps": 1,
                         "micro_batch_size": int(point.micro_batch)},
        }  # fmt: skip
        if reasons[index] == 0:
            make_run(table)
            legal += 1
        else:
            with pytest.raises(UserError):
                make_run(table)
    assert 10 < legal < 140


def test_every_rejected_point_keeps_its_reason() -> None:
    found = search(base("llama3-70b", 8192, 512), load_machine("dgx-h100"), prior_constants(), 64)
    assert sum(found.rejected().values()) + len(found.order) == found.evaluated
    assert (found.reason[found.order] == 0).all()
    assert set(found.rejected()) <= set(REASONS[1:])
    assert (np.diff(found.seconds[found.order]) >= 0).all()


def test_a_point_of_the_search_is_the_point_alone() -> None:
    machine, constants = load_machine("frontier"), prior_constants()
    found = search(base("gpt-80b", 2048, 4096), machine, constants, 1024)
    for index in found.order[:: max(1, len(found.order) // 50)]:
        alone = step_seconds(found.point(index), machine, constants)
        assert found.seconds[index] == pytest.approx(float(alone), rel=1e-9)


def test_the_whole_space_of_175b_on_512_gpus_takes_seconds() -> None:
    begin = time.process_time()
    found = search(base("frontier-175b", 2048, 1536), load_machine("dgx-a100"), prior_constants(), 512)
    taken = time.process_time() - begin
    assert found.evaluated > 500_000
    assert taken < 5
    assert found.evaluated / taken > 200_000


def test_limits_leave_out_what_they_say() -> None:
    limits = Limits(at_most=(("x", 4),), fixed=(("pp", 2),), zeros=(1,), recomputes=(2,))
    found = search(base("llama3-8b", 8192, 256), load_machine("dgx-h100"), prior_constants(), 32, limits)
    work = found.work
    assert (work.x <= 4).all() and (work.pp == 2).all() and (work.zero == 1).all() and (work.recompute == 2).all()
