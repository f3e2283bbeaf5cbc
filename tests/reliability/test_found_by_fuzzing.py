"""Inputs that once caused a traceback or a hang. Each is now refused in one sentence."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from command_line import Cli
from mutations import DEPTH
from tiny_runs import tiny_run

from fourfold import jobs
from fourfold.checkpoints.find_checkpoints import STATE_FILE
from fourfold.checkpoints.integrity import DamagedCheckpoint, seal
from fourfold.checkpoints.saved_state import read_state, state_of, write_state
from fourfold.data.manifest import Manifest, corpus_tokenizer, read_manifest
from fourfold.data.tokenizer import ByteTokenizer
from fourfold.errors import UserError, sentence
from fourfold.planning.machines.machine import load_machine
from fourfold.run_file.load import load_run
from fourfold.training.sample import sample_text

DEEP = "[" * DEPTH + "]" * DEPTH
MANIFEST: dict[str, Any] = {
    "split": "train", "documents": 1, "tokens": 2, "bytes": 3, "tokenizer": "bytes", "fingerprint": "bytes",
    "vocab_size": 257, "eod_id": 256, "dtype": "uint16", "inputs": [], "text_key": "text", "validation_fraction": 0.0,
    "seed": 0, "request": "",
}  # fmt: skip


def run_text(key: str, value: str) -> str:
    """Return a run file with one key set to this value."""
    sections = {
        "model": ['preset = "llama-tiny"'],
        "data": ['source = "python-stdlib"'],
        "training": ["global_batch_size = 4", "seq_length = 32", "train_steps = 1"],
    }
    section, _, name = key.rpartition(".")
    lines = [line for line in sections.get(section, []) if not line.startswith(f"{name} ")]
    sections[section] = [*lines, f"{name} = {value}"]
    top = sections.pop("", [])
    return "\n".join([*top, *("\n".join([f"[{header}]", *lines]) for header, lines in sections.items())])


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model.hidden_size", DEEP),
        ("model.hidden_size", str(10**400)),
        ("model.hidden_size", str(2**40)),
        ("model.num_hidden_layers", str(10**9)),
        ("model.num_attention_heads", str(2**31 - 1)),
        ("model.vocab_size", str(2**62)),
        ("training.seq_length", str(10**12)),
        ("training.global_batch_size", str(10**12)),
        ("masks.goldfish.h", str(2**62)),
        ("parallel.x", str(2**62)),
        ("training.train_steps", str(2**63)),
        ("name", f'"{"n" * 300}"'),
        ("output_dir", f'"{"n" * 300}"'),
        ("output_dir", f'"{"n/" * 5000}"'),
        ("data.cache_dir", '"a\\u0000b"'),
        ("data.tokenizer", f'"{"t" * 100_000}"'),
    ],
    ids=lambda value: value[:24],
)
def test_a_run_file(key: str, value: str, tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(run_text(key, value))
    with pytest.raises(UserError) as error:
        load_run(path)
    assert len(str(error.value)) < 500


def test_a_name_that_is_too_long_for_a_file(cli: Cli) -> None:
    code, _, errors = cli("masks", f"{'n' * 300}.toml")
    assert code == 2
    assert errors.startswith("fourfold: ") and errors.count("\n") == 1


def test_a_machine_file(tmp_path: Path) -> None:
    (tmp_path / "deep.toml").write_text(f"device = {DEEP}")
    with pytest.raises(UserError, match="nested too deeply"):
        load_machine(str(tmp_path / "deep.toml"))


@pytest.mark.parametrize(
    "change",
    [{"tokenizer": 5}, {"tokenizer": None}, {"tokenizer": "../tokenizer.json"}, {"tokenizer": "/etc/passwd"},
     {"tokenizer": "n" * 300}, {"tokenizer": "a\0b"}, {"tokens": [1]}, {"inputs": DEEP}, {"unknown": 1}],
    ids=lambda change: str(change)[:24],
)  # fmt: skip
def test_the_description_of_a_corpus(change: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "corpus.json").write_text(json.dumps({**MANIFEST, **change}).replace(f'"{DEEP}"', DEEP))
    with pytest.raises(UserError, match=r"corpus\.json"):
        corpus_tokenizer(tmp_path / "corpus")


def test_a_good_description_of_a_corpus(tmp_path: Path) -> None:
    (tmp_path / "corpus.json").write_text(json.dumps(MANIFEST))
    assert read_manifest(tmp_path / "corpus") == Manifest(**MANIFEST)


@pytest.mark.parametrize(
    "change",
    [{"optimizer_steps": 10**30}, {"optimizer_steps": 2**40}, {"optimizer_steps": -1}, {"step": 2**63},
     {"loss_scale": [-1.0, 0]}, {"model": {"": 1}}, {"model": {"hidden_size": 2**50}},
     {"optimization": {"lr_scheduler.warmup_steps": "0"}}, {"optimization": {"lr_scheduler.decay_style": "none"}},
     {"optimization": {"training.train_steps": None}}, {"optimization": {"optimizer.lr": "3e-4"}},
     {"optimization": {"optimizer.name": "adamx"}}],
    ids=str,
)  # fmt: skip
def test_the_state_of_a_checkpoint(change: dict[str, Any], tmp_path: Path) -> None:
    write_state(tmp_path, state_of(tiny_run(), 1))
    state = json.loads((tmp_path / STATE_FILE).read_text())
    if isinstance(value := change.get(key := next(iter(change))), dict):
        change = {key: {**state[key], **value}}
    (tmp_path / STATE_FILE).write_text(json.dumps({**state, **change}))
    seal(tmp_path)
    with pytest.raises(DamagedCheckpoint, match=r"state\.json is damaged"):
        read_state(tmp_path)


def sample(logit: float, temperature: float) -> str:
    """Sample from a model that gives every token the same logit, except token 65, whose logit is larger by 1."""
    logits_V = torch.full((257,), logit)
    logits_V[65] += 1
    job: Any = SimpleNamespace(
        run=tiny_run(sample={"prompt": "", "max_new_tokens": 3, "temperature": temperature}),
        device=torch.device("cpu"),
        next_token_logits=lambda tokens, position: logits_V,
    )
    return sample_text(job, "", ByteTokenizer())


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("logit", [float("nan"), float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_sample_of_logits_that_are_not_finite(logit: float, temperature: float) -> None:
    with pytest.raises(UserError, match="not finite"):
        sample(logit, temperature)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("temperature", [0.0, 5e-324, 1e-40, 1e-30])
def test_a_temperature_that_float32_does_not_hold(temperature: float) -> None:
    assert sample(0.0, temperature) == "AAA"


@pytest.mark.parametrize(
    "change", [{"hidden_size": 2**20}, {"vocab_size": 2 * 10**9}, {"num_hidden_layers": 100_000}], ids=str
)
def test_a_model_that_the_machine_cannot_hold(change: dict[str, int]) -> None:
    with pytest.raises(UserError, match="GB of memory"):
        jobs.train(tiny_run(model={"preset": "llama-tiny", **change}, training={"device": "cpu"}))


@pytest.mark.parametrize("text", ["a\nb", "\x1b[2J", "\0", "n" * 100_000])
def test_a_sentence_is_one_short_line(text: str) -> None:
    line = sentence(UserError(text))
    assert line.isprintable() and len(line) < 1500
