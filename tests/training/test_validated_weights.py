"""Validations decide which checkpoint is the best and when a run ends early. This file also tests the moving average of
the weights."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from command_line import Cli
from pool import Pool
from safetensors.torch import load_file
from tiny_corpus import run_file
from tiny_runs import GPT, tiny_run
from torch import Tensor

from fourfold.checkpoints.checkpoint import Checkpointer, load_checkpoint
from fourfold.checkpoints.find_checkpoints import BEST, list_checkpoints
from fourfold.checkpoints.saved_state import BestValidation
from fourfold.checkpoints.saved_weights import SavedWeights
from fourfold.config.during_training import ValidationConfig
from fourfold.config.run import CheckpointConfig, RunConfig
from fourfold.errors import UserError
from fourfold.launch.job_processes import run_on_grid
from fourfold.parallel.grid.grid import Grid
from fourfold.parallel.state import gather_full
from fourfold.run_file.load import load_run
from fourfold.training import trainer
from fourfold.training.job import Job
from fourfold.training.metrics import read_metrics
from fourfold.training.validation_loss import is_exhausted, note_validation
from fourfold.verification.batches import random_micro_batches

CPU = torch.device("cpu")


def train(run: RunConfig) -> Any:
    return run_on_grid("fourfold.training.trainer:train", [run], 1, "cpu")


def folder_of_checkpoints(run: RunConfig) -> Path:
    return Path(run.output_dir, run.name, "checkpoints")


@pytest.fixture
def losses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return a list of losses. Each validation of the run takes the next loss from the list, and gets 9 when the list
    is empty."""
    planned: list[float] = []
    monkeypatch.setattr(trainer, "validate", lambda *_: {"validation_loss": planned.pop(0) if planned else 9.0})
    return planned


def test_the_best_checkpoint_stays(tmp_path: Path, prefix: str, losses: list[float]) -> None:
    changes = {"validation__interval": 1, "validation__keep_best": True, "checkpoint__keep_latest_k": 1}
    run = load_run(run_file(tmp_path, prefix, checkpoint__interval=3, **changes))
    losses += [5.0, 3.0, 4.0, 3.0, 3.5]
    train(run)
    assert [path.name for path in list_checkpoints(folder_of_checkpoints(run))] == ["step_2", "step_8"]
    best = folder_of_checkpoints(run) / BEST
    assert best.resolve().name == "step_2"
    assert SavedWeights(best).state.step == 2

    longer = load_run(run_file(tmp_path, prefix, training__train_steps=10, checkpoint__interval=3, **changes))
    # The first loss is above the earlier best, which the resumed run must remember. The second is below it.
    losses += [3.2, 2.5]
    train(longer)
    assert [path.name for path in list_checkpoints(folder_of_checkpoints(run))] == ["step_10"]
    assert best.resolve().name == "step_10"


def test_the_best_checkpoint_of_a_run_that_went_back(tmp_path: Path, prefix: str, losses: list[float]) -> None:
    changes = {"validation__interval": 1, "validation__keep_best": True, "checkpoint__interval": 3}
    changes |= {"checkpoint__keep_latest_k": 3}
    run = load_run(run_file(tmp_path, prefix, **changes))
    losses += [6.0, 5.0, 4.0, 5.0, 5.0, 3.0]
    train(run)
    folder = folder_of_checkpoints(run)
    assert (folder / BEST).resolve().name == "step_6"

    changes |= {"checkpoint__resume": str(folder / "step_3"), "checkpoint__keep_latest_k": 1}
    losses += [5.0] * 5
    train(load_run(run_file(tmp_path, prefix, **changes)))
    assert [path.name for path in list_checkpoints(folder)] == ["step_3", "step_8"]
    assert (folder / BEST).resolve().name == "step_3"


def test_a_run_ends_when_nothing_improves(tmp_path: Path, prefix: str, losses: list[float]) -> None:
    changes = {"validation__interval": 2, "validation__patience": 2, "validation__min_improvement": 0.1}
    run = load_run(run_file(tmp_path, prefix, training__train_steps=30, **changes))
    losses += [5.0, 4.0, 3.95, 3.85, 3.8, 3.8]
    outcome = train(run)
    # 3.95 does not count as an improvement on 4.0. So 3.85 is compared with 4.0, and counts.
    assert (outcome.steps, outcome.stopped) == (12, False)
    assert [path.name for path in list_checkpoints(folder_of_checkpoints(run))] == ["step_12"]
    summary = Path(run.output_dir, run.name, "summary.json").read_text()
    assert "2 validations without a loss below the 3.8500 of step 8" in summary
    assert train(run).steps == 12, "the same command does not go on"


def test_a_loss_that_is_not_finite_is_never_the_best() -> None:
    best, config = BestValidation(), ValidationConfig(interval=1)
    assert [note_validation(best, config, step, loss) for step, loss in enumerate([math.nan, math.inf, 2.0])] == [
        False,
        False,
        True,
    ]


def test_improvements_are_counted_from_the_best() -> None:
    best, config = BestValidation(), ValidationConfig(interval=1, patience=2)
    assert [note_validation(best, config, step, loss) for step, loss in enumerate([2.0, 2.0, 1.9, float("nan")])] == [
        True,
        False,
        True,
        False,
    ]
    assert (best.loss, best.step, best.since) == (1.9, 2, 1) and not is_exhausted(best, config)
    note_validation(best, config, 4, 1.95)
    assert is_exhausted(best, config)


