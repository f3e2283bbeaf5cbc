"""Work in turn, and blocks that a batch does not divide for."""

from __future__ import annotations

from collections.abc import Generator

import pytest
import torch
from pool import Pool
from test_layers import job_of
from tiny_runs import LLAMA, tiny_run

from fourfold.config.run import RunConfig
from fourfold.errors import UserError
from fourfold.parallel.interleave import JoinedAttention, in_turn


def test_workers_take_one_step_after_the_other() -> None:
    taken: list[str] = []

    def work(name: str, steps: int) -> Generator[None, None, str]:
        for step in range(steps):
            taken.append(f"{name}{step}")
            yield
        return name

    assert in_turn([work("a", 2), work("b", 2), work("c", 2)]) == ["a", "b", "c"]
    assert taken == ["a0", "b0", "c0", "a1", "b1", "c1"]


def test_parts_divide_the_micro_batch() -> None:
    in_threes = {"overlap": {"batch_parts": 3}, "training": {"micro_batch_size": 2}}
    with pytest.raises(UserError, match=r"nor a rank's 16 tokens .* overlap\.batch_parts = 3; .* of 3 works"):
        tiny_run(LLAMA, {"x": 2}, **in_threes)
    with pytest.raises(UserError, match=r"= 2 cannot be split into overlap\.batch_parts = 3; .* of 3 works"):
        tiny_run(LLAMA | {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 8}, {"y": 4}, **in_threes)


def logits_body(rank: int, world_size: int, run: RunConfig) -> list[torch.Tensor]:
    job = job_of(run)
    tokens = torch.arange(3 * run.training.seq_length).reshape(3, -1) % run.model.vocab_size
    return [job.next_token_logits(tokens[:sequences], 4) for sequences in (1, 2, 3)]


def test_batches_of_any_size_are_evaluated(pool: Pool) -> None:
    """Two sequences as two parts; one, and three, as two parts of their tokens."""
    parts, whole = (pool.run(2, logits_body, tiny_run(LLAMA, {"x": 2}, overlap={"batch_parts": n}))[0] for n in (2, 1))
    for of_parts, of_whole in zip(parts, whole, strict=True):
        torch.testing.assert_close(of_parts, of_whole, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("ranks", [1, 2])
def test_attention_sees_all_tokens_in_order(ranks: int) -> None:
    """Two ranks share the residual stream: a part has tokens of both, and each of them has consecutive ones."""
    x_BSF = torch.arange(2 * 12 * 3).reshape(2, 12, 3).float()
    seen: list[torch.Tensor] = []

    def attend(*qkv: torch.Tensor) -> torch.Tensor:
        seen.extend(qkv)
        return qkv[0] + 100

    joined = JoinedAttention(attend, ranks)
    shares = [share.chunk(3, 1) for share in x_BSF.chunk(ranks, 1)]
    parts = [torch.cat(part, 1) for part in zip(*shares, strict=True)]
    for part in parts:
        joined.give(part, -part, 2 * part)
    for part in parts:
        torch.testing.assert_close(joined.take(), part + 100)
    for found, expected in zip(seen, (x_BSF, -x_BSF, 2 * x_BSF), strict=True):
        torch.testing.assert_close(found, expected)
