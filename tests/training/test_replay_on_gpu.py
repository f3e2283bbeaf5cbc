"""Replayed steps on a simulated GPU, whose kernels add in any order unless torch asks for a fixed order."""

from __future__ import annotations

from collections.abc import Callable
from unittest.mock import patch

import pytest
import torch
from pool import Pool
from simulated_gpu import GPU, OnGpu, simulated_gpu
from tiny_runs import LLAMA, tiny_run

from fourfold.errors import UserError
from fourfold.parallel.grid.grid import Grid
from fourfold.training.job import Job
from fourfold.training.replay import Replay
from fourfold.verification.batches import random_micro_batches

Kernel = Callable[[int], bool]
"""Takes the number of a pass, and returns whether a gradient gets other bits in that pass."""


def is_atomic(passes: int) -> bool:
    """Return whether a gradient changes, by the rule of attention in torch's CUDA code: the flag that only warns does
    not change the kernel."""
    is_strict = (
        torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()
    )
    assert not (is_strict and torch.utils.deterministic.fill_uninitialized_memory), (
        "fills memory that is written anyway"
    )
    return passes % 2 == 1 and not is_strict


def has_no_order(passes: int) -> bool:
    return True


def is_hit_once(passes: int) -> bool:
    return passes == 2


def has_no_kernel(passes: int) -> bool:
    if torch.are_deterministic_algorithms_enabled():
        raise RuntimeError("cumsum_cuda_kernel does not have a deterministic implementation, but you set ...")
    return False


def replayed(rank: int, world_size: int, kernel: Kernel, asked: bool) -> tuple[str, int]:
    """Replay a step. Return the error message and the number of passes. ``asked`` says whether the user has already
    asked torch for warnings about nondeterministic kernels."""
    run = tiny_run(LLAMA, checks={"replay_interval": 1})
    finish, passes = Job.finish_gradients, 0

    def finish_and_change(job: Job) -> None:
        nonlocal passes
        finish(job)
        passes += 1
        if kernel(passes):
            gradient = job.trained[3].grad
            assert isinstance(gradient, OnGpu)
            gradient.values.view(-1).view(torch.uint8)[0] ^= passes

    torch.use_deterministic_algorithms(asked, warn_only=asked)
    before = torch.get_deterministic_debug_mode()
    try:
        with simulated_gpu(), patch.object(Job, "finish_gradients", finish_and_change):
            job = Job(run, Grid(run.parallel, "cuda"), GPU)
            job.initialize(0)
            batches, sentence = random_micro_batches(run, 0, job.grid, GPU), ""
            try:
                Replay(job).forward_backward(0, batches, job.count_kept(batches))
            except UserError as error:
                sentence = str(error)
        assert torch.get_deterministic_debug_mode() == before
        assert torch.utils.deterministic.fill_uninitialized_memory
    finally:
        torch.use_deterministic_algorithms(False)
    return sentence, passes


@pytest.mark.parametrize("asked", [False, True], ids=["by default", "with warnings asked for"])
def test_a_healthy_gpu_is_not_accused(pool: Pool, asked: bool) -> None:
    assert pool.run(1, replayed, is_atomic, asked) == [("", 2)]


def test_a_step_without_a_fixed_order_accuses_no_device(pool: Pool) -> None:
    ((sentence, passes),) = pool.run(1, replayed, has_no_order, False)
    assert passes == 3
    assert "was computed three times and gave three different results, first on rank 0 (" in sentence
    assert "take that device out" not in sentence and "checks.replay_interval = 0" in sentence


def test_a_pass_that_disagrees_with_two_passes_accuses_its_device(pool: Pool) -> None:
    ((sentence, passes),) = pool.run(1, replayed, is_hit_once, False)
    assert passes == 3
    assert "once gave different bits on rank 0 (" in sentence and "take that device out of the job" in sentence


def test_an_operation_without_a_deterministic_kernel_is_a_sentence(pool: Pool) -> None:
    ((sentence, _),) = pool.run(1, replayed, has_no_kernel, False)
    assert sentence == (
        "checks.replay_interval = 1 needs a deterministic step, and step 1 is not deterministic on this GPU "
        "(cumsum_cuda_kernel does not have a deterministic implementation, but you set ...); set it to 0"
    )
