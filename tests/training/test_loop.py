"""A whole job in small: what it writes, how it goes on, how it stops, and what it refuses."""

from __future__ import annotations

import json
import math
import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pool import Pool
from safetensors.torch import load_file
from tiny_corpus import make_corpus, run_file

from fourfold.checkpoints.find import list_checkpoints
from fourfold.config.run import RunConfig
from fourfold.data.indexed import IndexedWriter
from fourfold.environment import Place
from fourfold.errors import UserError
from fourfold.launch.job_processes import run_on_grid
from fourfold.run_file.load import load_run
from fourfold.training import loop
from fourfold.training.job import Job
from fourfold.training.metrics import read_metrics
from fourfold.training.optimizer import learning_rate
from fourfold.training.outcome import Outcome
from fourfold.training.run_folder import open_run_folder


def make(folder: Path, prefix: str, **changes: Any) -> RunConfig:
    folder.mkdir(exist_ok=True)
    return load_run(run_file(folder, prefix, **changes))


def train(run: RunConfig) -> Outcome:
    return run_on_grid("fourfold.training.loop:train", [run], 1, "cpu")


def metrics_of(run: RunConfig) -> list[dict[str, Any]]:
    return read_metrics(Path(run.output_dir, run.name, "metrics.jsonl"))


def weights_of(run: RunConfig, step: int) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file in sorted(Path(run.output_dir, run.name, "checkpoints", f"step_{step}").glob("*.safetensors")):
        found |= load_file(file)
    assert found
    return found


def checkpoints_of(run: RunConfig) -> list[str]:
    return [path.name for path in list_checkpoints(Path(run.output_dir, run.name, "checkpoints"))]


def at_step(monkeypatch: pytest.MonkeyPatch, step: int, action: Callable[[], object]) -> None:
    """Have something happen when a step (from 0) begins."""
    original = loop.begin_step

    def begin_step(number: int) -> None:
        original(number)
        if number == step:
            action()

    monkeypatch.setattr(loop, "begin_step", begin_step)


def ask_to_stop() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def die() -> None:
    raise KeyboardInterrupt