def test_the_average_is_validated_and_exported(tmp_path: Path, prefix: str, cli: Cli) -> None:
    """The average is computed by hand from the weights of every step, which a run without an average saves."""
    every = {"checkpoint__interval": 1, "checkpoint__keep_latest_k": 0, "validation__interval": 4}
    plain = load_run(run_file(tmp_path, prefix, name="plain", **every))
    train(plain)
    averaged = load_run(run_file(tmp_path, prefix, name="averaged", ema__decay=0.7, **every))
    train(averaged)
    by_hand: dict[str, Tensor] = {}
    for path in list_checkpoints(folder_of_checkpoints(plain)):
        saved = SavedWeights(path)
        now = {name: saved.read(name) for name in saved.shapes}
        by_hand = {name: 0.7 * by_hand.get(name, now[name]) + 0.3 * now[name] for name in now}
    end = folder_of_checkpoints(averaged) / "step_8"
    found, weights = SavedWeights(end, averaged=True), SavedWeights(end)
    assert all(torch.allclose(found.read(name), by_hand[name], atol=1e-6) for name in by_hand)
    assert all(torch.equal(weights.read(name), now[name]) for name in now), "training itself is the same"

    validated = [
        r for r in read_metrics(Path(averaged.output_dir, "averaged", "metrics.jsonl")) if "validation_loss" in r
    ]
    assert [record["step"] for record in validated] == [4, 8]
    assert all(record["ema_validation_loss"] > record["validation_loss"] for record in validated), "it lags behind"

    assert cli("checkpoint", "export-hf", end, tmp_path / "exported", "--ema")[0] == 0
    exported = load_file(tmp_path / "exported" / "model.safetensors")
    assert torch.equal(exported["model.norm.weight"], found.read("norm.weight"))
    code, _, errors = cli(
        "checkpoint", "export-hf", folder_of_checkpoints(plain) / "step_8", tmp_path / "none", "--ema"
    )
    assert code == 2 and "has no moving average of its weights; a run with ema.decay above 0 saves one" in errors


def averages_of(job: Job) -> dict[str, Tensor] | None:
    found = gather_full(job.trained, job.average.averages)
    return found if dist.get_rank() == 0 else None


def train_and_save(rank: int, world_size: int, run: RunConfig, folder: Path) -> dict[str, Tensor] | None:
    job = Job(run, Grid(run.parallel, "cpu"), CPU)
    job.initialize(run.training.seed)
    for step in range(2):
        job.train_step(random_micro_batches(run, step, job.grid, CPU), step)
    Checkpointer(folder, job, CheckpointConfig()).save(2)
    return averages_of(job)


def load(rank: int, world_size: int, run: RunConfig, path: Path) -> dict[str, Tensor] | None:
    job = Job(run, Grid(run.parallel, "cpu"), CPU)
    load_checkpoint(path, job)
    before = [shard.local.clone() for shard in job.trained]
    with job.averaged():
        assert all(torch.equal(s.local, a) for s, a in zip(job.trained, job.average.averages, strict=True))
    assert all(torch.equal(s.local, b) for s, b in zip(job.trained, before, strict=True))
    return averages_of(job)


def test_every_grid_reads_the_average_exactly(pool: Pool, tmp_path: Path) -> None:
    ema = {"ema": {"decay": 0.5}}
    saved = pool.run(2, train_and_save, tiny_run(GPT, {"z": 2}, **ema), tmp_path)[0]
    for parallel in ({}, {"x": 2, "pp": 2}):
        other = tiny_run(GPT, parallel, **ema)
        loaded = pool.run(other.parallel.world_size, load, other, tmp_path / "step_2")[0]
        assert saved.keys() == loaded.keys()
        assert all(torch.equal(saved[name], loaded[name]) for name in saved)


def test_an_average_may_begin_later(tmp_path: Path, prefix: str) -> None:
    train(load_run(run_file(tmp_path, prefix)))
    run = load_run(run_file(tmp_path, prefix, training__train_steps=9, ema__decay=0.5))
    train(run)
    before, after = (folder_of_checkpoints(run) / f"step_{step}" for step in (8, 9))
    expected = (SavedWeights(before).read("norm.weight") + SavedWeights(after).read("norm.weight")) / 2
    assert torch.allclose(SavedWeights(after, averaged=True).read("norm.weight"), expected, atol=1e-7)
    # Resuming with averaged weights must work too.
    train(load_run(run_file(tmp_path, prefix, training__train_steps=10)))


def go_back_to_the_start(rank: int, world_size: int, run: RunConfig, folder: Path) -> None:
    job = Job(run, Grid(run.parallel, "cpu"), CPU)
    job.initialize(run.training.seed)
    # Save as if the gradients of the first step had overflowed.
    Checkpointer(folder, job, CheckpointConfig()).save(1)
    for step in (1, 2):
        job.train_step(random_micro_batches(run, step, job.grid, CPU), step)
    load_checkpoint(folder / "step_1", job)
    job.train_step(random_micro_batches(run, 1, job.grid, CPU), 1)
    assert all(torch.equal(s.local, a) for s, a in zip(job.trained, job.average.averages, strict=True))


def test_an_average_begins_again_after_going_back_to_before_the_first_update(pool: Pool, tmp_path: Path) -> None:
    pool.run(1, go_back_to_the_start, tiny_run(GPT, {}, ema={"decay": 0.5}), tmp_path)


def test_what_is_refused(tmp_path: Path) -> None:
    for section in ({"keep_best": True}, {"patience": 3}):
        with pytest.raises(UserError, match="and interval = 0 never validates"):
            tiny_run(validation=section)
