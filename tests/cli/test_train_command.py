"""``fourfold train`` as a user types it: what it prints, how it exits, and what it leaves behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import Cli, files_in, one_sentence
from patience import PATIENCE, wait_until
from report_pages import chart_specs
from tiny_corpus import run_file

from fourfold.data.tokenizer import train_bpe
from fourfold.run_file.load import load_run
from fourfold.training import trainer


def in_a_process(*arguments: object) -> subprocess.CompletedProcess[str]:
    code = "import sys; from fourfold.cli.app import main; sys.argv[0] = 'fourfold'; main()"
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)


def test_train(cli: Cli, tmp_path: Path, prefix: str) -> None:
    path = run_file(tmp_path, prefix, sample__prompt="the ", sample__max_new_tokens=5, metrics__log_interval=3)
    code, output, errors = cli("train", path, "--set", "training.train_steps=4", "--set", "name=other")
    assert (code, errors) == (0, "")
    run_dir = tmp_path / "runs" / "other"
    assert [line.split()[1] for line in output.splitlines() if line.startswith("step:")] == ["1/4", "3/4", "4/4"]
    assert f"Report: {run_dir / 'report.html'}" in output
    sample = (run_dir / "sample.txt").read_text()
    assert f"\nSample:\n{sample}\n" in output
    page = (run_dir / "report.html").read_text()
    assert "Learning rate" in page
    assert "step_4" in page
    assert load_run(run_dir / "run.toml").training.train_steps == 4
    assert sorted(path.name for path in run_dir.iterdir()) == [
        "attempts.jsonl",
        "checkpoints",
        "metrics.jsonl",
        "report.html",
        "run.toml",
        "sample.txt",
        "summary.json",
    ]
    # The run is done, so the same command trains no further. It only writes the missing page again.
    code, output, errors = cli("train", run_dir / "run.toml")
    assert (code, errors) == (0, "")
    (run_dir / "report.html").unlink()
    assert cli("report", run_dir) == (0, f"{run_dir / 'report.html'}\n", "")
    assert (run_dir / "report.html").is_file()
    # Train two more steps. The chart marks where they begin.
    assert cli("train", path, "--set", "training.train_steps=6", "--set", "name=other")[0] == 0
    loss = chart_specs((run_dir / "report.html").read_text())["Loss"]
    assert [mark["place"][0] for mark in loss["marks"]] == [4]
    assert [step for step, *_ in loss["curves"][0]["points"]] == [1, 2, 3, 4, 5, 6]


def test_train_stopped_by_a_signal(cli: Cli, tmp_path: Path, prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = run_file(tmp_path, prefix)

    def begin_step(step: int) -> None:
        if step == 1:
            os.kill(os.getpid(), signal.SIGUSR1)

    with monkeypatch.context() as patched:
        patched.setattr(trainer, "begin_step", begin_step)
        code, output, errors = cli("train", path)
    assert (code, errors) == (3, "")
    assert "a signal or the time limit, after saving" in output
    assert (tmp_path / "runs" / "run" / "checkpoints" / "step_2" / "state.json").is_file()
    assert (tmp_path / "runs" / "run" / "report.html").is_file()
    assert cli("train", path)[0] == 0
    assert (tmp_path / "runs" / "run" / "checkpoints" / "step_8" / "state.json").is_file()


@pytest.mark.slow
def test_local_workers_stopped_by_sigterm_save_and_exit_with_3(tmp_path: Path, prefix: str) -> None:
    """Like a scheduler, send the signal only to the parent process."""
    path = run_file(
        tmp_path, prefix, parallel__x=2, training__train_steps=100_000, lr_scheduler__decay_style="constant"
    )
    code = "import sys; from fourfold.cli.app import main; sys.argv[0] = 'fourfold'; main()"
    process = subprocess.Popen(
        [sys.executable, "-c", code, "train", str(path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    metrics = tmp_path / "runs" / "run" / "metrics.jsonl"
    wait_until(lambda: metrics.is_file() and metrics.read_text().count("\n") >= 2, process)
    process.send_signal(signal.SIGTERM)
    output, errors = process.communicate(timeout=PATIENCE)
    assert (process.returncode, errors) == (3, "")
    assert "a signal or the time limit, after saving" in output
    steps = metrics.read_text().count("\n")
    assert (tmp_path / "runs" / "run" / "checkpoints" / f"step_{steps}" / "state.json").is_file()


def break_index(folder: Path, prefix: str) -> str:
    for ending in (".bin", ".idx", ".json"):
        (folder / f"broken{ending}").write_bytes(Path(prefix + ending).read_bytes())
    os.truncate(folder / "broken.idx", 100)
    return str(folder / "broken")


def other_tokenizer(folder: Path, prefix: str) -> str:
    train_bpe(["a few words"], 300, folder / "tokenizer.json")
    return str(folder / "tokenizer.json")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"training__bogus": 1}, "unknown key 'training.bogus'"),
        ({"training__max_steps": 1}, "here it is called training.train_steps"),
        ({"optimizer__lr": float("nan")}, "optimizer.lr = nan"),
        ({"optimizer__lr": "1e-3"}, "optimizer.lr = '1e-3'"),
        ({"training__global_batch_size": 5}, "training.global_batch_size = 5 is not a multiple of"),
        ({"parallel__x": 3}, "cannot be split over x = 3"),
        ({"parallel__pp": 4}, "makes 4 stages, but the model has 2 layers"),
        ({"model__preset": "gpt-6t"}, "is not a preset"),
        ({"name": "../../etc"}, "name = '../../etc'"),
        ({"data__train": [{"path": "/nowhere/corpus"}]}, "/nowhere/corpus.idx does not exist"),
        ({"data__train": lambda folder, prefix: [{"path": break_index(folder, prefix)}]}, "broken.idx has 100 bytes"),
        ({"data__tokenizer": other_tokenizer}, "is not the tokenizer that made"),
        ({"data__tokenizer": "/nowhere/tokenizer.json"}, "/nowhere/tokenizer.json does not exist"),
        ({"model__vocab_size": 200}, "set model.vocab_size = 257"),
        ({"training__seq_length": 100_000}, "of one window of seq_length 100000"),
        ({"checkpoint__resume": "/nowhere"}, "there is no checkpoint"),
        ({"training__device": "cuda"}, "needs a GPU"),
    ],
)
def test_train_refuses_and_writes_nothing(
    cli: Cli, tmp_path: Path, prefix: str, changes: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    values = {key: value(tmp_path, prefix) if callable(value) else value for key, value in changes.items()}
    path = run_file(tmp_path, prefix, **values)
    before = files_in(tmp_path)
    assert message in one_sentence(cli("train", path))
    assert files_in(tmp_path) == before
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("override", ["parallel.x", "optimizer.lr=fast", "training.lr=1", "name.deep=2"])
def test_wrong_override(cli: Cli, tmp_path: Path, prefix: str, override: str) -> None:
    section = override.partition("=")[0].rpartition(".")[2]
    assert section in one_sentence(cli("train", run_file(tmp_path, prefix), "--set", override))
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_refusal_of_local_workers(tmp_path: Path, prefix: str) -> None:
    """If only the workers can find a mistake, the parent prints one sentence, and hides the logs of torch and of the
    workers."""
    done = in_a_process("train", run_file(tmp_path, prefix, model__vocab_size=200, parallel__z=2))
    assert "set model.vocab_size = 257" in one_sentence((done.returncode, done.stdout, done.stderr))
    assert not (tmp_path / "runs").exists()


def test_a_loss_that_is_not_a_number(cli: Cli, tmp_path: Path, prefix: str) -> None:
    path = run_file(tmp_path, prefix, optimizer__lr=1e30, lr_scheduler__warmup_steps=0)
    code, _, errors = cli("train", path)
    assert code == 2
    assert errors.startswith("fourfold: the ")
    assert "lower optimizer.lr" in errors
    assert errors.count("\n") == 1
    assert not list((tmp_path / "runs").glob("**/*.safetensors"))
