"""A run that stops and continues on another grid has the same model, optimizer states, and data as a run that never
stopped."""

from __future__ import annotations

import json
import math
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from pool import Pool
from tiny_corpus import run_file

from fourfold.checkpoints.saved_weights import SavedWeights
from fourfold.config.run import RunConfig
from fourfold.data.loader import Loader, MicroBatch
from fourfold.environment import Place
from fourfold.reports.run_report import write_run_report
from fourfold.run_file.load import load_run
from fourfold.training import trainer
from fourfold.training.metrics import EXPERTS_FILE, read_metrics

CHANGES = {"model__num_hidden_layers": 4, "training__micro_batch_size": 1, "optimizer__eps": 1e-3}
"""With a smaller eps, Adam would turn rounding noise in near-zero gradients into updates of full size."""
PAIRS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {"x": 2, "z": 2}),
    ({"x": 2, "z": 2}, {"pp": 2, "dp": 2, "zero": 1}),
    ({"x": 4}, {"z": 4}),
    ({"z": 4}, {"cp": 2, "dp": 2}),
    ({"y": 2, "z": 2}, {"x": 2, "y": 2}),
    ({"pp": 4}, {"pp": 2, "schedule": "GPipe"}),
    ({"pp": 2, "schedule": "Interleaved1F1B", "layers_per_stage": [1, 1, 1, 1]}, {}),
    ({"cp": 4}, {"x": 2, "cp": 2}),
    ({"dp": 4, "zero": 3}, {"dp": 2, "zero": 0}),
    ({"dp": 2, "zero": 2, "x": 2}, {"dp": 4, "zero": 1}),
    ({"pp": 2, "x": 2}, {"x": 2, "dp": 2, "zero": 3}),
    ({"z": 3}, {"pp": 2, "cp": 2}),
]


def on_grid(folder: Path, prefix: str, grid: dict[str, Any], **changes: Any) -> RunConfig:
    folder.mkdir(exist_ok=True)
    axes = {f"parallel__{axis}": size for axis, size in grid.items()}
    return load_run(run_file(folder, prefix, **{**CHANGES, **changes, **axes}))


def train_until(rank: int, world_size: int, run: RunConfig, stop: int, samples: Path | None = None) -> None:
    """Train until rank 0 is asked to stop during step ``stop``. Write the samples of each step that this rank has
    read."""
    begin_step, batches = trainer.begin_step, Loader.step
    read: dict[int, list[int]] = {}

    def begin_and_stop(step: int) -> None:
        begin_step(step)
        if rank == 0 and step + 1 == stop:
            os.kill(os.getpid(), signal.SIGTERM)

    def noted(loader: Loader, step: int) -> list[MicroBatch[NDArray[np.int64]]]:
        read[step] = loader.sample_numbers(step).flatten().tolist()
        return batches(loader, step)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(trainer, "begin_step", begin_and_stop)
        patched.setattr(Loader, "step", noted)
        outcome = trainer.train(Place(rank, rank, world_size, world_size, "local"), run)
    assert outcome.steps == stop
    if samples is not None:
        (samples / f"{stop}-{rank}.json").write_text(json.dumps(read))


def metrics_of(run: RunConfig) -> list[dict[str, Any]]:
    return read_metrics(Path(run.output_dir, run.name, "metrics.jsonl"))


def weights_of(run: RunConfig, step: int) -> dict[str, torch.Tensor]:
    saved = SavedWeights(Path(run.output_dir, run.name, "checkpoints", f"step_{step}"))
    return {name: saved.read(name) for name in saved.shapes}


def assert_close(run: RunConfig, expected: RunConfig) -> None:
    """Check that two runs are as close as the roundings of two grids allow."""
    ours, theirs = metrics_of(run), metrics_of(expected)
    assert [record["step"] for record in ours] == [record["step"] for record in theirs]
    for key, tolerance in (("loss", 1e-5), ("grad_norm", 1e-4)):
        assert [r[key] for r in ours] == pytest.approx([r[key] for r in theirs], rel=tolerance)
    steps = len(theirs)
    for name, weight in weights_of(expected, steps).items():
        torch.testing.assert_close(weights_of(run, steps)[name], weight, rtol=1e-4, atol=1e-5)


def test_one_run_on_four_grids(pool: Pool, tmp_path: Path, prefix: str) -> None:
    changes = {"training__train_steps": 4, "checkpoint__interval": 2}
    expected = on_grid(tmp_path / "expected", prefix, {}, **changes)
    pool.run(1, train_until, expected, 4)
    for stop, grid in zip((1, 2, 3, 4), [{"pp": 2}, {"x": 2}, {"cp": 2}, {}], strict=True):
        run = on_grid(tmp_path / "run", prefix, grid, **changes)
        pool.run(run.parallel.world_size, train_until, run, stop)
    assert_close(run, expected)


