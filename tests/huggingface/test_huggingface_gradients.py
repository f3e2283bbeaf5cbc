"""One process computes the gradients that transformers computes, for every parameter of every family."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tiny_huggingface import MODELS, make_model, ours_of
from torch import Tensor

from fourfold.huggingface.expert_files import in_modules, rows_in_files
from fourfold.huggingface.weight_names import name_map
from fourfold.models.transformer import Transformer

transformers = pytest.importorskip("transformers")


def loss(logits_BSV: Tensor, tokens_BS: Tensor) -> Tensor:
    return F.cross_entropy(logits_BSV[:, :-1].flatten(0, 1), tokens_BS[:, 1:].flatten())


def gradients_by_their_names(model: Transformer, theirs: Any) -> dict[str, Tensor]:
    """Return our gradients by the names in transformers' model. Frozen parameters get zeros."""
    grads = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()}
    tensors = name_map(theirs.config.model_type, model.config)
    found = {t.name: t.joined([p.of(grads[p.name]) for p in t.pieces]) for t in tensors}
    return in_modules(theirs, rows_in_files(theirs), found)


@pytest.mark.parametrize("name", MODELS)
def test_gradients_equal_transformers(name: str, tmp_path: Path) -> None:
    folder = make_model(tmp_path / "hf", name)
    theirs, ours = (
        transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval(),
        ours_of(folder),
    )
    # Leave out token 0, the padding token, because torch gives its row of the embedding no gradient.
    tokens = torch.randint(1, 201, (3, 40), generator=torch.Generator().manual_seed(0))
    expected, got = loss(theirs(tokens).logits, tokens), loss(ours(tokens), tokens)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=0)
    expected.backward()
    got.backward()
    found = gradients_by_their_names(ours, theirs)
    for key, parameter in theirs.named_parameters():
        assert parameter.grad is not None and parameter.grad.norm() > 0, key
        if key.endswith("k_proj.bias") and parameter.grad.norm() < 1e-7:
            # Without position embeddings, a key bias adds the same number to all scores of a query. So its gradient is
            # zero.
            assert found[key].norm() < 1e-7, key
            continue
        difference = (found[key] - parameter.grad).norm() / parameter.grad.norm()
        # Gradients of key biases and of decays are small differences of large numbers, so rounding errors are larger.
        # For decays, transformers rounds more than fourfold (tests/models/test_delta_net.py).
        is_rounded = key.endswith("k_proj.bias") or name.startswith(("qwen3_5", "qwen3_next"))
        of_decays = key.endswith(("dt_bias", "A_log", "in_proj_a.weight", "in_proj_ba.weight"))
        assert difference < (5e-3 if of_decays else 5e-4 if is_rounded else 1e-5), (key, difference)
