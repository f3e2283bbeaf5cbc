"""A decoder in plain, single-device PyTorch. It can be, for example, a GPT-2, Llama, Qwen, Gemma, or DeepSeek-V3 model.

Shapes: B sequences, S tokens, H hidden size, N heads, K key-value heads, D head_dim, F inner width, V padded
vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fourfold.config.model import IGNORE_INDEX, ModelConfig
from fourfold.config.model_keys import LayerType
from fourfold.models.causal_attention import AttentionContext, AttentionCore, AttentionTables
from fourfold.models.delta_net import DeltaNet
from fourfold.models.latent_attention import LatentAttention
from fourfold.models.mixture import Mixture
from fourfold.models.mlp import MLP, Linears
from fourfold.models.norms import norm_of
from fourfold.models.recomputation import recomputable
from fourfold.models.softcap import softcapped


class Transformer(nn.Module):
    """The decoder, or one pipeline stage of it.

    The first stage also has the embeddings. The last stage also has the final norm, the head, and the layers for
    multi-token prediction (prediction layers). If the model has prediction layers, the last stage also has a copy of
    the token embedding for them. Modules of a stage keep the names they have in the full model. Build the model under
    ``torch.device("meta")``. Then allocate memory for the weights, and call ``initialize`` to fill them.

    Args:
        layers: the indices of the stage's layers, by default all layers.
    """

    def __init__(self, config: ModelConfig, layers: range | None = None) -> None:
        super().__init__()
        self.config = config
        layers = range(config.num_hidden_layers) if layers is None else layers
        has_first, has_last = layers.start == 0, layers.stop == config.num_hidden_layers
        learned = has_first and config.position_embedding == "learned"
        beyond = range(layers.stop, layers.stop + config.num_nextn_predict_layers * has_last)
        kind = TokenEmbedding if config.num_nextn_predict_layers else nn.Embedding
        reads_tokens = has_first or len(beyond) > 0
        self.embed_tokens = kind(config.padded_vocab_size, config.hidden_size) if reads_tokens else None
        self.embed_positions = nn.Embedding(config.max_position_embeddings, config.hidden_size) if learned else None
        self.attention_tables = AttentionTables(config)
        self.layers = BlockStack({str(number): Block(config, number) for number in layers})
        self.layers.update({str(number): PredictionBlock(config) for number in beyond})
        self.norm = norm_of(config) if has_last else None
        self.lm_head = LMHead(config) if has_last else None
        if config.tie_word_embeddings and self.lm_head is not None and self.embed_tokens is not None:
            self.lm_head.weight = self.embed_tokens.get_parameter("weight")

    def forward(
        self,
        tokens_BS: Tensor,
        labels_BS: Tensor | None = None,
        positions_BS: Tensor | None = None,
        document_ends_BE: Tensor | None = None,
        loss_scale: Tensor | float = 1.0,
        x_BSH: Tensor | None = None,
        reference_B: Tensor | None = None,
        is_data_BS: Tensor | None = None,
        next_tokens_BSD: Tensor | None = None,
        next_labels_BSD: Tensor | None = None,
    ) -> Tensor:
        """Run the model, or one stage of it.

        Args:
            labels_BS: next tokens, or IGNORE_INDEX for positions that the loss skips.
            positions_BS: each token's position, by default 0, 1, 2, …
            document_ends_BE: the position after the last token of each document. With it, tokens attend only within
                their own document. In each sequence, the last end is S. Sequences with fewer than E documents repeat S.
            loss_scale: the factor that the caller multiplies the loss by before the backward pass. If several losses
                are returned, each has its own factor.
            x_BSH: the hidden states from the previous stage.
            reference_B: the reference model's log-probability of each sequence, for preference optimization (DPO).
            is_data_BS: True for tokens, False for padding. Experts do not process padding. By default, there is no
                padding.
            next_tokens_BSD: the tokens that the D prediction layers read (``MicroBatch.next_tokens``). Without them,
                these layers do not run.
            next_labels_BSD: the labels of the prediction layers.

        Returns:
            The sum of the token losses if there are labels, and the logits [B, S, vocab_size] if there are none. With
            ``next_tokens_BSD``, the losses or logits of the model and of each prediction layer, stacked. A stage
            without the last layer returns its hidden states [B, S, H].
        """
        if positions_BS is None:
            positions_BS = torch.arange(tokens_BS.shape[1], device=tokens_BS.device)[None]
        if x_BSH is None:
            x_BSH = self.embed(tokens_BS, positions_BS)
        contexts = self.attention_tables(positions_BS, document_ends_BE, is_data_BS)
        x_BSH = self.layers(x_BSH, contexts)
        if self.norm is None or self.lm_head is None:
            return x_BSH
        if next_tokens_BSD is not None:
            return self._predict(x_BSH, contexts, labels_BS, loss_scale, next_tokens_BSD, next_labels_BSD)
        reference = () if reference_B is None else (reference_B,)
        x_BSH = self._for_head(self.norm(x_BSH))
        out: Tensor = self.lm_head(x_BSH, labels_BS, loss_scale, *reference)
        return out

    def _predict(
        self,
        x_BSH: Tensor,
        contexts: Mapping[LayerType, AttentionContext],
        labels_BS: Tensor | None,
        loss_scale: Tensor | float,
        next_tokens_BSD: Tensor,
        next_labels_BSD: Tensor | None,
    ) -> Tensor:
        """Return the logits or losses of the model and of each prediction layer, stacked."""
        assert self.norm is not None and self.lm_head is not None
        scales, later = torch.as_tensor(loss_scale).expand(1 + next_tokens_BSD.shape[2]), list[Tensor]()
        normal_BSH = self._for_head(self.norm(x_BSH))
        for depth, block in enumerate(block for block in self.blocks if isinstance(block, PredictionBlock)):
            next_BSH = self._embed_tokens(next_tokens_BSD[..., depth])
            x_BSH, predicting_BSH = block(x_BSH, contexts[block.layer_type], next_BSH)
            labels = None if next_labels_BSD is None else next_labels_BSD[..., depth]
            # Call ``forward`` and not the module, because FSDP2's hooks expect only one call of each module per pass.
            later.append(self.lm_head.forward(self._for_head(predicting_BSH), labels, scales[1 + depth]))
        return torch.stack([self.lm_head(normal_BSH, labels_BS, scales[0]), *later])

    def _for_head(self, x_BSH: Tensor) -> Tensor:
        """Divide the head's inputs by ``logits_scaling``, so that no head needs to know this factor."""
        return x_BSH if self.config.logits_scaling == 1 else x_BSH / self.config.logits_scaling

    @property
    def blocks(self) -> list[Block | PredictionBlock]:
        """Return the blocks, followed by the prediction layers."""
        return cast("list[Block | PredictionBlock]", list(self.layers.children()))

    def embed(self, tokens_BS: Tensor, positions_BS: Tensor) -> Tensor:
        """Return the token embeddings [B, S, H], plus the position embeddings if positions are learned."""
        x_BSH = self._embed_tokens(tokens_BS)
        return x_BSH if self.embed_positions is None else x_BSH + self.embed_positions(positions_BS)

    def _embed_tokens(self, tokens_BS: Tensor) -> Tensor:
        assert self.embed_tokens is not None
        x_BSH: Tensor = self.embed_tokens(tokens_BS)
        if self.config.scale_embeddings:
            # Round the factor to the model's dtype, as Gemma does.
            x_BSH = x_BSH * x_BSH.new_full((), self.config.hidden_size**0.5)
        if self.config.embedding_multiplier != 1:
            x_BSH = x_BSH * self.config.embedding_multiplier
        return x_BSH


