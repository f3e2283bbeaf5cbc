"""Resuming is bit-identical on any grid, a checkpoint is either complete or absent, and damage is reported in one
sentence."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import Pool
from safetensors.torch import load_file
from saved_jobs import equal, new_job, save, tensors_of, train
from tiny_runs import GPT, LLAMA, QWEN, tiny_run
from torch import Tensor

from fourfold.checkpoints import checkpoint
from fourfold.checkpoints.checkpoint import Checkpointer, load_checkpoint
from fourfold.checkpoints.find_checkpoints import STATE_FILE, find_checkpoint, list_checkpoints
from fourfold.checkpoints.leftover_checkpoints import set_later_aside
from fourfold.checkpoints.saved_state import read_state
from fourfold.checkpoints.saved_weights import SavedWeights
from fourfold.config.run import CheckpointConfig, RunConfig
from fourfold.errors import UserError
from fourfold.models.transformer import Transformer
from fourfold.parallel.state import gather_full
from fourfold.training.job import Job

SHORT = {"head_dim": 4, "num_attention_heads": 8, "num_key_value_heads": 2}
"""With qk_norm, norm weights have 4 numbers, so with z = 3 one process has none of them."""


def whole(job: Job) -> dict[str, Tensor] | None:
    """Return the weights and moments by name, on rank 0."""
    weights = gather_full(job.shards, [shard.local for shard in job.shards])
    found = {f"model.{name}": tensor for name, tensor in (weights or {}).items()}
    for moment in ("exp_avg", "exp_avg_sq"):
        moments = gather_full(job.shards, [job.optimizer.moments(i)[moment] for i in range(len(job.shards))])
        found |= {f"{moment}.{name}": tensor for name, tensor in (moments or {}).items()}
    return found if dist.get_rank() == 0 else None


def resume_on_the_same_grid(rank: int, world_size: int, run: RunConfig, folder: Path) -> tuple[bool, bool, int]:
    """Resume on the same grid, and check the losses.

    Returns:
        Whether the loaded tensors equal the interrupted job's tensors, whether the final tensors equal an uninterrupted
        job's tensors, and the number of empty shards.
    """
    straight = new_job(run)
    losses = train(straight, range(4))
    interrupted = new_job(run)
    train(interrupted, range(2))
    path = save(interrupted, folder, 2)
    resumed = new_job(run, initialized=False)
    torch.manual_seed(rank)
    assert load_checkpoint(path, resumed) == 2
    same_start = equal(tensors_of(resumed), tensors_of(interrupted))
    again = train(resumed, range(2, 4))
    empty = sum(shard.local.numel() == 0 for shard in resumed.shards)
    assert again == losses[2:], (again, losses)
    return same_start, equal(tensors_of(resumed), tensors_of(straight)), empty


@pytest.mark.fast_cases(3)
@pytest.mark.parametrize(
    ("model", "parallel", "more"),
    [
        (LLAMA, {}, {}),
        pytest.param(GPT, {"z": 2}, {}, marks=pytest.mark.slow),
        (LLAMA, {"x": 2}, {"training": {"precision": "bf16"}}),
        (LLAMA, {"dp": 2}, {"training": {"precision": "fp16"}, "loss_scaling": {"initial": 2.0**20}}),
        (QWEN | SHORT, {"z": 3}, {"training": {"global_batch_size": 12}}),
        (QWEN, {"x": 2, "dp": 2, "zero": 1}, {}),
        pytest.param(
            GPT, {"y": 2, "z": 2}, {"training": {"precision": "bf16", "master_weights": "bf16"}}, marks=pytest.mark.slow
        ),
    ],
    ids=["one process", "z2 tied", "x2 bf16", "dp2 fp16", "z3 empty shards", "x2 dp2 zero 1", "y2 z2 bf16 masters"],
)
def test_resume_on_the_same_grid_is_bit_identical(
    pool: Pool, tmp_path: Path, model: dict[str, Any], parallel: dict[str, int], more: dict[str, Any]
) -> None:
    run = tiny_run(model, parallel, **more)
    answers = pool.run(run.parallel.world_size, resume_on_the_same_grid, run, tmp_path)
    assert all(same_start and same_end for same_start, same_end, _ in answers)
    if parallel.get("z") == 3:
        assert answers[2][2] > 0  # the test needs a process with empty shards
    files = sorted(path.suffix for path in (tmp_path / "step_2").rglob("*"))
    assert set(files) == {".json", ".safetensors"}  # there are no pickle files
    assert [path.name for path in tmp_path.iterdir()] == ["step_2"]


def train_and_save(rank: int, world_size: int, run: RunConfig, folder: Path) -> dict[str, Tensor] | None:
    job = new_job(run)
    train(job, range(2))
    save(job, folder, 2)
    return whole(job)


def load_elsewhere(rank: int, world_size: int, run: RunConfig, path: Path) -> dict[str, Tensor] | None:
    job = new_job(run, initialized=False)
    load_checkpoint(path, job)
    return whole(job)


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("model", [GPT, QWEN | SHORT], ids=["gpt", "short norms"])
def test_every_grid_loads_a_checkpoint_exactly(pool: Pool, tmp_path: Path, model: dict[str, Any]) -> None:
    batch = {"training": {"global_batch_size": 12, "micro_batch_size": 1}}
    run = tiny_run(model, {"z": 3}, **batch)
    saved = pool.run(3, train_and_save, run, tmp_path)[0]
    assert len(saved) == 3 * len(Transformer(run.model).state_dict()) - 3 * run.model.tie_word_embeddings
    for parallel in ({}, {"x": 2, "y": 2}, {"z": 2, "dp": 2, "zero": 3}):
        other = tiny_run(model, parallel, **batch)
        loaded = pool.run(other.parallel.world_size, load_elsewhere, other, tmp_path / "step_2")[0]
        assert saved.keys() == loaded.keys()
        for name in saved:
            assert torch.equal(saved[name], loaded[name]), (name, parallel)
    weights = SavedWeights(tmp_path / "step_2")
    assert {f"model.{name}" for name in weights.shapes} == {name for name in saved if name.startswith("model.")}
    assert all(torch.equal(saved[f"model.{name}"], weights.read(name)) for name in weights.shapes)


def save_both_ways(rank: int, world_size: int, run: RunConfig, folder: Path) -> tuple[bool, list[str]]:
    """Save in both modes. Return whether step_2 existed before `wait`, and the checkpoints listed before `wait`."""
    job = new_job(run)
    train(job, range(2))
    save(job, folder / "sync", 2)
    checkpointer = Checkpointer(folder / "async", job, CheckpointConfig(async_mode="async"))
    checkpointer.save(2)
    early = (folder / "async" / "step_2").exists()
    train(job, range(2, 4))  # train while the save is still in progress
    listed = [path.name for path in list_checkpoints(folder / "async")]
    checkpointer.wait()
    dist.barrier()
    return early, listed


def contents(path: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for file in sorted(path.glob("*.safetensors")):
        found |= {f"{file.name}/{name}": tensor for name, tensor in load_file(file).items()}
    return found


@pytest.mark.parametrize("parallel", [{}, {"x": 2}, {"z": 3}])
def test_asynchronous_saves_equal_synchronous_saves(pool: Pool, tmp_path: Path, parallel: dict[str, int]) -> None:
    """The saved weights are the weights of that step, although training continues meanwhile."""
    run = tiny_run(QWEN, parallel, training={"global_batch_size": 12})
    answers = pool.run(run.parallel.world_size, save_both_ways, run, tmp_path)
    assert answers[0] == (False, [])
    synchronous, asynchronous = contents(tmp_path / "sync" / "step_2"), contents(tmp_path / "async" / "step_2")
    assert synchronous.keys() == asynchronous.keys()
    assert all(torch.equal(tensor, asynchronous[name]) for name, tensor in synchronous.items())
    assert read_state(tmp_path / "sync" / "step_2") == read_state(tmp_path / "async" / "step_2")


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("mode", ["disabled", "async"])
@pytest.mark.parametrize(
    ("keep", "left"), [(0, [1, 2, 9, 10, 11]), (1, [11]), (3, [9, 10, 11]), (7, [1, 2, 9, 10, 11])]
)
def test_keep_latest_k(tmp_path: Path, mode: str, keep: int, left: list[int]) -> None:
    job = new_job(tiny_run())
    checkpointer = Checkpointer(tmp_path, job, CheckpointConfig(keep_latest_k=keep, async_mode=mode))
    for step in (1, 2, 9, 10, 11):
        checkpointer.save(step)
    checkpointer.wait()
    assert names(tmp_path) == sorted(f"step_{step}" for step in left)


@pytest.mark.usefixtures("alone")
def test_resuming_from_an_earlier_step_keeps_both_histories_apart(tmp_path: Path) -> None:
    """After a run resumes from step 2, 'auto' no longer picks the old steps 9 and 10, and they do not count as kept
    checkpoints."""
    job = new_job(tiny_run())
    checkpointer = Checkpointer(tmp_path, job, CheckpointConfig(keep_latest_k=2))
    for step in (2, 9, 10):
        checkpointer.save(step)
    assert names(tmp_path) == ["step_10", "step_9"]
    set_later_aside(tmp_path, 2)
    checkpointer.save(3)
    assert names(tmp_path) == ["step_10.superseded", "step_3", "step_9.superseded"]
    assert find_checkpoint("auto", tmp_path) == tmp_path / "step_3"
    for step in (9, 10):
        checkpointer.save(step)
    set_later_aside(tmp_path, 3)
    assert names(tmp_path) == ["step_10.superseded", "step_9.superseded"]


@pytest.mark.usefixtures("alone")
def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    run = tiny_run()
    save(new_job(run), tmp_path, 2)
    job = new_job(run)
    train(job, range(1))
    path = save(job, tmp_path, 2)
    loaded = new_job(run, initialized=False)
    load_checkpoint(path, loaded)
    assert equal(tensors_of(loaded)[: len(job.shards)], [shard.local for shard in job.shards])
    assert names(tmp_path) == ["step_2"]


def die_while_saving(rank: int, world_size: int, run: RunConfig, folder: Path) -> None:
    job = new_job(run)
    checkpointer = Checkpointer(folder, job, CheckpointConfig())
    checkpointer.save(2)
    checkpoint.swap_in = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    checkpointer.save(4)


def test_a_killed_save_leaves_no_checkpoint(pool: Pool, tmp_path: Path) -> None:
    run = tiny_run()
    with pytest.raises(RuntimeError, match="rank 0 of 1 died: exit code -9"):
        pool.run(1, die_while_saving, run, tmp_path)
    assert names(tmp_path) == [".step_4.partial", "step_2"]
    assert list((tmp_path / ".step_4.partial").glob("*.safetensors"))
    assert find_checkpoint("auto", tmp_path) == tmp_path / "step_2"
    pool.run(1, load_elsewhere, run, tmp_path / "step_2")
    pool.run(1, train_and_save, run, tmp_path)
    # The killed process left files behind, which are removed.
    assert names(tmp_path) == ["step_2"]


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_a_failed_save_says_why(tmp_path: Path, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_space(*_: object) -> None:
        raise OSError(28, "No space left on device")

    job = new_job(tiny_run())
    checkpointer = Checkpointer(tmp_path, job, CheckpointConfig(async_mode=mode))
    checkpointer.save(2)
    checkpointer.wait()
    monkeypatch.setattr(checkpoint, "write_file", no_space)
    with pytest.raises(UserError, match=r"cannot write .*step_4\.partial: .*No space left on device"):
        checkpointer.save(4)
        checkpointer.wait()
    assert find_checkpoint("auto", tmp_path) == tmp_path / "step_2"


def test_resume_finds_the_right_checkpoint(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    assert find_checkpoint("auto", folder) is None
    for name in ("step_9", "step_10", "step_²", "step_x", ".step_200.partial", "step_300.superseded"):
        (folder / name).mkdir(parents=True)
        (folder / name / STATE_FILE).touch()
    assert find_checkpoint("auto", folder) == folder / "step_10"
    assert find_checkpoint("never", folder) is None
    for path in (tmp_path, folder, folder / "step_10"):
        assert find_checkpoint(str(path), tmp_path / "elsewhere") == folder / "step_10"
    assert find_checkpoint(str(folder / "step_9"), folder) == folder / "step_9"
    (folder / "step_100").mkdir()  # like an incomplete copy of a checkpoint
    assert find_checkpoint("auto", folder) == folder / "step_100"
    for wrong in (folder / "step_1000", tmp_path / "none", folder / "step_9" / STATE_FILE):
        with pytest.raises(UserError, match="there is no checkpoint"):
            find_checkpoint(str(wrong), folder)


@pytest.mark.usefixtures("alone")
def test_random_state_is_restored(tmp_path: Path) -> None:
    job = new_job(tiny_run())
    torch.manual_seed(5)
    path = save(job, tmp_path, 1)
    expected = torch.rand(3)
    torch.manual_seed(6)
    load_checkpoint(path, job)
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.usefixtures("alone")
def test_every_nth_step_is_kept(tmp_path: Path) -> None:
    job = new_job(tiny_run())
    for step in range(2, 11, 2):
        save(job, tmp_path, step, keep_latest_k=1, keep_every=4)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step_4", "step_8", "step_10"]
