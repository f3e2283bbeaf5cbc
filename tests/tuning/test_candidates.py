"""A search tries the layouts that the planner's rules and the given values allow."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from fake_trials import MACHINE, request, tiny_candidates

from fourfold.errors import UserError
from fourfold.planning.machines.constants import prior_constants
from fourfold.planning.search.limits import parse_limits
from fourfold.planning.search.plan import predict
from fourfold.planning.search.space import refusal
from fourfold.tuning.candidates import KNOBS, Candidates, search_candidates


def searched(folder: Path, *space: str, gpus: int = 8, on_gpu: bool = True) -> Candidates:
    base, limits = request(folder).base, parse_limits(space, "--space")
    return search_candidates(base, MACHINE, prior_constants(), gpus, limits, on_gpu)


def test_values_of_knobs_are_those_asked_for(tmp_path: Path) -> None:
    found = searched(tmp_path, "pp=1,2", "x<=2", "micro_batch_size=1,4", "recompute=none,full", "zero=0")
    values = {name: set(column.tolist()) for name, column in found.knobs.items()}
    assert values["pp"] == {1, 2} and values["micro_batch_size"] == {1, 4} and values["x"] == {1, 2}
    assert values["recompute"] == {0, 2} and values["zero"] == {0}
    assert values["recompute_every"] == {1, 2, 4}
    assert set(found.knobs) == set(KNOBS)


def test_candidates_are_legal_and_predicted_as_the_planner_does(candidates: Candidates) -> None:
    for index in range(0, candidates.count, 41):
        point = candidates.point(index)
        assert refusal(point, MACHINE) == ""
        assert predict(point, MACHINE, prior_constants()).seconds == pytest.approx(candidates.seconds[index])
    np.testing.assert_allclose(candidates.shares.sum(axis=1), 1)
    knobs = np.array(list(candidates.knobs.values())).T
    assert len(np.unique(knobs, axis=0)) == candidates.count


def test_a_processor_keeps_no_buffers_for_groups(tmp_path: Path) -> None:
    gpu, cpu = (searched(tmp_path, "pp=1", "zero=0", "recompute=none", on_gpu=on_gpu) for on_gpu in (True, False))
    assert cpu.needed.min() < gpu.needed.min()
    assert (cpu.needed >= MACHINE.reserved).all()


def test_a_distance_of_one_is_a_doubling_or_another_choice() -> None:
    candidates = tiny_candidates()
    knobs = np.array(list(candidates.knobs.values())).T
    other = candidates.features - candidates.features[0]
    distance = np.sqrt((other**2).sum(axis=1))
    names = list(candidates.knobs)
    for index in range(candidates.count):
        changed = [names[i] for i in np.flatnonzero(knobs[index] != knobs[0])]
        if len(changed) == 1:
            at = names.index(changed[0])
            steps = abs(np.log2(knobs[index, at] / knobs[0, at])) if changed == ["micro_batch_size"] else 1
            assert distance[index] == pytest.approx(steps), changed


def test_a_space_without_layouts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no layout of 8 GPUs is within these limits"):
        searched(tmp_path, "x=3")
    with pytest.raises(UserError, match="no layout of 8 devices of dgx-a100 is left to try: most often"):
        searched(tmp_path, "pp=8")
