"""Make small random models with a basis for Loki. This file also has a slow, simple implementation of Loki to compare
with."""

from __future__ import annotations

import copy
import inspect
from functools import cache
from typing import Any

import torch
from tiny_dense_models import SIZES
from torch import Tensor

from fourfold.inference.loki import LokiConfig
from fourfold.inference.loki.codes import Encoder

SPARSE = LokiConfig(d=8, k=12, min_seq=0)
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "mistral": ("MistralConfig", {"sliding_window": None, "head_dim": 12}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {"head_dim": 16}),
}


def changed(config: LokiConfig, **values: Any) -> LokiConfig:
    return config.model_copy(update=values)


def loki_model(name: str = "llama", kv_heads: int = 2, seed: int = 0, **changes: Any) -> Any:
    """Return a model with eight query heads, and logits of size about 1."""
    import transformers

    kind, keys = SHAPES[name]
    torch.manual_seed(seed)
    sizes = SIZES | {"max_position_embeddings": 512, "initializer_range": 0.1, "num_key_value_heads": kv_heads}
    config = getattr(transformers, kind)(**(sizes | keys | changes))
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()


def windows(count: int = 4, length: int = 64, seed: int = 1) -> list[list[int]]:
    tokens = torch.randint(1, 201, (count, length), generator=torch.Generator().manual_seed(seed))
    return tokens.tolist()


@cache
def _calibrated() -> tuple[Any, Any]:
    from fourfold.inference.loki import calibrate

    model = loki_model()
    return model, calibrate(model, windows())


def calibrated_llama() -> tuple[Any, Any]:
    """Return a new Llama and its basis. The basis is computed only once."""
    model, basis = _calibrated()
    return copy.deepcopy(model), basis


def prompt(batch: int = 2, length: int = 50, seed: int = 2) -> Tensor:
    return torch.randint(1, 201, (batch, length), generator=torch.Generator().manual_seed(seed))


def encoder_of(basis_KDd: Tensor) -> Encoder:
    """Return an encoder for queries and keys with the same directions. The keys have mean 0 and variance 1 in all
    directions."""
    heads, width, _ = basis_KDd.shape
    return Encoder.of(basis_KDd, basis_KDd, torch.zeros(heads, width), torch.eye(width).expand(heads, -1, -1))


def slow_codes(key_SD: Tensor, direction_D: Tensor, mean_D: Tensor, covariance_DD: Tensor) -> tuple[Tensor, Tensor]:
    """Return the codes of keys along one direction, and the width of an interval: one standard deviation. A code counts
    how many of the three borders between the intervals are not above the key."""
    width = (direction_D @ covariance_DD @ direction_D).sqrt()
    middle = direction_D @ mean_D
    borders_3 = torch.stack([middle - width, middle, middle + width])
    return ((key_SD @ direction_D)[:, None] >= borders_3).sum(-1), width


def slow_decode(
    query_ND: Tensor,
    key_KSD: Tensor,
    value_KSD: Tensor,
    basis_2KDd: Tensor,
    k: int,
    scaling: float,
    mean_KD: Tensor,
    covariance_KDD: Tensor,
) -> Tensor:
    """Run one step of Loki on one sequence, head by head. Query heads that share a KV head choose keys by the sum of
    their softmaxes. The first 4 and the last 64 keys, but at most a quarter of the k keys each, are always chosen. All
    other keys share one value: their mean. Their scores are the scores of their codes, plus a constant: the mean
    difference between the exact scores and the codes' scores of the chosen keys."""
    group = len(query_ND) // len(key_KSD)
    out = []
    for head, (key_SD, value_SD, query_Dd, key_Dd) in enumerate(zip(key_KSD, value_KSD, *basis_2KDd, strict=True)):
        queries_GD = query_ND[head * group : (head + 1) * group]
        approximate_GS = torch.zeros(len(queries_GD), len(key_SD))
        for query_D, key_D in zip(query_Dd.T, key_Dd.T, strict=True):
            codes_S, width = slow_codes(key_SD, key_D, mean_KD[head], covariance_KDD[head])
            approximate_GS += (queries_GD @ query_D)[:, None] * width * codes_S
        worth_S = torch.softmax(approximate_GS * scaling, -1).sum(0)
        last = len(key_SD) - min(64, k // 4)
        ends = [*range(min(4, k // 4)), *range(last, len(key_SD))]
        best = [place for place in worth_S.argsort(descending=True).tolist() if place not in ends]
        chosen = {*ends, *best[: k - len(ends)]}
        hidden_S = torch.tensor([place not in chosen for place in range(len(key_SD))])
        scores_GS, coded_GS = queries_GD @ key_SD.T * scaling, approximate_GS * scaling
        constant_G = (scores_GS - coded_GS)[:, ~hidden_S].mean(-1)
        weights_GS = torch.softmax(torch.where(hidden_S, coded_GS + constant_G[:, None], scores_GS), -1)
        values_SD = torch.where(hidden_S[:, None], value_SD[hidden_S].mean(0), value_SD)
        out.append(weights_GS @ values_SD)
    return torch.cat(out)


@cache
def name_of_cache() -> str:
    """Return the name of the cache argument of a model's forward. transformers 5.24 changed this name."""
    from transformers import LlamaForCausalLM

    return "cache" if "cache" in inspect.signature(LlamaForCausalLM.forward).parameters else "past_key_values"


def with_cache(cache: Any) -> dict[str, Any]:
    """Return keyword arguments that make a model's forward read and extend a cache."""
    return {name_of_cache(): cache, "use_cache": True}


def step_by_step(model: Any, tokens_BS: Tensor, begin: int, **more: Any) -> Tensor:
    """Return the logits of all tokens. The first step processes a prompt of ``begin`` tokens, and each later step
    processes one token."""
    from transformers import DynamicCache

    cache = more.pop("cache", None) or DynamicCache(config=model.config)
    out = [model(tokens_BS[:, :begin], **with_cache(cache), **more).logits]
    for place in range(begin, tokens_BS.shape[1]):
        out.append(model(tokens_BS[:, place : place + 1], **with_cache(cache)).logits)
    return torch.cat(out, dim=1)