EXPERTS = {
    "model__num_experts": 4,
    "model__moe_intermediate_size": 48,
    "model__router_bias": True,
    "model__shared_expert_intermediate_size": 24,
    "moe__load_balancing_loss": 0.1,
    "moe__z_loss": 1e-3,
    "moe__bias_update_rate": 1e-3,
    "moe__capacity_factor": 1.0,
    "checks__replay_interval": 2,
    "metrics__log_interval": 1,
    "training__train_steps": 4,
    "model__num_hidden_layers": 2,
}
FIGURES = ("expert_load", "dropped_share", "router_entropy", "balance_loss", "router_z_loss")


@pytest.mark.parametrize(
    "grids",
    [
        [{"dp": 2, "ep": 2, "zero": 1}, {"y": 2}],
        pytest.param(
            [{"dp": 4, "ep": 4, "zero": 1}, {"x": 2, "z": 2, "ep": 2}, {"pp": 2, "cp": 2, "ep": 2}, {"y": 2}],
            marks=pytest.mark.slow,
        ),
    ],
    ids=len,
)
def test_one_run_of_experts_on_several_grids(
    pool: Pool, tmp_path: Path, prefix: str, grids: list[dict[str, int]]
) -> None:
    expected = on_grid(tmp_path / "expected", prefix, {}, **EXPERTS)
    pool.run(1, train_until, expected, 4)
    for number, grid in enumerate(grids, 1):
        run = on_grid(tmp_path / "run", prefix, grid, **EXPERTS | {"training__micro_batch_size": 1})
        pool.run(run.parallel.world_size, train_until, run, 4 * number // len(grids))
    assert_close(run, expected)
    for ours, theirs in zip(metrics_of(run), metrics_of(expected), strict=True):
        assert [ours[key] for key in FIGURES] == pytest.approx([theirs[key] for key in FIGURES], rel=1e-5)
        assert 1 <= ours["expert_load"] <= 2
        assert 0 < ours["dropped_share"] < 0.5
        assert 1 < ours["router_entropy"] <= math.log(4) + 1e-6
    folder = Path(run.output_dir, run.name)
    for ours, figures in zip(read_metrics(folder / EXPERTS_FILE), metrics_of(run), strict=True):  # one line per step
        rows = ours["tokens_per_expert"]
        assert [sum(each) for each in rows] == [2 * figures["tokens"] // figures["step"]] * 2
        assert ours["layers"] == [0, 1]
        assert max(max(each) * 4 / sum(each) for each in rows) == pytest.approx(figures["expert_load"])
        for key in ("dropped_share", "router_entropy"):
            assert sum(ours[key]) / 2 == pytest.approx(figures[key])
    assert "Load of the busiest expert" in write_run_report(folder).read_text()


@pytest.mark.slow
@pytest.mark.parametrize(("first", "second"), PAIRS, ids=str)
def test_pairs_of_grids(pool: Pool, tmp_path: Path, prefix: str, first: dict[str, Any], second: dict[str, Any]) -> None:
    batch = {"training__global_batch_size": 12}  # this batch can be divided by 3 and by 4
    expected = on_grid(tmp_path / "expected", prefix, {}, **batch)
    pool.run(1, train_until, expected, 8)
    for stop, grid in ((4, first), (8, second)):
        run = on_grid(tmp_path / "run", prefix, grid, **batch)
        pool.run(run.parallel.world_size, train_until, run, stop)
    assert_close(run, expected)


@pytest.mark.parametrize(("steps", "stops"), [(12, 3), pytest.param(200, 10, marks=pytest.mark.slow)])
def test_each_sample_is_seen_once(pool: Pool, tmp_path: Path, prefix: str, steps: int, stops: int) -> None:
    """On all grids of a run, the ranks of each step together read exactly its samples."""
    grids: list[dict[str, Any]] = [{"dp": 2}, {"x": 2}, {"z": 2, "dp": 2}, {}, {"cp": 2}, {"pp": 2}, {"dp": 4}]
    seen: dict[int, list[int]] = {}
    for attempt in range(stops + 1):
        stop = steps * (attempt + 1) // (stops + 1)
        run = on_grid(tmp_path, prefix, grids[attempt % len(grids)], training__train_steps=steps)
        ranks = run.parallel.world_size
        pool.run(ranks, train_until, run, stop, tmp_path)
        read = [json.loads((tmp_path / f"{stop}-{rank}.json").read_text()) for rank in range(ranks)]
        for step in read[0]:
            assert int(step) not in seen
            # Ranks that share a sequence report the same shares.
            shares = {tuple(each[step]) for each in read}
            seen[int(step)] = sorted(number for share in shares for number in share)
    batch = run.training.global_batch_size
    assert seen == {step: list(range(step * batch, (step + 1) * batch)) for step in range(steps)}
