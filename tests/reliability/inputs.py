"""Everything that the program reads: a good input of each kind, ways to damage it, and the command that reads it."""

from __future__ import annotations

import csv
import io
import json
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from command_line import exit_code
from hypothesis import strategies as st
from mutations import as_json, as_toml, contents, texts
from planner_rows import COLUMNS
from tiny_corpus import make_corpus, run_file
from tiny_huggingface import make_model

from fourfold.checkpoints.integrity import seal
from fourfold.data.tokenizer import train_bpe
from fourfold.planning.machines.machine import load_machine

Changes = dict[str, bytes]
"""New contents of files, by their path in the input's folder."""


@dataclass(frozen=True)
class Kind:
    """A kind of input. Its command runs in the input's folder."""

    make: Callable[[Path], None]
    damage: Callable[[Path], st.SearchStrategy[Changes]]
    command: Sequence[object]
    codes: Sequence[int] = (0, 2)
    finish: Callable[[Path], object] = lambda folder: None
    """Adjusts the damaged input so that the damage looks intended."""
    seeds: int = 1
    """Number of seeds, with 250 cases each."""
    fast: int = 3
    """Number of cases in the fast tests."""


def one_file(name: str, tree: Callable[[bytes], Any] | None = None, write: Callable[[Any], str] = as_json) -> Any:
    """Return a strategy that damages one file. If ``tree`` can parse the file, values of its tree are damaged.
    Otherwise, bytes are."""

    def damage(folder: Path) -> st.SearchStrategy[Changes]:
        good = (folder / name).read_bytes()
        mutants = contents(good) if tree is None else texts(tree(good), write)
        return mutants.map(lambda content: {name: content})

    return damage


def any_of(*damages: Callable[[Path], st.SearchStrategy[Changes]]) -> Callable[[Path], st.SearchStrategy[Changes]]:
    return lambda folder: st.one_of(*(damage(folder) for damage in damages))


def toml(content: bytes) -> Any:
    return tomllib.loads(content.decode())


MORE = {
    "model": {
        "preset": "llama-tiny", "vocab_size": 257, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 8,
        "num_key_value_heads": 4, "intermediate_size": 176, "max_position_embeddings": 64, "rope_theta": 1e4,
        "norm_eps": 1e-5, "initializer_range": 0.02, "pad_vocab_size_to_multiple_of": 128, "qk_norm": False,
        "rope_scaling": {"rope_type": "linear", "factor": 2.0},
    },
    "training": {"precision": "fp32", "seed": 0, "device": "cpu"},
    "activation_checkpoint": {"mode": "none", "every": 1},
    "overlap": {"weight_prefetch": 1},
    "loss_scaling": {"initial": 1024.0, "growth_interval": 2},
    "lr_scheduler": {"decay_style": "wsd", "decay_ratio": 0.2, "min_lr_ratio": 0.1},
    "parallel": {"x": 1, "z": 1, "zero": 0, "schedule": "1F1B"},
    "masks": {"goldfish": {"strategy": "hash", "k": 4, "h": 13}},
    "optimizer": {"betas": [0.9, 0.95], "eps": 1e-8, "groups": [{"parameters": ["layers.*"], "lr_ratio": 0.5}]},
    "checkpoint": {"interval": 1, "resume": "auto", "keep_latest_k": 1},
    "metrics": {"log_interval": 1, "machine": "laptop"},
    "validation": {"interval": 1, "steps": 1},
    "sample": {"prompt": "the", "max_new_tokens": 2, "temperature": 0.8},
}  # fmt: skip
"""More keys for the run file, so that damage can hit them."""


def make_run_file(folder: Path) -> None:
    """Write a run file with relative paths, and its corpora."""
    corpus = make_corpus(folder)
    path = run_file(folder, corpus, training__train_steps=1, optimizer__lr=1e-3, validation__interval=0)
    table = tomllib.loads(path.read_text().replace(f"{folder}/", ""))
    for section, keys in MORE.items():
        table[section] = {**table.get(section, {}), **keys}
    path.write_text(as_toml(table))


def make_checkpoint(folder: Path) -> None:
    """Make the folder of a run that has taken one of two steps."""
    make_run_file(folder)
    assert exit_code("train", "run.toml", "--set", "checkpoint.keep_latest_k=0") == 0
    state = next((folder / "runs").rglob("state.json"))
    state.parent.rename(folder / "step_1")


def reseal(folder: Path) -> None:
    for manifest in (folder / "step_1").glob("manifest-*.json"):
        manifest.unlink()
    seal(folder / "step_1")


def damage_checkpoint(folder: Path) -> st.SearchStrategy[Changes]:
    """Damage the bytes of any file."""
    files = sorted(path for path in (folder / "step_1").iterdir())
    return st.sampled_from(files).flatmap(
        lambda file: contents(file.read_bytes()).map(lambda content: {f"step_1/{file.name}": content})
    )


def make_tokenizer(folder: Path) -> None:
    train_bpe(["the quick brown fox jumps over the lazy dog " * 5], 280, folder / "tokenizer.json")
    (folder / "text.jsonl").write_text('{"text": "the dog"}\n{"text": "a fox"}\n')


