"""Silent corruption: a step is computed twice, copies are compared, and the faulty rank is named."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from command_line import Cli
from flipped_bits import KINDS, Trial, flip_bits
from poisoned_runs import same_tensors, tensors_at, train_poisoned
from pool import Pool
from small_jobs import metrics_of, train
from tiny_corpus import run_file
from tiny_runs import LLAMA, QWEN, tiny_run

from fourfold.checkpoints.checkpoint import Checkpointer
from fourfold.parallel.grid.checksums import Given, checksum, first_to_differ
from fourfold.run_file.load import load_run
from fourfold.training import replay, trainer
from fourfold.training.job import Job

GRIDS: dict[str, dict[str, Any]] = {
    "dp 2 · x 2": {"dp": 2, "x": 2},
    "pp 2 · z 2": {"pp": 2, "z": 2},
    "one process": {},
    "cp 2 · y 2": {"cp": 2, "y": 2},
    "dp 2 · z 2": {"dp": 2, "z": 2},
    "dp 4": {"dp": 4},
    "dp 2 · x 2 zero 3": {"dp": 2, "x": 2, "zero": 3},
}
CASES = [
    pytest.param({"dp": 2}, 3, id="dp 2"),
    *(pytest.param(grid, 8, id=name, marks=pytest.mark.slow) for name, grid in GRIDS.items()),
]


def copies(grid: dict[str, Any]) -> bool:
    """Return whether every weight has a copy on another rank."""
    return grid.get("dp", 1) > 1 and not grid.get("zero")


@pytest.mark.parametrize(("grid", "times"), CASES)
def test_flipped_bits_are_found_and_the_rank_is_named(pool: Pool, grid: dict[str, Any], times: int) -> None:
    """Replay finds every flip that changes a gradient or a copy. The remaining flips hit tokens without a label, or
    disappear in rounding."""
    run = tiny_run(LLAMA, grid, checks={"replay_interval": 1})
    kinds = tuple(kind for kind in KINDS if kind != "stale weight" or copies(grid))
    everyone: list[list[Trial]] = pool.run(run.parallel.world_size, flip_bits, run, kinds, times)
    found, tried = Counter(t.kind for t in everyone[0] if t.named), Counter(t.kind for t in everyone[0])
    for trial, *others in zip(*everyone, strict=True):
        if trial.named:
            is_draw = trial.kind == "stale weight" and len(trial.named) == 2
            assert trial.named == (trial.rank,) or (is_draw and trial.rank in trial.named), trial
        else:
            assert all(each.is_harmless for each in (trial, *others)), trial
    assert set(found) == set(tried), (found, tried)
    assert all(found[kind] == tried[kind] for kind in ("summed gradient", "stale weight"))


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("grid", [{}, {"parallel__z": 2}, {"parallel__pp": 2, "parallel__x": 2}], ids=str)
def test_a_replayed_run_is_the_run_to_the_bit(pool: Pool, tmp_path: Path, prefix: str, grid: dict[str, Any]) -> None:
    weights = []
    for interval in (0, 2):
        (tmp_path / str(interval)).mkdir()
        changes = {"training__micro_batch_size": 1, "checks__replay_interval": interval, **grid}
        run = load_run(run_file(tmp_path / str(interval), prefix, **changes))
        pool.run(run.parallel.world_size, train_poisoned, run, {})
        weights.append(tensors_at(run, 8))
    assert same_tensors(*weights)


def test_the_run_ends_before_the_weights_move(
    cli: Cli, tmp_path: Path, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    finish, calls = Job.finish_gradients, [0]

    def finish_and_flip(job: Job) -> None:
        finish(job)
        calls[0] += 1
        # Every second step has two passes, so the passes belong to the steps 1, 2, 2, 3, 4, and 4. The sixth pass is
        # the second pass of step 4.
        if calls[0] == 6:
            job.trained[3].grad.view(-1).view(torch.uint8)[0] ^= 1

    monkeypatch.setattr(Job, "finish_gradients", finish_and_flip)
    code, _, errors = cli("train", run_file(tmp_path, prefix, checks__replay_interval=2, checkpoint__interval=1))
    assert code == 2
    (sentence,) = errors.splitlines()
    assert "step 4 was computed three times and once gave different bits on rank 0 (" in sentence
    assert "in the gradient of layers.0." in sentence
    assert {path.name for path in (tmp_path / "runs" / "run" / "checkpoints").iterdir()} == {"step_2", "step_3"}


def test_the_time_of_a_check_does_not_count_in_the_rate(
    tmp_path: Path, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pass takes a second on the clock of this test."""
    forward_backward, now = Job.forward_backward, [0.0]

    def in_a_second(job: Job, *arguments: Any) -> torch.Tensor:
        now[0] += 1
        return forward_backward(job, *arguments)

    monkeypatch.setattr(Job, "forward_backward", in_a_second)
    for module in (trainer, replay):
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: now[0], strftime=time.strftime))
    run = load_run(run_file(tmp_path, prefix, checks__replay_interval=2, training__train_steps=4))
    train(run)
    assert now == [6]
    assert [record["step_seconds"] for record in metrics_of(run)] == [1, 1, 1, 1]
    assert {record["tokens_per_second"] for record in metrics_of(run)} == {4 * 32}


