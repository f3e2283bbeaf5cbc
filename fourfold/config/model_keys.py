"""The keys of the run file's section [model], under the names that Hugging Face uses."""

from typing import Literal

from pydantic import Field

from fourfold.config.rope_scaling import RopeScaling
from fourfold.config.strict import PathText, Size, Strict

MOST_LAYERS = 100_000

UNSET = 0
"""Default of a size that ``ModelConfig`` derives from other sizes."""

LayerType = Literal["full_attention", "sliding_attention", "linear_attention"]


class ModelKeys(Strict):
    """The keys of [model]. ``ModelConfig`` checks them and derives missing sizes."""

    preset: str | None = Field(None, examples=["gpt2"])
    """Name of a [preset](#presets) that gives the sizes of the model. Other keys of [model] override the preset."""
    from_hf: PathText | None = None
    """Folder or Hub id of a Hugging Face model. The run starts from this model's sizes and weights. Other keys of
    [model] override the model's config.json."""
    vocab_size: Size = Field(examples=[50257])
    """Number of tokens in the tokenizer's vocabulary."""
    hidden_size: Size = Field(examples=[768])
    """Width of the residual stream."""
    num_hidden_layers: int = Field(examples=[12], gt=0, le=MOST_LAYERS)
    """Number of blocks. Each block has attention and an MLP."""
    num_attention_heads: Size = Field(examples=[12])
    """Number of query heads."""
    num_key_value_heads: Size = UNSET
    """Number of key and value heads (GQA). Must divide num_attention_heads. Default: num_attention_heads."""
    head_dim: Size = UNSET
    """Width of one head. Default: hidden_size / num_attention_heads."""
    intermediate_size: int = Field(UNSET, gt=0)
    """Inner width of the MLP. Default: 4 × hidden_size."""
    max_position_embeddings: Size = 2048
    """Largest sequence length. With position_embedding = 'learned', the model has this many position embeddings."""
    mlp: Literal["swiglu", "geglu", "gelu", "relu2"] = "swiglu"
    """Type of the MLP: three matrices with a SiLU gate (swiglu) or a GELU gate (geglu), or two matrices with a plain
    GELU (gelu) or a squared ReLU (relu2)."""
    gelu_approximation: Literal["tanh", "none"] = "tanh"
    """How geglu and gelu compute GELU: with a tanh approximation (tanh) or exactly, with the error function (none)."""
    swiglu_limit: float = Field(0.0, ge=0)
    """GPT-OSS's limit c for swiglu. If c is above 0, the gate's output g is clamped to at most c, and the up
    projection's output u to [−c, c]. The result is (u + 1) · g · sigmoid(1.702 · g). 0 (default) computes the usual
    swiglu."""
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    """Type of all norms."""
    norm_placement: Literal["before", "after", "around"] = "before"
    """Normalize the inputs of attention and MLP (before), their outputs (after, OLMo 2), or both (around, Gemma 2)."""
    norm_eps: float = Field(1e-5, gt=0)
    """Small number that a norm adds to the variance (layernorm) or to the mean square (rmsnorm)."""
    zero_centered_norm: bool = False
    """RMSNorms multiply by 1 + weight instead of weight (Gemma)."""
    norm_rounds_last: bool = False
    """RMSNorms multiply by the weight in float32, and then round to the model's dtype (GPT-OSS). By default, they round
    first and then multiply. Zero-centered norms always round last."""
    parallel_residual: bool = False
    """Give a block's attention and MLP the same input, and add both outputs to this input (GPT-NeoX). By default, the
    MLP follows the attention."""
    position_embedding: Literal["rope", "learned"] = "rope"
    """`rope` rotates queries and keys. `learned` adds a trained vector per position to the token embedding."""
    rope_theta: float = Field(10000.0, gt=1)
    """Base of the rotary frequencies."""
    partial_rotary_factor: float = Field(1.0, gt=0, le=1)
    """Fraction of a head's channels that are rotated (GPT-NeoX). The first channels are rotated."""
    rope_scaling: RopeScaling | None = Field(None, examples=[{"rope_type": "linear", "factor": 2.0}])
    """Scale the rotary frequencies for longer contexts (see below). Default: no scaling."""
    sliding_window: int = Field(0, ge=0)
    """Number of tokens that a query in a sliding_attention layer attends to, including its own token. 0 turns windows
    off."""
    layer_types: list[LayerType] = Field([])
    """Attention type of each layer. If the list has fewer entries than the model has layers, it repeats.
    `sliding_attention` layers use sliding_window. `linear_attention` layers are Gated DeltaNets (Qwen3-Next). If the
    list is empty (default), all layers are `sliding_attention` layers if sliding_window is above 0, and
    `full_attention` layers otherwise."""
    no_rope_layers: list[Literal[0, 1]] = Field([])
    """For each layer, 1 for rotary embeddings or 0 for no position embeddings (SmolLM3). The list repeats as in
    layer_types. If the list is empty (default), all layers have rotary embeddings."""
    rope_local_base_freq: float = Field(0.0, ge=0)
    """Base of the rotary frequencies in sliding_attention layers. If it is above 0, these layers ignore rope_scaling
    (Gemma 3). With 0 (default), all layers use rope_theta."""
    query_pre_attn_scalar: Size = UNSET
    """Attention scores are divided by this number's square root. Default: head_dim."""
    attention_multiplier: float = Field(UNSET, ge=0)
    """Factor on attention scores (Granite). If it is above 0, query_pre_attn_scalar is ignored. With 0 (default), the
    factor is 1 / √query_pre_attn_scalar. With latent attention, rope_scaling.mscale_all_dim also changes this default
    factor."""
    attn_logit_softcapping: float = Field(0.0, ge=0)
    """If this value c is above 0, attention scores s become c·tanh(s / c) (Gemma 2). This turns fused attention kernels
    off."""
    final_logit_softcapping: float = Field(0.0, ge=0)
    """If this value c is above 0, the LM head's logits s become c·tanh(s / c) (Gemma 2)."""
    attention_sinks: bool = False
    """Give each query head a learned logit (sink). The sink is part of the softmax over the head's scores, but has no
    value vector (GPT-OSS)."""
    attention_bias: bool = False
    """Add biases to the query, key, and value projections."""
    attention_output_bias: bool = False
    """Add a bias to the attention's output projection."""
    mlp_bias: bool = False
    """Add biases to the MLP's projections. In MoE models, also add biases to the router's logits (GPT-OSS)."""
    attention_output_gate: bool = False
    """Multiply the outputs of the query heads by the sigmoid of a gate that is projected from the layer's input
    (Qwen3-Next)."""
    qk_norm: bool = False
    """Normalize queries and keys with RMSNorms (Qwen3)."""
    qk_norm_over: Literal["head", "all_heads"] = "head"
    """With qk_norm, normalize each head separately (head), or all heads of a token together (all_heads, OLMoE)."""
    kv_lora_rank: int = Field(0, ge=0)
    """Width of the latent that keys and values are computed from (multi-head latent attention, DeepSeek-V3). With 0,
    keys and values are computed from the hidden states."""
    q_lora_rank: int = Field(0, ge=0)
    """Width of the latent that queries are computed from, if kv_lora_rank is set. With 0, queries are computed from the
    hidden states."""
    qk_nope_head_dim: int = Field(0, ge=0)
    """Number of query and key channels per head without rotary embeddings, if kv_lora_rank is set."""
    qk_rope_head_dim: int = Field(0, ge=0)
    """Number of query and key channels per head with rotary embeddings, if kv_lora_rank is set. All heads have the same
    values in these channels of the keys."""
    v_head_dim: int = Field(0, ge=0)
    """Width of one value head, if kv_lora_rank is set."""
    linear_num_key_heads: int = Field(0, ge=0)
    """Number of query and key heads of a linear_attention layer."""
    linear_num_value_heads: int = Field(0, ge=0)
    """Number of value heads of a linear_attention layer, a multiple of linear_num_key_heads. Each value head has its
    own state."""
    linear_key_head_dim: int = Field(0, ge=0)
    """Width of a query or key head of a linear_attention layer."""
    linear_value_head_dim: int = Field(0, ge=0)
    """Width of a value head of a linear_attention layer."""
    linear_conv_kernel_dim: int = Field(4, gt=0, le=64)
    """Number of tokens that the convolution in a linear_attention layer reads, including the current token."""
    num_nextn_predict_layers: int = Field(0, ge=0, le=16)
    """Number of extra layers for multi-token prediction (DeepSeek-V3). Each extra layer predicts one token further
    ahead than the layer before it. Training adds the mean loss of these layers, times training.mtp_loss_weight, to the
    loss. Validation and text generation do not run these layers."""
    tie_word_embeddings: bool = False
    """The LM head shares the embedding's weights."""
    scale_embeddings: bool = False
    """Multiply token embeddings by √hidden_size (Gemma)."""
    embedding_multiplier: float = Field(1.0, gt=0)
    """Factor on token embeddings (Granite)."""
    residual_multiplier: float = Field(1.0, gt=0)
    """Factor on the outputs of attention and MLP before they are added to the residual stream (Granite)."""
    logits_scaling: float = Field(1.0, gt=0)
    """Divide the LM head's logits by this number (Granite)."""
    initializer_range: float = Field(0.02, gt=0)
    """Standard deviation of the initial weights. For o_proj and down_proj, it is divided by √(2 ·
    num_hidden_layers)."""
    num_experts: int = Field(0, ge=0, le=2**16)
    """Number of experts per MLP (mixture-of-experts model, MoE). 0 makes the MLPs dense."""
    num_experts_per_tok: Size = 2
    """Number of experts that each token is routed to (top-k)."""
    moe_intermediate_size: int = Field(UNSET, ge=0)
    """Inner width of one expert. 0 uses intermediate_size."""
    router_score: Literal["softmax", "sigmoid"] = "softmax"
    """How router logits become scores: softmax over all experts, or a sigmoid for each expert (DeepSeek-V3)."""
    norm_topk_prob: bool = True
    """Divide the scores of a token's chosen experts by their sum, so that the scores add up to 1."""
    router_bias: bool = False
    """Add a bias per expert to the scores when experts are chosen, but not to the weights of the experts' outputs. With
    moe.bias_update_rate, the biases change so that the experts get similar numbers of tokens (DeepSeek-V3)."""
    n_group: Size = 1
    """Number of groups of experts. A token is routed only to experts in the topk_group groups with the highest scores
    (DeepSeek-V3). With router_score = 'sigmoid', a group's score is the sum of its two highest expert scores. With
    'softmax', a group's score is its highest expert score."""
    topk_group: Size = 1
    """Number of groups that a token's experts may come from, if n_group is above 1."""
    routed_scaling_factor: float = Field(1.0, gt=0)
    """Factor on the sum of the chosen experts' outputs."""
    shared_expert_intermediate_size: int = Field(0, ge=0)
    """Inner width of a shared expert, which processes every token. 0 means no shared expert."""
    shared_expert_gate: bool = False
    """Multiply the shared expert's output by a sigmoid gate (Qwen2-MoE)."""
    first_k_dense_replace: int = Field(0, ge=0)
    """Number of initial layers that use a dense MLP instead of experts (DeepSeek-V3: 3)."""
    pad_vocab_size_to_multiple_of: Size = 128
    """Pad the vocabulary to a multiple of this number. The padding tokens are never predicted."""
