"""The run finds bad numbers before the update and records them. Then it stops, skips the update, or rolls back."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import Cli
from patience import PATIENCE
from poisoned_runs import (
    KILL,
    LARGE_GRADIENT,
    LARGE_LOSS,
    NAN_AFTER_SUM,
    NAN_GRADIENT,
    NAN_LOSS,
    Killed,
    poison,
    same_tensors,
    tensors_at,
    train_poisoned,
    train_without,
)
from pool import Pool
from python_start import run_at_start
from tiny_corpus import make_corpus, run_file
from tiny_huggingface import make_model

from fourfold.checkpoints.checkpoint import Checkpointer
from fourfold.checkpoints.saved_state import read_state
from fourfold.config.run import RunConfig
from fourfold.errors import UserError
from fourfold.launch.job_processes import run_on_grid
from fourfold.run_file.load import load_run
from fourfold.training.job import Job
from fourfold.training.metrics import read_metrics

FP16 = {"training__precision": "fp16", "loss_scaling__initial": 1024.0}
GRIDS: dict[str, dict[str, Any]] = {
    "one process, accumulation": {},
    "z 2 fp16": {"parallel__z": 2, **FP16},
    "pp 2 · x 2 fp16": {"parallel__pp": 2, "parallel__x": 2, "training__micro_batch_size": 1, **FP16},
    "pp 2 tied": {"parallel__pp": 2, "training__micro_batch_size": 1, "model__tie_word_embeddings": True},
    "dp 2 zero 1": {"parallel__dp": 2, "parallel__zero": 1, "training__micro_batch_size": 1},
    "z 2, saved while training": {"parallel__z": 2, "checkpoint__async_mode": "async"},
    "cp 2 · y 2": {"parallel__cp": 2, "parallel__y": 2, "training__micro_batch_size": 1},
}


def make(folder: Path, prefix: str, **changes: Any) -> RunConfig:
    folder.mkdir(exist_ok=True)
    return load_run(run_file(folder, prefix, checkpoint__interval=2, checkpoint__keep_latest_k=0, **changes))


def bad_steps(folder: Path) -> list[dict[str, Any]]:
    return read_metrics(folder / "runs" / "run" / "bad_steps.jsonl")


def figures_of(run: RunConfig) -> list[tuple[int, float, float, bool]]:
    records = read_metrics(Path(run.output_dir, run.name, "metrics.jsonl"))
    return [(r["step"], r["loss"], r["grad_norm"], r.get("skipped", False)) for r in records]


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("grid", GRIDS.values(), ids=GRIDS.keys())
def test_a_skipped_step_changes_nothing_in_the_optimizer(
    pool: Pool, tmp_path: Path, prefix: str, grid: dict[str, Any]
) -> None:
    """The weights and moments of every later checkpoint, and the losses of all other steps, are bit-identical."""
    healthy = make(tmp_path / "healthy", prefix, **grid)
    run = make(tmp_path / "run", prefix, checks__non_finite="skip", **grid)
    ranks = run.parallel.world_size
    outcomes = pool.run(ranks, train_poisoned, run, {3: NAN_LOSS, 4: NAN_LOSS, 6: NAN_LOSS})
    pool.run(ranks, train_without, healthy, {3, 4, 6})
    for step in (2, 4, 6, 8):
        assert same_tensors(tensors_at(run, step), tensors_at(healthy, step))
    state = read_state(tmp_path / "run" / "runs" / "run" / "checkpoints" / "step_8")
    assert (state.step, state.optimizer_steps) == (8, 5)
    for (step, loss, norm, skipped), theirs in zip(figures_of(run), figures_of(healthy), strict=True):
        assert skipped == (step in (3, 4, 6))
        assert (step, norm) == (theirs[0], theirs[2])
        assert loss == (None if skipped else theirs[1])
    assert {outcome.loss for outcome in outcomes} == {figures_of(run)[-1][1]}
    assert [(line["step"], line["action"], line["loss"]) for line in bad_steps(tmp_path / "run")] == [
        (step, "skip", "nan") for step in (3, 4, 6)
    ]
    assert bad_steps(tmp_path / "run")[2]["samples"] == [20, 21, 22, 23]


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("grid", GRIDS.values(), ids=GRIDS.keys())
def test_a_run_that_rolled_back_equals_a_run_without_the_bad_batch(
    pool: Pool, tmp_path: Path, prefix: str, grid: dict[str, Any]
) -> None:
    """The run rolls back from step 5 to 4, and from step 8 to 6. Then it skips steps 7 and 8. No step is recorded
    twice."""
    healthy = make(tmp_path / "healthy", prefix, **grid)
    checks = {"checks__non_finite": "roll_back", "checks__roll_back_batches": 2}
    run = make(tmp_path / "run", prefix, **checks, **grid)
    ranks = run.parallel.world_size
    bad = NAN_LOSS if "training__precision" in grid else NAN_GRADIENT
    pool.run(ranks, train_poisoned, run, {5: bad, 8: bad})
    pool.run(ranks, train_without, healthy, {5, 7, 8})
    assert same_tensors(tensors_at(run, 8), tensors_at(healthy, 8))
    assert [(line["step"], line["back_to"], line["skips"]) for line in bad_steps(tmp_path / "run")] == [
        (5, 4, [5]),
        (8, 6, [7, 8]),
    ]
    assert [(step, skipped) for step, _, _, skipped in figures_of(run)] == [
        (step, step in (5, 7, 8)) for step in range(1, 9)
    ]


@pytest.mark.slow
def test_adapters_skip_and_go_back_alike(pool: Pool, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    base = make_model(tmp_path / "base", "qwen3", vocab_size=300)
    prefix = make_corpus(tmp_path)
    changes = {"model__preset": None, "model__from_hf": str(base), "lora__rank": 2, "parallel__z": 2, **FP16}
    weights = []
    for name in ("skip", "roll_back"):
        run = make(tmp_path / name, prefix, checks__non_finite=name, **changes)
        pool.run(2, train_poisoned, run, {5: NAN_LOSS})
        weights.append(tensors_at(run, 8))
    healthy = make(tmp_path / "healthy", prefix, **changes)
    pool.run(2, train_without, healthy, {5})
    assert all(same_tensors(each, tensors_at(healthy, 8)) for each in weights)


SPIKES = {"checks__spike": "skip", "checks__spike_window": 4, "checks__spike_sigma": 100.0}


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("policy", ["skip", "roll_back"])
@pytest.mark.parametrize("stops", [[5, 7], [4], [8]], ids=str)
def test_a_killed_run_judges_steps_like_an_uninterrupted_run(
    tmp_path: Path, prefix: str, monkeypatch: pytest.MonkeyPatch, policy: str, stops: list[int]
) -> None:
    """The window of earlier steps comes from the checkpoint, and the batches to skip come from the record."""
    faults = {6: LARGE_LOSS}
    changes = SPIKES | {"checks__spike": policy, "checks__non_finite": policy, "training__train_steps": 10}
    straight, killed = (make(tmp_path / name, prefix, **changes) for name in ("straight", "killed"))
    with monkeypatch.context() as patched:
        poison(patched, faults)
        train(straight)
    for stop in stops:
        with monkeypatch.context() as patched:
            poison(patched, {**faults, stop: KILL})
            with pytest.raises(Killed):
                train(killed)
    with monkeypatch.context() as patched:
        poison(patched, faults)
        train(killed)
    assert same_tensors(tensors_at(killed, 10), tensors_at(straight, 10))
    assert figures_of(killed) == figures_of(straight)
    assert [skipped for _, _, _, skipped in figures_of(straight)] == [step == 6 for step in range(1, 11)]
    states = [read_state(tmp_path / n / "runs" / "run" / "checkpoints" / "step_10") for n in ("straight", "killed")]
    assert states[0] == states[1]
    assert len(states[0].recent.losses) == len(states[0].recent.grad_norms) == 4
    assert {line["step"] for line in bad_steps(tmp_path / "killed")} == {6}


def train(run: RunConfig) -> None:
    run_on_grid("fourfold.training.trainer:train", [run], 1, "cpu")


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("fault", [LARGE_LOSS, LARGE_GRADIENT])
@pytest.mark.parametrize("step", [3, 5])
def test_spikes_of_loss_and_gradient_norm(
    cli: Cli, tmp_path: Path, prefix: str, monkeypatch: pytest.MonkeyPatch, fault: str, step: int
) -> None:
    """There is no spike before the window is full, and a spike does not become part of it."""
    poison(monkeypatch, {step: fault, step + 1: fault})
    path = run_file(tmp_path, prefix, **SPIKES)
    code, _, errors = cli("train", path)
    assert code == 0, errors
    steps = [line["step"] for line in bad_steps(tmp_path)] if step == 5 else []
    assert steps == ([5, 6] if step == 5 else [])
    if step == 5:
        name = {LARGE_LOSS: "the loss", LARGE_GRADIENT: "the gradient norm"}[fault]
        assert f"{name} is " in errors and "standard deviations" in errors
        assert f"step 5: its update is skipped; see {tmp_path}/runs/run/bad_steps.jsonl" in errors


@pytest.mark.parametrize("fault", [NAN_LOSS, NAN_GRADIENT, LARGE_LOSS])
def test_the_run_file_says_stop(
    cli: Cli, tmp_path: Path, prefix: str, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """The record is written, no weight has changed, and the exit code is 2."""
    poison(monkeypatch, {5: fault})
    path = run_file(tmp_path, prefix, checkpoint__interval=2, **SPIKES | {"checks__spike": "stop"})
    code, _, errors = cli("train", path)
    assert code == 2
    sentence = errors.splitlines()[-1]
    assert "at step 5; lower optimizer.lr" in sentence and f"{tmp_path}/runs/run/checkpoints" in sentence
    (line,) = bad_steps(tmp_path)
    assert (line["step"], line["action"], line["samples"]) == (5, "stop", [16, 17, 18, 19])
    assert json.dumps(line)  # no NaN in it


def test_the_run_file_says_roll_back(cli: Cli, tmp_path: Path, prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    poison(monkeypatch, {5: NAN_GRADIENT})
    path = run_file(tmp_path, prefix, checkpoint__interval=3, checks__non_finite="roll_back")
    code, output, errors = cli("train", path)
    assert code == 0, errors
    assert "the gradient norm is nan at step 5: the run returns to step 3, and will skip 1 of the next" in errors
    assert "nan" not in output.partition("Done")[2]
    # Start the same run again without the fault. The record of bad steps from the first start is renamed.
    monkeypatch.undo()
    assert cli("train", path, "--set", "checkpoint.resume=never")[0] == 0
    folder = tmp_path / "runs" / "run"
    assert not (folder / "bad_steps.jsonl").exists() and (folder / "bad_steps.jsonl.superseded").is_file()
    assert not any("skipped" in record for record in read_metrics(folder / "metrics.jsonl"))


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ("skip", "after 3 bad steps in a row were skipped; lower optimizer.lr"),
        ("roll_back", "at step 5, after 3 rollbacks since the last good step"),
        ("stop", "at step 2; lower optimizer.lr"),
    ],
)
def test_a_run_that_diverges_ends_with_a_sentence(
    cli: Cli, tmp_path: Path, prefix: str, policy: str, message: str
) -> None:
    changes = {"optimizer__lr": 1e30, "lr_scheduler__warmup_steps": 0, "checkpoint__interval": 1}
    path = run_file(tmp_path, prefix, checks__non_finite=policy, checks__max_in_a_row=3, **changes)
    code, _, errors = cli("train", path)
    assert code == 2 and message in errors.splitlines()[-1], errors


def test_no_run_ends_well_without_a_good_step(
    cli: Cli, tmp_path: Path, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison(monkeypatch, dict.fromkeys(range(1, 4), NAN_LOSS))
    code, _, errors = cli("train", run_file(tmp_path, prefix, training__train_steps=3, checks__non_finite="skip"))
    assert code == 2 and "at step 3, after 2 bad steps in a row" in errors


def test_a_return_needs_a_checkpoint(cli: Cli, tmp_path: Path, prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    code, _, errors = cli("train", run_file(tmp_path, prefix, checks__spike="roll_back"))
    assert code == 2 and "checks.spike = 'roll_back' returns to a checkpoint" in errors
    poison(monkeypatch, {2: NAN_LOSS})
    code, _, errors = cli("train", run_file(tmp_path, prefix, checks__non_finite="roll_back", checkpoint__interval=4))
    assert code == 2 and "the loss is nan at step 2, and there is no checkpoint yet to return to" in errors


def test_fp16_ends_after_overflows_in_a_row(
    cli: Cli, tmp_path: Path, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Overflows before a checkpoint still count after it."""
    faults = dict.fromkeys([2, *range(4, 9)], NAN_GRADIENT)
    poison(monkeypatch, faults)
    changes = FP16 | {"loss_scaling__max_overflows": 3, "checkpoint__interval": 5, "training__train_steps": 5}
    path = run_file(tmp_path, prefix, **changes)
    assert cli("train", path)[0] == 0
    assert not (tmp_path / "runs" / "run" / "bad_steps.jsonl").exists()  # loss scaling handles these steps
    code, _, errors = cli("train", path, "--set", "training.train_steps=8")
    assert code == 2 and "overflowed fp16 in 3 steps in a row, up to step 6; lower optimizer.lr" in errors


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_is_no_overflow(
    tmp_path: Path, prefix: str, monkeypatch: pytest.MonkeyPatch, value: float
) -> None:
    """A smaller loss scale would not help, because the loss itself is not finite."""
    mean_loss = Job.mean_loss
    monkeypatch.setattr(Job, "mean_loss", lambda *args: mean_loss(*args) * torch.tensor(value))
    with pytest.raises(UserError, match=f"the loss is {value} at step 1; lower"):
        train(load_run(run_file(tmp_path, prefix, **FP16)))


