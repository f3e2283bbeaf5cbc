"""A pipeline stage: some consecutive layers, with the embeddings in the first and the head in the last."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fourfold.models.transformer import Transformer


class Stage(Transformer):
    """The part of a decoder that one stage computes. Modules keep the names that they have in the whole."""

    def __init__(self, whole: Transformer, layers: range) -> None:
        """Take the modules of a model on the meta device, of which nothing else is kept."""
        nn.Module.__init__(self)
        is_first, is_last = layers.start == 0, layers.stop == len(whole.layers)
        self.config = whole.config
        self.register_module("embed_tokens", whole.embed_tokens if is_first else None)
        self.register_module("embed_positions", whole.embed_positions if is_first else None)
        self.attention_tables = whole.attention_tables
        self.register_module("layers", nn.ModuleDict({str(i): whole.layers[i] for i in layers}))
        self.register_module("norm", whole.norm if is_last else None)
        self.register_module("lm_head", whole.lm_head if is_last else None)

    def forward(
        self,
        tokens_BS: Tensor,
        labels_BS: Tensor | None = None,
        positions_BS: Tensor | None = None,
        documents_BS: Tensor | None = None,
        loss_scale: Tensor | float = 1.0,
        x_BSH: Tensor | None = None,
    ) -> Tensor:
        """Hidden states for the next stage, or in the last stage the result of the whole model.

        x_BSH: hidden states of the stage before, None in the first.
        """
        if positions_BS is None:
            positions_BS = torch.arange(tokens_BS.shape[1], device=tokens_BS.device)[None]
        if x_BSH is None:
            x_BSH = self.embed(tokens_BS, positions_BS)
        context = self.attention_tables(positions_BS, documents_BS)
        for block in self.blocks:
            x_BSH = block(x_BSH, context)
        if self.lm_head is None:
            return x_BSH
        result: Tensor = self.lm_head(self.norm(x_BSH), labels_BS, loss_scale)
        return result
