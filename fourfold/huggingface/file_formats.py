"""Describe how each family's files name and store the decoder's parameters.

A row of a table maps one Hugging Face tensor to the decoder's parameters that it joins along the output dim. The tensor
has the parameters in this order, one after another, or interleaved head by head or row by row. ``i`` is the layer's
index, and ``e`` is an expert's index in a parameter that stacks experts. If a model lacks a parameter (such as a bias),
its map has no row for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any

Table = dict[str, tuple[str, ...]]


def _weight_and_bias(prefix: str, modules: Mapping[str, str | tuple[str, ...]]) -> Table:
    """Return rows for modules that have a weight and may have a bias."""
    return {
        f"{prefix}{theirs}.{kind}": tuple(f"{each}.{kind}" for each in ((ours,) if isinstance(ours, str) else ours))
        for theirs, ours in modules.items()
        for kind in ("weight", "bias")
    }


def _renamed(table: Table, names: Mapping[str, str]) -> Table:
    """Return a table in which parts of the Hugging Face names are replaced, one after another."""
    return {reduce(lambda name, pair: name.replace(*pair), names.items(), theirs): table[theirs] for theirs in table}


def _without(table: Table, *parts: str) -> Table:
    """Return a table without the rows whose Hugging Face names have one of these parts."""
    return {theirs: ours for theirs, ours in table.items() if not any(part in theirs for part in parts)}


_QKV = tuple(f"layers.{{i}}.self_attn.qkv.{part}_proj" for part in "qkv")
_OUTSIDE: Table = {
    "model.embed_tokens.weight": ("embed_tokens.weight",),
    "lm_head.weight": ("lm_head.weight",),
} | _weight_and_bias(
    "model.", {name: name for name in ("norm", "layers.{i}.input_layernorm", "layers.{i}.post_attention_layernorm")}
)
_LLAMA = _OUTSIDE | _weight_and_bias(
    "model.layers.{i}.",
    {
        "self_attn.q_proj": "layers.{i}.self_attn.qkv.q_proj", "self_attn.k_proj": "layers.{i}.self_attn.qkv.k_proj",
        "self_attn.v_proj": "layers.{i}.self_attn.qkv.v_proj", "self_attn.q_norm": "layers.{i}.self_attn.core.q_norm",
        "self_attn.k_norm": "layers.{i}.self_attn.core.k_norm", "self_attn.o_proj": "layers.{i}.self_attn.o_proj",
        "mlp.gate_proj": "layers.{i}.mlp.up.gate_proj", "mlp.up_proj": "layers.{i}.mlp.up.up_proj",
        "mlp.down_proj": "layers.{i}.mlp.down_proj",
    },
)  # fmt: skip


def _output_norms(attention: str, mlp: str) -> Table:
    """Return rows for the norms of the outputs of attention and MLP, given their Hugging Face names."""
    ours = {f"layers.{{i}}.{attention}": "attention", f"layers.{{i}}.{mlp}": "mlp"}
    return _weight_and_bias("model.", {name: f"layers.{{i}}.{part}_output_layernorm" for name, part in ours.items()})


_OUTPUT_NORMS = _output_norms("post_attention_layernorm", "post_feedforward_layernorm")
_OLMO2 = _without(_LLAMA, "input_layernorm") | _OUTPUT_NORMS
_GEMMA2 = _LLAMA | _OUTPUT_NORMS | {
    "model.layers.{i}.pre_feedforward_layernorm.weight": ("layers.{i}.post_attention_layernorm.weight",)
}  # fmt: skip
_GLM = _without(_LLAMA, "mlp.gate", "mlp.up") | {
    "model.layers.{i}.mlp.gate_up_proj.weight": tuple(f"layers.{{i}}.mlp.up.{p}_proj.weight" for p in ("gate", "up"))
}
_GLM4 = _GLM | _output_norms("post_self_attn_layernorm", "post_mlp_layernorm")
_PHI3 = _without(_GLM, "q_proj", "k_proj", "v_proj") | _weight_and_bias(
    "model.layers.{i}.", {"self_attn.qkv_proj": _QKV}
)
_GPT2: Table = {
    "transformer.wte.weight": ("embed_tokens.weight",),
    "transformer.wpe.weight": ("embed_positions.weight",),
    "lm_head.weight": ("lm_head.weight",),
} | _weight_and_bias(
    "transformer.",
    {
        "ln_f": "norm", "h.{i}.ln_1": "layers.{i}.input_layernorm",
        "h.{i}.ln_2": "layers.{i}.post_attention_layernorm", "h.{i}.attn.c_attn": _QKV,
        "h.{i}.attn.c_proj": "layers.{i}.self_attn.o_proj", "h.{i}.mlp.c_fc": "layers.{i}.mlp.up.up_proj",
        "h.{i}.mlp.c_proj": "layers.{i}.mlp.down_proj",
    },
)  # fmt: skip
_GPT_NEOX: Table = {
    "gpt_neox.embed_in.weight": ("embed_tokens.weight",),
    "embed_out.weight": ("lm_head.weight",),
} | _weight_and_bias(
    "gpt_neox.",
    {
        "final_layer_norm": "norm", "layers.{i}.input_layernorm": "layers.{i}.input_layernorm",
        "layers.{i}.post_attention_layernorm": "layers.{i}.post_attention_layernorm",
        "layers.{i}.attention.query_key_value": _QKV, "layers.{i}.attention.dense": "layers.{i}.self_attn.o_proj",
        "layers.{i}.mlp.dense_h_to_4h": "layers.{i}.mlp.up.up_proj",
        "layers.{i}.mlp.dense_4h_to_h": "layers.{i}.mlp.down_proj",
    },
)  # fmt: skip


def _experts(block: str, **matrices: str) -> Table:
    """Return rows for a router and its experts.

    ``matrices`` maps the decoder's names for an expert's matrices to the Hugging Face names.
    """
    theirs, ours = f"model.layers.{{i}}.{block}.", "layers.{i}.mlp."
    router = ("gate.weight", "gate.e_score_correction_bias")
    routers: Table = {theirs + name: (ours + name,) for name in router}
    return routers | {
        f"{theirs}experts.{{e}}.{their_name}.weight": (f"{ours}experts.{name}",)
        for name, their_name in matrices.items()
    }


def _shared_expert(name: str) -> Table:
    """Return rows for the shared expert, given its Hugging Face name."""
    parts = {"gate_proj": "up.gate_proj", "up_proj": "up.up_proj", "down_proj": "down_proj"}
    modules = {f"{name}.{theirs}": f"layers.{{i}}.mlp.shared_expert.{ours}" for theirs, ours in parts.items()}
    return _weight_and_bias("model.layers.{i}.mlp.", modules)


_MIXTRAL = _LLAMA | _experts("block_sparse_moe", gate_proj="w1", up_proj="w3", down_proj="w2")
_EXPERTS = _experts("mlp", gate_proj="gate_proj", up_proj="up_proj", down_proj="down_proj")
_QWEN_MOE = _LLAMA | _EXPERTS
_QWEN_MOE_SHARED = _QWEN_MOE | _shared_expert("shared_experts")
_STACKED_EXPERTS: Table = {
    f"model.layers.{{i}}.mlp.experts.{theirs}{kind}": tuple(f"layers.{{i}}.mlp.experts.{n}{kind}" for n in ours)
    for theirs, ours in {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}.items()
    for kind in ("", "_bias")
}
_SINKS: Table = {"model.layers.{i}.self_attn.sinks": ("layers.{i}.self_attn.core.sinks",)}
_GPT_OSS = (
    _without(_LLAMA, ".mlp.")
    | _weight_and_bias("model.layers.{i}.mlp.", {"router": "layers.{i}.mlp.gate"})
    | _SINKS
    | _STACKED_EXPERTS
)
_LATENT = _without(_QWEN_MOE_SHARED, "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj") | {
    f"model.layers.{{i}}.self_attn.{theirs}.weight": tuple(f"layers.{{i}}.self_attn.{name}.weight" for name in ours)
    for theirs, ours in {
        "q_a_proj": ("down.q_a_proj",),
        "q_a_layernorm": ("q_a_layernorm",),
        "q_b_proj": ("q.q_nope_proj", "q.q_rope_proj"),
        "q_proj": ("q.q_nope_proj", "q.q_rope_proj"),
        "kv_a_proj_with_mqa": ("down.kv_a_proj", "down.k_rope_proj"),
        "kv_a_layernorm": ("kv_a_layernorm",),
        "kv_b_proj": ("kv.k_nope_proj", "kv.v_proj"),
    }.items()
}
_SHARED_GATE: Table = {"model.layers.{i}.mlp.shared_expert_gate.weight": ("layers.{i}.mlp.shared_expert_gate.weight",)}
_QWEN_MOE_GATED = _QWEN_MOE | _shared_expert("shared_expert") | _SHARED_GATE


def _linear_attention(**inputs: str) -> Table:
    """Return rows for layers with linear attention, and for attention layers with an output gate.

    ``inputs`` maps the Hugging Face name of each input projection to the letters of the decoder's projections that it
    joins. For example, "ba" stands for b_proj and a_proj.
    """
    ours = {f"{name}.weight": [f"inputs.{part}_proj.weight" for part in parts] for name, parts in inputs.items()} | {
        "conv1d.weight": [f"core.{part}_conv" for part in "qkv"],
        **{name: [f"core.{name}"] for name in ("A_log", "dt_bias", "norm.weight")},
        "out_proj.weight": ["o_proj.weight"],
    }
    gated = {"self_attn.q_proj": tuple(f"layers.{{i}}.self_attn.qkv.{part}_proj" for part in ("q", "gate"))}
    return _weight_and_bias("model.layers.{i}.", gated) | {
        f"model.layers.{{i}}.linear_attn.{name}": tuple(f"layers.{{i}}.self_attn.{part}" for part in parts)
        for name, parts in ours.items()
    }


_EXAONE = _renamed(_LLAMA, {
    "model.embed_tokens": "transformer.wte", "model.layers": "transformer.h", "model.norm": "transformer.ln_f",
    "self_attn.o_proj": "self_attn.out_proj", "self_attn": "attn.attention", "input_layernorm": "ln_1",
    "post_attention_layernorm": "ln_2", "gate_proj": "c_fc_0", "up_proj": "c_fc_1", "down_proj": "c_proj",
})  # fmt: skip
_GPT_NEO = _renamed(_EXAONE, {"c_fc_1": "c_fc"}) | {"transformer.wpe.weight": ("embed_positions.weight",)}
_GRANITE_MOE = _LLAMA | _SINKS | {
    f"model.layers.{{i}}.{theirs}.weight": tuple(f"layers.{{i}}.mlp.{name}" for name in ours)
    for theirs, ours in {
        "block_sparse_moe.router.layer": ("gate.weight",),
        "block_sparse_moe.input_linear": ("experts.gate_proj", "experts.up_proj"),
        "block_sparse_moe.output_linear": ("experts.down_proj",),
        "shared_mlp.input_linear": ("shared_expert.up.gate_proj.weight", "shared_expert.up.up_proj.weight"),
        "shared_mlp.output_linear": ("shared_expert.down_proj.weight",),
    }.items()
}  # fmt: skip
_GRANITE_SWA = _renamed(_GRANITE_MOE, {
    "moe.router.layer": "moe.router", "moe.input_linear.weight": "moe.experts.gate_up_proj",
    "moe.output_linear.weight": "moe.experts.down_proj",
})  # fmt: skip
_ARIA = _shared_expert("shared_experts") | _renamed(_without(_GRANITE_MOE, "shared_mlp"), {
    "block_sparse_moe.router.layer": "mlp.router", "block_sparse_moe.input_linear": "mlp.experts.fc1",
    "block_sparse_moe.output_linear": "mlp.experts.fc2",
})  # fmt: skip
_FALCON = _renamed(_GPT_NEOX, {
    "gpt_neox.embed_in": "transformer.word_embeddings", "embed_out": "lm_head", "gpt_neox.layers": "transformer.h",
    "gpt_neox.final_layer_norm": "transformer.ln_f", ".attention.": ".self_attention.", "input_layernorm": "ln_attn",
    "post_attention_layernorm": "ln_mlp",
})  # fmt: skip
_HY_V3 = _renamed(_QWEN_MOE | _shared_expert("shared_mlp"), {
    "mlp.gate.weight": "mlp.router.gate.weight", "gate.e_score_correction_bias": "expert_bias",
})  # fmt: skip
_SARVAM = _QWEN_MOE_SHARED | _weight_and_bias("model.layers.{i}.", {"self_attn.query_key_value": _QKV})
_SARVAM_MOE = _renamed(_without(_SARVAM, "q_proj", "k_proj", "v_proj"), {
    "self_attn.o_proj": "self_attn.dense", "q_norm": "query_layernorm", "k_norm": "key_layernorm",
    "self_attn": "attention", "embed_tokens": "word_embeddings", "e_score_correction_bias": "expert_bias",
})  # fmt: skip


@dataclass(frozen=True)
class Format:
    """The format of a family's files."""

    table: Table
    prefix: str = "model."
    """A prefix that the names in files lack if the model was saved without its head."""
    transposed: tuple[str, ...] = ()
    """Tensors that are stored as [in, out]. The decoder's parameters are [out, in]."""
    by_head: Mapping[str, str] = field(default_factory=dict)
    """Tensors that interleave the rows of the decoder's parameters head by head. Each maps to the key of [model] that
    has the number of heads."""
    by_row: tuple[str, ...] = ()
    """Tensors that interleave the rows of the decoder's parameters one by one."""
    stacked: tuple[str, ...] = ()
    """Tensors that stack all experts along the first dim, as the decoder's parameters do."""
    convolutions: tuple[str, ...] = ()
    """Tensors that have a dim of size 1 after the first dim. The decoder's parameters are matrices."""
    rotated_in_pairs: tuple[str, ...] = ()
    """Parameters whose rows are in another order in these files. In files, rotary embeddings rotate rows 2i and 2i + 1
    of a head as a pair. In the decoder, they rotate rows i and i + rotary_dim / 2."""
    layers_beyond: str | None = None
    """Key of config.json with the number of extra layers that predict tokens after the next token. fourfold does not
    import these layers."""

    ignored: tuple[str, ...] = ()
    """Name prefixes of modules that predict tokens after the next token. fourfold does not import these modules."""

    def names_beyond(self, last: int, config: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the name prefixes of tensors that are not imported, such as the tensors of layers after ``last``."""
        count = config.get(self.layers_beyond) if self.layers_beyond is not None else 0
        layers = range(last, last + count) if isinstance(count, int) else ()
        return self.ignored + tuple(f"model.layers.{n}." for n in layers)


_PAIRS = (".q_proj.", ".k_proj.")
_FUSED = {".query_key_value.": "num_key_value_heads"}
_GATED = {".self_attn.q_proj.": "num_attention_heads"}
_QWEN3_5 = Format(
    _LLAMA | _linear_attention(in_proj_qkv="qkv", in_proj_z="z", in_proj_b="b", in_proj_a="a"),
    by_head=_GATED,
    convolutions=(".conv1d.",),
    ignored=("mtp.", "model.visual."),
)
_OF_LLAMA = (
    "llama", "mistral", "qwen2", "qwen3", "gemma", "ministral", "seed_oss", "granite", "arcee", "stablelm",
    "smollm3", "internlm3", "iquestcoder", "cwm", "jais2",
)  # fmt: skip
FORMATS = dict.fromkeys(_OF_LLAMA, Format(_LLAMA)) | {
    "phi3": Format(_PHI3),
    **dict.fromkeys(("olmo2", "olmo3", "exaone4"), Format(_OLMO2)),
    **dict.fromkeys(("gemma2", "gemma3_text"), Format(_GEMMA2)),
    "gpt_neox": Format(_GPT_NEOX, prefix="gpt_neox.", by_head=_FUSED),
    "gpt2": Format(_GPT2, prefix="transformer.", transposed=(".c_attn.", ".c_proj.", ".c_fc.")),
    "mixtral": Format(_MIXTRAL),
    **dict.fromkeys(("qwen3_moe", "olmoe"), Format(_QWEN_MOE)),
    "qwen2_moe": Format(_QWEN_MOE_GATED),
    **dict.fromkeys(
        ("glm4_moe", "solar_open", "dots1"), Format(_QWEN_MOE_SHARED, layers_beyond="num_nextn_predict_layers")
    ),
    "gpt_oss": Format(_GPT_OSS, transposed=(".experts.",), by_row=(".gate_up_proj",), stacked=(".experts.",)),
    "falcon": Format(_FALCON, prefix="transformer.", by_head=_FUSED),
    "flint": Format(_renamed(_QWEN_MOE | _SINKS | _shared_expert("shared_expert"), {"sinks": "softmax_offset"})),
    "mellum": Format(_QWEN_MOE, ignored=("mtp.",)),
    "flex_olmo": Format(_OLMO2 | _EXPERTS),
    "vaultgemma": Format(_renamed(_LLAMA, {"post_attention_layernorm": "pre_feedforward_layernorm"})),
    "granite_swa": Format(_LLAMA | _SINKS),
    "granitemoe_swa": Format(_GRANITE_SWA, stacked=(".block_sparse_moe.experts.",)),
    **dict.fromkeys(
        ("granitemoe", "granitemoeshared"),
        Format(_GRANITE_MOE, stacked=(".block_sparse_moe.input_linear", ".block_sparse_moe.output_linear")),
    ),
    "hyperclovax": Format(_LLAMA | _output_norms("post_norm1", "post_norm2")),
    "exaone": Format(_EXAONE, prefix="transformer."),
    "gpt_neo": Format(_GPT_NEO, prefix="transformer."),
    "gpt_bigcode": Format(_GPT2, prefix="transformer."),
    "exaone_moe": Format(_renamed(_QWEN_MOE_SHARED, {"gate.e_score": "e_score"}), ignored=("mtp.",)),
    "minimax_m2": Format(_renamed(_MIXTRAL, {"gate.e_score": "e_score"})),
    "hy_v3": Format(_HY_V3, layers_beyond="num_nextn_predict_layers"),
    "sarvam_moe": Format(_SARVAM_MOE, layers_beyond="num_nextn_predict_layers"),
    "aria_text": Format(_ARIA, transposed=(".experts.",), stacked=(".experts.",)),
    "starcoder2": Format(_renamed(_LLAMA, {"up_proj": "c_fc", "down_proj": "c_proj"})),
    **dict.fromkeys(("helium", "ernie4_5"), Format(_LLAMA, rotated_in_pairs=_PAIRS)),
    **dict.fromkeys(
        ("deepseek_v2", "deepseek_v3", "youtu", "glm4_moe_lite", "sarvam_mla"),
        Format(
            _LATENT,
            by_head=dict.fromkeys((".q_proj.", ".q_b_proj.", ".kv_b_proj."), "num_attention_heads"),
            rotated_in_pairs=("_rope_proj.",),
            layers_beyond="num_nextn_predict_layers",
        ),
    ),
    "qwen3_next": Format(
        _QWEN_MOE_GATED | _linear_attention(in_proj_qkvz="qkvz", in_proj_ba="ba"),
        by_head=_GATED | dict.fromkeys((".in_proj_qkvz.", ".in_proj_ba."), "linear_num_key_heads"),
        convolutions=(".conv1d.",),
        ignored=("mtp.",),
    ),
    "qwen3_5_text": _QWEN3_5,
    "qwen3_5_moe_text": replace(_QWEN3_5, table=_QWEN_MOE_GATED | _QWEN3_5.table),
    "glm": Format(_GLM, rotated_in_pairs=_PAIRS),
    "glm4": Format(_GLM4, rotated_in_pairs=_PAIRS),
}

WITH_STACKED_EXPERTS = {
    "qwen3_5_moe_text": replace(
        _QWEN3_5,
        table=_without(FORMATS["qwen3_5_moe_text"].table, ".experts.") | _STACKED_EXPERTS,
        stacked=(".experts.",),
    )
}
"""Formats of files that stack the experts, in families whose files can also have one matrix per expert."""

BUFFERS = (".attn.bias", ".attn.masked_bias", ".attention.bias", ".attention.masked_bias", ".rotary_emb.inv_freq")
"""Endings of the names of tensors that are buffers, not weights. Only older files have such tensors."""

HEAD = "lm_head.weight"

VOCABULARY = ("embed_tokens.weight", HEAD)
"""Parameters with one row per token. The decoder's parameters are padded, and the Hugging Face tensors are not."""
