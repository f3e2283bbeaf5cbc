"""Describe the sizes of a decoder for the planner. The sizes can be arrays with one entry per case, such as one entry
per layout."""

from dataclasses import dataclass

import numpy as np

from fourfold.planning.array_fields import ArrayFields, Flag, Number


@dataclass(frozen=True)
class ModelShape(ArrayFields):
    """The sizes of a decoder. A *width* is the number of features of one token."""

    num_hidden_layers: Number
    """Number of blocks, including the prediction layers."""
    hidden_size: Number
    queries: Number
    """Width of all query heads together (number of heads · head_dim)."""
    keys: Number
    """Width of all key heads together. Without latent attention, the value heads have the same width."""
    head_dim: Number
    intermediate_size: Number
    """Width of a dense MLP. 0 if there is none."""
    gate_up: Number
    """Output width of the MLP's first matmul: 2 · intermediate_size with a gate, or intermediate_size without a
    gate."""
    padded_vocab_size: Number
    """Number of tokens in the vocabulary, including padding."""
    tie_word_embeddings: Flag
    """Whether the embedding and the head share one weight."""
    rope: Number = 1
    """Number of sets of rotary frequencies: 2 if sliding-window layers have different frequencies than other layers,
    otherwise 1. 0 with learned position embeddings."""
    rotary_share: Number = 1.0
    """Fraction of a head's channels that rotary embeddings rotate."""
    rotated: Number = 1
    """Fraction of the blocks that rotate queries and keys. 0 with learned position embeddings."""
    positions: Number = 0
    """Number of learned position embeddings. 0 if there are none."""
    attention_bias: Flag = False
    """Whether q, k, and v have biases."""
    qk_norm: Flag = False
    """Whether queries and keys are normalized."""
    joint_head_norms: Flag = False
    """Whether the norms of queries and keys normalize all heads together instead of each head."""
    layer_norm: Flag = False
    """Whether norms are LayerNorm instead of RMSNorm."""
    zero_centered_norm: Flag = False
    """Whether norms multiply by 1 + weight."""
    parallel_residual: Flag = False
    """Whether attention and MLP read the same residual stream, as in GPT-NeoX. Otherwise the MLP reads the stream after
    attention has added its output."""
    norms: Number = 2
    """Number of norms in a block, not counting the norms of queries and keys."""
    output_norms: Flag = False
    """Whether some norms apply to the outputs of attention and MLP."""
    sliding_window: Number = 0
    """Largest number of tokens that a query attends to in a sliding-window layer."""
    sliding: Number = 0
    """Fraction of the blocks with a sliding window."""
    caps_scores: Flag = False
    """Whether attention scores are soft-capped."""
    caps_logits: Flag = False
    """Whether the logits are soft-capped."""
    num_experts: Number = 0
    """Number of experts per block. 0 if there are none."""
    num_experts_per_tok: Number = 0
    """Number of experts that each token is routed to (top-k)."""
    moe_intermediate_size: Number = 0
    """Inner width of one expert. Experts are gated MLPs."""
    shared_expert_intermediate_size: Number = 0
    """Inner width of the shared expert, a gated MLP that processes every token. 0 if there is none."""
    shared_expert_gate: Flag = False
    """Whether a per-token gate multiplies the shared expert's output."""
    sparse: Number = 0
    """Fraction of the blocks that have experts."""
    clamps_gate: Flag = False
    """Whether the MLP clamps the outputs of gate and up (GPT-OSS). The backward pass then recomputes the activation of
    the gate."""
    q_latent: Number = 0
    """Width of the query latent (latent attention). 0 if queries have no latent."""
    kv_latent: Number = 0
    """Width of the latent of keys and values (latent attention). 0 without latent attention."""
    shared_key: Number = 0
    """Number of key channels that all heads share (latent attention)."""
    latent_values: Number = 0
    """Width of all value heads together in latent attention. Attention pads the values with zeros to the width of the
    keys."""

    output_gate: Flag = False
    """Whether attention has an output gate: a projection of the block's input multiplies the outputs of the query
    heads."""
    linear: Number = 0
    """Fraction of the blocks with linear attention."""
    after_linear: Number = 0
    """Number of blocks after the last block with linear attention."""
    predictions: Number = 0
    """Number of prediction layers (multi-token prediction). Each is a block like the last one, plus two projections."""
    prediction_width: Number = 0
    """Input and output width of a prediction layer's two projections. 0 without prediction layers."""
    linear_num_key_heads: Number = 0
    linear_num_value_heads: Number = 0
    linear_key_head_dim: Number = 0
    linear_value_head_dim: Number = 0

    @property
    def linear_keys(self) -> Number:
        """Return the width of all key heads of linear attention together. The queries have the same width."""
        return self.linear_num_key_heads * self.linear_key_head_dim

    @property
    def linear_values(self) -> Number:
        """Return the width of all value heads of linear attention together."""
        return self.linear_num_value_heads * self.linear_value_head_dim

    @property
    def linear_states(self) -> Number:
        """Return the number of entries in the states of all linear-attention heads of a block."""
        return self.linear_values * self.linear_key_head_dim

    @property
    def has_latents(self) -> Flag:
        return np.greater(self.kv_latent, 0)

    @property
    def latents(self) -> Number:
        """Return the total width of the latents and shared key channels that latent attention projects hidden states
        to."""
        return self.q_latent + self.kv_latent + self.shared_key

    @property
    def read_by_heads(self) -> Number:
        """Return the total input width of the projections to queries, keys, and values. With latent attention, these
        projections read latents. If queries have no latent, the projection to queries reads the hidden states."""
        hidden = np.where(np.greater(self.q_latent, 0), 0, self.hidden_size)
        return np.where(self.has_latents, self.q_latent + self.kv_latent + hidden, self.hidden_size)

    @property
    def values(self) -> Number:
        """Return the input width of attention's output projection."""
        return np.where(self.has_latents, self.latent_values, self.queries)

    @property
    def projected(self) -> Number:
        """Return the total output width of the projections to queries, keys, values, and output gate. With latent
        attention, this excludes the key channels that all heads share."""
        own_keys = self.keys * (1 - self.rotary_share)
        gated = self.queries * (1 + self.output_gate)
        return gated + np.where(self.has_latents, own_keys + self.latent_values, 2 * self.keys)

    @property
    def attention_weights(self) -> Number:
        """Return the mean number of weight entries in the matrices of a block's attention."""
        reads = np.where(np.greater(self.q_latent, 0), self.q_latent, self.hidden_size)
        latent = self.hidden_size * self.latents + reads * self.queries
        latent = latent + self.kv_latent * (self.projected - self.queries) + self.latent_values * self.hidden_size
        plain = self.hidden_size * ((2 + self.output_gate) * self.queries + 2 * self.keys)
        softmax = np.where(self.has_latents, latent, plain)
        outputs = 2 * self.linear_keys + 3 * self.linear_values + 2 * self.linear_num_value_heads
        return (1 - self.linear) * softmax + self.linear * self.hidden_size * outputs

    @property
    def dense_first(self) -> Number:
        """Return the number of blocks of an MoE model that have a dense MLP. These are the model's first blocks. Return
        0 for dense models."""
        return np.where(np.greater(self.sparse, 0), np.rint(self.num_hidden_layers * (1 - self.sparse)), 0)

    def keys_seen(self, seq: Number) -> Number:
        """Return the mean number of keys that a query attends to, over all queries and blocks. Without a window, this
        is half of the sequence, because attention is causal. Blocks with linear attention count as 0."""
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
        """Return the mean output width of the first matmul of the MLP that processes every token (see
        ``mean_inner``)."""
        return (1 - self.sparse) * self.gate_up + self.sparse * 2 * self.shared_expert_intermediate_size

    @property
    def mlps(self) -> Number:
        """Return the fraction of the blocks that have an MLP that processes every token (a dense MLP or a shared
        expert)."""
        shared = self.shared_expert_intermediate_size > 0
        return (1 - self.sparse) * (self.intermediate_size > 0) + self.sparse * shared

    @property
    def block_weights(self) -> Number:
        """Return the mean number of weight entries in the matrices of a block, with the router but without the
        experts."""
        router = self.sparse * self.num_experts
        return self.attention_weights + self.hidden_size * (self.mean_gate_up + self.mean_inner + router)

    @property
    def expert_weights(self) -> Number:
        """Return the mean number of weight entries in the matrices of a block's experts."""
        return self.num_experts * self.sparse * 3 * self.hidden_size * self.moe_intermediate_size

    @property
    def own_linear(self) -> Number:
        """Return the fraction of the blocks with linear attention, without the prediction layers. These layers have
        linear attention if the model's last block has it."""
        ends_linear = np.greater(self.linear, 0) & np.equal(self.after_linear, 0)
        own = self.num_hidden_layers - self.predictions
        return (self.linear * self.num_hidden_layers - self.predictions * ends_linear) / own

    @property
    def projection_weights(self) -> Number:
        """Return the number of weight entries in the projections of all prediction layers."""
        return 2 * self.predictions * self.prediction_width**2

    @property
    def projections_per_head(self) -> Number:
        """Return the entries in the projections of all prediction layers, divided by the entries of the head."""
        return self.projection_weights / (self.padded_vocab_size * self.hidden_size)

    @property
    def copies_embedding(self) -> Flag:
        """Return whether the last rank of a pipeline has a copy of the embedding. Prediction layers read this copy, or
        it is also the head."""
        return np.asarray(self.tie_word_embeddings, bool) | np.greater(self.predictions, 0)

    @property
    def active_weights(self) -> Number:
        """Return the mean number of weight entries, per block, in the matrices that take part in the matmuls of one
        token."""
        chosen = self.num_experts_per_tok
        return self.block_weights + chosen * self.sparse * 3 * self.hidden_size * self.moe_intermediate_size
