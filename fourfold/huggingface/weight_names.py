"""Map every parameter of the decoder to the tensors in a Hugging Face model's files. Each family has one table.

A row maps one Hugging Face tensor to the parameters of ours that it joins along the output dim, in this order, whole or
head by head. ``i`` is the layer's index, and ``e`` is an expert's index in a parameter that stacks experts. If a model
lacks a parameter (such as a bias), its map has no row for it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fourfold.config.model import ModelConfig
from fourfold.models.transformer import parameter_shapes

Table = dict[str, tuple[str, ...]]


def _weight_and_bias(prefix: str, modules: Mapping[str, str | tuple[str, ...]]) -> Table:
    """Return rows for modules that have a weight and may have a bias."""
    return {
        f"{prefix}{theirs}.{kind}": tuple(f"{each}.{kind}" for each in ((ours,) if isinstance(ours, str) else ours))
        for theirs, ours in modules.items()
        for kind in ("weight", "bias")
    }


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
        "self_attn.q_proj": "layers.{i}.self_attn.qkv.q_proj",
        "self_attn.k_proj": "layers.{i}.self_attn.qkv.k_proj",
        "self_attn.v_proj": "layers.{i}.self_attn.qkv.v_proj",
        "self_attn.q_norm": "layers.{i}.self_attn.core.q_norm",
        "self_attn.k_norm": "layers.{i}.self_attn.core.k_norm",
        "self_attn.o_proj": "layers.{i}.self_attn.o_proj",
        "mlp.gate_proj": "layers.{i}.mlp.up.gate_proj",
        "mlp.up_proj": "layers.{i}.mlp.up.up_proj",
        "mlp.down_proj": "layers.{i}.mlp.down_proj",
    },
)
_OUTPUT_NORMS: Table = {
    "model.layers.{i}.post_attention_layernorm.weight": ("layers.{i}.attention_output_layernorm.weight",),
    "model.layers.{i}.post_feedforward_layernorm.weight": ("layers.{i}.mlp_output_layernorm.weight",),
}
_OLMO2 = {theirs: ours for theirs, ours in _LLAMA.items() if "input_layernorm" not in theirs} | _OUTPUT_NORMS
_GEMMA2 = (
    _LLAMA
    | _OUTPUT_NORMS
    | {"model.layers.{i}.pre_feedforward_layernorm.weight": ("layers.{i}.post_attention_layernorm.weight",)}
)
_GLM = {theirs: ours for theirs, ours in _LLAMA.items() if "mlp.gate" not in theirs and "mlp.up" not in theirs} | {
    "model.layers.{i}.mlp.gate_up_proj.weight": tuple(f"layers.{{i}}.mlp.up.{p}_proj.weight" for p in ("gate", "up"))
}
_GLM4 = _GLM | {
    "model.layers.{i}.post_self_attn_layernorm.weight": ("layers.{i}.attention_output_layernorm.weight",),
    "model.layers.{i}.post_mlp_layernorm.weight": ("layers.{i}.mlp_output_layernorm.weight",),
}
_PHI3 = _OUTSIDE | _weight_and_bias(
    "model.layers.{i}.",
    {
        "self_attn.qkv_proj": _QKV,
        "self_attn.o_proj": "layers.{i}.self_attn.o_proj",
        "mlp.gate_up_proj": ("layers.{i}.mlp.up.gate_proj", "layers.{i}.mlp.up.up_proj"),
        "mlp.down_proj": "layers.{i}.mlp.down_proj",
    },
)
_GPT2: Table = {
    "transformer.wte.weight": ("embed_tokens.weight",),
    "transformer.wpe.weight": ("embed_positions.weight",),
    "lm_head.weight": ("lm_head.weight",),
} | _weight_and_bias(
    "transformer.",
    {
        "ln_f": "norm",
        "h.{i}.ln_1": "layers.{i}.input_layernorm",
        "h.{i}.ln_2": "layers.{i}.post_attention_layernorm",
        "h.{i}.attn.c_attn": _QKV,
        "h.{i}.attn.c_proj": "layers.{i}.self_attn.o_proj",
        "h.{i}.mlp.c_fc": "layers.{i}.mlp.up.up_proj",
        "h.{i}.mlp.c_proj": "layers.{i}.mlp.down_proj",
    },
)
_GPT_NEOX: Table = {
    "gpt_neox.embed_in.weight": ("embed_tokens.weight",),
    "embed_out.weight": ("lm_head.weight",),
} | _weight_and_bias(
    "gpt_neox.",
    {
        "final_layer_norm": "norm",
        "layers.{i}.input_layernorm": "layers.{i}.input_layernorm",
        "layers.{i}.post_attention_layernorm": "layers.{i}.post_attention_layernorm",
        "layers.{i}.attention.query_key_value": _QKV,
        "layers.{i}.attention.dense": "layers.{i}.self_attn.o_proj",
        "layers.{i}.mlp.dense_h_to_4h": "layers.{i}.mlp.up.up_proj",
        "layers.{i}.mlp.dense_4h_to_h": "layers.{i}.mlp.down_proj",
    },
)


def _renamed(table: Table, **names: str) -> Table:
    """Return a table with other Hugging Face names for some modules."""
    return {".".join(names.get(part, part) for part in theirs.split(".")): ours for theirs, ours in table.items()}


def _experts(block: str, **matrices: str) -> Table:
    """Return rows for a router and its experts.

    ``matrices`` maps our names for an expert's matrices to the Hugging Face names.
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
_QWEN_MOE = _LLAMA | _experts("mlp", gate_proj="gate_proj", up_proj="up_proj", down_proj="down_proj")
_SHARED_GATE: Table = {"model.layers.{i}.mlp.shared_expert_gate.weight": ("layers.{i}.mlp.shared_expert_gate.weight",)}


