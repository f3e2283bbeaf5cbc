"""Loki can read a cache that was cropped, copied, or filled by dense attention before."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tiny_loki import SPARSE, changed, prompt, step_by_step, with_cache
from torch import Tensor

pytest.importorskip("transformers")

from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from fourfold.inference.loki import LokiBasis, disable_loki, enable_loki
from fourfold.inference.loki.cache import LokiLayer

pytestmark = pytest.mark.usefixtures("no_gradients")


def test_a_cache_is_cropped_copied_and_reordered(llama: tuple[Any, LokiBasis]) -> None:
    model, basis = llama
    tokens = prompt(2)
    enable_loki(model, basis, SPARSE)
    expected = step_by_step(model, tokens, 45)[:, 45]
    held = DynamicCache(config=model.config)
    step_by_step(model, tokens, 45, cache=held)
    held.crop(-5)
    assert held.get_seq_length() == 45

    def next_logits(one: Any, row: Tensor) -> Tensor:
        return model(row, **with_cache(one)).logits[:, 0]

    row = tokens[:, 45:46]
    torch.testing.assert_close(next_logits(copy.deepcopy(held), row), expected)
    swapped = copy.deepcopy(held)
    swapped.reorder_cache(torch.tensor([1, 0]))
    torch.testing.assert_close(next_logits(swapped, row.flip(0)), expected.flip(0))
    twice = copy.deepcopy(held)
    twice.batch_repeat_interleave(2)
    torch.testing.assert_close(next_logits(twice, row.repeat_interleave(2, 0)), expected.repeat_interleave(2, 0))
    one = copy.deepcopy(held)
    one.batch_select_indices(torch.tensor([1]))
    torch.testing.assert_close(next_logits(one, row[1:]), expected[1:])
    held.reset()
    assert held.get_seq_length() == 0
    again = step_by_step(model, tokens[:, :46], 45, cache=held)[:, 45]
    disable_loki(model)
    torch.testing.assert_close(again, expected)


def test_a_cache_that_was_filled_before(llama: tuple[Any, LokiBasis]) -> None:
    """Dense attention fills the cache. Then Loki continues with two different numbers of dims, and finally dense
    attention continues."""
    model, basis = llama
    tokens = prompt()

    enable_loki(model, basis, SPARSE)
    expected = step_by_step(model, tokens, 40)
    disable_loki(model)
    held = DynamicCache(config=model.config)
    model(tokens[:, :40], **with_cache(held))
    assert type(held.layers[0]) is DynamicLayer
    enable_loki(model, basis, changed(SPARSE, d=7))
    model(tokens[:, 40:41], **with_cache(held))
    held.crop(-1)
    enable_loki(model, basis, SPARSE)
    found = [model(tokens[:, i : i + 1], **with_cache(held)).logits for i in range(40, 49)]
    torch.testing.assert_close(torch.cat(found, 1), expected[:, 40:49])
    disable_loki(model)
    last = model(tokens[:, 49:], **with_cache(held)).logits
    assert isinstance(held.layers[0], LokiLayer)
    assert last.isfinite().all()
    assert held.get_seq_length() == 50


def test_a_cache_continues_with_another_basis(llama: tuple[Any, LokiBasis]) -> None:
    """The result equals a cache that had the other basis from the beginning."""
    model, basis = llama
    tokens = prompt()
    enable_loki(model, basis.random(), SPARSE)
    expected = step_by_step(model, tokens[:, :43], 40)[:, 40:]
    enable_loki(model, basis, SPARSE)
    held = DynamicCache(config=model.config)
    model(tokens[:, :40], **with_cache(held))
    enable_loki(model, basis.random(), SPARSE)
    found = [model(tokens[:, i : i + 1], **with_cache(held)).logits for i in range(40, 43)]
    disable_loki(model)
    torch.testing.assert_close(torch.cat(found, 1), expected)


def test_the_cache_does_not_move_at_every_token(llama: tuple[Any, LokiBasis]) -> None:
    model, basis = llama
    tokens = prompt(1, 200)
    enable_loki(model, basis, SPARSE)
    held = DynamicCache(config=model.config)
    places = set()
    for i in range(200):
        model(tokens[:, i : i + 1], **with_cache(held))
        places |= {(buffer, held.layers[0].buffers[buffer].filled.data_ptr()) for buffer in range(3)}
    disable_loki(model)
    # Each of the three buffers moves only when it grows, to 64, 128, and 256 tokens.
    assert len(places) <= 3 * 3