def test_all_ranks_hear_of_a_record_that_cannot_be_written(pool: Pool, tmp_path: Path, prefix: str) -> None:
    (tmp_path / "runs" / "run" / "bad_steps.jsonl").mkdir(parents=True)
    run = make(tmp_path, prefix, checks__non_finite="skip", parallel__x=2)
    with pytest.raises(UserError, match=r"cannot write .*bad_steps\.jsonl"):
        pool.run(2, train_poisoned, run, {3: NAN_AFTER_SUM})


POISON = """
from fourfold.training.job import Job

mean_loss, calls = Job.mean_loss, [0]

def mean_of_poisoned(job, losses, kept):
    calls[0] += 1
    return mean_loss(job, losses, kept) * (float("nan") if calls[0] == 3 else 1.0)

Job.mean_loss = mean_of_poisoned
"""


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "code"), [("stop", 2), ("skip", 0), ("roll_back", 0)])
def test_local_workers_say_it_once(tmp_path: Path, prefix: str, policy: str, code: int) -> None:
    path = run_file(tmp_path, prefix, parallel__x=2, checkpoint__interval=2, checks__non_finite=policy)
    program = "import sys; from fourfold.cli.app import main; sys.argv[0] = 'fourfold'; main()"
    done = subprocess.run(
        [sys.executable, "-c", program, "train", str(path)],
        env=os.environ | run_at_start(tmp_path, POISON) | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == code, done.stderr
    (sentence,) = done.stderr.splitlines()
    assert "the loss is nan at step 3" in sentence
    assert [(line["step"], line["action"]) for line in bad_steps(tmp_path)] == [(3, policy)]


def stop_before_poll(rank: int, world_size: int, run: RunConfig, fault: str) -> str:
    """Stop in the step after a save that is still under way."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Checkpointer, "poll", lambda self: None)
        with pytest.raises(UserError) as caught:
            train_poisoned(rank, world_size, run, {3: fault})
    return str(caught.value)


@pytest.mark.parametrize("fault", [NAN_LOSS, NAN_GRADIENT])
def test_a_stop_loses_no_checkpoint_that_is_being_written(pool: Pool, tmp_path: Path, prefix: str, fault: str) -> None:
    changes = {"parallel__z": 2, "training__micro_batch_size": 1, "checkpoint__async_mode": "async"}
    if fault == NAN_GRADIENT:  # fp16 stops after its first overflow
        changes |= FP16 | {"loss_scaling__max_overflows": 1}
    run = make(tmp_path / "run", prefix, **changes)
    sentences = pool.run(2, stop_before_poll, run, fault)
    saved = Path(run.output_dir, run.name, "checkpoints", "step_2")
    assert read_state(saved).step == 2
    assert (fault == NAN_GRADIENT) or all(str(saved) in sentence for sentence in sentences)