@dataclass(frozen=True)
class Format:
    """The format of a family's files."""

    table: Table
    prefix: str = "model."
    """A prefix that the names in files lack if the model was saved without its head."""
    transposed: tuple[str, ...] = ()
    """Tensors that are stored as [in, out]. Our parameters are [out, in]."""
    by_head: tuple[str, ...] = ()
    """Tensors that interleave the rows of our parameters head by head."""
    rotated_in_pairs: tuple[str, ...] = ()
    """Tensors whose rotary embeddings rotate the rows 2i and 2i + 1 of a head. Our decoder rotates i and i + d."""
    layers_beyond: str | None = None
    """Key of config.json with the number of extra layers, which predict tokens further ahead and are not imported."""

    def names_beyond(self, last: int, config: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the name prefixes of layers after the ``last`` layer. These layers are not imported."""
        count = config.get(self.layers_beyond) if self.layers_beyond is not None else 0
        return tuple(f"model.layers.{n}." for n in range(last, last + count)) if isinstance(count, int) else ()


_PAIRS = (".q_proj.", ".k_proj.")
_OF_LLAMA = ("llama", "mistral", "qwen2", "qwen3", "gemma", "ministral", "seed_oss")
FORMATS = dict.fromkeys(_OF_LLAMA, Format(_LLAMA)) | {
    "phi3": Format(_PHI3),
    "olmo2": Format(_OLMO2),
    "olmo3": Format(_OLMO2),
    "gemma2": Format(_GEMMA2),
    "gemma3_text": Format(_GEMMA2),
    "gpt_neox": Format(_GPT_NEOX, prefix="gpt_neox.", by_head=(".query_key_value.",)),
    "gpt2": Format(_GPT2, prefix="transformer.", transposed=(".c_attn.", ".c_proj.", ".c_fc.")),
    "mixtral": Format(_MIXTRAL),
    "qwen3_moe": Format(_QWEN_MOE),
    "qwen2_moe": Format(_QWEN_MOE | _shared_expert("shared_expert") | _SHARED_GATE),
    "olmoe": Format(_QWEN_MOE),
    "glm4_moe": Format(_QWEN_MOE | _shared_expert("shared_experts"), layers_beyond="num_nextn_predict_layers"),
    "vaultgemma": Format(_renamed(_LLAMA, post_attention_layernorm="pre_feedforward_layernorm")),
    "starcoder2": Format(_renamed(_LLAMA, up_proj="c_fc", down_proj="c_proj")),
    "helium": Format(_LLAMA, rotated_in_pairs=_PAIRS),
    "ernie4_5": Format(_LLAMA, rotated_in_pairs=_PAIRS),
    "glm": Format(_GLM, rotated_in_pairs=_PAIRS),
    "glm4": Format(_GLM4, rotated_in_pairs=_PAIRS),
}

BUFFERS = (".attn.bias", ".attn.masked_bias", ".attention.bias", ".attention.masked_bias", ".rotary_emb.inv_freq")
"""Endings of tensor names in older files that are buffers, not weights."""

HEAD = "lm_head.weight"

VOCABULARY = ("embed_tokens.weight", HEAD)
"""Parameters with one row per token. Our parameters are padded, and the Hugging Face tensors are not."""


@dataclass(frozen=True)
class TensorPiece:
    """One of our parameters inside a Hugging Face tensor: ``rows`` of the output dim, in ``groups`` of equal size.

    The first group begins at row ``first``, and each following group begins ``stride`` rows later. Any remaining rows
    of our parameter are padding.
    """

    name: str
    first: int
    rows: int
    groups: int
    stride: int
    expert: int | None = None
    """The index of the expert, if our parameter stacks experts along the first dim."""
    paired_rows: int = 0
    """Number of rows at the beginning of each group that are interleaved: the first half of our rows has even positions
    in the Hugging Face tensor, and the second half has odd positions."""

    def of(self, parameter: Tensor) -> Tensor:
        """Return the whole parameter, or one expert of a parameter that stacks experts."""
        return parameter if self.expert is None else parameter[self.expert]

    def runs(self, rows: slice) -> Iterator[tuple[slice, slice]]:
        """Divide ``rows`` of our parameter into runs that are evenly spaced in the Hugging Face tensor. For each run,
        yield its rows, counted from the start of ``rows``, and its rows in the Hugging Face tensor (every second row if
        they are interleaved)."""
        size, pairs = self.rows // self.groups, self.paired_rows
        for group in range(rows.start // size, math.ceil(rows.stop / size)):
            ours, theirs = group * size, self.first + group * self.stride
            for part in (range(0, pairs, 2), range(1, pairs, 2), range(pairs, size)):
                begin, end = max(rows.start, ours), min(rows.stop, ours + len(part))
                if begin < end:
                    here, there = slice(begin - rows.start, end - rows.start), part[begin - ours : end - ours]
                    yield here, slice(theirs + there[0], theirs + there[-1] + 1, there.step)
                ours += len(part)

    def grouped(self, ours: Tensor) -> Tensor:
        """Return our rows as [groups, rows of a group, …], in the order of the Hugging Face tensor."""
        whole: Tensor = ours[: self.rows].unflatten(0, (self.groups, -1))
        if not self.paired_rows:
            return whole
        rotated, rest = whole[:, : self.paired_rows], whole[:, self.paired_rows :]
        return torch.cat([rotated.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2), rest], dim=1)


@dataclass(frozen=True)
class TheirTensor:
    """A tensor of a Hugging Face model, and the parameters of ours that it joins."""

    name: str
    shape: tuple[int, ...]
    transposed: bool
    pieces: tuple[TensorPiece, ...]

    def joined(self, ours: Sequence[Tensor]) -> Tensor:
        """Join the pieces into the Hugging Face tensor: drop the padding, stack the rows, and transpose if that
        tensor is stored as [in, out]."""
        groups = [piece.grouped(tensor) for piece, tensor in zip(self.pieces, ours, strict=True)]
        whole = (groups[0] if len(groups) == 1 else torch.cat(groups, dim=1)).flatten(0, 1)
        return whole.T.contiguous() if self.transposed else whole


def head_of(kind: str) -> str:
    """Return the Hugging Face name of the LM head."""
    return next(theirs for theirs, ours in FORMATS[kind].table.items() if ours == (HEAD,))


def name_map(kind: str, model: ModelConfig) -> list[TheirTensor]:
    """Return the tensors of a Hugging Face model of the family ``kind``, layer by layer."""
    shapes = parameter_shapes(model)
    found: list[TheirTensor] = []
    for theirs, ours, expert in _rows(FORMATS[kind].table, model):
        if ours[0] in shapes:
            found.append(_their_tensor(FORMATS[kind], theirs, ours, expert, shapes, model))
    placed = [(piece.name, piece.expert) for tensor in found for piece in tensor.pieces]
    assert len(placed) == len(set(placed)), f"two places in {kind} for one parameter"
    missing = set(shapes) ^ {name for name, _ in placed}
    assert not missing, f"no place in {kind}: {missing}"
    return found


def _rows(table: Table, model: ModelConfig) -> Iterator[tuple[str, tuple[str, ...], int | None]]:
    """Yield a table's rows for every layer and expert: the Hugging Face name, our names, and the expert's index (or
    None)."""
    yield from ((theirs, ours, None) for theirs, ours in table.items() if "{i}" not in theirs)
    layered = [row for row in table.items() if "{i}" in row[0]]
    for i in range(model.num_hidden_layers):
        for theirs, ours in layered:
            names = tuple(name.format(i=i) for name in ours)
            if "{e}" in theirs:
                yield from ((theirs.format(i=i, e=e), names, e) for e in range(model.num_experts))
            else:
                yield theirs.format(i=i), names, None


def _their_tensor(
    files: Format,
    theirs: str,
    ours: tuple[str, ...],
    expert: int | None,
    shapes: dict[str, tuple[int, ...]],
    model: ModelConfig,
) -> TheirTensor:
    dims = [shapes[name] if expert is None else shapes[name][1:] for name in ours]
    rows = [model.vocab_size if name in VOCABULARY else shape[0] for name, shape in zip(ours, dims, strict=True)]
    pairs = model.rotary_dim if any(part in theirs for part in files.rotated_in_pairs) else 0
    is_by_head = pairs or any(part in theirs for part in files.by_head)
    groups = min(rows) // model.head_dim if is_by_head else 1
    stride = sum(rows) // groups
    firsts = [sum(rows[:i]) // groups for i in range(len(rows))]
    pieces = [
        TensorPiece(name, first, n, groups, stride, expert, pairs)
        for name, first, n in zip(ours, firsts, rows, strict=True)
    ]
    shape = (sum(rows), *dims[0][1:])
    transposed = len(shape) == 2 and any(part in theirs for part in files.transposed)
    return TheirTensor(theirs, shape[::-1] if transposed else shape, transposed, tuple(pieces))
