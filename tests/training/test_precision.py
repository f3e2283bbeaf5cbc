"""Test bf16 and fp16: rounding, loss scaling, and the working copies of weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pool import Pool
from tiny_runs import GPT, LLAMA, tiny_run

from fourfold.config.during_training import LossScalingConfig
from fourfold.config.run import RunConfig
from fourfold.errors import UserError
from fourfold.parallel.data.fully_sharded import FullySharded
from fourfold.parallel.data.replicated import Replicated
from fourfold.parallel.grid.grid import Grid
from fourfold.parallel.state import gather_full
from fourfold.training.job import Job
from fourfold.training.loss_scaling import SMALLEST, LossScale
from fourfold.training.optimizer import stochastically_rounded
from fourfold.verification.batches import random_micro_batches

CPU = torch.device("cpu")


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_stochastic_rounding_keeps_what_bfloat16_can_hold() -> None:
    wide = torch.randn(4096, generator=seeded()).bfloat16().float()
    wide = torch.cat([wide, torch.tensor([0.0, -0.0, 1.0, -2.0, 2.0**-126, 3e38, torch.inf]).bfloat16().float()])
    for seed in range(20):
        assert torch.equal(stochastically_rounded(wide, seeded(seed)).float(), wide)


@pytest.mark.parametrize("value", [1.001, -1.001, 3.14159, -2.5e-5, 1.2e20])
def test_stochastic_rounding_is_right_on_average(value: float) -> None:
    """Each result is one of the two neighbors of the value, and the mean of the results is the value."""
    draws = 200_000
    rounded = stochastically_rounded(torch.full((draws,), value), seeded(7)).float()
    exact = torch.tensor(value)
    below = (exact.view(torch.int32) & -(1 << 16)).view(torch.float32)  # the next bfloat16 towards zero
    above = ((exact.view(torch.int32) & -(1 << 16)) + (1 << 16)).view(torch.float32)
    assert set(rounded.unique().tolist()) == {below.item(), above.item()}
    share = ((exact - below) / (above - below)).item()
    deviation = (share * (1 - share) / draws) ** 0.5
    assert (rounded == above).double().mean().item() == pytest.approx(share, abs=5 * deviation)


def test_small_updates_survive_stochastic_rounding() -> None:
    # Near 1, rounding to the nearest bfloat16 would lose updates below 0.004.
    update, steps = 1e-4, 1000
    stochastic, nearest = torch.ones(4096, dtype=torch.bfloat16), torch.ones(4096, dtype=torch.bfloat16)
    generator = seeded()
    for _ in range(steps):
        stochastic = stochastically_rounded(stochastic.float() + update, generator)
        nearest = (nearest.float() + update).bfloat16()
    assert (nearest == 1).all()
    assert stochastic.double().mean().item() == pytest.approx(1 + update * steps, abs=2e-3)


def test_the_loss_scale_halves_and_doubles() -> None:
    scale = LossScale(LossScalingConfig(growth_interval=3), 1024.0)
    seen = []
    for overflowed in (False, False, True, False, False, False, False, True, True):
        scale.update(overflowed)
        seen.append(scale.scale)
    assert seen == [1024, 1024, 512, 512, 512, 1024, 1024, 512, 256]
    assert (scale.scale, scale.steps_since_change) == (256.0, 0)


def test_a_loss_scale_that_cannot_fall_any_further_is_refused() -> None:
    scale = LossScale(LossScalingConfig(), 2 * SMALLEST)
    scale.update(overflowed=True)
    with pytest.raises(UserError, match=r"diverged; lower optimizer\.lr"):
        scale.update(overflowed=True)


def stepped(run: RunConfig, steps: int = 1) -> Job:
    job = Job(run, Grid(run.parallel, "cpu"), CPU)
    job.initialize(0)
    for step in range(steps):
        job.train_step(random_micro_batches(run, step, job.grid, CPU), step)
    return job


def skipped_body(rank: int, world_size: int, run: RunConfig) -> dict[str, Any]:
    job = stepped(run, steps=2)
    assert job.loss_scale is not None
    before = [shard.local.clone() for shard in job.shards]
    moments = [{k: m.clone() for k, m in job.optimizer.moments(i).items()} for i in range(len(job.shards))]
    job.loss_scale.scale = 2.0**40
    batch = random_micro_batches(run, 2, job.grid, CPU)
    result = job.train_step(batch, 2)
    unchanged = all(torch.equal(shard.local, old) for shard, old in zip(job.shards, before, strict=True))
    unchanged &= all(
        torch.equal(moment, moments[i][name])
        for i in range(len(job.shards))
        for name, moment in job.optimizer.moments(i).items()
    )
    steps, dropped = job.optimizer.steps_taken(), all(shard.grad is None for shard in job.shards)
    scale = job.loss_scale.scale
    job.loss_scale.scale = 1024.0
    after = job.train_step(batch, 2)
    moved = any(not torch.equal(shard.local, old) for shard, old in zip(job.shards, before, strict=True))
    return {
        "skipped": result.skipped,
        "norm": result.grad_norm.item(),
        "unchanged": unchanged,
        "dropped": dropped,
        "steps": steps,
        "scale": scale,
        "goes on": not after.skipped and moved and after.loss.isfinite().item(),
    }


@pytest.mark.parametrize("grid", [{}, {"z": 2}, {"pp": 2}], ids=str)
def test_a_skipped_step_changes_nothing(pool: Pool, grid: dict[str, int]) -> None:
    run = tiny_run(LLAMA, grid, training={"precision": "fp16"}, loss_scaling={"initial": 1024.0})
    for seen in pool.run(run.parallel.world_size, skipped_body, run):
        assert seen.pop("norm") in (torch.inf, pytest.approx(torch.nan, nan_ok=True))
        assert seen == {
            "skipped": True,
            "unchanged": True,
            "dropped": True,
            "steps": 2,
            "scale": 2.0**39,
            "goes on": True,
        }


def tables_body(rank: int, world_size: int, run: RunConfig) -> tuple[set[str], set[torch.dtype], set[torch.dtype]]:
    """Return how weights are held, and the types of the rotary tables and of the hidden states that blocks receive."""
    job = Job(run, Grid(run.parallel, "cpu"), CPU)
    job.initialize(0)
    tables, hidden = set(), set()

    def look(_, inputs: tuple[Any, ...]) -> None:
        hidden.add(inputs[0].dtype)
        tables.update({inputs[1].cos_BS1d.dtype, inputs[1].sin_BS1d.dtype})

    for stage in job.stages.values():
        for block in stage.model.blocks:
            block.register_forward_pre_hook(look)
    job.train_step(random_micro_batches(run, 0, job.grid, CPU), 0)
    return {type(stage).__name__ for stage in job.stages.values()}, tables, hidden


@pytest.mark.parametrize("grid", [{}, {"z": 2}, {"cp": 2}, {"pp": 2}], ids=str)
def test_rotary_tables_stay_float32_in_bf16_runs(pool: Pool, grid: dict[str, int]) -> None:
    """bf16 cannot represent all integers above 256, so such positions would be rounded to other positions."""
    run = tiny_run(LLAMA, grid, training={"precision": "bf16"})
    for kinds, tables, hidden in pool.run(run.parallel.world_size, tables_body, run):
        assert kinds == {"FullySharded" if "z" in grid else "Replicated"}
        assert tables == {torch.float32}
        assert hidden == {torch.bfloat16}


def masters_body(rank: int, world_size: int, run: RunConfig) -> tuple[bool, dict[str, torch.Tensor] | None]:
    """Return whether every working copy is its stored weight rounded, and the stored weights."""
    job = stepped(run)
    rounded = True
    for stage in job.stages.values():
        if isinstance(stage, Replicated):
            for working, weight in stage.weights.items():
                rounded &= working.dtype == torch.bfloat16 and weight.stored.dtype == torch.float32
                rounded &= torch.equal(working, weight.stored.bfloat16())
        else:
            assert isinstance(stage, FullySharded)
            for group in stage.fsdp_groups():
                group.unshard()
                group.wait_for_unshard()
            stored = {shard.name: shard.local for shard in job.shards}
            for name, working in stage.model.named_parameters():
                rounded &= working.dtype == torch.bfloat16
                # Compare only the rows that this rank stores, at their place in the gathered weight.
                mine = stored[name]
                rows = slice(rank * len(mine), (rank + 1) * len(mine))
                rounded &= torch.equal(working.detach()[rows], mine.bfloat16())
            stage.free_gathered()
    return rounded, gather_full(job.shards, [shard.local for shard in job.shards])


@pytest.mark.parametrize("model", [LLAMA, GPT | {"num_hidden_layers": 2}], ids=["llama", "gpt"])
def test_working_copies_are_the_stored_weights_rounded(pool: Pool, model: dict[str, Any]) -> None:
    """Replicas and shards also get bit-identical weights, because gradients are summed over two ranks in float32 and in
    the same order."""
    weights = []
    for grid in ({"dp": 2}, {"dp": 2, "zero": 1}, {"dp": 2, "zero": 3}, {"z": 2}):
        run = tiny_run(model, grid, training={"precision": "bf16", "global_batch_size": 4})
        (rounded, whole), (also_rounded, _) = pool.run(2, masters_body, run)
        assert rounded and also_rounded
        assert {tensor.dtype for tensor in whole.values()} == {torch.float32}
        weights.append(whole)
    for other in weights[1:]:
        for name, tensor in weights[0].items():
            torch.testing.assert_close(other[name], tensor, rtol=3e-7, atol=1e-7, msg=name)


@pytest.mark.parametrize("grid", [{"dp": 2}, {"dp": 2, "zero": 1}], ids=str)
def test_replicas_of_a_stochastically_rounded_weight_stay_alike(pool: Pool, grid: dict[str, int]) -> None:
    run = tiny_run(
        LLAMA,
        grid,
        training={"precision": "bf16", "master_weights": "bf16"},
        optimizer={"stochastic_rounding": True, "lr": 1e-3},
    )
    here, there = pool.run(2, stored_body, run)
    assert all(tensor.dtype == torch.bfloat16 for tensor in here.values())
    if "zero" not in grid:
        assert all(torch.equal(here[name], there[name]) for name in here)


def stored_body(rank: int, world_size: int, run: RunConfig) -> dict[str, torch.Tensor]:
    job = stepped(run, steps=2)
    return {shard.name: shard.local.clone() for shard in job.shards}
