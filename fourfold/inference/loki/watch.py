"""Looks at the queries and keys of a model that runs as ever: what calibration sees."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
    turns: dict[int, tuple[Tensor, Tensor]] = {}

    def remember_turn(module: nn.Module, arguments: Any, keywords: dict[str, Any]) -> None:
        turns[module.layer_idx] = keywords["position_embeddings"]

    def show(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **keywords: Any) -> Any:
        scaling = keywords.get("scaling") or query.shape[-1] ** -0.5
        keys = {"post": key, "pre": turned_back(key, *turns.pop(module.layer_idx))}
        watcher(module.layer_idx, query, keys, scaling)
        return sdpa_attention_forward(module, query, key, value, mask, **keywords)

    before = text_config(model)._attn_implementation
    AttentionInterface.register("loki_watch", show)
    AttentionMaskInterface.register("loki_watch", sdpa_mask)
    hooks = [each.register_forward_pre_hook(remember_turn, with_kwargs=True) for each in attentions]
    model.set_attn_implementation("loki_watch")
    try:
        yield
    finally:
        model.set_attn_implementation(before)
        for hook in hooks:
            hook.remove()


def turned_back(key_BKSD: Tensor, cos_BSR: Tensor, sin_BSR: Tensor) -> Tensor:
    """Keys before their rotary embedding, from those after it, in float32.

    cos and sin may turn only the first R dims of a head, and may be scaled, as YaRN's are.
    """
    turned = key_BKSD[..., : cos_BSR.shape[-1]].float()
    cos, sin = cos_BSR[:, None].float(), sin_BSR[:, None].float()
    straight = (turned * cos - rotate_half(turned) * sin) / (cos**2 + sin**2)
    return torch.cat([straight, key_BKSD[..., cos_BSR.shape[-1] :].float()], -1)
