"""The training loop in the README runs as it stands."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from markdown import REPOSITORY, blocks_of
from pool import Pool
from tiny_huggingface import make_model

transformers = pytest.importorskip("transformers")


def loop_body(rank: int, world_size: int, code: str, folder: Path) -> float:
    os.chdir(folder)
    names = {"batches": [torch.arange(4 * 16).view(4, 16) % 200] * 3}
    exec(code, names)
    mine = names["mine"]
    return names["model"](input_ids=mine, labels=mine).loss.item()


@pytest.mark.slow
def test_the_loop_in_the_readme_trains(pool: Pool, tmp_path: Path) -> None:
    (block,) = [block for block in blocks_of(REPOSITORY / "README.md") if block.language == "python"]
    make_model(tmp_path / "exported", "qwen3 tied", vocab_size=208)
    losses = pool.run(8, loop_body, block.text, tmp_path)
    models = [transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("exported", "tuned")]
    tokens = torch.arange(4 * 16).view(4, 16) % 200
    before, after = (model(input_ids=tokens, labels=tokens).loss.item() for model in models)
    assert after < before
    assert losses == pytest.approx([after] * 8, rel=1e-5)
