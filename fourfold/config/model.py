"""The sizes of a decoder, with Hugging Face's names."""

from __future__ import annotations

import math
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from fourfold.config.expected_values import round_to_multiple, shown
from fourfold.config.layer_pattern import pattern_of
from fourfold.config.no_meaning import NO_MEANING, NOT_WITH_LATENTS
from fourfold.config.rope_scaling import RopeScaling, no_pairs
from fourfold.config.strict import PathText, Size, Strict

IGNORE_INDEX = -100
"""Label of a position that the loss leaves out. The data writes it, and the model reads it."""

MOST_LAYERS = 100_000

UNSET = 0
"""Default of a size, which means that ``ModelConfig`` derives it from other sizes."""

DERIVED = {"num_key_value_heads", "head_dim", "intermediate_size", "moe_intermediate_size", "query_pre_attn_scalar"}
"""Sizes that ``ModelConfig`` derives from other sizes, and that may be null."""

LayerType = Literal["full_attention", "sliding_attention", "linear_attention"]


class ModelConfig(Strict):
    """The model, a decoder. The same keys describe models of GPT-2/3, GPT-NeoX, GPT-OSS, Llama, Mistral, Qwen, OLMo,
    Gemma, Granite, and DeepSeek."""

    preset: str | None = Field(None, examples=["gpt2"])
    """Start from a preset's sizes. Any other key overrides the preset."""
    from_hf: PathText | None = None
    """Start from a Hugging Face model's sizes and weights (folder or Hub id). Other keys override its config.json."""
    vocab_size: Size = Field(examples=[50257])
    """Number of tokens in the tokenizer's vocabulary."""
    hidden_size: Size = Field(examples=[768])
    """Width of the residual stream."""
    num_hidden_layers: int = Field(examples=[12], gt=0, le=MOST_LAYERS)
    """Number of blocks. Each has attention and an MLP."""
    num_attention_heads: Size = Field(examples=[12])
    """Number of query heads."""
    num_key_value_heads: Size = UNSET
    """Number of key and value heads (GQA). Must divide num_attention_heads. Default: num_attention_heads."""
    head_dim: Size = UNSET
    """Width of one head. Default: hidden_size / num_attention_heads."""
    intermediate_size: int = Field(UNSET, gt=0)
    """Inner width of the MLP. Default: 4 × hidden_size."""
    max_position_embeddings: Size = 2048
    """Length of the longest sequence. With position_embedding = 'learned', the number of rows in the position table."""
    mlp: Literal["swiglu", "geglu", "gelu", "relu2"] = "swiglu"
    """Type of the MLP: three matrices with a SiLU gate (swiglu) or a GELU gate (geglu), or two matrices with a plain
    GELU (gelu) or a squared ReLU (relu2)."""
    gelu_approximation: Literal["tanh", "none"] = "tanh"
    """How geglu and gelu compute GELU: with a tanh approximation (tanh) or exactly, with the error function (none)."""
    swiglu_limit: float = Field(0.0, ge=0)
    """If c > 0, swiglu computes (up + 1) · gate · sigmoid(1.702 · gate), with gate clamped to at most c, and up to ±c
    (GPT-OSS)."""
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    """Type of all norms."""
    norm_placement: Literal["before", "after", "around"] = "before"
    """Normalize the inputs of attention and MLP (before), their outputs (after, OLMo 2), or both (around, Gemma 2)."""
    norm_eps: float = Field(1e-5, gt=0)
    """Added to the variance (layernorm) or to the mean square (rmsnorm) inside a norm."""
    zero_centered_norm: bool = False
    """RMSNorms multiply by 1 + weight instead of weight (Gemma)."""
    norm_rounds_last: bool = False
    """RMSNorms multiply by the weight in float32, and round the product to the model's dtype (GPT-OSS). Otherwise they
    round before they multiply. Zero-centered norms always round last."""
    parallel_residual: bool = False
    """Attention and MLP of a block read the same input and run in parallel (GPT-NeoX)."""
    position_embedding: Literal["rope", "learned"] = "rope"
    """`rope` rotates queries and keys. `learned` adds a trained vector per position to the token embedding."""
    rope_theta: float = Field(10000.0, gt=1)
    """Base of the rotary frequencies."""
    partial_rotary_factor: float = Field(1.0, gt=0, le=1)
    """Fraction of a head's channels that are rotated (GPT-NeoX). The first channels are rotated."""
    rope_scaling: RopeScaling | None = Field(None, examples=[{"rope_type": "linear", "factor": 2.0}])
    """Stretch the rotary frequencies for longer contexts. By default, or with rope_type = 'default', they stay as
    trained."""
    sliding_window: int = Field(0, ge=0)
    """Number of tokens that a query in a sliding_attention layer attends to, including itself. 0 turns windows off."""
    layer_types: list[LayerType] = Field([])
    """Attention types of the first layers. The list repeats for the remaining layers. Only sliding_attention layers use
    sliding_window. If the list is empty, all layers use it. linear_attention layers are Gated DeltaNets, which keep a
    state of fixed size instead of keys and values (Qwen3-Next)."""
    no_rope_layers: list[Literal[0, 1]] = Field([])
    """With rope: 1 for layers that rotate queries and keys, and 0 for layers without positions (SmolLM3). The list
    repeats as layer_types does. If it is empty, all layers rotate."""
    rope_local_base_freq: float = Field(0.0, ge=0)
    """Rotary base of sliding_attention layers, which then ignore rope_scaling (Gemma 3). 0: all layers use
    rope_theta."""
    query_pre_attn_scalar: Size = UNSET
    """Attention scores are divided by this number's square root. Default: head_dim."""
    attention_multiplier: float = Field(UNSET, ge=0)
    """Factor on attention scores, instead of query_pre_attn_scalar (Granite). Default: 1 / √query_pre_attn_scalar, with
    latent attention times the factor of rope_scaling.mscale_all_dim."""
    attn_logit_softcapping: float = Field(0.0, ge=0)
    """If c > 0, attention scores s become c·tanh(s / c) (Gemma 2). This turns fused attention kernels off."""
    final_logit_softcapping: float = Field(0.0, ge=0)
    """If c > 0, the LM head's logits s become c·tanh(s / c) (Gemma 2)."""
    attention_sinks: bool = False
    """Each query head has a learned logit, its sink. It joins the softmax over the head's scores, but has no value
    vector (GPT-OSS)."""
    attention_bias: bool = False
    """Biases in the query, key, and value projections."""
    attention_output_bias: bool = False
    """Bias in the attention's output projection."""
    mlp_bias: bool = False
    """Biases in the MLP's projections. With experts, the router's logits have biases too (GPT-OSS)."""
    attention_output_gate: bool = False
    """Multiply the outputs of the query heads by the sigmoid of a gate that is projected from the layer's input
    (Qwen3-Next)."""
    qk_norm: bool = False
    """RMSNorms of queries and keys (Qwen3)."""
    qk_norm_over: Literal["head", "all_heads"] = "head"
    """With qk_norm, normalize each head separately, or all heads of a token together (OLMoE)."""
    kv_lora_rank: int = Field(0, ge=0)
    """Width of the latents from which keys and values are computed (multi-head latent attention, DeepSeek-V3). 0
    computes them from the hidden states."""
    q_lora_rank: int = Field(0, ge=0)
    """With kv_lora_rank, width of the latents of queries. 0 computes queries from the hidden states."""
    qk_nope_head_dim: int = Field(0, ge=0)
    """With kv_lora_rank, number of a head's query and key channels without rotary embeddings."""
    qk_rope_head_dim: int = Field(0, ge=0)
    """With kv_lora_rank, number of a head's query and key channels with rotary embeddings. These channels of the keys
    are the same for all heads."""
    v_head_dim: int = Field(0, ge=0)
    """With kv_lora_rank, width of one value head."""
    linear_num_key_heads: int = Field(0, ge=0)
    """Number of query and key heads of a linear_attention layer."""
    linear_num_value_heads: int = Field(0, ge=0)
    """Number of value heads of a linear_attention layer, a multiple of linear_num_key_heads. Each has its own state."""
    linear_key_head_dim: int = Field(0, ge=0)
    """Width of a query or key head of a linear_attention layer."""
    linear_value_head_dim: int = Field(0, ge=0)
    """Width of a value head of a linear_attention layer."""
    linear_conv_kernel_dim: int = Field(4, gt=0, le=64)
    """Number of tokens that the convolution of a linear_attention layer reads, including the current token."""
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
    """Number of experts each token is routed to (top-k)."""
    moe_intermediate_size: int = Field(UNSET, ge=0)
    """Inner width of one expert. 0 uses intermediate_size."""
    router_score: Literal["softmax", "sigmoid"] = "softmax"
    """How router logits become scores: softmax over all experts, or a sigmoid for each expert (DeepSeek-V3)."""
    norm_topk_prob: bool = True
    """Divide the chosen experts' scores by their sum."""
    router_bias: bool = False
    """Add a bias per expert to the scores that choose experts, but not to the weights of the experts' outputs. With
    moe.bias_update_rate, it balances the load (DeepSeek-V3)."""
    n_group: Size = 1
    """Number of groups that the experts are divided into. A token is routed only to experts of its best topk_group
    groups (DeepSeek-V3). A group's score is the sum of its two best experts' scores with router_score = 'sigmoid', and
    its best expert's score with 'softmax'."""
    topk_group: Size = 1
    """With n_group, number of groups that a token is routed to."""
    routed_scaling_factor: float = Field(1.0, gt=0)
    """Factor on the sum of the chosen experts' outputs."""
    shared_expert_intermediate_size: int = Field(0, ge=0)
    """Inner width of a shared expert that reads every token. 0 means no shared expert."""
    shared_expert_gate: bool = False
    """Multiply the shared expert's output by a sigmoid gate (Qwen2-MoE)."""
    first_k_dense_replace: int = Field(0, ge=0)
    """Number of initial layers that use a dense MLP instead of experts (DeepSeek-V3: 3)."""
    pad_vocab_size_to_multiple_of: Size = 128
    """Pad the rows of embedding and head to a multiple of this number. Padding rows are never predicted."""

    @model_validator(mode="before")
    @classmethod
    def _none_is_unset(cls, table: Any) -> Any:
        """Drop null for a size that follows from other sizes. Hugging Face's files write null for such sizes."""
        if not isinstance(table, dict):
            return table
        return {key: value for key, value in table.items() if value is not None or key not in DERIVED}

    @field_validator("rope_scaling", mode="before")
    @classmethod
    def _default_is_none(cls, value: Any) -> Any:
        """Read rope_type = 'default' as no scaling, as in Hugging Face's files. This value removes a preset's
        scaling."""
        return None if isinstance(value, dict) and value.get("rope_type") == "default" else value

    @model_validator(mode="after")
    def _fill_and_check(self) -> ModelConfig:
        if self.num_key_value_heads == UNSET:
            self.num_key_value_heads = self.num_attention_heads
        if self.kv_lora_rank and self.head_dim == UNSET:
            self.head_dim = self.qk_nope_head_dim + self.qk_rope_head_dim
        if self.head_dim == UNSET:
            if self.hidden_size % self.num_attention_heads:
                raise ValueError(
                    f"hidden_size = {self.hidden_size} is not a multiple of num_attention_heads = "
                    f"{self.num_attention_heads}, and there is no head_dim; hidden_size = "
                    f"{round_to_multiple(self.hidden_size, self.num_attention_heads)} works"
                )
            self.head_dim = self.hidden_size // self.num_attention_heads
        if self.query_pre_attn_scalar == UNSET:
            self.query_pre_attn_scalar = self.head_dim
        if self.attention_multiplier == UNSET:
            self.attention_multiplier = self.query_pre_attn_scalar**-0.5
            if self.kv_lora_rank and self.rope_scaling is not None and self.rope_scaling.mscale_all_dim:
                self.attention_multiplier *= self.rope_scaling.yarn_scale(self.rope_scaling.mscale_all_dim) ** 2
        if self.intermediate_size == UNSET:
            self.intermediate_size = 4 * self.hidden_size
        if self.num_experts and self.moe_intermediate_size == UNSET:
            self.moe_intermediate_size = self.intermediate_size
        if 0 < self.rope_local_base_freq <= 1:
            raise ValueError(f"rope_local_base_freq = {self.rope_local_base_freq} must be 0 or above 1; 10000.0 works")
        self._fill_layer_types()
        self._check_linear_attention()
        self._check_experts()
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_key_value_heads = {self.num_key_value_heads} does not divide model.num_attention_heads = "
                f"{self.num_attention_heads}; num_key_value_heads = "
                f"{math.gcd(self.num_key_value_heads, self.num_attention_heads)} works"
            )
        if self.kv_lora_rank:
            self._check_latents()
        if self.position_embedding == "rope" and (self.rotary_dim % 2 or self.rotary_dim == 0):
            is_derived = self.head_dim * self.num_attention_heads == self.hidden_size
            raise ValueError(no_pairs(self.head_dim, is_derived, self.partial_rotary_factor, self.rotary_dim))
        for key, unset, other, value in NO_MEANING:
            if getattr(self, key) != unset and getattr(self, other) == value:
                raise ValueError(
                    f"{key} = {shown(getattr(self, key))} has no meaning with "
                    f"model.{other} = {shown(value)}; leave {key} out"
                )
        return self

    def _fill_layer_types(self) -> None:
        """Shorten the lists of layers to their repeating patterns, and drop a local rotary base that equals the global
        base."""
        self.no_rope_layers = pattern_of(self.no_rope_layers or [1], self.num_hidden_layers)
        if self.no_rope_layers == [1]:
            self.no_rope_layers = []
        if self.rope_local_base_freq == self.rope_theta and self.rope_scaling is None:
            self.rope_local_base_freq = 0.0
        if "sliding_attention" in self.layer_types and not self.sliding_window:
            raise ValueError(
                f"layer_types = {self.layer_types} needs model.sliding_window, which is 0; layer_types = [] works"
            )
        by_default: LayerType = "sliding_attention" if self.sliding_window else "full_attention"
        self.layer_types = pattern_of(self.layer_types or [by_default], self.num_hidden_layers)
        if self.layer_types == ["full_attention"]:
            self.layer_types = []
        if self.sliding_window and not self.sliding_layers:
            self.sliding_window, self.rope_local_base_freq = 0, 0.0

    def _check_linear_attention(self) -> None:
        """Check the sizes of linear attention layers. Without such layers, there are no such sizes."""
        sizes = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim")
        for key in (f"linear_{size}" for size in sizes):
            value = getattr(self, key)
            if self.linear_layers and value == 0:
                raise ValueError(f"layer_types = {self.layer_types} needs {key}; {key} = 16 works")
            if value and not self.linear_layers:
                raise ValueError(f"{key} = {value} has no meaning without a linear_attention layer; leave {key} out")
        if self.linear_layers and self.linear_num_value_heads % self.linear_num_key_heads:
            raise ValueError(
                f"linear_num_key_heads = {self.linear_num_key_heads} does not divide linear_num_value_heads = "
                f"{self.linear_num_value_heads}; linear_num_key_heads = "
                f"{math.gcd(self.linear_num_key_heads, self.linear_num_value_heads)} works"
            )

    def _check_latents(self) -> None:
        """Check the sizes of latent attention, and that no key changes what it does not have."""
        for key in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"):
            if getattr(self, key) == 0:
                raise ValueError(f"kv_lora_rank = {self.kv_lora_rank} needs {key}; {key} = 64 works")
        if self.qk_rope_head_dim % 2:
            raise ValueError(f"qk_rope_head_dim = {self.qk_rope_head_dim} is odd, but must be even; 64 works")
        width = self.qk_nope_head_dim + self.qk_rope_head_dim
        if self.v_head_dim > width:
            raise ValueError(
                f"v_head_dim = {self.v_head_dim} is above qk_nope_head_dim + qk_rope_head_dim = {width}; {width} works"
            )
        only = {"head_dim": width, "num_key_value_heads": self.num_attention_heads, "position_embedding": "rope"}
        for key, value in (NOT_WITH_LATENTS | only).items():
            if getattr(self, key) not in (UNSET, value):
                raise ValueError(
                    f"{key} = {shown(getattr(self, key))} does not go with kv_lora_rank = {self.kv_lora_rank}; "
                    f"{key} = {shown(value)} works"
                )

    def _check_experts(self) -> None:
        if not self.num_experts:
            return
        if self.num_experts_per_tok > self.num_experts:
            raise ValueError(
                f"num_experts_per_tok = {self.num_experts_per_tok} is more than num_experts = {self.num_experts}; "
                f"num_experts_per_tok = {self.num_experts} works"
            )
        if not self.gated_mlp:
            raise ValueError(
                f"num_experts = {self.num_experts} is for gated MLPs, and mlp = '{self.mlp}'; mlp = 'swiglu' works"
            )
        if self.first_k_dense_replace >= self.num_hidden_layers:
            raise ValueError(
                f"first_k_dense_replace = {self.first_k_dense_replace} leaves none of num_hidden_layers = "
                f"{self.num_hidden_layers} with experts; first_k_dense_replace = 0 works"
            )
        few = 2 if self.router_score == "sigmoid" and self.n_group > 1 else 1
        if self.num_experts % (few * self.n_group):
            raise ValueError(
                f"n_group = {self.n_group} must split num_experts = {self.num_experts} into groups of ≥ {few}; 1 works"
            )
        fewest = math.ceil(self.num_experts_per_tok * self.n_group / self.num_experts)
        if not fewest <= self.topk_group <= self.n_group:
            raise ValueError(
                f"topk_group = {self.topk_group} must be {fewest} to n_group = {self.n_group} for num_experts_per_tok "
                f"= {self.num_experts_per_tok} of num_experts = {self.num_experts}; topk_group = {self.n_group} works"
            )
        if self.shared_expert_gate and not self.shared_expert_intermediate_size:
            raise ValueError(
                "shared_expert_gate = true gates a shared expert, and shared_expert_intermediate_size = 0 makes none; "
                f"shared_expert_intermediate_size = {self.moe_intermediate_size} works"
            )

    def type_of(self, layer: int) -> LayerType:
        """Return the attention type of a layer."""
        return self.layer_types[layer % len(self.layer_types)] if self.layer_types else "full_attention"

    def rotates(self, layer: int) -> bool:
        """Return whether a layer has rotary embeddings."""
        is_left_out = self.no_rope_layers and not self.no_rope_layers[layer % len(self.no_rope_layers)]
        return self.position_embedding == "rope" and not is_left_out

    @property
    def kinds_of_layers(self) -> list[LayerType]:
        """Return the attention types that the layers use."""
        return list(dict.fromkeys(self.layer_types)) or ["full_attention"]

    @property
    def sliding_layers(self) -> int:
        """Return the number of layers with a window."""
        return self._count("sliding_attention")

    @property
    def linear_layers(self) -> int:
        """Return the number of layers with linear attention."""
        return self._count("linear_attention")

    def _count(self, kind: LayerType) -> int:
        return sum(self.type_of(layer) == kind for layer in range(self.num_hidden_layers))

    @property
    def gated_mlp(self) -> bool:
        """Return whether the MLP has a gate in addition to its up projection."""
        return self.mlp.endswith("glu")

    @property
    def rotary_dim(self) -> int:
        """Return the number of a head's channels that rotary embeddings rotate."""
        return self.qk_rope_head_dim or int(self.head_dim * self.partial_rotary_factor)

    @property
    def padded_vocab_size(self) -> int:
        """Return the number of rows of embedding and head. This number does not depend on the grid, so checkpoints do
        not depend on it either."""
        multiple = self.pad_vocab_size_to_multiple_of
        return math.ceil(self.vocab_size / multiple) * multiple

    def is_sparse(self, layer: int) -> bool:
        """Return whether a layer has experts."""
        return self.num_experts > 0 and layer >= self.first_k_dense_replace

    @property
    def sparse_layers(self) -> int:
        """Return the number of layers that have experts."""
        return self.num_hidden_layers - self.first_k_dense_replace if self.num_experts else 0
