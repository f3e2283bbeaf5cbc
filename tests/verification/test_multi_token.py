"""Multi-token prediction equals a second implementation, which runs each document alone and shares no code."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from mutants_of_multi_token import IN_THE_MODEL, Mutant
from mutation import mutated
from tiny_runs import DEEPSEEK_V3, HYBRID, LLAMA, QWEN3_NEXT, tiny_run
from torch import Tensor

from fourfold.config.layout import check_layout
from fourfold.config.model import IGNORE_INDEX
from fourfold.config.parameter_counts import num_parameters
from fourfold.config.run import RunConfig
from fourfold.data.loader import document_ends, shifted
from fourfold.errors import UserError
from fourfold.models.initialize import initialize
from fourfold.models.transformer import Transformer, parameter_shapes
from fourfold.training.flops import flops_per_token

TWO = {"num_nextn_predict_layers": 2}
LENGTHS = [[11, 1, 2, 10], [3, 4, 17], [24]]
"""Lengths of documents. Some are too short for a label two tokens further."""

Weights = dict[str, Tensor]


def run_of() -> RunConfig:
    return tiny_run(LLAMA | TWO)


def filled(run: RunConfig) -> Transformer:
    """Return the model in float64. Its norms' weights are random, so that a norm that is left out or exchanged
    matters."""
    model = Transformer(run.model).double()
    initialize(model, run.model, seed=1)
    draw = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.data = 0.5 + torch.rand(parameter.shape, generator=draw, dtype=torch.float64)
    return model


def losses_of_the_model(model: Transformer) -> Tensor:
    """Return the losses that the model computes from packed documents, each summed over tokens: [1 + D]."""
    tokens, documents, dropped = batch(model.config.vocab_size)
    labels = tokens[:, 1:].copy()
    labels[(documents[:, 1:] != documents[:, :-1]) | dropped] = IGNORE_INDEX
    inputs, of_inputs = tokens[:, :-1].copy(), documents[:, :-1]
    starts = np.concatenate([np.ones((3, 1), bool), of_inputs[:, 1:] != of_inputs[:, :-1]], 1)
    places = np.arange(inputs.shape[1])
    positions = places - np.maximum.accumulate(np.where(starts, places, 0), 1)
    ahead = [torch.from_numpy(shifted(each, of_inputs, 2)) for each in (inputs, labels)]
    fields = [torch.from_numpy(each) for each in (inputs, labels, positions, document_ends(of_inputs))]
    out: Tensor = model(*fields, torch.ones(3), None, None, None, *ahead)
    return out


def batch(vocab_size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return tokens and documents [3, 25], and which targets a mask drops [3, 24]."""
    draw = np.random.default_rng(0)
    documents = np.stack([np.repeat(np.arange(len(row) + 1), [*row, 1]) for row in LENGTHS])
    # The last document continues after the end of the sequence.
    documents[2, 24] = 0
    return draw.integers(vocab_size, size=(3, 25)), documents, draw.random((3, 24)) < 0.2


def losses_of_documents(weights: Weights, run: RunConfig) -> Tensor:
    """Compute the losses of ``losses_of_the_model`` a second time. Each document runs alone, without masks, and layer k
    reads only its first n − k tokens."""
    tokens, documents, dropped = batch(run.model.vocab_size)
    total = torch.zeros(3, dtype=torch.float64)
    for row in range(3):
        for document in np.unique(documents[row, :24]):
            places = np.flatnonzero(documents[row] == document)
            t = torch.from_numpy(tokens[row, places])
            inputs = t if places[-1] < 24 else t[:-1]
            x = F.embedding(inputs, weights["embed_tokens.weight"])
            layers = run.model.num_hidden_layers
            for layer in range(layers):
                x = block(x, weights, f"layers.{layer}.", run)
            of_depth = [normed(x, weights["norm.weight"], run)]
            for k in (1, 2):
                name = f"layers.{layers + k - 1}."
                next_tokens = F.embedding(inputs[k:], weights["embed_tokens.weight"])
                both = [
                    normed(next_tokens, weights[name + "embedding_layernorm.weight"], run),
                    normed(x[: len(inputs) - k] if k == 1 else x[:-1], weights[name + "hidden_layernorm.weight"], run),
                ]
                eh_proj = torch.cat([weights[name + "e_proj.weight"], weights[name + "h_proj.weight"]], dim=1)
                if len(next_tokens) == 0:
                    break
                x = block(torch.cat(both, -1) @ eh_proj.T, weights, name, run)
                of_depth.append(normed(x, weights[name + "output_layernorm.weight"], run))
            for k, hidden in enumerate(of_depth):
                log_p = (hidden @ weights["lm_head.weight"][: run.model.vocab_size].T).log_softmax(-1)
                for i in range(len(hidden)):
                    target = i + k + 1
                    if target < len(t) and not dropped[row, places[target] - 1]:
                        total[k] -= log_p[i, t[target]]
    return total


def normed(x: Tensor, weight: Tensor, run: RunConfig) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + run.model.norm_eps).rsqrt() * weight


