"""GPT-2 on the grid. Its queries, keys, and values are one matrix [in, out], and its published sizes have few
divisors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from mutation import mutated
from parallelized_models import difference, make, make_batch, reference
from pool import Pool
from torch import Tensor

import fourfold
from fourfold.config.run import ParallelConfig
from fourfold.errors import UserError
from fourfold.parallel.grid.grid import Grid

FAULTS = {
    "y cuts queries, keys and values from each other": (
        "fourfold.parallel.other_models.conv1d",
        "weight.unflatten(-1, (ranks, -1)).transpose(1, 2).flatten(1)",
        "weight.flatten(1)",
    ),
    "the bias is added feature by feature": (
        "fourfold.parallel.other_models.whole_residual",
        "out + self.bias.flatten()",
        "out + self.bias.T.flatten()",
    ),
}


def gradients_body(
    rank: int, world_size: int, grid: dict[str, int], fault: str | None, changes: dict[str, Any], rules: dict[str, str]
) -> dict[str, Tensor] | None:
    model = fourfold.parallelize(make("gpt2", **changes), Grid(ParallelConfig(**grid), "cpu"), rules)
    tokens, labels = (model.rows(each) for each in make_batch())
    if fault is None:
        model.backward(model(input_ids=tokens, labels=labels).loss)
    else:
        with mutated(*FAULTS[fault]):
            model.backward(model(input_ids=tokens, labels=labels).loss)
    return model.gather(gradients=True)


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_in_fused_queries_keys_and_values_are_seen(pool: Pool, fault: str) -> None:
    found = pool.run(2, gradients_body, {"y": 2}, fault, {}, {})[0]
    assert difference(found, reference("gpt2")[2]) > 1e-2


WHOLE_TABLES = {"transformer.wte": "replicate", "lm_head": "replicate"}


def test_a_vocabulary_that_does_not_divide_stays_whole_by_rules(pool: Pool) -> None:
    found = pool.run(4, gradients_body, {"x": 2, "z": 2}, None, {"vocab_size": 201}, WHOLE_TABLES)[0]
    model = make("gpt2", vocab_size=201)
    tokens, labels = make_batch()
    model(input_ids=tokens, labels=labels).loss.backward()
    assert difference(found, {name: weight.grad for name, weight in model.named_parameters()}) < 5e-6


def refused_body(rank: int, world_size: int, changes: dict[str, Any], rules: dict[str, str], says: str) -> None:
    with pytest.raises(UserError, match=says):
        fourfold.parallelize(make("gpt2", **changes), Grid(ParallelConfig(x=2), "cpu"), rules)


@pytest.mark.parametrize(
    ("changes", "rules", "says"),
    [
        ({"vocab_size": 201}, {}, "num_embeddings = 201 cannot be split over x = 2"),
        ({"resid_pdrop": 0.1}, {}, r"attn.resid_dropout.p = 0.1 gives .* set it to 0"),
        ({}, {"*.c_fc": "colwise_in_parts"}, "whose module cuts its features into parts of split_size"),
    ],
)
def test_what_gpt2_cannot_do_is_refused(pool: Pool, changes: dict[str, Any], rules: dict[str, str], says: str) -> None:
    pool.run(2, refused_body, changes, rules, says)


OPENAI_GPT = {
    "transformer.positions_embed": "embedding",
    "*.attn.c_attn": "colwise_in_parts",
    "*.attn.c_proj": "rowwise",
    "*.mlp.c_fc": "colwise",
    "*.mlp.c_proj": "rowwise",
}
WHOLE_HEADS = {"*.attn.c_attn": "colwise_gather_output", "*.attn.c_proj": "rowwise_split_input"}


def counted_heads_body(rank: int, world_size: int, sizes: dict[str, int]) -> dict[str, Tensor] | None:
    grid = Grid(ParallelConfig(**sizes), "cpu")
    with pytest.raises(UserError, match=r"h\.0\.attn \(Attention\) has no head_dim or head_size"):
        fourfold.parallelize(make("openai_gpt"), grid, OPENAI_GPT)
    model = fourfold.parallelize(make("openai_gpt"), grid, OPENAI_GPT | WHOLE_HEADS)
    tokens, labels = (model.rows(each) for each in make_batch())
    model.backward(model(input_ids=tokens, labels=labels).loss)
    return model.gather(gradients=True)


@pytest.mark.parametrize("axis", ["x", "y"])
def test_heads_that_are_counted_are_not_cut(pool: Pool, axis: str) -> None:
    """OpenAI's first GPT has a ``split_size`` like GPT-2. The layout that the refusal advises gives exact gradients."""
    found = pool.run(2, counted_heads_body, {axis: 2})[0]
    assert difference(found, reference("openai_gpt")[2]) < 5e-6


def decayed_body(rank: int, world_size: int, sizes: dict[str, int]) -> dict[str, Tensor] | None:
    model = fourfold.parallelize(make("gpt2"), Grid(ParallelConfig(**sizes), "cpu"))
    tokens, labels = (model.rows(each) for each in make_batch())
    model.backward(model(input_ids=tokens, labels=labels).loss)
    vectors = [shard.parameter for shard in model.shards if len(model.shapes[shard.name]) < 2]
    matrices = [shard.parameter for shard in model.shards if len(model.shapes[shard.name]) >= 2]
    assert {id(p) for p in vectors + matrices} == {id(p) for p in model.parameters()}
    torch.optim.SGD([{"params": matrices, "weight_decay": 0.5}, {"params": vectors}], lr=0.1).step()
    return model.gather()


@pytest.mark.parametrize("sizes", [{"x": 2}, {"z": 2}])
def test_decay_by_the_dims_of_the_untouched_model(pool: Pool, sizes: dict[str, int]) -> None:
    """Weight decay as in docs/parallelize.md depends on the number of dimensions of the original parameters. On the
    grid, a bias may have two dimensions, and would have weight decay if its local dimensions were counted."""
    found = pool.run(2, decayed_body, sizes)[0]
    model, (tokens, labels) = make("gpt2"), make_batch()
    model(input_ids=tokens, labels=labels).loss.backward()
    groups = [
        {"params": [p for p in model.parameters() if p.ndim >= 2], "weight_decay": 0.5},
        {"params": [p for p in model.parameters() if p.ndim < 2]},
    ]
    torch.optim.SGD(groups, lr=0.1).step()
    assert difference(found, {name: p.detach() for name, p in model.named_parameters()}) < 1e-6
