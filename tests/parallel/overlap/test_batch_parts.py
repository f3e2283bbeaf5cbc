"""Batch parts that take turns, also if the batch does not divide into equal parts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pool import Pool
from tiny_jobs import job_of
from tiny_runs import LLAMA, tiny_run

from fourfold.config.run import RunConfig
from fourfold.errors import UserError
from fourfold.models.causal_attention import AttentionContext
from fourfold.overlap_order import Steps, Until, run_batch_parts
from fourfold.parallel.overlap.batch_parts import HookedVisit, JoinedAttention, Parts


def taken_in_turn(parts: int, ends: list[Until], runs_ahead: bool = True) -> str:
    """Run parts a, b, … in turn, and return the order of their steps."""
    taken: list[str] = []

    def steps(name: str) -> Steps[str]:
        for number, until in enumerate(ends):
            taken.append(f"{name}{number}")
            yield until
        taken.append(f"{name}{len(ends)}")
        return name

    names = "abcd"[:parts]
    assert run_batch_parts((steps(name) for name in names), runs_ahead) == list(names)
    return " ".join(taken)


def test_parts_run_ahead_if_a_matmul_hides_their_collective() -> None:
    """The steps are the steps of a block whose attention and MLP run collectives only over x. With three parts, one
    part already gathers for its MLP before another part begins its attention."""
    ends = [Until.GATHERED, Until.SUMMED_TO_GATHER, Until.GATHERED, Until.SUMMED]
    assert taken_in_turn(2, ends) == "a0 b0 a1 b1 a2 b2 a3 b3 a4 b4"
    assert taken_in_turn(3, ends) == "a0 b0 c0 a1 b1 a2 c1 b2 a3 c2 b3 a4 c3 b4 c4"
    assert taken_in_turn(3, ends, runs_ahead=False) == "a0 b0 c0 a1 b1 c1 a2 b2 c2 a3 b3 c3 a4 b4 c4"


def test_a_part_enters_the_next_block_before_the_last_computes_its_mlp() -> None:
    ends = [Until.GATHERED, Until.SUMMED_TO_GATHER, Until.GATHERED, Until.SUMMED_TO_GATHER] * 2
    taken = taken_in_turn(3, ends).split()
    assert taken.index("a4") < taken.index("c3") < taken.index("a5")


def test_parts_wait_until_all_parts_arrive() -> None:
    ends = [Until.GATHERED, Until.ALL_PARTS, Until.SUMMED_TO_GATHER, Until.GATHERED]
    taken = taken_in_turn(3, ends).split()
    assert max(taken.index(f"{name}1") for name in "abc") < min(taken.index(f"{name}2") for name in "abc")


def test_a_recomputation_that_ends_early_keeps_the_order_of_the_forward() -> None:
    """Only the last matmuls are left out. All other steps keep their order."""
    ends = [Until.GATHERED, Until.SUMMED_TO_GATHER, Until.GATHERED, Until.SUMMED]
    for parts in (2, 3, 4):
        whole, again = taken_in_turn(parts, ends).split(), taken_in_turn(parts, [*ends, Until.ALL_PARTS]).split()
        begun = [step for step in whole if step[1] != "4"]
        assert [step for step in again if step[1] not in "45"] == begun


def test_parts_divide_the_micro_batch() -> None:
    in_threes = {"overlap": {"batch_parts": 3}, "training": {"micro_batch_size": 2}}
    with pytest.raises(UserError, match=r"nor a rank's 16 tokens .* overlap\.batch_parts = 3; batch_parts = 2 works"):
        tiny_run(LLAMA, {"x": 2}, **in_threes)
    with pytest.raises(UserError, match=r"= 2 cannot be split into overlap\.batch_parts = 3; batch_parts = 2 works"):
        tiny_run(LLAMA | {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 8}, {"y": 4}, **in_threes)


def test_hooks_of_a_block_run_when_the_first_part_enters_and_when_the_last_has_left() -> None:
    block: Any = torch.nn.Identity()
    block.parts, seen = Parts(2, 1, by_tokens=True, token_ranks=1, run_ahead=True), []
    block.register_forward_pre_hook(lambda *_: None)
    block.register_forward_pre_hook(lambda _, args, kwargs: ((args[0] * 4,), kwargs), with_kwargs=True)
    block.register_forward_hook(lambda _, args, out: seen.append(out))
    block.register_forward_hook(lambda _, args, kwargs, out: seen.append(out), with_kwargs=True)
    visit, one, two = HookedVisit(block, is_last=True), torch.tensor(1), torch.tensor(2)
    assert visit.enter(one) == 4 and visit.enter(one) == 1
    visit.leave(1, two)
    assert not seen
    visit.leave(0, one)
    assert seen == [[one, two], [one, two]]


def logits_body(rank: int, world_size: int, run: RunConfig) -> list[torch.Tensor]:
    job = job_of(run)
    tokens = torch.arange(3 * run.training.seq_length).reshape(3, -1) % run.model.vocab_size
    return [job.next_token_logits(tokens[:sequences], 4) for sequences in (1, 2, 3)]


def test_batches_of_any_size_are_evaluated(pool: Pool) -> None:
    """Two sequences are split into two parts of one sequence. One sequence, or three sequences, are split into two
    parts of their tokens."""
    parts, whole = (pool.run(2, logits_body, tiny_run(LLAMA, {"x": 2}, overlap={"batch_parts": n}))[0] for n in (2, 1))
    for of_parts, of_whole in zip(parts, whole, strict=True):
        torch.testing.assert_close(of_parts, of_whole, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("ranks", [1, 2])
def test_attention_sees_all_tokens_in_order(ranks: int) -> None:
    """If two ranks share the residual stream, a part has consecutive tokens from each of them."""
    x_BSF = torch.arange(2 * 12 * 3).reshape(2, 12, 3).float()
    seen: list[torch.Tensor] = []

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, context: AttentionContext) -> torch.Tensor:
        seen.extend((q, k, v))
        return q + 100

    joined = JoinedAttention(attend, AttentionContext(None, None), ranks)
    shares = [share.chunk(3, 1) for share in x_BSF.chunk(ranks, 1)]
    parts = [torch.cat(part, 1) for part in zip(*shares, strict=True)]
    for index, part in reversed(list(enumerate(parts))):
        joined.give(index, part, -part, 2 * part)
    for index, part in enumerate(parts):
        torch.testing.assert_close(joined.take(index), part + 100)
    for found, expected in zip(seen, (x_BSF, -x_BSF, 2 * x_BSF), strict=True):
        torch.testing.assert_close(found, expected)
