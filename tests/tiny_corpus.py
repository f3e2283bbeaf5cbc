"""A small corpus for tests, and run files that train on it."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from pathlib import Path

from fourfold.data.prepare import prepare
from fourfold.data.sources import list_inputs, read_documents

WORDS = ("grid", "axis", "tile", "shard", "gather", "reduce", "scatter", "token", "layer", "head", "norm", "loss")


def line(**values: object) -> str:
    """Return one document of a .jsonl file."""
    return json.dumps(values) + "\n"


def documents_of(inputs: Iterable[str | Path]) -> list[str]:
    """Return every document of these inputs, in order."""
    return [text for file in list_inputs(inputs) for text in read_documents(file.path, "text")]


def make_corpus(folder: Path, name: str = "corpus", documents: int = 60, tokenizer: str = "bytes") -> str:
    """Prepare a corpus of random sentences, about 100 bytes each, and hold out a fifth of them. Return the corpus's
    prefix."""
    chance = random.Random(name)
    texts = (" ".join(chance.choices(WORDS, k=chance.randint(10, 30))) for _ in range(documents))
    lines = folder / f"{name}.jsonl"
    lines.write_text("".join(f'{{"text": "{text}"}}\n' for text in texts))
    prepare([lines], folder / name, tokenizer=tokenizer, workers=1, validation_fraction=0.2)
    return str(folder / name)


def run_file(folder: Path, corpus: str, **changes: object) -> Path:
    """Write FOLDER/run.toml, which trains a tiny Llama for 8 steps of 4 sequences of 32 bytes. Arguments such as
    ``section__key=value`` change keys."""
    values: dict[str, object] = {
        "output_dir": str(folder / "runs"),
        "model__preset": "llama-tiny",
        "data__train": [{"path": corpus}],
        "data__validation": [{"path": f"{corpus}-validation"}],
        "training__global_batch_size": 4,
        "training__micro_batch_size": 2,
        "training__seq_length": 32,
        "training__train_steps": 8,
        "optimizer__lr": 1e-2,
        "lr_scheduler__warmup_steps": 2,
        **changes,
    }
    lines: dict[str, list[str]] = {"": []}
    for place, value in values.items():
        section, _, key = place.rpartition("__")
        if value is not None:
            lines.setdefault(section, []).append(f"{key} = {_toml(value)}")
    text = "\n".join("\n".join([f"[{section}]"] * bool(section) + keys) for section, keys in lines.items())
    path = folder / "run.toml"
    path.write_text(text + "\n")
    return path


def _toml(value: object) -> str:
    if isinstance(value, list):
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {_toml(item)}" for key, item in value.items()) + "}"
    return str(value).lower() if isinstance(value, bool) else f'"{value}"' if isinstance(value, str) else str(value)
