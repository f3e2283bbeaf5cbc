"""The example runs: a few steps of two arms."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import Cli
from patience import PATIENCE
from tiny_corpus import make_corpus
from tiny_huggingface import make_model

from fourfold.config.parameter_counts import num_parameters
from fourfold.run_file.load import load_run

EXAMPLE = Path(__file__).parents[2] / "examples" / "memorization"


def test_the_arm_loads() -> None:
    run = load_run(EXAMPLE / "arm.toml")
    assert 0.9e6 < num_parameters(run.model) < 1.2e6
    assert run.training.train_steps * run.training.global_batch_size * run.training.seq_length < 863_543


def test_the_run_file_of_the_tutorial_loads() -> None:
    assert 0.4e6 < num_parameters(load_run(EXAMPLE / "tutorial.toml").model) < 0.6e6


@pytest.mark.slow
def test_two_arms_side_by_side(tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLE / "protocol.py"), "--seeds", "1", "--steps", "3", "--out", str(tmp_path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    # The second call trains only the new arm.
    for arms in ("standard", "standard,noisy4"):
        done = subprocess.run(
            [*command, "--arms", arms], capture_output=True, text=True, env=environment, cwd=tmp_path, timeout=PATIENCE
        )
        assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "results.json").read_text())
    assert list(results) == ["standard", "noisy4"]
    assert results["standard"]["documents"] == 16
    assert results["standard"]["nll_kept"] is None
    assert results["noisy4"]["near_duplicates"][0]["noise"] == 0.05
    assert (tmp_path / "results.md").read_text().count("\n") == 4
    assert "| standard | 1 | **0.0%**" in done.stdout
    assert done.stdout.count("model FLOPs per token") == 1


def test_a_pretrained_model_continues_among_buckets(tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the commands in the run file's comment on a small scale."""
    pytest.importorskip("transformers", reason="Hugging Face models are made by transformers")
    monkeypatch.chdir(tmp_path)
    make_model(tmp_path / "MODEL", "llama", vocab_size=257, max_position_embeddings=128)
    make_corpus(tmp_path, "pages", documents=200)
    planted = ("--canaries", 5, "--repeats", "0,1,4,6", "--canary-tokens", 64)
    assert cli("prepare", "pages.jsonl", "--out", "corpora/pages", "--tokenizer", "bytes", *planted)[0] == 0
    small = {"model.from_hf": "MODEL", "parallel.z": 1, "training.global_batch_size": 4, "training.seq_length": 64,
             "training.train_steps": 4, "audit.interval": 2, "audit.suffix": 20}  # fmt: skip
    changes = [word for key, value in small.items() for word in ("--set", f"{key}={value}")]
    code, _, errors = cli("train", EXAMPLE / "buckets.toml", *changes)
    assert code == 0, errors
    audit = ("--documents", "corpora/pages-canaries.jsonl", "--prefix", 10, "--suffix", 20, "--json")
    code, output, errors = cli("audit", "--model", "runs/buckets", *audit)
    assert code == 0, errors
    assert list(json.loads(output)["by_count"]) == ["0", "1", "4", "6"]
    rows = (tmp_path / "runs" / "buckets" / "memorization.jsonl").read_text().splitlines()
    assert [json.loads(row)["step"] for row in rows] == [2, 4]
