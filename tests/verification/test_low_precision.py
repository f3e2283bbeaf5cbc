"""In low precision, a grid's error relative to float64 is about the error of one process. The limit allows slightly
more, because the grid also rounds partial sums."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from low_precision import LIMIT, PrecisionError, precision_error
from pool import Pool
from tiny_runs import LLAMA, tiny_run
from tuned_products import forced_layouts

from fourfold.config.run import ParallelConfig, RunConfig

SIXTEENS = LLAMA | {"num_key_value_heads": 8, "intermediate_size": 192, "num_hidden_layers": 4}
"""All sizes are multiples of 16 on every rank, as float8 needs them."""

PRECISIONS: dict[str, dict[str, Any]] = {
    "fp16": {"precision": "fp16"},
    "bf16 weights": {"precision": "bf16", "master_weights": "bf16"},
    "bf16 sums": {"precision": "bf16", "reduce_dtype": "bf16"},
    "bf16": {"precision": "bf16"},
    **{
        f"float8 {recipe}": {"precision": "bf16", "float8": recipe}
        for recipe in ("tensorwise", "rowwise", "rowwise_with_gw_hp")
    },
}
GRIDS = ({"x": 2}, {"y": 2}, {"z": 2}, {"dp": 2}, {"cp": 2}, {"pp": 2}, {"x": 2, "y": 2}, {"x": 2, "z": 2, "dp": 2})


def precision_body(rank: int, world_size: int, run: RunConfig) -> PrecisionError | None:
    return precision_error(run, torch.device("cpu"), steps=8)


def tuned_body(rank: int, world_size: int, run: RunConfig) -> PrecisionError | None:
    with forced_layouts(run):
        return precision_body(rank, world_size, run)


@pytest.mark.slow
@pytest.mark.parametrize("grid", [{"z": 2}, {"x": 2}, {"dp": 2, "zero": 2}, {"y": 2, "z": 2}], ids=str)
def test_tuned_matmuls_round_like_one_process(pool: Pool, grid: dict[str, int], tmp_path: Path) -> None:
    training = {"precision": "bf16", "tuned_products": "cached"}
    run = tiny_run(LLAMA, grid, training=training, output_dir=str(tmp_path))
    tuned, one = (pool.run(r.parallel.world_size, tuned_body, r)[0] for r in (run, alone(run)))
    assert tuned.gradients <= LIMIT * one.gradients
    assert tuned.weights <= LIMIT * one.weights


def alone(run: RunConfig) -> RunConfig:
    """Return the run on one process, without tuned matmul layouts."""
    training = run.training.model_copy(update={"tuned_products": "off"})
    return run.model_copy(update={"parallel": ParallelConfig(), "training": training})


@pytest.fixture(scope="module")
def errors_alone() -> dict[str, PrecisionError]:
    """Return the errors of one process in each precision, computed once. The errors of all grids are compared with
    them."""
    return {}


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_grid_rounds_as_one_process_does(
    pool: Pool, precision: str, grid: dict[str, int], errors_alone: dict[str, PrecisionError], tmp_path: Path
) -> None:
    training = PRECISIONS[precision] | {"seq_length": 64}
    run = tiny_run(SIXTEENS, grid, training=training, output_dir=str(tmp_path))
    if precision not in errors_alone:
        errors_alone[precision] = pool.run(1, precision_body, alone(run))[0]
    on_grid, one = pool.run(run.parallel.world_size, precision_body, run)[0], errors_alone[precision]
    assert on_grid.gradients <= LIMIT * one.gradients
    assert on_grid.weights <= LIMIT * one.weights