@pytest.fixture(scope="module")
def finished(prefix: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[RunConfig, Outcome]:
    """A run that nothing disturbed; tests that need one compare with it."""
    folder = tmp_path_factory.mktemp("finished")
    changes = {"validation__interval": 4, "validation__steps": 2, "checkpoint__interval": 2, "sample__prompt": "the "}
    run = make(folder, prefix, **changes, sample__max_new_tokens=12)
    return run, train(run)


def test_a_run_from_beginning_to_end(finished: tuple[RunConfig, Outcome]) -> None:
    run, outcome = finished
    run_dir = Path(run.output_dir, run.name)
    metrics = metrics_of(run)
    assert [record["step"] for record in metrics] == list(range(1, 9))
    assert [record["tokens"] for record in metrics] == [4 * 32 * step for step in range(1, 9)]
    assert [record["lr"] for record in metrics] == [
        learning_rate(step, 8, run.optimizer.lr, run.lr_scheduler) for step in range(8)
    ]
    assert [record["step"] for record in metrics if "validation_loss" in record] == [4, 8]
    assert metrics[0]["loss"] == pytest.approx(math.log(257), abs=0.2)
    assert metrics[-1]["loss"] < metrics[0]["loss"] - 0.5  # it learns
    assert metrics[-1]["validation_loss"] < metrics[3]["validation_loss"]
    for record in metrics:
        assert record["grad_norm"] > 0
        assert record["tokens_per_second"] == pytest.approx(128 / record["step_seconds"])
        assert 0.9 < record["trained_token_share"] <= 1
        assert record["peak_memory_bytes"] > 2**20
        assert record["mfu"] is None  # nobody publishes a peak of this processor
    assert load_run(run_dir / "run.toml") == run
    assert checkpoints_of(run) == ["step_6", "step_8"]
    assert outcome.checkpoint == str(run_dir / "checkpoints" / "step_8")
    assert (outcome.steps, outcome.loss, outcome.stopped) == (8, metrics[-1]["loss"], False)
    assert outcome.sample is not None
    assert outcome.sample.startswith("the ")
    assert (run_dir / "sample.txt").read_text() == outcome.sample
    summary = json.loads((run_dir / "summary.json").read_text())
    assert (summary["steps"], summary["final loss"]) == (8, outcome.loss)
    assert (summary["parameters"], summary["tokens"]) == (run.model.num_parameters, 8 * 4 * 32)
    seconds = sum(record["step_seconds"] for record in metrics)
    assert summary["seconds to the first step"] >= 0 and summary["seconds after it"] >= round(seconds, 1) - 0.1


def test_the_same_run_again_is_the_same(finished: tuple[RunConfig, Outcome], tmp_path: Path, prefix: str) -> None:
    other = make(tmp_path, prefix)
    train(other)
    assert [r["loss"] for r in metrics_of(other)] == [r["loss"] for r in metrics_of(finished[0])]
    assert checkpoints_of(other) == ["step_8"]  # at the end, with no interval
    weights, expected = weights_of(other, 8), weights_of(finished[0], 8)
    assert all(torch.equal(weights[name], tensor) for name, tensor in expected.items())


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_stopped_by_a_signal_it_saves_and_goes_on(
    finished: tuple[RunConfig, Outcome], tmp_path: Path, prefix: str, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    run = make(tmp_path, prefix, checkpoint__async_mode=mode, sample__prompt="the ")
    handler = signal.getsignal(signal.SIGTERM)
    with monkeypatch.context() as patched:
        at_step(patched, 2, ask_to_stop)
        outcome = train(run)
    assert (outcome.stopped, outcome.steps, outcome.sample) == (True, 3, None)
    assert checkpoints_of(run) == ["step_3"]
    assert signal.getsignal(signal.SIGTERM) == handler

    updated: list[int] = []
    for step in range(8):
        at_step(monkeypatch, step, partial(updated.append, step))
    outcome = train(run)
    assert (outcome.stopped, outcome.steps) == (False, 8)
    assert updated == [3, 4, 5, 6, 7]
    expected = metrics_of(finished[0])
    assert [(r["step"], r["loss"], r["lr"]) for r in metrics_of(run)] == [
        (r["step"], r["loss"], r["lr"]) for r in expected
    ]
    weights, straight = weights_of(run, 8), weights_of(finished[0], 8)
    assert all(torch.equal(weights[name], tensor) for name, tensor in straight.items())


def test_killed_between_checkpoints_it_repeats_the_lost_steps(
    finished: tuple[RunConfig, Outcome], tmp_path: Path, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lines of the lost steps are written again, once."""
    run = make(tmp_path, prefix, checkpoint__interval=3)
    with monkeypatch.context() as patched:
        at_step(patched, 5, die)
        with pytest.raises(KeyboardInterrupt):
            train(run)
    assert [r["step"] for r in metrics_of(run)] == [1, 2, 3, 4, 5]
    assert checkpoints_of(run) == ["step_3"]
    train(run)
    assert [(r["step"], r["loss"]) for r in metrics_of(run)] == [
        (r["step"], r["loss"]) for r in metrics_of(finished[0])
    ]


def test_a_finished_run_has_nothing_to_do(tmp_path: Path, prefix: str) -> None:
    run = make(tmp_path, prefix, training__train_steps=2)
    train(run)
    before = metrics_of(run)
    outcome = train(run)
    assert (outcome.steps, outcome.loss, outcome.stopped) == (2, None, False)
    assert metrics_of(run) == before


def test_resume_never_starts_afresh_in_the_same_folder(tmp_path: Path, prefix: str) -> None:
    """And what it saves is kept, though the run before came further."""
    train(make(tmp_path, prefix, training__train_steps=4))
    run = make(tmp_path, prefix, training__train_steps=2, checkpoint__resume="never", checkpoint__keep_latest_k=1)
    outcome = train(run)
    assert [record["step"] for record in metrics_of(run)] == [1, 2]
    assert outcome.checkpoint is not None
    assert outcome.checkpoint.endswith("step_2")
    assert checkpoints_of(run) == ["step_2"]


def test_resume_from_a_path_into_another_folder(tmp_path: Path, prefix: str) -> None:
    first = make(tmp_path, prefix, training__train_steps=2)
    train(first)
    second = make(tmp_path, prefix, name="second", training__train_steps=4, checkpoint__resume=f"{tmp_path}/runs/run")
    assert train(second).steps == 4
    assert [record["step"] for record in metrics_of(second)] == [3, 4]
    assert [record["step"] for record in metrics_of(first)] == [1, 2]


def test_a_resumed_run_warns_of_other_data(tmp_path: Path, prefix: str, capfd: pytest.CaptureFixture[str]) -> None:
    train(make(tmp_path, prefix, training__train_steps=2))
    train(make(tmp_path, prefix, training__train_steps=3))
    assert "other samples" not in capfd.readouterr().err
    other = make_corpus(tmp_path, "other", documents=50)
    assert train(make(tmp_path, other, training__train_steps=4)).steps == 4
    printed = capfd.readouterr().err
    assert "the training data gives other samples than before the checkpoint" in printed
    assert "[masks]" not in printed


def test_a_resumed_run_warns_of_another_small_corpus(
    tmp_path: Path, prefix: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """None of whose samples is among the first of the mixture."""
    first, second = (
        [{"path": prefix, "weight": 0.99}, {"path": make_corpus(tmp_path, name, documents=50), "weight": 0.01}]
        for name in ("first", "second")
    )
    train(make(tmp_path, prefix, training__train_steps=2, data__train=first))
    train(make(tmp_path, prefix, training__train_steps=3, data__train=second))
    assert "other samples" in capfd.readouterr().err


def test_a_resumed_run_warns_of_other_masks(tmp_path: Path, prefix: str, capfd: pytest.CaptureFixture[str]) -> None:
    train(make(tmp_path, prefix, training__train_steps=2))
    train(make(tmp_path, prefix, training__train_steps=3, masks__goldfish={"strategy": "hash"}))
    assert "[masks] is not that of the steps before the checkpoint" in capfd.readouterr().err


def test_a_run_without_a_step_left_keeps_its_files(
    tmp_path: Path, prefix: str, capfd: pytest.CaptureFixture[str]
) -> None:
    run = make(tmp_path, prefix, training__train_steps=2)
    train(run)
    folder = Path(run.output_dir, run.name)
    before = {name: (folder / name).read_text() for name in ("run.toml", "summary.json", "metrics.jsonl")}
    train(make(tmp_path, prefix, training__train_steps=2, optimizer__lr=0.5))
    assert {name: (folder / name).read_text() for name in before} == before
    assert "nothing: all steps were taken before" in capfd.readouterr().out


def test_a_loss_that_is_not_a_number_is_told_and_not_saved(tmp_path: Path, prefix: str) -> None:
    run = make(tmp_path, prefix, optimizer__lr=1e30, lr_scheduler__warmup_steps=0, checkpoint__interval=1)
    with pytest.raises(UserError, match=r"the (loss|gradient norm) is (nan|inf) at step \d; lower optimizer\.lr"):
        train(run)
    assert metrics_of(run)[-1]["loss"] is None or metrics_of(run)[-1]["grad_norm"] is None
    for name in checkpoints_of(run):
        assert all(tensor.isfinite().all() for tensor in weights_of(run, int(name[5:])).values())


def test_nan_gradients_are_told_before_they_are_saved(
    tmp_path: Path, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loss of that step is still a number; its update has ruined every weight."""
    run = make(tmp_path, prefix, checkpoint__interval=1)
    clip = Job.clip

    def clip_with_nan(job: Job) -> torch.Tensor:
        if job.optimizer.adamw.state and len(metrics_of(run)) == 2:
            job.shards[0].grad[0] = torch.nan  # type: ignore[index]
        return clip(job)

    monkeypatch.setattr(Job, "clip", clip_with_nan)
    with pytest.raises(UserError, match="the gradient norm is nan at step 3"):
        train(run)
    assert math.isfinite(metrics_of(run)[-1]["loss"])
    assert checkpoints_of(run) == ["step_1", "step_2"]
    assert all(tensor.isfinite().all() for tensor in weights_of(run, 2).values())


def test_a_step_without_a_token_to_learn(tmp_path: Path) -> None:
    """Documents of one token each: the loss is 0 / 0, but no learning rate is to blame."""
    with IndexedWriter(tmp_path / "empty", 257) as writer:
        writer.add_documents(np.full(500, 256), np.ones(500, dtype=np.int64))
    run = make(tmp_path, str(tmp_path / "empty"), data__validation=[])
    with pytest.raises(UserError, match="step 1 has no token to learn"):
        train(run)


@pytest.mark.fast_cases(3)
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data__train": [{"path": "/nowhere/corpus"}]}, "does not exist"),
        ({"model__vocab_size": 200}, r"set model\.vocab_size = 257"),
        ({"training__seq_length": 100_000}, "of one window"),
        ({"data__tokenizer": "/nowhere/tokenizer.json"}, "does not exist"),
        ({"checkpoint__resume": "/nowhere"}, "there is no checkpoint"),
        ({"data__validation": [], "validation__interval": 1}, "names no corpus"),
    ],
)
def test_what_is_refused_leaves_nothing(tmp_path: Path, prefix: str, changes: dict[str, Any], message: str) -> None:
    run = make(tmp_path, prefix, **changes)
    with pytest.raises(UserError, match=message):
        train(run)
    assert [path.name for path in tmp_path.iterdir()] == ["run.toml"]


def test_checkpoint_of_another_model_leaves_the_run_as_it_was(tmp_path: Path, prefix: str) -> None:
    run = make(tmp_path, prefix, training__train_steps=2)
    train(run)
    before = {path: path.read_bytes() for path in tmp_path.glob("runs/**/*") if path.is_file()}
    other = make(tmp_path, prefix, training__train_steps=2, model__num_hidden_layers=3)
    with pytest.raises(UserError, match="another model: its num_hidden_layers is 2, and the run file's is 3"):
        train(other)
    assert {path: path.read_bytes() for path in tmp_path.glob("runs/**/*") if path.is_file()} == before


def test_a_folder_that_cannot_be_made(tmp_path: Path, prefix: str) -> None:
    (tmp_path / "runs").write_text("a file")
    with pytest.raises(UserError, match=r"cannot make the folder of the run, .*/runs/run: "):
        train(make(tmp_path, prefix))
    assert (tmp_path / "runs").read_text() == "a file"


def test_two_jobs_in_one_folder(tmp_path: Path, prefix: str) -> None:
    run = make(tmp_path, prefix)
    run_dir = tmp_path / "runs" / "run"
    run_dir.mkdir(parents=True)
    with (
        open_run_folder(run_dir),
        pytest.raises(UserError, match=r"another job is training in .*runs/run; "),
    ):
        train(run)
    assert train(run).steps == 8


def train_on_ranks(rank: int, world_size: int, run: RunConfig, stop_rank: int | None = None) -> Outcome:
    place = Place(rank, rank, world_size, world_size, "local")
    if stop_rank is None:
        return loop.train(place, run)
    with pytest.MonkeyPatch.context() as patched:
        if rank == stop_rank:
            at_step(patched, 3, ask_to_stop)
        return loop.train(place, run)


def test_on_a_grid_it_stops_on_all_ranks_and_goes_on_on_another(
    finished: tuple[RunConfig, Outcome], pool: Pool, tmp_path: Path, prefix: str
) -> None:
    """A signal to one rank alone stops all after the same step; another grid takes over the data and the weights."""
    changes = {"training__micro_batch_size": 1, "sample__prompt": "the ", "sample__max_new_tokens": 3}
    run = make(tmp_path, prefix, **changes, parallel__z=2)
    outcomes = pool.run(2, train_on_ranks, run, 1)
    assert [(outcome.stopped, outcome.steps) for outcome in outcomes] == [(True, 4)] * 2
    assert [outcome.is_first_process for outcome in outcomes] == [True, False]
    run = make(tmp_path, prefix, **changes, parallel__x=2, parallel__dp=2, parallel__zero=2)
    outcomes = pool.run(4, train_on_ranks, run)
    assert [outcome.steps for outcome in outcomes] == [8] * 4
    assert len({outcome.sample for outcome in outcomes}) == 1  # all drew the same
    metrics, expected = metrics_of(run), metrics_of(finished[0])
    assert [record["step"] for record in metrics] == list(range(1, 9))
    for ours, theirs in zip(metrics, expected, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-3)
        assert ours["trained_token_share"] == pytest.approx(theirs["trained_token_share"], abs=1e-6)


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("grid", [{"pp": 2, "cp": 2}, {"cp": 4}, {"pp": 2, "x": 2, "schedule": "GPipe"}], ids=str)
def test_the_sample_is_the_same_on_every_grid(
    finished: tuple[RunConfig, Outcome], pool: Pool, tmp_path: Path, prefix: str, grid: dict[str, Any]
) -> None:
    outcome = finished[1]
    changes = {
        "training__micro_batch_size": 2,  # a sample is of one sequence
        "checkpoint__resume": outcome.checkpoint,
        "sample__prompt": "the ",
        "sample__max_new_tokens": 8,
        "sample__temperature": 0.0,
    }
    axes = {f"parallel__{key}": value for key, value in grid.items()}
    one, other = make(tmp_path / "one", prefix, **changes), make(tmp_path / "grid", prefix, **changes, **axes)
    outcomes = pool.run(1, train_on_ranks, one) + pool.run(4, train_on_ranks, other)
    texts = [outcome.sample for outcome in outcomes]
    assert len(set(texts)) == 1


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("temperature", [0.0, 1e-30, 1.0])
def test_sample_at_any_temperature(tmp_path: Path, prefix: str, temperature: float) -> None:
    changes = {"sample__temperature": temperature, "sample__max_new_tokens": 40, "checkpoint__save_last": False}
    run = make(tmp_path, prefix, sample__prompt="the grid é ", **changes, training__train_steps=2)
    sample = train(run).sample
    assert sample is not None
    assert sample.startswith("the grid é ")
    assert checkpoints_of(run) == []
    if temperature < 1:  # both take the likeliest token
        greedy = make(
            tmp_path, prefix, sample__prompt="the grid é ", **{**changes, "sample__temperature": 0.0}, name="b"
        )
        assert train(greedy.model_copy(update={"training": run.training})).sample == sample


def test_a_goldfish_run_says_what_it_trains(tmp_path: Path, prefix: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The share in the record and in the log; the loss is the mean of the tokens that are left."""
    mask = {"masks.goldfish__strategy": "hash", "masks.goldfish__h": 4, "masks.goldfish__start_step": 4}
    run = make(tmp_path, prefix, **mask)
    train(run)
    output = capsys.readouterr().out
    assert "goldfish mask" in output
    shares = [step["trained_token_share"] for step in metrics_of(run)]
    assert min(shares[:4]) > 0.95  # no step before the first masked one leaves out more than starts of documents
    assert max(shares[4:]) < 0.9
    assert f"trained: {shares[0]:.1%}" in output
    plain = make(tmp_path, prefix, name="plain")
    train(plain)
    before, after = metrics_of(run), metrics_of(plain)
    assert [step["loss"] for step in before[:4]] == [step["loss"] for step in after[:4]]
    assert before[4]["loss"] != after[4]["loss"]
    assert before[4]["loss"] == pytest.approx(after[4]["loss"], rel=0.1)


def test_a_mask_that_suits_the_data_badly_is_warned_of(
    tmp_path: Path, prefix: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make(tmp_path, prefix, **{"masks.goldfish__strategy": "hash", "masks.goldfish__h": 80})
    train(run)
    assert "warning: the goldfish mask leaves out" in capsys.readouterr().err