def make_basis(folder: Path) -> None:
    """Write a model of transformers, its tokenizer, and a basis."""
    model = make_model(folder / "model", "llama gqa tied", vocab_size=300, max_position_embeddings=64)
    (folder / "text.txt").write_text("grid axis tile shard gather reduce scatter token layer head norm loss " * 20)
    train_bpe([(folder / "text.txt").read_text()], 290, model / "tokenizer.json")
    command = ("loki", "calibrate", "--model", "model", "--text", "text.txt", "--out", "basis.safetensors")
    assert exit_code(*command, "--seq-len", 32, "--tokens", 512, "--tolerance", 10) == 0


def header_of(content: bytes) -> Any:
    """Return the header of a safetensors file."""
    return json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])


def damage_basis(folder: Path) -> st.SearchStrategy[Changes]:
    good = (folder / "basis.safetensors").read_bytes()
    size = int.from_bytes(good[:8], "little")
    tensors = good[8 + size :]
    headers = texts(header_of(good), as_json).map(lambda text: len(text).to_bytes(8, "little") + text + tensors)
    return st.one_of(headers, contents(good)).map(lambda content: {"basis.safetensors": content})


def make_machine(folder: Path) -> None:
    built_in = Path(load_machine.__code__.co_filename).with_name("dgx-h100.toml")
    (folder / "machine.toml").write_bytes(built_in.read_bytes())


def make_rows(folder: Path) -> None:
    (folder / "rows.csv").write_text(as_csv([COLUMNS, {**COLUMNS, "tp": "2", "memory_gb": "20"}]))


def as_csv(rows: Any) -> str:
    """Return a list of rows as CSV, and anything else unchanged."""
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        return as_json(rows)[:10_000]
    text = io.StringIO()
    writer = csv.DictWriter(text, list(COLUMNS), extrasaction="ignore")
    writer.writeheader()
    for row in rows:
        writer.writerow({key: as_json(cell) if isinstance(cell, list | dict) else cell for key, cell in row.items()})
    return text.getvalue()


def rows_of(content: bytes) -> Any:
    return list(csv.DictReader(io.StringIO(content.decode())))


RUN = any_of(one_file("run.toml", toml, as_toml))
STATE = one_file("step_1/state.json", json.loads)
VERIFY, DAMAGED = ("checkpoint", "verify", "step_1"), (0, 1, 2)
GENERATE = ("generate", "--model", "model", "--prompt", "grid", "--max-new-tokens", 2,
            "--basis", "basis.safetensors", "--loki", "min_k=1", "--loki", "min_seq=0")  # fmt: skip
TRAIN = ("train", "run.toml", "--set", "validation.steps=1", "--set", "sample.max_new_tokens=2",
         "--set", "training.global_batch_size=4", "--set")  # fmt: skip
PLAN = ("plan", "--model", "llama-tiny", "--gpus", 2, "--limit", "pp=1", "--limit", "cp=1")

KINDS = {
    "run file, its data": Kind(make_run_file, RUN, ("masks", "run.toml", "--tokens", 200), seeds=8),
    "run file, its plan": Kind(make_run_file, RUN, ("plan", "run.toml"), seeds=4, fast=2),
    "run file, trained": Kind(make_run_file, RUN, (*TRAIN, "training.train_steps=1"), seeds=2, fast=1),
    "corpus": Kind(
        make_run_file,
        any_of(one_file("corpus.idx"), one_file("corpus.bin"), one_file("corpus-validation.idx")),
        ("masks", "run.toml", "--tokens", 200),
        seeds=6,
    ),
    "corpus description": Kind(
        make_run_file, one_file("corpus.json", json.loads), ("masks", "run.toml", "--tokens", 200), seeds=3
    ),
    "checkpoint": Kind(make_checkpoint, damage_checkpoint, VERIFY, codes=DAMAGED, seeds=3),
    "checkpoint state": Kind(make_checkpoint, STATE, VERIFY, codes=DAMAGED, finish=reseal, seeds=3),
    "checkpoint resumed": Kind(
        make_checkpoint,
        STATE,
        (*TRAIN, "training.train_steps=2", "--set", "checkpoint.resume=step_1"),
        finish=reseal,
        fast=1,
    ),
    "tokenizer": Kind(
        make_tokenizer,
        one_file("tokenizer.json", json.loads),
        ("prepare", "text.jsonl", "--out", "runs/corpus", "--tokenizer", "tokenizer.json", "--workers", 1, "--force"),
        seeds=3,
    ),
    "basis": Kind(make_basis, damage_basis, GENERATE, seeds=3, fast=1),
    "machine file": Kind(
        make_machine,
        one_file("machine.toml", toml, as_toml),
        (*PLAN, "--machine", "machine.toml"),
        seeds=3,
    ),
    "rows": Kind(make_rows, one_file("rows.csv", rows_of, as_csv), ("plan", "validate", "rows.csv"), seeds=3),
}
