"""Loki as an attention of transformers: what each attention module knows, and what it computes.

transformers calls ``loki_attention`` with the keys and values that the cache returned, but not with the cache: a hook
before each attention module (``meet_cache``) looks it up, and puts the layers of ``cache.py`` into it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from fourfold.errors import UserError
from fourfold.inference.loki.attend import decode, project
from fourfold.inference.loki.cache import LokiLayer, RotatedLayer, StaticLokiLayer
from fourfold.inference.loki.replace_cache import LayerRecipe, adopt
from fourfold.inference.loki.select import keys_of_each
from fourfold.inference.loki.settings import LokiConfig
from fourfold.inference.loki.simulate import Probe, simulate

NAME = "loki"
"""Of the attention and of its mask in the registers of transformers."""

RankedLayer = LokiLayer | RotatedLayer | StaticLokiLayer


@dataclass(eq=False)
class LayerState:
    """What an attention module carries: how its cache is made, and the layer of the cache that it meets in a pass.

    before: the attention that the model had. probe: notes what simulated rows chose, for the evaluation.
    """

    recipe: LayerRecipe
    before: str
    layer: Any = None
    probe: Probe | None = None

    def release(self) -> None:
        """Let go of the cache: it must not stay in memory with the model, nor believe that Loki reads it still."""
        if isinstance(self.layer, RankedLayer):
            self.layer.release()
        self.layer = None


def meet_cache(module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
    """Before an attention module runs: find its layer of the cache, and exchange it where it is transformers' own."""
    state: LayerState = module.loki
    hidden_states = keywords["hidden_states"] if "hidden_states" in keywords else arguments[0]
    state.recipe.to(hidden_states.device)
    state.release()
    cache = keywords.get("past_key_values")
    if isinstance(cache, Cache):
        is_loki = module.config._attn_implementation == NAME
        state.layer = adopt(cache, module.layer_idx, state.recipe, is_loki)


def leave_cache(module: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
    """After it, also when it failed."""
    module.loki.release()


def loki_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **keywords: Any,
) -> tuple[Tensor, None]:
    """Attention as transformers calls it: query [B, N, Q, D], key and value [B, K, S, D]; out [B, Q, N, D].

    attention_mask: None for causal attention without padding, else True where a key is seen, [B, 1, Q, S]. Raises
    ``UserError`` for what a model adds to attention and Loki does not compute.
    """
    state: LayerState | None = getattr(module, "loki", None)
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    if state is None or state.recipe.is_dense:  # a model that shares its config with one that has Loki
        return _dense(module, query, key, value, attention_mask, scaling, dropout, keywords)
    for name in ("softcap", "s_aux"):
        if keywords.get(name) is not None:
            raise UserError(f"loki: this model's attention has {name}, which Loki does not compute; use full attention")
    recipe, config = state.recipe, state.recipe.config
    is_rotated = isinstance(state.layer, RotatedLayer)
    if is_rotated:
        query = rotate_queries(query, recipe.basis_KDD)
    if dropout:  # training, of which Loki makes no part
        return _dense(module, query, key, value, attention_mask, scaling, dropout, keywords)
    basis_KDd = None if is_rotated else recipe.basis_KDd
    if query.shape[2] == 1 and _decodes_sparsely(state, key.shape[2], attention_mask):
        visible_B1S = None if attention_mask is None else attention_mask[:, :, 0].expand(query.shape[0], -1, -1)
        k, k_B, proxy = config.keys_of(key.shape[2]), None, state.layer.proxy_BKSd
        if visible_B1S is not None and not isinstance(state.layer, StaticLokiLayer):
            k, k_B = config.most_keys_of(key.shape[2]), keys_of_each(visible_B1S[:, 0].sum(-1), config)
        out = decode(query[:, :, 0], key, value, proxy, basis_KDd, k, config, scaling, visible_B1S, k_B)
        return out[:, None], None
    if _is_simulated(config, query, key, attention_mask):
        mask = attention_mask
        out = simulate(query, key, value, basis_KDd, recipe.d, config, scaling, mask, state.probe)
        return out.transpose(1, 2).contiguous(), None
    if config.prefill == "simulate" and query.shape[2] > 1 and not config.is_dense_at(key.shape[2]):
        raise UserError(
            'loki: prefill = "simulate" needs a whole prompt at once, an empty cache that grows, and no mask of your '
            'own; leave prefill at "dense", or give the prompt in one piece'
        )
    return _dense(module, query, key, value, attention_mask, scaling, dropout, keywords)


def rotate_queries(query_BNQD: Tensor, basis_KDD: Tensor) -> Tensor:
    """Turn each query head by the basis of its KV head, so that products with rotated keys are what they were."""
    query_BKXD = query_BNQD.unflatten(1, (basis_KDD.shape[0], -1)).flatten(2, 3)
    return project(query_BKXD, basis_KDD).view(query_BNQD.shape)


def _decodes_sparsely(state: LayerState, length: int, mask: Tensor | None) -> bool:
    if not isinstance(state.layer, RankedLayer) or not _is_understood(mask):
        return False
    return not state.recipe.config.is_dense_at(length)


def _is_simulated(config: LokiConfig, query: Tensor, key: Tensor, mask: Tensor | None) -> bool:
    """Whether a prompt is to be sparsified: one that began the cache, so that rows and keys are the same tokens."""
    whole = query.shape[2] == key.shape[2] > 1
    return config.prefill == "simulate" and whole and _is_understood(mask) and not config.is_dense_at(key.shape[2])


def _is_understood(mask: Tensor | None) -> bool:
    """A mask of our own making, the same for all heads; what a caller has made himself is left to torch."""
    return mask is None or (mask.dtype == torch.bool and mask.shape[1] == 1)


def _dense(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float,
    dropout: float,
    keywords: dict[str, Any],
) -> tuple[Tensor, None]:
    """torch's attention; a row that sees nothing (padding on the left) gives zeros, and never NaN."""
    out, _ = sdpa_attention_forward(module, query, key, value, mask, dropout=dropout, scaling=scaling, **keywords)
    if mask is not None and mask.dtype == torch.bool:
        out = out.masked_fill(~mask.any(-1).transpose(1, 2)[..., None], 0.0)
    return out, None