def test_a_refused_replay_keeps_the_checkpoint_that_is_still_being_written(
    cli: Cli, tmp_path: Path, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward_backward, calls = Job.forward_backward, [0]

    def without_a_deterministic_kernel(job: Job, *arguments: Any) -> torch.Tensor:
        calls[0] += 1
        if calls[0] == 4:
            raise RuntimeError("some_backward does not have a deterministic implementation")
        return forward_backward(job, *arguments)

    monkeypatch.setattr(Job, "forward_backward", without_a_deterministic_kernel)
    # Act as if the save took until step 4.
    monkeypatch.setattr(Checkpointer, "poll", lambda checkpointer: None)
    changes = {"checks__replay_interval": 4, "checkpoint__interval": 3, "checkpoint__async_mode": "async"}
    code, _, errors = cli("train", run_file(tmp_path, prefix, **changes))
    assert code == 2 and "step 4 is not deterministic on this GPU" in errors, errors
    assert {path.name for path in (tmp_path / "runs" / "run" / "checkpoints").iterdir()} == {"step_3"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8])
def test_one_flipped_bit_changes_the_checksum(dtype: torch.dtype) -> None:
    tensor = torch.randn(3, 50, generator=torch.Generator().manual_seed(0)).mul(9).to(dtype)
    bits = tensor.clone().view(-1).view(torch.uint8)
    before = checksum(tensor)
    for place in range(0, len(bits), 7):
        for bit in range(8):
            changed = tensor.clone()
            changed.view(-1).view(torch.uint8)[place] ^= 1 << bit
            assert checksum(changed) != before
    assert checksum(tensor.flip(0)) != before
    assert checksum(tensor.t()) == checksum(tensor.t().contiguous())
    assert checksum(tensor[:0]) == 0


def test_a_victim_is_not_named() -> None:
    """Rank 1 contributes a wrong value to the sum of ranks 0 and 1. So rank 0 then contributes a wrong value to its sum
    with rank 2. Only rank 1 may be named."""

    def log(*checksums: int, members: tuple[tuple[int, ...], ...]) -> list[Given]:
        return [Given(ranks, "sum", value) for ranks, value in zip(members, checksums, strict=True)]

    first = [
        log(1, 2, members=((0, 1), (0, 2))),
        log(1, 5, members=((0, 1), ())),
        log(7, 8, members=((0, 2), ())),
    ]
    second = [
        log(1, 3, members=((0, 1), (0, 2))),
        log(4, 6, members=((0, 1), ())),
        log(7, 9, members=((0, 2), ())),
    ]
    assert first_to_differ(first, second) == {1: "sum"}
    assert first_to_differ(first, first) == {}


@pytest.mark.slow
def test_tied_and_copied_weights_are_alike(pool: Pool) -> None:
    """If nothing is wrong, there is no alarm after a step, on grids with copies along every axis."""
    for grid in ({"pp": 2, "dp": 2}, {"x": 2, "y": 2}, {"dp": 2, "zero": 1}):
        run = tiny_run(QWEN, grid, checks={"replay_interval": 1})
        for trial in pool.run(run.parallel.world_size, flip_bits, run, ("nothing",), 2)[0]:
            assert not trial.sentence
