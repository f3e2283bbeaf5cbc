"""Test a small job: what it writes, what it samples, and what it refuses."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from command_line import exit_code
from small_jobs import checkpoints_of, make, metrics_of, train, weights_of
from tiny_corpus import run_file
from tiny_huggingface import make_model

from fourfold.config.parameter_counts import num_parameters
from fourfold.config.run import RunConfig
from fourfold.data.indexed import IndexedWriter
from fourfold.errors import UserError
from fourfold.run_file.load import load_run
from fourfold.training.flops import mfu, peak_flops
from fourfold.training.job import Job
from fourfold.training.optimizer import learning_rate
from fourfold.training.outcome import Outcome
from fourfold.training.run_folder import open_run_folder


def test_a_resumed_run_asks_the_hub_for_no_weights(
    tmp_path: Path, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_model(tmp_path / "hf", "llama", vocab_size=257)
    asked: list[str] = []

    def download(name: str, allow_patterns: list[str], ignore_patterns: str) -> str:
        asked.extend(allow_patterns)
        return str(folder)

    monkeypatch.setattr(pytest.importorskip("huggingface_hub"), "snapshot_download", download)
    changes = {"model__preset": None, "model__from_hf": "some/model", "checkpoint__interval": 1}
    for steps in (1, 2):
        path = run_file(tmp_path, prefix, training__train_steps=steps, **changes)
        assert exit_code("train", path) == 0
        assert ("*.safetensors" in asked) == (steps == 1)
        asked.clear()
    assert (tmp_path / "runs" / "run" / "huggingface" / "config.json").is_file()


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
    assert metrics[-1]["loss"] < metrics[0]["loss"] - 0.5  # the model learns
    assert metrics[-1]["validation_loss"] < metrics[3]["validation_loss"]
    peak = peak_flops(torch.cuda.get_device_name(), "fp32") if torch.cuda.is_available() else None
    for record in metrics:
        assert record["grad_norm"] > 0
        assert record["tokens_per_second"] == pytest.approx(128 / record["step_seconds"])
        assert 0.9 < record["trained_token_share"] <= 1
        assert record["peak_memory_bytes"] > 2**20
        assert record["mfu"] == mfu(record["model_tflops_per_device"], peak)
    assert load_run(run_dir / "run.toml") == run
    assert checkpoints_of(run) == ["step_6", "step_8"]
    assert outcome.checkpoint == str(run_dir / "checkpoints" / "step_8")
    assert (outcome.steps, outcome.loss, outcome.stopped) == (8, metrics[-1]["loss"], False)
    assert outcome.sample is not None
    assert outcome.sample.startswith("the ")
    assert (run_dir / "sample.txt").read_text() == outcome.sample
    summary = json.loads((run_dir / "summary.json").read_text())
    assert (summary["steps"], summary["final loss"]) == (8, outcome.loss)
    assert (summary["parameters"], summary["tokens"]) == (num_parameters(run.model), 8 * 4 * 32)
    assert summary["software"].startswith("fourfold ") and "torch " in summary["software"]
    (corpus,) = [str(value) for label, value in summary.items() if label.startswith("corpus ")]
    assert re.fullmatch(r"[\d,]+ documents, [\d,]+ tokens, digest [0-9a-f]{12}", corpus)
    seconds = sum(record["step_seconds"] for record in metrics)
    assert summary["seconds to the first step"] >= 0 and summary["seconds after it"] >= round(seconds, 1) - 0.1


def test_the_same_run_again_is_the_same(finished: tuple[RunConfig, Outcome], tmp_path: Path, prefix: str) -> None:
    other = make(tmp_path, prefix)
    train(other)
    assert [r["loss"] for r in metrics_of(other)] == [r["loss"] for r in metrics_of(finished[0])]
    assert checkpoints_of(other) == ["step_8"]  # without an interval, only the last step is saved
    weights, expected = weights_of(other, 8), weights_of(finished[0], 8)
    assert all(torch.equal(weights[name], tensor) for name, tensor in expected.items())


def test_a_loss_that_is_not_a_number_is_reported_and_not_saved(tmp_path: Path, prefix: str) -> None:
    run = make(tmp_path, prefix, optimizer__lr=1e30, lr_scheduler__warmup_steps=0, checkpoint__interval=1)
    with pytest.raises(UserError, match=r"the (loss|gradient norm) is (nan|inf) at step \d; lower optimizer\.lr"):
        train(run)
    assert metrics_of(run)[-1]["loss"] is None or metrics_of(run)[-1]["grad_norm"] is None
    saved = checkpoints_of(run)
    assert saved, "those of the steps before"
    for name in saved:
        assert all(tensor.isfinite().all() for tensor in weights_of(run, int(name[5:])).values())


def test_nan_gradients_are_reported_before_they_are_saved(
    tmp_path: Path, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loss of that step is still a number, but the update has ruined every weight."""
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
    """All documents have only one token, so no token is trained and the loss is 0 / 0. The error must not blame the
    learning rate."""
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


def test_a_folder_that_cannot_be_made(tmp_path: Path, prefix: str) -> None:
    (tmp_path / "runs").write_text("a file")
    with pytest.raises(UserError, match=r"cannot create the run's folder, .*/runs/run: "):
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


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("temperature", [0.0, 1e-30, 1.0])
def test_sample_at_any_temperature(tmp_path: Path, prefix: str, temperature: float) -> None:
    changes = {"sample__temperature": temperature, "sample__max_new_tokens": 40, "checkpoint__save_last": False}
    run = make(tmp_path, prefix, sample__prompt="the grid é ", **changes, training__train_steps=2)
    sample = train(run).sample
    assert sample is not None
    assert sample.startswith("the grid é ")
    assert checkpoints_of(run) == []
    if temperature < 1:  # the most likely token is taken at 0 and at 1e-30
        greedy = make(
            tmp_path, prefix, sample__prompt="the grid é ", **{**changes, "sample__temperature": 0.0}, name="b"
        )
        assert train(greedy.model_copy(update={"training": run.training})).sample == sample


def test_a_goldfish_run_says_what_it_trains(tmp_path: Path, prefix: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The metrics and the log show the fraction of trained tokens, and the loss is the mean over these tokens."""
    mask = {"masks.goldfish__strategy": "hash", "masks.goldfish__h": 4, "masks.goldfish__start_step": 4}
    run = make(tmp_path, prefix, **mask)
    train(run)
    output = capsys.readouterr().out
    assert "goldfish mask" in output
    shares = [step["trained_token_share"] for step in metrics_of(run)]
    # Before the mask begins, only the first tokens of documents are left out.
    assert min(shares[:4]) > 0.95
    assert max(shares[4:]) < 0.9
    assert f"trained: {shares[0]:.1%}" in output
    plain = make(tmp_path, prefix, name="plain")
    train(plain)
    before, after = metrics_of(run), metrics_of(plain)
    assert [step["loss"] for step in before[:4]] == [step["loss"] for step in after[:4]]
    assert before[4]["loss"] != after[4]["loss"]
    assert before[4]["loss"] == pytest.approx(after[4]["loss"], rel=0.1)


def test_a_mask_that_does_not_suit_the_data_causes_a_warning(
    tmp_path: Path, prefix: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make(tmp_path, prefix, **{"masks.goldfish__strategy": "hash", "masks.goldfish__h": 80})
    train(run)
    assert "warning: the goldfish mask drops" in capsys.readouterr().err
