"""Runs on a streamed dataset that stop, or continue on other grids, equal a run that never stopped."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from poisoned_runs import NAN_GRADIENT, same_tensors, tensors_at, train_poisoned, train_without
from pool import Pool
from tiny_corpus import make_corpus, run_file
from tiny_hub import make_dataset

from fourfold.checkpoints.saved_state import read_state
from fourfold.config.run import RunConfig
from fourfold.environment import Place
from fourfold.errors import UserError
from fourfold.launch.job_processes import run_on_grid
from fourfold.run_file.load import load_run
from fourfold.training import trainer
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
    trainer.train(Place(rank, rank, world_size, world_size, "local"), run)


def train(run: RunConfig) -> None:
    run_on_grid("fourfold.training.trainer:train", [run], 1, "cpu")


def lines_of(run: RunConfig) -> list[dict[str, Any]]:
    return read_metrics(Path(run.output_dir, run.name, "metrics.jsonl"))


def test_a_run_that_stops_and_changes_its_grid_sees_what_one_process_sees(tmp_path: Path, pool: Pool) -> None:
    dataset = make_dataset(tmp_path / "tales", documents=400)
    shuffled = {"data__shuffle_buffer": 8}
    whole = make(tmp_path / "whole", dataset, **shuffled)
    train(whole)
    for steps, grid in ((3, {"dp": 2, "zero": 1}), (4, {"x": 2}), (8, {"z": 2})):
        axes = {f"parallel__{axis}": size for axis, size in grid.items()}
        run = make(tmp_path / "parts", dataset, training__train_steps=steps, **shuffled, **axes)
        pool.run(2, train_on, run)
    for expected, line in zip(lines_of(whole), lines_of(run), strict=True):
        assert line["trained_token_share"] == expected["trained_token_share"] < 0.95  # equal masks
        assert line["loss"] == pytest.approx(expected["loss"], rel=1e-4)
    assert lines_of(run)[-1]["loss"] < lines_of(run)[0]["loss"] - 0.3


@pytest.mark.parametrize(
    ("grid", "shuffled"),
    [({}, 0), ({"dp": 2}, 8)],
    ids=["one process", "dp 2, shuffled"],
)
@pytest.mark.slow
def test_a_streamed_run_that_rolled_back_equals_a_run_without_the_bad_batch(
    tmp_path: Path, pool: Pool, grid: dict[str, int], shuffled: int
) -> None:
    """The run rolls back from step 5 to 4, and from step 8 to 6. Then it skips steps 7 and 8."""
    dataset = make_dataset(tmp_path / "tales", documents=400)
    changes: dict[str, Any] = {f"parallel__{axis}": size for axis, size in grid.items()}
    changes |= {"checkpoint__interval": 2, "checkpoint__keep_latest_k": 0, "data__shuffle_buffer": shuffled}
    healthy = make(tmp_path / "healthy", dataset, **changes)
    changes |= {"checks__non_finite": "roll_back", "checks__roll_back_batches": 2}
    run = make(tmp_path / "run", dataset, **changes)
    ranks = run.parallel.world_size
    pool.run(ranks, train_poisoned, run, {5: NAN_GRADIENT, 8: NAN_GRADIENT})
    pool.run(ranks, train_without, healthy, {5, 7, 8})
    assert same_tensors(tensors_at(run, 8), tensors_at(healthy, 8))
    saved, expected = (read_state(Path(r.output_dir, "run", "checkpoints", "step_8")).stream for r in (run, healthy))
    assert saved is not None and saved == expected
    assert [line["step"] for line in lines_of(run) if line.get("skipped")] == [5, 7, 8]
    for line, other in zip(lines_of(run), lines_of(healthy), strict=True):
        assert line.get("skipped") or line["loss"] == other["loss"], "the batches after the return are the same"


def test_a_checkpoint_continues_only_on_its_own_data(tmp_path: Path) -> None:
    dataset = make_dataset(tmp_path / "tales", documents=400)
    train(make(tmp_path / "run", dataset, training__train_steps=2))
    checkpoint = tmp_path / "run/runs/run/checkpoints/step_2"
    saved = read_state(checkpoint).stream
    assert saved is not None
    assert (saved.source, len(saved.positions)) == (f"{dataset}:train", 2)
    with pytest.raises(UserError, match=r"in 2 streams, but the run file has .* in 4 streams; restore the old value"):
        train(make(tmp_path / "run", dataset, data__streams=4))
    with pytest.raises(
        UserError, match=r"data\.text_key = 'text', but the run file has 'title'; restore the old value"
    ):
        train(make(tmp_path / "run", dataset, data__text_key="title"))
    with pytest.raises(UserError, match=r"data\.shuffle_buffer = '0', but the run file has '8'; restore the old value"):
        train(make(tmp_path / "run", dataset, data__shuffle_buffer=8))
    other = make_dataset(tmp_path / "others", documents=400)
    with pytest.raises(UserError, match=rf"was trained on data.source = '{dataset}:train' in 2 streams"):
        train(make(tmp_path / "run", other))
    corpus = make_corpus(tmp_path)
    shutil.rmtree(tmp_path / "run")
    (tmp_path / "run").mkdir()
    train(load_run(run_file(tmp_path / "run", corpus, training__train_steps=2, training__micro_batch_size=1)))
    with pytest.raises(UserError, match=r"was trained on corpora on disk, but the run file has data.source = 'hf:"):
        train(make(tmp_path / "run", dataset))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"data__streams": 3}, "data.streams = 3 does not divide training.global_batch_size = 4"),
        ({"data__tokenizer": None}, "source = 'hf:tales' needs data.tokenizer"),
        ({"data__source": "tales"}, "data.source = 'tales': must be 'python-stdlib' or have the form 'hf:NAME'"),
        ({"data__train": [{"path": "corpus"}]}, r"give either data.train \(corpora\) or data.source"),
        ({"data__source": "python-stdlib"}, "is only for a streamed data.source = 'hf:NAME'; leave streams out"),
        (
            {"data__bos_token": "auto"},
            "data.bos_token = 'auto' needs a tokenizer.json, and data.tokenizer is 'bytes'",
        ),
    ],
)
def test_settings_that_do_not_suit_a_stream_are_refused(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        make(tmp_path / "run", "hf:tales", **changes)


def test_validation_has_the_same_tokenizer(tmp_path: Path) -> None:
    dataset = make_dataset(tmp_path / "tales", documents=400)
    corpus = make_corpus(tmp_path)
    validation = {"data__validation": [{"path": f"{corpus}-validation"}], "validation__interval": 1}
    run = make(tmp_path / "run", dataset, **validation, training__train_steps=1)
    train(run)
    assert "validation_loss" in lines_of(run)[0]
