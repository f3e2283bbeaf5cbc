"""A step is as accurate with many small micro-batches as with one large one, on every grid."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pool import Pool
from tiny_runs import LLAMA, MIXTURE, QWEN, tiny_run

from fourfold.config.run import RunConfig
from fourfold.data.loader import MicroBatch
from fourfold.parallel.grid.grid import Grid
from fourfold.parallel.state import gather_full
from fourfold.training.job import Job
from fourfold.verification.batches import random_micro_batches

SEQUENCES = 64
CPU = torch.device("cpu")
FOUR = {"num_hidden_layers": 4}
BF16 = {"precision": "bf16", "master_weights": "bf16"}


def gradients(run: RunConfig) -> tuple[dict[str, torch.Tensor] | None, set[torch.dtype]]:
    """Return the full gradients of a step on rank 0, and their dtypes. bf16 can represent the weights exactly."""
    job = Job(run, Grid(run.parallel, "cpu"), CPU)
    job.initialize(0)
    for shard in job.shards:
        shard.local.copy_(shard.local.bfloat16())
    job.publish()
    # Draw micro-batches of one sequence and join them. Then the labels are the same for every micro-batch size.
    size, one = run.training.micro_batch_size, {"micro_batch_size": 1}
    each = random_micro_batches(
        run.model_copy(update={"training": run.training.model_copy(update=one)}), 0, job.grid, CPU
    )
    batch = [joined(each[first : first + size]) for first in range(0, len(each), size)]
    job.forward_backward(batch, job.count_kept(batch))
    found = [(shard, shard.grad) for shard in job.trained if shard.grad is not None]
    types = {grad.dtype for _, grad in found}
    return gather_full([shard for shard, _ in found], [grad for _, grad in found]), types


def joined(parts: list[MicroBatch[torch.Tensor]]) -> MicroBatch[torch.Tensor]:
    """Join micro-batches into one that has all their sequences."""
    positions = [part.positions for part in parts if part.positions is not None]
    return MicroBatch(
        torch.cat([part.tokens for part in parts]),
        torch.cat([part.labels for part in parts if part.labels is not None]),
        torch.cat(positions) if positions else None,
    )


def errors_body(rank: int, world_size: int, runs: list[RunConfig]) -> list[float] | None:
    """Return the relative error of each run's gradients. The first run is the reference and has no error."""
    whole, types = zip(*map(gradients, runs), strict=True)
    for run, found in zip(runs, types, strict=True):
        low = "fp32" not in (run.training.reduce_dtype, run.training.master_weights)
        assert found <= {torch.bfloat16 if low else torch.float32}
    right = whole[0]
    if right is None:
        return None
    return [
        (_joined([each[name] - right[name] for name in right]) / _joined(list(right.values()))).item()
        for each in whole[1:]
    ]


def _joined(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors]).norm()


def errors(pool: Pool, model: dict[str, Any], grid: dict[str, Any], training: dict[str, Any]) -> list[float]:
    """Return the relative errors of a step with the largest micro-batch that the grid can have, and with the
    smallest."""
    ranks = grid.get("dp", 1) * grid.get("z", 1)
    sizes = {"global_batch_size": SEQUENCES, "seq_length": 16}
    stages = 2 if "pp" in grid else 1
    lora = {"rank": 4} if model.get("lora") else {}
    model = {key: value for key, value in model.items() if key != "lora"}
    runs = [
        tiny_run(model, grid, training=sizes | types | {"micro_batch_size": size}, lora=lora)
        for types, size in (({}, 1), (training, SEQUENCES // ranks // stages), (training, 1))
    ]
    return next(found for found in pool.run(runs[0].parallel.world_size, errors_body, runs) if found)


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize(
    ("model", "grid"),
    [
        (LLAMA, {}),
        (LLAMA, {"dp": 2}),
        (LLAMA, {"dp": 2, "zero": 2}),
        (LLAMA, {"z": 2}),
        (LLAMA, {"dp": 2, "zero": 1}),
        (LLAMA, {"dp": 2, "zero": 3}),
        (LLAMA, {"cp": 2}),
        (LLAMA, {"x": 2}),
        (LLAMA, {"y": 2}),
        (QWEN, {"pp": 2}),
        (QWEN, {"pp": 2, "z": 2}),
        (QWEN | FOUR, {"pp": 2, "schedule": "ZBVZeroBubble"}),
        (LLAMA | {"lora": True}, {"dp": 2}),
        (MIXTURE, {"dp": 2, "ep": 2}),
        (MIXTURE, {"z": 2, "ep": 2}),
    ],
    ids=str,
)
def test_small_micro_batches_are_as_accurate_as_a_large_one(
    model: dict[str, Any], grid: dict[str, Any], pool: Pool
) -> None:
    large, small = errors(pool, model, grid, BF16)
    assert 0 < small < 1.1 * large


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("grid", [{}, {"dp": 2}, {"z": 2}, {"dp": 2, "zero": 1}, {"dp": 2, "zero": 2}], ids=str)
@pytest.mark.parametrize("master", [{}, {"master_weights": "bf16"}], ids=str)
def test_sums_of_a_low_type_are_the_same_on_every_grid(
    pool: Pool, grid: dict[str, Any], master: dict[str, str]
) -> None:
    """If a run file asks for sums in bf16, it gets them on one process too."""
    low = {"precision": "bf16", "reduce_dtype": "bf16"} | master
    large, small = errors(pool, LLAMA, grid, low)
    assert small > 1.3 * large
