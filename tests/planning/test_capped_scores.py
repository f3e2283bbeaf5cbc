"""For attention with capped scores, the planner's memory equals the trace, and the planner counts the bytes that the
operations really move."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from planned_memory import planned_peak
from tiny_runs import GEMMA2, tiny_run
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from fourfold.parallel.attention import block_attention, document_attention
from fourfold.parallel.attention.block_attention import AttentionScores, attend_block, attend_block_backward
from fourfold.planning.cost import tensor_sizes
from fourfold.planning.cost.block_time import block_time
from fourfold.planning.cost.terms import attention_core
from fourfold.planning.machines.constants import prior_constants
from fourfold.planning.machines.machine import load_machine
from fourfold.planning.run_workload import workload_of
from fourfold.verification.trace import trace

QUERIES, KEYS = 512, 2048
SEEN_OF_LOG_SUM_EXP, MOVED_BY_LOG_SUM_EXP = 4, 24
"""Bytes per score of the log-sum-exp operation: as ``MovedScores`` counts them, and as they really move. The operation
reads the scores three times and writes them twice, but ``MovedScores`` sees only one read."""


class MovedScores(TorchDispatchMode):
    """Count the bytes of all operands and results that have as many entries as the scores."""

    moved = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not func.is_view and func._overloadpacket.__name__ != "_unsafe_view":
            tensors = (t for t in tree_iter((args, out)) if isinstance(t, Tensor) and t.dtype != torch.bool)
            self.moved += sum(t.nbytes for t in tensors if t.numel() == QUERIES * KEYS)
        return out


def moved_a_score(run: Callable[[], Any]) -> float:
    with MovedScores() as counted:
        run()
    return counted.moved / (QUERIES * KEYS)


def test_bytes_equal_the_bytes_of_the_operations() -> None:
    q, k, v = (torch.ones(1, 1, size, 8, dtype=torch.bfloat16) for size in (QUERIES, KEYS, KEYS))
    mask, scores = torch.ones(1, 1, QUERIES, KEYS, dtype=torch.bool), AttentionScores(0.3, 50.0)
    out, lse = attend_block(q, k, v, False, mask, scores)
    forward = moved_a_score(lambda: attend_block(q, k, v, False, mask, scores))
    backward = moved_a_score(lambda: attend_block_backward(out, q, out, lse, k, v, False, mask, scores))
    assert forward - SEEN_OF_LOG_SUM_EXP + MOVED_BY_LOG_SUM_EXP == attention_core.CAPPED_FORWARD
    assert backward == attention_core.CAPPED_BACKWARD


def test_pieces_equal_the_pieces_of_the_attention() -> None:
    assert tensor_sizes.CAPPED_QUERIES == block_attention.CAPPED_ROWS == document_attention.MOST_QUERIES
    assert tensor_sizes.WIDEST_FLASH == block_attention.WIDEST_FLASH
    assert tensor_sizes.LEAST_QUERIES == document_attention.LEAST_QUERIES


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(
    ("grid", "mode", "more"),
    [
        ({"x": 2}, "none", {}),
        ({"y": 2, "z": 2}, "none", {}),
        ({}, "full", {}),
        ({}, "none", {"sliding_window": 64}),
    ],
    ids=str,
)
def test_memory_equals_the_trace(grid: dict[str, int], mode: str, more: dict[str, int]) -> None:
    """Most of this memory is the scores of one piece of 512 queries."""
    ranks = grid.get("z", 1)
    training = {"precision": "bf16", "global_batch_size": ranks, "micro_batch_size": 1, "seq_length": 1024}
    capped, plain = (
        tiny_run(
            GEMMA2 | {"num_hidden_layers": 2} | more | cap,
            grid,
            training=training,
            activation_checkpoint={"mode": mode},
        )
        for cap in ({}, {"attn_logit_softcapping": 0.0})
    )
    planned = [planned_peak(run) for run in (capped, plain)]
    assert planned[0] == pytest.approx(trace(capped, whole=True).memory.total_peak, rel=0.05)
    assert planned[0] > 2 * planned[1]


def test_capped_scores_take_longer_than_a_fused_kernel() -> None:
    """Attention with capped scores takes at least as long as moving its bytes, and all of it counts as computation."""
    run = tiny_run(GEMMA2 | {"preset": "llama3-8b"}, {}, training={"precision": "bf16", "seq_length": 4096})
    machine, constants = load_machine("dgx-h100"), prior_constants()
    work = workload_of(run).but(sliding=0)
    capped, fused = (block_time(work.but(caps_scores=caps), machine, constants) for caps in (True, False))
    scores = work.layout.micro_batch_size * work.model.queries / work.model.head_dim * 4096 * (4096 + 512) / 2
    moving = scores * attention_core.CAPPED_FORWARD / (constants.memory * machine.memory_bandwidth)
    assert moving < capped.attention_forward < 2 * moving
    assert capped.attention_forward > 5 * fused.attention_forward
    assert capped.launch_backward > fused.launch_backward