class TokenEmbedding(nn.Embedding):
    """An embedding that maps negative indices, such as IGNORE_INDEX, to zeros."""

    def forward(self, indices_BS: Tensor) -> Tensor:
        return super().forward(indices_BS.clamp(min=0)).masked_fill((indices_BS < 0)[..., None], 0)


class BlockStack(nn.ModuleDict):
    """The decoder's blocks in order, followed by the prediction layers. The keys are layer indices. Calling the stack
    runs only the blocks."""

    def forward(self, x_BSH: Tensor, contexts: Mapping[LayerType, AttentionContext]) -> Tensor:
        for block in cast("list[Block | PredictionBlock]", list(self.values())):
            if not isinstance(block, PredictionBlock):
                x_BSH = block(x_BSH, contexts[block.layer_type])
        return x_BSH


class AttentionAndMLP(nn.Module):
    """The modules of one layer: attention and the MLP, with their norms.

    Norms come before attention and MLP, after them (OLMo 2, arXiv 2501.00656), or both (Gemma 2, arXiv 2408.00118).
    """

    def __init__(self, config: ModelConfig, number: int) -> None:
        super().__init__()
        self.parallel_residual, self.residual_multiplier = config.parallel_residual, config.residual_multiplier
        self.layer_type = config.type_of(number)
        before, after = (config.norm_placement in (place, "around") for place in ("before", "after"))
        self.input_layernorm = norm_of(config) if before else None
        self.self_attn = attention_of(config, number)
        self.attention_output_layernorm = norm_of(config) if after else None
        self.post_attention_layernorm = norm_of(config) if before else None
        self.mlp = Mixture(config) if config.is_sparse(number) else MLP(config)
        self.mlp_output_layernorm = norm_of(config) if after else None

    @recomputable
    def add_outputs(self, x_BSH: Tensor, context: AttentionContext) -> Tensor:
        """Add the outputs of attention and MLP to the residual stream, one after the other, or both in parallel (GPT-J,
        GPT-NeoX)."""
        # Do not assign the attention's output to a variable, because it would stay in memory until the MLP has run.
        attended_BSH = torch.add(
            x_BSH,
            normed(self.self_attn(normed(x_BSH, self.input_layernorm), context), self.attention_output_layernorm),
            alpha=self.residual_multiplier,
        )
        mlp_reads_BSH = x_BSH if self.parallel_residual else attended_BSH
        padding = () if isinstance(self.mlp, MLP) else (context.is_data_BS,)
        mlp_BSH = self.mlp(normed(mlp_reads_BSH, self.post_attention_layernorm), *padding)
        return torch.add(attended_BSH, normed(mlp_BSH, self.mlp_output_layernorm), alpha=self.residual_multiplier)


