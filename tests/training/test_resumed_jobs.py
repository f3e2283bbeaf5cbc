"""How a job stops and continues, and what a resumed job warns about and refuses."""

from __future__ import annotations

import contextlib
import io
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from pool import Pool
from small_jobs import ask_to_stop, at_step, checkpoints_of, make, metrics_of, train, weights_of
from tiny_chat import CHATML, make_chat_tokenizer, talks, write_rows
from tiny_corpus import make_corpus

from fourfold.checkpoints.saved_state import compared_settings
from fourfold.config.run import RunConfig
from fourfold.data.prepare_conversations import prepare_conversations
from fourfold.environment import Place
from fourfold.errors import UserError
from fourfold.training import trainer
from fourfold.training.outcome import Outcome
from fourfold.training.resume_warnings import settings_warnings


def die() -> None:
    raise KeyboardInterrupt


def train_on_ranks(rank: int, world_size: int, run: RunConfig, stop_rank: int | None = None) -> Outcome:
    place = Place(rank, rank, world_size, world_size, "local")
    if stop_rank is None:
        return trainer.train(place, run)
    with pytest.MonkeyPatch.context() as patched:
        if rank == stop_rank:
            at_step(patched, 3, ask_to_stop)
        return trainer.train(place, run)


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_a_run_stopped_by_a_signal_saves_and_resumes(
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


def test_a_run_killed_between_checkpoints_repeats_the_lost_steps(
    finished: tuple[RunConfig, Outcome], tmp_path: Path, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The resumed run replaces the lines of the lost steps, so each line is there once."""
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
    """The new run's checkpoints are kept, although the earlier run had reached a later step."""
    train(make(tmp_path, prefix, training__train_steps=4))
    run = make(tmp_path, prefix, training__train_steps=2, checkpoint__resume="never", checkpoint__keep_latest_k=1)
    outcome = train(run)
    assert [record["step"] for record in metrics_of(run)] == [1, 2]
    assert outcome.checkpoint is not None
    assert outcome.checkpoint.endswith("step_2")
    assert checkpoints_of(run) == ["step_2"]


def test_the_outcome_names_no_checkpoint_of_an_earlier_run(tmp_path: Path, prefix: str) -> None:
    first = make(tmp_path, prefix, training__train_steps=4)
    train(first)
    unsaved = {"training__train_steps": 2, "checkpoint__interval": 0, "checkpoint__save_last": False}
    longer = unsaved | {"training__train_steps": 5, "checkpoint__resume": f"{tmp_path}/runs/run"}
    assert train(make(tmp_path, prefix, name="second", **longer)).checkpoint is None
    assert train(make(tmp_path, prefix, checkpoint__resume="never", **unsaved)).checkpoint is None


def test_a_run_that_starts_again_never_resumes_from_a_step_of_the_earlier_run(tmp_path: Path, prefix: str) -> None:
    """The new run is stopped before its first checkpoint. Later it saves a step that the earlier run had also saved."""
    train(make(tmp_path, prefix, training__train_steps=4, checkpoint__interval=2))
    again = {"checkpoint__resume": "never", "checkpoint__interval": 0, "checkpoint__save_last": False}
    run = make(tmp_path, prefix, training__train_steps=2, **again)
    train(run)
    assert checkpoints_of(run) == []
    run = make(tmp_path, prefix, training__train_steps=5, checkpoint__interval=5)
    train(run)
    assert [record["step"] for record in metrics_of(run)] == [1, 2, 3, 4, 5]
    assert checkpoints_of(run) == ["step_5"]
    folder = Path(run.output_dir, run.name, "checkpoints")
    assert {path.name for path in folder.iterdir()} == {"step_5", "step_2.superseded", "step_4.superseded"}


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
    assert "the training data has changed" not in capfd.readouterr().err
    other = make_corpus(tmp_path, "other", documents=50)
    assert train(make(tmp_path, other, training__train_steps=4)).steps == 4
    printed = capfd.readouterr().err
    assert "the training data has changed since the checkpoint" in printed
    assert "[masks]" not in printed


def test_a_resumed_run_warns_of_another_small_corpus(
    tmp_path: Path, prefix: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """None of the mixture's first samples is from this corpus."""
    first, second = (
        [{"path": prefix, "weight": 0.99}, {"path": make_corpus(tmp_path, name, documents=50), "weight": 0.01}]
        for name in ("first", "second")
    )
    train(make(tmp_path, prefix, training__train_steps=2, data__train=first))
    train(make(tmp_path, prefix, training__train_steps=3, data__train=second))
    assert "the training data has changed" in capfd.readouterr().err


def test_a_resumed_run_warns_of_another_answer_mask(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The corpus was prepared again, and one answer of its last conversation is no longer trained."""
    pytest.importorskip("transformers")
    tokenizer, rows = make_chat_tokenizer(tmp_path / "tokenizer", CHATML), talks(102)

    def resume(steps: int) -> str:
        prepare_conversations([write_rows(tmp_path / "rows.jsonl", rows)], tmp_path / "c", tokenizer=tokenizer)
        data = {"data__format": "sft", "data__validation": [{"path": f"{tmp_path}/c"}], "model__vocab_size": 310}
        train(make(tmp_path, f"{tmp_path}/c", training__train_steps=steps, **VALIDATED, **data))
        return capfd.readouterr().err

    assert "has changed" not in resume(2) + resume(3)
    rows[-1]["messages"][-1]["weight"] = 0
    printed = resume(4)
    assert "the answer mask of the training data has changed since the checkpoint" in printed
    assert "the answer mask of the validation data has changed since the checkpoint" in printed
    assert "warning: the training data" not in printed


VALIDATED = {"validation__interval": 2, "validation__steps": 1}


def test_a_resumed_run_warns_of_other_validation_data(
    tmp_path: Path, prefix: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """The warning distinguishes validation data from training data. Another path to the same data is not a change."""
    other = make_corpus(tmp_path, "other", documents=50)
    (tmp_path / "moved").mkdir()
    moved = make_corpus(tmp_path / "moved", "other", documents=50)
    train(make(tmp_path, prefix, training__train_steps=2, **VALIDATED, data__validation=[{"path": other}]))
    train(make(tmp_path, prefix, training__train_steps=4, **VALIDATED, data__validation=[{"path": moved}]))
    assert "data has changed" not in capfd.readouterr().err
    train(make(tmp_path, prefix, training__train_steps=6, **VALIDATED, data__validation=[{"path": prefix}]))
    printed = capfd.readouterr().err
    assert "the validation data has changed since the checkpoint" in printed and "step_4" in printed
    assert "training data" not in printed
    train(make(tmp_path, prefix, training__train_steps=7, data__validation=[{"path": other}]))
    assert "data has changed" not in capfd.readouterr().err, "a run without validations has none to compare"


def test_a_resumed_run_warns_of_other_measurements(
    tmp_path: Path, prefix: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """Without validations before and after the checkpoint, there is nothing to compare."""
    constant = {
        "lr_scheduler__decay_style": "constant",
        "audit__interval": 4,
        "audit__documents": "a.jsonl",
        "audit__suffix": 8,
    }
    train(make(tmp_path, prefix, training__train_steps=2, validation__steps=2, **constant))
    train(make(tmp_path, prefix, training__train_steps=4, **VALIDATED, **constant))
    assert warnings_in(capfd.readouterr().err) == []
    changed = VALIDATED | constant | {"validation__steps": 3, "audit__suffix": 20}
    train(make(tmp_path, prefix, training__train_steps=6, **changed))
    (warning,) = warnings_in(capfd.readouterr().err)
    assert "step_4: validation.steps = 1 → 3, audit.suffix = 8 → 20. " in warning


def test_a_resumed_run_warns_of_other_masks(tmp_path: Path, prefix: str, capfd: pytest.CaptureFixture[str]) -> None:
    train(make(tmp_path, prefix, training__train_steps=2))
    train(make(tmp_path, prefix, training__train_steps=3, masks__goldfish={"strategy": "hash"}))
    assert "[masks] has changed since the checkpoint" in capfd.readouterr().err


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


def test_checkpoint_of_another_model_leaves_the_run_as_it_was(tmp_path: Path, prefix: str) -> None:
    run = make(tmp_path, prefix, training__train_steps=2)
    train(run)
    before = {path: path.read_bytes() for path in tmp_path.glob("runs/**/*") if path.is_file()}
    other = make(tmp_path, prefix, training__train_steps=2, model__num_hidden_layers=3)
    with pytest.raises(UserError, match=r"another model: its model\.num_hidden_layers is 2, but the run file has 3"):
        train(other)
    assert {path: path.read_bytes() for path in tmp_path.glob("runs/**/*") if path.is_file()} == before


def test_a_grid_stops_on_all_ranks_and_another_grid_resumes(
    finished: tuple[RunConfig, Outcome], pool: Pool, tmp_path: Path, prefix: str
) -> None:
    """A signal to one rank stops all ranks after the same step. The data and the weights continue on another grid."""
    changes = {"training__micro_batch_size": 1, "sample__prompt": "the ", "sample__max_new_tokens": 3}
    run = make(tmp_path, prefix, **changes, parallel__z=2)
    outcomes = pool.run(2, train_on_ranks, run, 1)
    assert [(outcome.stopped, outcome.steps) for outcome in outcomes] == [(True, 4)] * 2
    assert [outcome.is_first_process for outcome in outcomes] == [True, False]
    run = make(tmp_path, prefix, **changes, parallel__x=2, parallel__dp=2, parallel__zero=2)
    outcomes = pool.run(4, train_on_ranks, run)
    assert [outcome.steps for outcome in outcomes] == [8] * 4
    assert len({outcome.sample for outcome in outcomes}) == 1  # all ranks drew the same sample
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
        # The prompt is one sequence, even with larger micro-batches.
        "training__micro_batch_size": 2,
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


CHANGED = {
    "optimizer__betas": [0.5, 0.6],
    "optimizer__weight_decay": 0.5,
    "lr_scheduler__decay_style": "linear",
    "training__precision": "bf16",
}


def errors_of_rank(rank: int, world_size: int, run: RunConfig) -> str:
    """Train, and return what the rank prints to standard error."""
    with contextlib.redirect_stderr(io.StringIO()) as errors:
        train_on_ranks(rank, world_size, run)
    return errors.getvalue()


def warnings_in(printed: str) -> list[str]:
    return [line for line in printed.splitlines() if line.startswith("warning: ")]


def test_a_resumed_run_names_every_changed_key_of_the_optimization(
    finished: tuple[RunConfig, Outcome], pool: Pool, tmp_path: Path, prefix: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """The warning names each key once, on one process and on another grid. It does not name keys of the layout."""
    named = (
        'training.precision = "fp32" → "bf16", optimizer.betas = [0.9, 0.95] → [0.5, 0.6], '
        'optimizer.weight_decay = 0.1 → 0.5, lr_scheduler.decay_style = "cosine" → "linear"'
    )
    changes = {
        "checkpoint__resume": f"{Path(finished[1].checkpoint or '').parent}/step_6",
        "training__micro_batch_size": 1,
    }
    train(make(tmp_path / "same", prefix, **changes))
    assert warnings_in(capfd.readouterr().err) == []
    train(make(tmp_path / "one", prefix, **changes, **CHANGED))
    on_one = warnings_in(capfd.readouterr().err)
    assert len(on_one) == 2 and "step_6: " + named + ". " in on_one[0]
    on_grid = make(tmp_path / "grid", prefix, **changes, **CHANGED, parallel__x=2, parallel__z=2)
    assert [warnings_in(errors) for errors in pool.run(4, errors_of_rank, on_grid)] == [on_one, [], [], []]


def test_an_extended_run_says_that_its_learning_rate_jumps(
    tmp_path: Path, prefix: str, capfd: pytest.CaptureFixture[str]
) -> None:
    train(make(tmp_path, prefix, training__train_steps=4))
    run = make(tmp_path, prefix, training__train_steps=8)
    train(run)
    keys, jump = warnings_in(capfd.readouterr().err)
    assert "training.train_steps = 4 → 8" in keys
    last, first = (metrics_of(run)[step]["lr"] for step in (3, 4))
    assert first > 2 * last
    assert f"the learning rate jumps from {last:.3g} in step 4 to {first:.3g} in step 5" in jump


def test_a_constant_rate_is_extended_without_a_warning(
    tmp_path: Path, prefix: str, capfd: pytest.CaptureFixture[str]
) -> None:
    for steps in (2, 3):
        train(make(tmp_path, prefix, training__train_steps=steps, lr_scheduler__decay_style="constant"))
    assert warnings_in(capfd.readouterr().err) == []


def test_keys_that_one_version_does_not_know_are_not_compared(tmp_path: Path, prefix: str) -> None:
    now = compared_settings(make(tmp_path, prefix))
    was = {**now, "optimizer.lr": 0.5, "optimizer.renamed_later": 1}
    del was["ema.decay"], was["lr_scheduler.min_lr_ratio"]
    changed, jump = settings_warnings(was, now, 2, tmp_path)
    assert f"step_2: optimizer.lr = 0.5 → {now['optimizer.lr']}. The next" in changed.replace(str(tmp_path), "step_2")
    assert jump.startswith("the learning rate jumps from ")
