"""Describe the decoders of workloads to predict, as arrays with one entry per case."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fourfold.planning.array_fields import ArrayFields, Flag, Number


@dataclass(frozen=True)
class ModelShape(ArrayFields):
    """The sizes of a decoder."""

    num_hidden_layers: Number
    hidden_size: Number
    queries: Number
    """Number of features of all query heads."""
    keys: Number
    """Number of features of all key heads. The value heads have the same number."""
    head_dim: Number
    intermediate_size: Number
    """Width of a dense MLP. 0 if there is none."""
    gate_up: Number
    """Number of outputs of the MLP's first matmul: 2 · intermediate_size with a gate, or intermediate_size without."""
    padded_vocab_size: Number
    """Number of rows of the vocabulary, including padding."""
    tie_word_embeddings: Flag
    """Whether embedding and head share one table."""
    rope: Number = 1
    """Number of rotary tables. Sliding-window layers can have their own table. 0 for learned positions."""
    rotary_share: Number = 1.0
    """Fraction of a head's channels that rotary embeddings rotate."""
    rotated: Number = 1
    """Fraction of the blocks that rotate queries and keys. 0 for learned positions."""
    positions: Number = 0
    """Number of rows of a learned position table. 0 if there is none."""
    attention_bias: Flag = False
    """Whether q, k, and v have biases."""
    qk_norm: Flag = False
    """Whether queries and keys are normalized."""
    joint_head_norms: Flag = False
    """Whether queries and keys are normalized over all heads together."""
    layer_norm: Flag = False
    """Whether norms are LayerNorm instead of RMSNorm."""
    zero_centered_norm: Flag = False
    """Whether norms multiply by 1 + weight."""
    parallel_residual: Flag = False
    """Whether attention and MLP read the same input."""
    norms: Number = 2
    """Number of norms in a block, without the norms of queries and keys."""
    output_norms: Flag = False
    """Whether some norms apply to the outputs of attention and MLP."""
    sliding_window: Number = 0
    """Number of tokens that a query in a sliding-window layer sees."""
    sliding: Number = 0
    """Fraction of the blocks with a sliding window."""
    caps_scores: Flag = False
    """Whether the attention's scores are soft-capped."""
    caps_logits: Flag = False
    """Whether the head's logits are soft-capped."""
    num_experts: Number = 0
    """Number of experts per block. 0 if there are none."""
    num_experts_per_tok: Number = 0
    """Number of experts per token."""
    moe_intermediate_size: Number = 0
    """Width of an expert, which has a gate."""
    shared_expert_intermediate_size: Number = 0
    """Width of the shared expert, a gated MLP that processes every token. 0 if there is none."""
    shared_expert_gate: Flag = False
    """Whether a per-token gate multiplies the shared expert's output."""
    sparse: Number = 0
    """Fraction of the blocks that have experts."""
    clamps_gate: Flag = False
    """Whether the gate is clamped (GPT-OSS). The backward pass then computes the activation of the gate again."""
    q_latent: Number = 0
    """Width of the latents of queries. 0 if there are none."""
    kv_latent: Number = 0
    """Width of the latents of keys and values (latent attention). 0 if there are none."""
    shared_key: Number = 0
    """Number of key channels that all heads share (latent attention)."""
    latent_values: Number = 0
    """Number of features of all value heads of latent attention. Zeros pad them to the width of the keys."""

    output_gate: Flag = False
    """Whether a gate, projected from the block's input, multiplies the outputs of the query heads."""
    linear: Number = 0
    """Fraction of the blocks with linear attention."""
    linear_weights: Number = 0
    """Number of matrix entries of a block's linear attention."""
    linear_states: Number = 0
    """Number of entries in the states of all heads of linear attention."""

    @property
    def has_latents(self) -> Flag:
        latents: Flag = np.greater(self.kv_latent, 0)
        return latents

    @property
    def latents(self) -> Number:
        """Return the number of features that latent attention projects hidden states to."""
        return self.q_latent + self.kv_latent + self.shared_key

    @property
    def read_by_heads(self) -> Number:
        """Return the number of features that the projections to queries, keys, and values read."""
        hidden = np.where(np.greater(self.q_latent, 0), 0, self.hidden_size)
        return np.where(self.has_latents, self.q_latent + self.kv_latent + hidden, self.hidden_size)

    @property
    def values(self) -> Number:
        """Return the number of features that the output projection reads."""
        return np.where(self.has_latents, self.latent_values, self.queries)

    @property
    def projected(self) -> Number:
        """Return the number of features of queries, keys, and values that are projected for each token."""
        own_keys = self.keys * (1 - self.rotary_share)
        return self.queries + np.where(self.has_latents, own_keys + self.latent_values, 2 * self.keys)

    @property
    def attention_weights(self) -> Number:
        """Return the mean number of matrix entries of a block's attention."""
        reads = np.where(np.greater(self.q_latent, 0), self.q_latent, self.hidden_size)
        latent = self.hidden_size * self.latents + reads * self.queries
        latent = latent + self.kv_latent * (self.projected - self.queries) + self.latent_values * self.hidden_size
        plain = self.hidden_size * ((2 + self.output_gate) * self.queries + 2 * self.keys)
        return (1 - self.linear) * np.where(self.has_latents, latent, plain) + self.linear * self.linear_weights

    @property
    def dense_first(self) -> Number:
        """Return the number of an MoE model's blocks that have a dense MLP. These are the first blocks."""
        return np.where(np.greater(self.sparse, 0), np.rint(self.num_hidden_layers * (1 - self.sparse)), 0)

    def keys_seen(self, seq: Number) -> Number:
        """Return the number of keys that a query sees (half of all keys, a window, or none with linear attention), as a
        mean over queries and blocks."""
        window = np.minimum(self.sliding_window, seq)
        return (1 - self.sliding - self.linear) * seq / 2 + self.sliding * window * (
            1 - window / np.maximum(2 * seq, 1)
        )

    @property
    def mean_inner(self) -> Number:
        """Return the mean width, over all blocks, of the MLP that processes every token (dense or shared expert)."""
        return (1 - self.sparse) * self.intermediate_size + self.sparse * self.shared_expert_intermediate_size

    @property
    def mean_gate_up(self) -> Number:
        """Return the mean number of outputs of the first matmul of ``mean_inner``'s MLP."""
        return (1 - self.sparse) * self.gate_up + self.sparse * 2 * self.shared_expert_intermediate_size

    @property
    def mlps(self) -> Number:
        """Return the fraction of the blocks that have an MLP for every token."""
        shared = self.shared_expert_intermediate_size > 0
        return (1 - self.sparse) * (self.intermediate_size > 0) + self.sparse * shared

    @property
    def block_weights(self) -> Number:
        """Return the mean number of matrix entries of a block, without its experts."""
        router = self.sparse * self.num_experts
        return self.attention_weights + self.hidden_size * (self.mean_gate_up + self.mean_inner + router)

    @property
    def expert_weights(self) -> Number:
        """Return the mean number of matrix entries of a block's experts."""
        return self.num_experts * self.sparse * 3 * self.hidden_size * self.moe_intermediate_size

    @property
    def active_weights(self) -> Number:
        """Return the mean number of entries in a block's matrices that a token is multiplied by."""
        chosen = self.num_experts_per_tok
        return self.block_weights + chosen * self.sparse * 3 * self.hidden_size * self.moe_intermediate_size