def block(x: Tensor, weights: Weights, name: str, run: RunConfig) -> Tensor:
    model, count = run.model, len(x)
    w = {part[len(name) :]: weight for part, weight in weights.items() if part.startswith(name)}
    h = normed(x, w["input_layernorm.weight"], run)
    q, k, v = ((h @ w[f"self_attn.qkv.{p}_proj.weight"].T).view(count, -1, model.head_dim) for p in "qkv")
    angles = torch.arange(count)[:, None] * model.rope_theta ** (
        -torch.arange(0, model.head_dim, 2, dtype=torch.float64) / model.head_dim
    )
    q, k = rotated(q, angles), rotated(k, angles)
    repeats = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
    scores = torch.einsum("qnd,knd->nqk", q, k) / math.sqrt(model.head_dim)
    scores = scores.masked_fill(torch.ones(count, count).triu(1) > 0, -torch.inf)
    heads = torch.einsum("nqk,knd->qnd", scores.softmax(-1), v).flatten(1)
    x = x + heads @ w["self_attn.o_proj.weight"].T
    h = normed(x, w["post_attention_layernorm.weight"], run)
    gate, up = (h @ w[f"mlp.up.{p}_proj.weight"].T for p in ("gate", "up"))
    return x + (gate * gate.sigmoid() * up) @ w["mlp.down_proj.weight"].T


def rotated(x: Tensor, angles: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def largest_error() -> float:
    """Return the largest relative difference of a loss or of a gradient from the second implementation."""
    run = run_of()
    model = filled(run)
    factors = torch.tensor([1.0, 0.3, 0.2], dtype=torch.float64)
    own = {name: parameter.detach().clone().requires_grad_() for name, parameter in model.named_parameters()}
    expected, found = losses_of_documents(own, run), losses_of_the_model(model)
    (expected * factors).sum().backward()
    (found * factors).sum().backward()
    errors = [float((found - expected).detach().abs().max() / expected.detach().abs().max())]
    for name, parameter in model.named_parameters():
        grad, wanted = parameter.grad, own[name].grad
        assert wanted is not None, name
        errors.append(1.0 if grad is None else float((grad - wanted).norm() / wanted.norm()))
    return max(errors)


def test_losses_and_gradients_equal_a_second_implementation() -> None:
    # The loss is computed in float32, so allow its rounding errors.
    assert largest_error() < 1e-5


@pytest.mark.parametrize("mutant", IN_THE_MODEL, ids=lambda mutant: mutant.fault)
def test_the_second_implementation_catches(mutant: Mutant) -> None:
    with mutated(f"fourfold.{mutant.module}", mutant.old, mutant.new):
        assert not largest_error() < 1e-4


def test_inputs_and_labels_stop_at_the_end_of_a_document() -> None:
    values, documents = np.array([[5, 6, 7, 8, 9]]), np.array([[0, 0, 0, 1, 1]])
    none = IGNORE_INDEX
    assert shifted(values, documents, 2).tolist() == [[[6, 7], [7, none], [none, none], [9, none], [none, none]]]
    assert shifted(values, documents, 6)[..., 5].tolist() == [[none] * 5]


@pytest.mark.parametrize("model", [LLAMA, DEEPSEEK_V3, HYBRID, QWEN3_NEXT], ids=["dense", "latents", "hybrid", "next"])
def test_parameters_and_flops_include_the_prediction_layers(model: dict[str, object]) -> None:
    plain, run = tiny_run(model).model, tiny_run(model | TWO).model
    shapes = parameter_shapes(run)
    assert num_parameters(run) == sum(map(math.prod, shapes.values()))
    more = flops_per_token(run, 32).matmul_parameters - flops_per_token(plain, 32).matmul_parameters
    added = shapes.keys() - parameter_shapes(plain).keys()
    matrices = {name: math.prod(shapes[name]) for name in added if len(shapes[name]) > 1 and "conv" not in name}
    share = run.num_experts_per_tok / max(run.num_experts, 1)
    sizes = sum(size * (share if ".experts." in name else 1) for name, size in matrices.items())
    assert more == sizes + 2 * run.padded_vocab_size * run.hidden_size


@pytest.mark.parametrize(
    ("model", "grid", "sections", "sentence"),
    [
        ({}, {}, {"lora": {"rank": 4}}, "lora.rank = 4"),
        ({}, {"x": 2}, {"overlap": {"batch_parts": 2}}, "batch_parts = 2"),
        ({}, {}, {"training": {"precision": "bf16", "float8": "rowwise"}}, "float8"),
        ({}, {}, {"training": {"compile": True}}, "training.compile = true"),
        ({}, {}, {"training": {"tuned_products": "cached"}}, "tuned_products = 'cached'"),
        ({"tie_word_embeddings": True}, {"pp": 2}, {}, "tie_word_embeddings = true and parallel.pp = 2"),
        (
            {},
            {},
            {"dpo": {"beta": 0.2}, "data": {"format": "preferences", "train": [{"path": "nowhere"}]}},
            "dpo.beta = 0.2",
        ),
    ],
    ids=["lora", "parts", "float8", "compile", "tuned", "tied", "dpo"],
)
def test_what_does_not_work_with_multi_token_prediction_is_refused(
    model: dict[str, object], grid: dict[str, int], sections: dict[str, dict[str, object]], sentence: str
) -> None:
    with pytest.raises(UserError, match=sentence):
        check_layout(tiny_run(LLAMA | TWO | model, grid, **sections))