class Block(AttentionAndMLP):
    """One layer of the decoder."""

    def forward(self, x_BSH: Tensor, context: AttentionContext) -> Tensor:
        return self.add_outputs(x_BSH, context)


class PredictionBlock(AttentionAndMLP):
    """A layer that predicts one token further than the layers before it (multi-token prediction, DeepSeek-V3, arXiv
    2412.19437, section 2.2). Its attention and MLP have their own weights, and the same types as in the decoder's last
    layer.

    At position i, the layer of depth k reads the hidden state of depth k − 1 and the embedding of token i + k. The
    layer predicts token i + k + 1. Hidden states of depth 0 are the outputs of the decoder's last layer, before the
    final norm. In weight files, [e_proj, h_proj] is one matrix [H, 2H], ``eh_proj``.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config, config.num_hidden_layers - 1)
        self.embedding_layernorm, self.hidden_layernorm = norm_of(config), norm_of(config)
        self.e_proj, self.h_proj = (nn.Linear(config.hidden_size, config.hidden_size, bias=False) for _ in range(2))
        self.output_layernorm = norm_of(config)

    def forward(self, x_BSH: Tensor, context: AttentionContext, next_BSH: Tensor) -> tuple[Tensor, Tensor]:
        """Return the new hidden states, and then the same hidden states after a norm, which the LM head reads."""
        x_BSH = self.e_proj(self.embedding_layernorm(next_BSH)) + self.h_proj(self.hidden_layernorm(x_BSH))
        x_BSH = self.add_outputs(x_BSH, context)
        return x_BSH, self.output_layernorm(x_BSH)


def attention_of(config: ModelConfig, number: int) -> Attention | LatentAttention | DeltaNet:
    """Create the attention module of a layer."""
    if config.type_of(number) == "linear_attention":
        return DeltaNet(config)
    return (LatentAttention if config.kv_lora_rank else Attention)(config, config.rotates(number))


def normed(x: Tensor, norm: nn.Module | None) -> Tensor:
    """Apply the norm if there is one."""
    return x if norm is None else norm(x)


class Attention(nn.Module):
    """Causal self-attention with grouped key-value heads. In some models, a learned gate scales the heads' outputs."""

    def __init__(self, config: ModelConfig, rotates: bool = True) -> None:
        super().__init__()
        queries, keys = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
        gate = {"gate_proj": queries} if config.attention_output_gate else {}
        self.qkv = Linears(config.hidden_size, config.attention_bias, q_proj=queries, k_proj=keys, v_proj=keys, **gate)
        self.core = AttentionCore(config, rotates)
        self.o_proj = nn.Linear(queries, config.hidden_size, bias=config.attention_output_bias)

    def forward(self, x_BSH: Tensor, context: AttentionContext) -> Tensor:
        q, k, v, *gate = self.qkv(x_BSH)
        heads_BSf = self.core(q, k, v, context)
        if gate:
            heads_BSf = heads_BSf * gate[0].sigmoid()
        out_BSH: Tensor = self.o_proj(heads_BSf)
        return out_BSH


class LMHead(nn.Module):
    """Maps hidden states to logits. If there are labels, returns the sum of the token losses instead."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.vocab_size, self.softcap = config.vocab_size, config.final_logit_softcapping
        self.weight = nn.Parameter(torch.empty(config.padded_vocab_size, config.hidden_size))

    def forward(self, x_BSH: Tensor, labels_BS: Tensor | None = None, loss_scale: Tensor | float = 1.0) -> Tensor:
        """Return the logits, or the sum of the token losses if there are labels.

        This head ignores ``loss_scale``. Other heads need it because they compute gradients together with the loss.
        """
        logits_BSV = softcapped(F.linear(x_BSH, self.weight)[..., : self.vocab_size], self.softcap)
        if labels_BS is None:
            return logits_BSV
        return F.cross_entropy(
            logits_BSV.flatten(0, 1).float(), labels_BS.flatten(), ignore_index=IGNORE_INDEX, reduction="sum"
        )


def parameter_shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of every parameter of the decoder. A tied parameter appears once."""
    with torch.device("meta"):
        return {name: tuple(p.shape) for name, p in Transformer(model).named_parameters()}
