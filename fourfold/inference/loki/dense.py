"""Run dense attention. If the heads of a model have learned sinks (GPT-OSS), include the sinks in the softmax."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from fourfold.errors import UserError
from fourfold.parallel.attention.block_attention import AttentionScores, attend_masked


def dense_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    s_aux: Tensor | None = None,
    **keywords: Any,
) -> tuple[Tensor, None]:
    """Attend to all keys. This is an attention function for transformers, with the arguments of ``loki_attention``.

    The output is zero for a query that sees no key (left padding), never NaN.

    Args:
        s_aux: The sink of each query head, [N], if the model has sinks. A sink is one more score, without a value.

    Raises:
        UserError: The model has sinks, and dropout is on.
    """
    if s_aux is None:
        out, _ = sdpa_attention_forward(module, query, key, value, mask, dropout=dropout, scaling=scaling, **keywords)
    else:
        if dropout:
            raise UserError("loki: attention with sinks has no dropout here; set the model's attention_dropout to 0")
        rows, length = query.shape[2], key.shape[2]
        seen = torch.ones(1, 1, rows, length, dtype=torch.bool, device=key.device).tril(length - rows)
        scores = AttentionScores(query.shape[-1] ** -0.5 if scaling is None else scaling)
        out = attend_masked(query, key, value, seen if mask is None else mask, scores, s_aux).transpose(1, 2)
    if mask is not None and mask.dtype == torch.bool:
        out = out.masked_fill(~mask.any(-1).transpose(1, 2)[..., None], 0.0)
    return out, None
