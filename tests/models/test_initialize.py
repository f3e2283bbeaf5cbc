"""Initial weights: if a process draws only a slice of a parameter, it gets the same values as in the full parameter.
Standard deviations are as published."""

from __future__ import annotations

import math
import random

import pytest
import torch
from torch import Tensor

from fourfold.config.model import ModelConfig
from fourfold.config.presets import PRESETS
from fourfold.models import initialize as initialize_module
from fourfold.models.initialize import BLOCK_ELEMENTS, fill_slice, initialize
from fourfold.models.transformer import Transformer

CONFIG = ModelConfig(**PRESETS["gpt-demo"])
NAME = "layers.0.self_attn.qkv.q_proj.weight"


def fill(name: str, shape: tuple[int, ...], slices: tuple[slice, ...] | None = None, seed: int = 0) -> Tensor:
    slices = tuple(slice(0, n) for n in shape) if slices is None else slices
    out = torch.full([s.stop - s.start for s in slices], torch.nan)
    fill_slice(out, name, shape, slices, CONFIG, seed)
    return out


@pytest.mark.parametrize("shape", [(700, 300), (3, BLOCK_ELEMENTS + 5), (1000, 1), (219, 299)])
def test_any_slice_is_the_slice_of_the_whole(shape: tuple[int, int]) -> None:
    whole = fill(NAME, shape)
    assert not whole.isnan().any()
    chance = random.Random(0)
    rows_per_block = max(1, BLOCK_ELEMENTS // shape[1])
    rows = [(0, 1), (shape[0] - 1, shape[0]), (0, shape[0]), (1, min(shape[0], rows_per_block))]
    rows += [(rows_per_block, shape[0]), (rows_per_block - 1, rows_per_block + 1)] if rows_per_block < shape[0] else []
    rows += [tuple(sorted(chance.sample(range(shape[0] + 1), 2))) for _ in range(10)]
    for first, last in rows:
        columns = tuple(sorted(chance.sample(range(shape[1] + 1), 2)))
        slices = (slice(first, last), slice(*columns))
        assert torch.equal(fill(NAME, shape, slices), whole[slices])
    assert torch.equal(fill("norm.weight", (shape[0],), (slice(1, 3),)), torch.ones(2))
    assert torch.equal(fill("norm.bias", (shape[0],), (slice(1, 3),)), torch.zeros(2))


def test_more_threads_draw_the_same_values(monkeypatch: pytest.MonkeyPatch) -> None:
    shape, part = (5000, 300), (slice(100, 4900), slice(7, 299))
    alone = fill(NAME, shape)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    monkeypatch.setattr(initialize_module, "available_cores", lambda: 4)
    monkeypatch.setattr(initialize_module, "BLOCKS_AT_ONCE", 3)
    assert torch.equal(fill(NAME, shape), alone)
    assert torch.equal(fill(NAME, shape, part), alone[part])


def test_no_rows_are_no_rows() -> None:
    assert fill(NAME, (700, 300), (slice(700, 700), slice(0, 300))).shape == (0, 300)
    assert fill(NAME, (700, 300), (slice(218, 218), slice(0, 300))).shape == (0, 300)


def test_a_slice_of_another_type_is_the_rounded_slice() -> None:
    out = torch.empty(100, 300, dtype=torch.bfloat16)
    fill_slice(out, NAME, (700, 300), (slice(200, 300), slice(0, 300)), CONFIG, 0)
    assert torch.equal(out, fill(NAME, (700, 300))[200:300].bfloat16())


@pytest.mark.parametrize(
    ("name", "std"),
    [
        ("embed_tokens.weight", 0.02),
        ("embed_positions.weight", 0.02),
        ("lm_head.weight", 0.02),
        ("layers.3.self_attn.qkv.k_proj.weight", 0.02),
        ("layers.3.mlp.up.up_proj.weight", 0.02),
        ("layers.0.self_attn.o_proj.weight", 0.02 / math.sqrt(2 * CONFIG.num_hidden_layers)),
        ("layers.3.mlp.down_proj.weight", 0.02 / math.sqrt(2 * CONFIG.num_hidden_layers)),
    ],
)
def test_spread(name: str, std: float) -> None:
    values = fill(name, (1000, 500))
    assert values.std().item() == pytest.approx(std, rel=0.01)
    assert abs(values.mean().item()) < std * 5 / math.sqrt(values.numel())
    assert values.abs().max() > 4 * std  # not a uniform or truncated distribution


def test_names_seeds_and_blocks_differ() -> None:
    shape = (700, 300)
    whole = fill(NAME, shape)
    rows_per_block = BLOCK_ELEMENTS // 300
    others = [
        fill(NAME, shape, seed=1),
        fill(NAME.replace("q_proj", "k_proj"), shape),
        fill(NAME.replace("layers.0", "layers.1"), shape),
        fill(NAME, shape).roll(rows_per_block, 0),
    ]
    for other in others:
        correlation = torch.corrcoef(torch.stack([whole.flatten(), other.flatten()]))[0, 1].item()
        assert abs(correlation) < 5 / math.sqrt(whole.numel())
    assert torch.equal(whole, fill(NAME, shape))


def test_initialize_fills_every_parameter() -> None:
    config = ModelConfig(**{**PRESETS["gpt-tiny"], "vocab_size": 300})
    model = Transformer(config)
    for parameter in model.parameters():
        parameter.data.fill_(torch.nan)
    initialize(model, config, seed=3)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            assert (parameter == 0).all(), name
        elif parameter.ndim == 1:
            assert (parameter == 1).all(), name
        else:
            assert 0.001 < parameter.std() < 0.03, name


def test_first_loss_equals_the_loss_of_guessing() -> None:
    config = ModelConfig(**PRESETS["llama-tiny"])
    model = Transformer(config)
    initialize(model, config, seed=0)
    tokens = torch.randint(257, (4, 64), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        loss = model(tokens, torch.roll(tokens, -1, 1)) / tokens.numel()
    assert loss.item() == pytest.approx(math.log(257), abs=0.1)
