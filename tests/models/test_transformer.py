"""The decoder by itself: packed documents, positions, loss, and parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fourfold.config.model import ModelConfig
from fourfold.config.parameter_counts import num_parameters
from fourfold.config.presets import PRESETS
from fourfold.models.initialize import initialize
from fourfold.models.transformer import IGNORE_INDEX, Transformer

LLAMA = {**PRESETS["llama-tiny"], "initializer_range": 0.2}
GPT = {**PRESETS["gpt-tiny"], "vocab_size": 201, "max_position_embeddings": 32, "initializer_range": 0.2}


def make(sizes: dict[str, Any], seed: int = 0) -> Transformer:
    config = ModelConfig(**sizes)
    model = Transformer(config)
    initialize(model, config, seed)
    return model


def some_tokens(rows: int, length: int) -> Tensor:
    return torch.randint(200, (rows, length), generator=torch.Generator().manual_seed(rows * length))


@pytest.mark.parametrize("sizes", [LLAMA, GPT, {**LLAMA, "qk_norm": True}], ids=["llama", "gpt", "qk_norm"])
def test_packed_documents_are_computed_as_if_alone(sizes: dict[str, Any]) -> None:
    model = make(sizes)
    rows = [[7, 1, 12], [20]]  # lengths of the documents in each row
    tokens = some_tokens(2, 20)
    ends = torch.tensor([[7, 8, 20], [20, 20, 20]])
    positions = torch.tensor([[i for n in row for i in range(n)] for row in rows])
    packed = model(tokens, None, positions, ends)
    for row, lengths in enumerate(rows):
        begin = 0
        for length in lengths:
            alone = model(tokens[row : row + 1, begin : begin + length])[0]
            torch.testing.assert_close(packed[row, begin : begin + length], alone, rtol=1e-5, atol=1e-5)
            begin += length
    assert (packed - model(tokens)).abs().max() > 0.1  # without the mask, documents attend to each other


def test_the_mask_without_documents_to_part_is_causal() -> None:
    model, tokens = make(LLAMA), some_tokens(2, 20)
    masked = model(tokens, None, None, torch.full((2, 1), 20))
    torch.testing.assert_close(masked, model(tokens), rtol=1e-5, atol=1e-5)


def test_under_a_mask_kernels_get_as_many_key_value_heads_as_query_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """No fused GPU kernel supports a mask with fewer key-value heads. Without a kernel, torch would keep all scores."""
    attend, heads = F.scaled_dot_product_attention, []

    def noting(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, **how: Any) -> Tensor:
        heads.append((q.shape[1], k.shape[1], v.shape[1], attn_mask is not None, how["enable_gqa"]))
        return attend(q, k, v, attn_mask=attn_mask, **how)

    monkeypatch.setattr(F, "scaled_dot_product_attention", noting)
    model, tokens = make({**LLAMA, "num_attention_heads": 8, "num_key_value_heads": 4}), some_tokens(2, 20)
    model(tokens, None, None, torch.full((2, 1), 20))
    model(tokens)
    assert set(heads) == {(8, 8, 8, True, False), (8, 4, 4, False, True)}


@pytest.mark.parametrize("sizes", [LLAMA, GPT], ids=["llama", "gpt"])
def test_no_token_sees_the_future(sizes: dict[str, Any]) -> None:
    model, tokens = make(sizes), some_tokens(1, 20)
    changed = tokens.clone()
    changed[0, 11] = (changed[0, 11] + 1) % 200
    before, after = model(tokens), model(changed)
    assert torch.equal(before[0, :11], after[0, :11])
    assert ((before - after)[0, 11:].abs().amax(-1) > 0).all()


def test_rotary_logits_depend_on_distances_alone() -> None:
    model, tokens = make(LLAMA), some_tokens(1, 12)
    places = torch.arange(12)[None]
    torch.testing.assert_close(model(tokens, None, places + 100), model(tokens), rtol=1e-4, atol=1e-4)
    assert (model(tokens, None, places * 2) - model(tokens)).abs().max() > 0.01


def test_loss_is_the_sum_over_the_labeled() -> None:
    model, tokens = make(LLAMA), some_tokens(2, 16)
    labels = torch.roll(tokens, -1, 1)
    labels[0, 3:] = IGNORE_INDEX
    log_probabilities = model(tokens).log_softmax(-1)
    kept = [(r, i) for r in range(2) for i in range(16) if labels[r, i] != IGNORE_INDEX]
    expected = -sum(log_probabilities[r, i, labels[r, i]] for r, i in kept)
    assert len(kept) == 19
    torch.testing.assert_close(model(tokens, labels), expected, rtol=1e-5, atol=0)
    assert model(tokens, torch.full_like(tokens, IGNORE_INDEX)) == 0


def test_padding_of_the_vocabulary_is_never_predicted_and_never_learns() -> None:
    model, tokens = make({**LLAMA, "vocab_size": 201}), some_tokens(1, 8)
    assert model.lm_head.weight.shape[0] == 256
    assert model(tokens).shape == (1, 8, 201)
    model(tokens, tokens).backward()
    assert model.lm_head.weight.grad[201:].abs().max() == 0
    assert model.lm_head.weight.grad[:201].abs().amin(0).max() > 0


def test_tied_weights_are_one_parameter_and_learn_from_both_uses() -> None:
    tied, tokens = make({**LLAMA, "tie_word_embeddings": True}), some_tokens(1, 8)
    untied = make(LLAMA)
    untied.load_state_dict(tied.state_dict())
    assert "lm_head.weight" not in dict(tied.named_parameters())
    for model in (tied, untied):
        model(tokens, torch.roll(tokens, -1, 1)).backward()
    both = untied.embed_tokens.weight.grad + untied.lm_head.weight.grad
    torch.testing.assert_close(tied.embed_tokens.weight.grad, both, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"qk_norm": True, "head_dim": 10},
        {"attention_bias": True},
        {"attention_output_bias": True, "mlp_bias": True},
        {"norm": "layernorm", "mlp": "gelu", "mlp_bias": True},
        {"position_embedding": "learned", "tie_word_embeddings": True},
        {"vocab_size": 128, "pad_vocab_size_to_multiple_of": 1},
    ],
)
def test_parameters_are_counted_right(changes: dict[str, Any]) -> None:
    model = make({**LLAMA, **changes})
    assert sum(p.numel() for p in model.parameters()) == num_parameters(model.config)


@pytest.mark.parametrize("name", PRESETS)
def test_parameters_of_presets_are_counted_right(name: str) -> None:
    with torch.device("meta"):
        model = Transformer(ModelConfig(**PRESETS[name]))
    assert sum(p.numel() for p in model.parameters()) == num_parameters(model.config)
