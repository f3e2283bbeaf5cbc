"""Runs on a streamed dataset: stopped, on other grids, they are the run that never stopped."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from pool import Pool
from tiny_corpus import make_corpus, run_file
from tiny_hub import make_dataset

from fourfold.checkpoints.saved_state import read_state
from fourfold.config.run import RunConfig
from fourfold.environment import Place
from fourfold.errors import UserError
from fourfold.launch.job_processes import run_on_grid
from fourfold.run_file.load import load_run
from fourfold.training import loop
from fourfold.training.metrics import read_metrics

pytest.importorskip("datasets")

STREAMED: dict[str, Any] = {
    "data__train": None,
    "data__validation": None,
    "data__tokenizer": "bytes",
    "data__streams": 2,
    "data__mask_documents": True,
    "masks.goldfish__strategy": "hash",
    "masks.goldfish__k": 4,
    "masks.goldfish__h": 5,
    "training__micro_batch_size": 1,
    "optimizer__eps": 1e-3,
    "lr_scheduler__decay_style": "constant",
}


def make(folder: Path, dataset: str, **changes: Any) -> RunConfig:
    folder.mkdir(exist_ok=True)
    return load_run(run_file(folder, "none", **{**STREAMED, "data__source": dataset, **changes}))


def train_on(rank: int, world_size: int, run: RunConfig) -> None:
    loop.train(Place(rank, rank, world_size, world_size, "local"), run)


def train(run: RunConfig) -> None:
    run_on_grid("fourfold.training.loop:train", [run], 1, "cpu")


def lines_of(run: RunConfig) -> list[dict[str, Any]]:
    return read_metrics(Path(run.output_dir, run.name, "metrics.jsonl"))


def test_a_run_that_stops_and_changes_its_grid_sees_what_one_process_sees(tmp_path: Path, pool: Pool) -> None:
    dataset = make_dataset(tmp_path / "tales", documents=400)
    whole = make(tmp_path / "whole", dataset)
    train(whole)
    for steps, grid in ((3, {"dp": 2, "zero": 1}), (4, {"x": 2}), (8, {"z": 2})):
        axes = {f"parallel__{axis}": size for axis, size in grid.items()}
        run = make(tmp_path / "parts", dataset, training__train_steps=steps, **axes)
        pool.run(2, train_on, run)
    for expected, line in zip(lines_of(whole), lines_of(run), strict=True):
        assert line["trained_token_share"] == expected["trained_token_share"] < 0.95  # the same masks, to the token
        assert line["loss"] == pytest.approx(expected["loss"], rel=1e-4)
    assert lines_of(run)[-1]["loss"] < lines_of(run)[0]["loss"] - 0.3


def test_a_checkpoint_goes_on_in_its_own_data_only(tmp_path: Path) -> None:
    dataset = make_dataset(tmp_path / "tales", documents=400)
    train(make(tmp_path / "run", dataset, training__train_steps=2))
    checkpoint = tmp_path / "run/runs/run/checkpoints/step_2"
    saved = read_state(checkpoint).stream
    assert saved is not None
    assert (saved.source, len(saved.positions)) == (f"{dataset}:train", 2)
    with pytest.raises(UserError, match=r"in 2 streams, and the run file has .* in 4 streams; set it back"):
        train(make(tmp_path / "run", dataset, data__streams=4))
    with pytest.raises(UserError, match=r"another data\.text_key: 'text', not 'title'; set it back"):
        train(make(tmp_path / "run", dataset, data__text_key="title"))
    other = make_dataset(tmp_path / "others", documents=400)
    with pytest.raises(UserError, match=rf"was trained on data.source = '{dataset}:train' in 2 streams"):
        train(make(tmp_path / "run", other))
    corpus = make_corpus(tmp_path)
    shutil.rmtree(tmp_path / "run")
    (tmp_path / "run").mkdir()
    train(load_run(run_file(tmp_path / "run", corpus, training__train_steps=2, training__micro_batch_size=1)))
    with pytest.raises(UserError, match=r"was trained on corpora on disk, and the run file has data.source = 'hf:"):
        train(make(tmp_path / "run", dataset))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"data__streams": 3}, "data.streams = 3 does not divide training.global_batch_size = 4"),
        ({"data__tokenizer": None}, "source = 'hf:tales' needs data.tokenizer"),
        ({"data__source": "tales"}, "source = 'tales' is neither 'python-stdlib' nor of the form 'hf:NAME'"),
        ({"data__train": [{"path": "corpus"}]}, r"give either data.train \(corpora\) or data.source"),
        ({"data__source": "python-stdlib"}, "streams is of a streamed source = 'hf:NAME'; remove it"),
    ],
)
def test_what_a_stream_does_not_go_with(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        make(tmp_path / "run", "hf:tales", **changes)


def test_validation_has_the_same_tokenizer(tmp_path: Path) -> None:
    dataset = make_dataset(tmp_path / "tales", documents=400)
    corpus = make_corpus(tmp_path)
    validation = {"data__validation": [{"path": f"{corpus}-validation"}], "validation__interval": 1}
    run = make(tmp_path / "run", dataset, **validation, training__train_steps=1)
    train(run)
    assert "validation_loss" in lines_of(run)[0]
