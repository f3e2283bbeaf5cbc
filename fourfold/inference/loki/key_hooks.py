"""Observe the queries and keys of an unmodified forward pass, for calibration.

Shape letters: B sequences, N query heads, K KV heads, S tokens, D head_dim, R rotated dims of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.models.llama.modeling_llama import rotate_half

from fourfold.inference.loki.architecture import AttentionModule, text_config
from fourfold.inference.loki.dense import dense_attention

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NAME = "loki_observer"
"""The name under which transformers registers ``_observed_attention`` and its mask function."""

KeyObserver = Callable[[int, Tensor, dict[str, Tensor], float], None]
"""A function with four arguments: the index of a layer, the layer's queries [B, N, S, D] after the rotary embedding,
the layer's keys [B, K, S, D] before ("pre") and after ("post") the rotary embedding, and the factor on the scores."""


@contextmanager
def observe_keys(model: PreTrainedModel, attentions: list[AttentionModule], observer: KeyObserver) -> Iterator[None]:
    """While the context is open, pass every attention's queries and keys to ``observer``. The model's results do not
    change."""
    before = text_config(model)._attn_implementation
    AttentionInterface.register(NAME, _observed_attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    hooks = []
    for attention in attentions:
        attention.loki_observer = state = _LayerObserver(observer)
        hooks.append(attention.register_forward_pre_hook(state.note_rotary, with_kwargs=True))
    model.set_attn_implementation(NAME)
    try:
        yield
    finally:
        model.set_attn_implementation(before)
        for attention, hook in zip(attentions, hooks, strict=True):
            hook.remove()
            del attention.loki_observer


@dataclass(eq=False)
class _LayerObserver:
    observer: KeyObserver
    rotary: tuple[Tensor, Tensor] | None = None
    """cos and sin of the rotary embedding in the current pass. None for a layer without a rotary embedding."""

    def note_rotary(self, module: AttentionModule, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        self.rotary = keywords["position_embeddings"] if getattr(module, "use_rope", True) else None
        # In GPT-OSS, cos and sin have entries for half a head only.
        if self.rotary is not None and module.config.model_type == "gpt_oss":
            cos, sin = (torch.cat([half, half], -1) for half in self.rotary)
            self.rotary = cos, sin


def _observed_attention(
    module: AttentionModule, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **keywords: Any
) -> tuple[Tensor, None]:
    state = getattr(module, "loki_observer", None)
    # Without state, the module belongs to another model that shares the configuration object.
    if state is not None:
        scaling = keywords.get("scaling") or query.shape[-1] ** -0.5
        before = key.float() if state.rotary is None else undo_rotary(key, *state.rotary)
        state.observer(module.layer_idx, query, {"post": key, "pre": before}, scaling)
    return dense_attention(module, query, key, value, mask, **keywords)


def undo_rotary(key_BKSD: Tensor, cos_BSR: Tensor, sin_BSR: Tensor) -> Tensor:
    """Return the keys before their rotary embedding, computed in float32 from the keys after it.

    cos and sin may rotate only the first R dims of a head, and may be scaled, as in YaRN.
    """
    rotated = key_BKSD[..., : cos_BSR.shape[-1]].float()
    cos, sin = cos_BSR[:, None].float(), sin_BSR[:, None].float()
    plain = (rotated * cos - rotate_half(rotated) * sin) / (cos**2 + sin**2)
    return torch.cat([plain, key_BKSD[..., cos_BSR.shape[-1] :].float()], -1)
