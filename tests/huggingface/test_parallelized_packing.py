"""Packed documents in the user's own training loop."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pool import Pool
from torch import nn

import fourfold
from fourfold.errors import UserError
from fourfold.parallel.grid.grid import Grid

transformers = pytest.importorskip("transformers")

TOKENS = torch.randint(3, 64, (2, 24), generator=torch.Generator().manual_seed(1))
POSITIONS = torch.cat([torch.arange(10), torch.arange(14)]).expand(2, 24).contiguous()
LABELS = TOKENS.masked_fill(POSITIONS == 0, -100)


def make() -> Any:
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(**sizes, **heads, initializer_range=0.3)
    return transformers.AutoModelForCausalLM.from_config(config)


def packed_body(rank: int, world_size: int) -> tuple[float, float, float, list[str]]:
    model = fourfold.parallelize(make(), Grid(fourfold.ParallelConfig(x=2), "cpu"))
    packed = {"position_ids": POSITIONS, "labels": LABELS}
    loss = model(TOKENS, **packed).loss
    model.backward(loss)
    norm = model.clip_grad_norm_(1e9)
    refusals = []
    for more in ({"use_cache": True}, {"attention_mask": torch.ones_like(TOKENS)}):
        with pytest.raises(UserError) as caught:
            model(TOKENS, **packed, **more)
        refusals.append(str(caught.value))
    with pytest.MonkeyPatch.context() as patch:
        # In training, positions must not be read, because reading them makes the host wait. Reading a meta tensor would
        # fail.
        patch.setattr(model.module, "forward", lambda *_, **given: given)
        given = model(TOKENS, position_ids=POSITIONS.to("meta"), use_cache=None)
        assert given["use_cache"] is False
    with torch.no_grad():
        # Positions of padding do not ascend. In a padded batch, this must not count as a second document.
        mask = torch.ones_like(TOKENS)
        mask[:, :3] = 0
        positions = (mask.cumsum(-1) - 1).masked_fill(mask == 0, 1)
        model(TOKENS, attention_mask=mask, position_ids=positions, use_cache=True)
        evaluated = model(TOKENS, **packed).loss
    return loss.item(), float(norm), evaluated.item(), refusals


def test_packed_documents_do_not_attend_to_each_other(pool: Pool) -> None:
    model, count = make(), int((LABELS[:, 1:] != -100).sum())
    total = torch.zeros(())
    for begin, end in ((0, 10), (10, 24)):
        logits = model(TOKENS[:, begin:end]).logits[:, :-1]
        targets = TOKENS[:, begin + 1 : end]
        total = total + nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    (total / count).backward()
    norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9))
    for loss, found_norm, evaluated, refusals in pool.run(2, packed_body):
        assert (loss, found_norm, evaluated) == pytest.approx([(total / count).item(), norm, loss], rel=1e-5)
        assert "use_cache = True" in refusals[0] and "attention_mask" in refusals[1]
