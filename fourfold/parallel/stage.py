"""A pipeline stage: some consecutive layers, with the embeddings in the first and the head in the last."""

from __future__ import annotations

from torch import Tensor, nn

from fourfold.models.transformer import Block, Transformer


class Stage(Transformer):
    """The part of a decoder that one stage computes. Modules keep the names that they have in the whole."""

    def __init__(self, whole: Transformer, layers: range) -> None:
        """Take the modules of a model on the meta device, of which nothing else is kept."""
        nn.Module.__init__(self)
        is_first, is_last = layers.start == 0, layers.stop == len(whole.layers)
        self.config = whole.config
        self.embed_tokens = whole.embed_tokens if is_first else None
        self.embed_positions = whole.embed_positions if is_first else None
        self.attention_tables = whole.attention_tables
        self.layers = nn.ModuleDict({str(i): whole.layers[i] for i in layers})
        self.norm = whole.norm if is_last else None
        self.lm_head = whole.lm_head if is_last else None

    @property
    def blocks(self) -> list[Block]:
        return list(self.layers.values())

    def forward(
        self, inputs: Tensor, labels_BS: Tensor | None, positions_BS: Tensor, documents_BS: Tensor | None
    ) -> Tensor:
        """Tokens in the first stage, else hidden states → hidden states, or in the last what the whole returns."""
        x_BSH = inputs if self.embed_tokens is None else self.embed(inputs, positions_BS)
        context = self.attention_tables(positions_BS, documents_BS)
        for block in self.blocks:
            x_BSH = block(x_BSH, context)
        return x_BSH if self.lm_head is None else self.lm_head(self.norm(x_BSH), labels_BS)
