"""Looks at the queries and keys of a model that runs as ever: what calibration sees."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.models.llama.modeling_llama import rotate_half

from fourfold.inference.loki.architecture import text_config

Watcher = Callable[[int, Tensor, dict[str, Tensor], float], None]
"""Called with the number of a layer, its queries [B, N, S, D], its keys [B, K, S, D] by kind, and the scaling."""


@contextmanager
def watched(model: nn.Module, attentions: list[nn.Module], watcher: Watcher) -> Iterator[None]:
    """Inside, every attention shows its queries and keys before it computes what it always does."""
    before = text_config(model)._attn_implementation
    AttentionInterface.register("loki_watch", _show)
    AttentionMaskInterface.register("loki_watch", sdpa_mask)
    hooks = []
    for attention in attentions:
        attention.loki_watch = _Watch(watcher)
        hooks.append(attention.register_forward_pre_hook(_remember_turn, with_kwargs=True))
    model.set_attn_implementation("loki_watch")
    try:
        yield
    finally:
        model.set_attn_implementation(before)
        for attention, hook in zip(attentions, hooks, strict=True):
            hook.remove()
            del attention.loki_watch


@dataclass(eq=False)
class _Watch:
    """What an attention carries while it is watched; turn: cos and sin of its pass, None where keys are not turned."""

    watcher: Watcher
    turn: tuple[Tensor, Tensor] | None = None


def _remember_turn(module: nn.Module, arguments: Any, keywords: dict[str, Any]) -> None:
    is_turned = getattr(module, "use_rope", True)
    module.loki_watch.turn = keywords["position_embeddings"] if is_turned else None


def _show(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **keywords: Any) -> Any:
    watch = getattr(module, "loki_watch", None)
    if watch is not None:  # else a model that shares its configuration with the one that is watched
        scaling = keywords.get("scaling") or query.shape[-1] ** -0.5
        before = key.float() if watch.turn is None else turned_back(key, *watch.turn)
        watch.watcher(module.layer_idx, query, {"post": key, "pre": before}, scaling)
    return sdpa_attention_forward(module, query, key, value, mask, **keywords)


def turned_back(key_BKSD: Tensor, cos_BSR: Tensor, sin_BSR: Tensor) -> Tensor:
    """Keys before their rotary embedding, from those after it, in float32.

    cos and sin may turn only the first R dims of a head, and may be scaled, as YaRN's are.
    """
    turned = key_BKSD[..., : cos_BSR.shape[-1]].float()
    cos, sin = cos_BSR[:, None].float(), sin_BSR[:, None].float()
    straight = (turned * cos - rotate_half(turned) * sin) / (cos**2 + sin**2)
    return torch.cat([straight, key_BKSD[..., cos_BSR.shape[-1] :].float()], -1)
