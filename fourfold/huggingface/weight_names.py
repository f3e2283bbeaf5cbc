"""The place of every parameter of the decoder in a Hugging Face model's files: one table per family.

A row maps a tensor of theirs to the parameters of ours that it joins along the output dim, in this order, as wholes or
head by head; ``i`` is the number of the layer. A parameter that a model does not have (a bias) has no row in its map.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fourfold.config.model import ModelConfig
from fourfold.models.transformer import parameter_shapes

Table = dict[str, tuple[str, ...]]


def _weight_and_bias(prefix: str, modules: Mapping[str, str | tuple[str, ...]]) -> Table:
    """Rows of modules that have a weight and may have a bias."""
    return {
        f"{prefix}{theirs}.{kind}": tuple(f"{each}.{kind}" for each in ((ours,) if isinstance(ours, str) else ours))
        for theirs, ours in modules.items()
        for kind in ("weight", "bias")
    }


_QKV = tuple(f"layers.{{i}}.self_attn.qkv.{part}_proj" for part in "qkv")
_OUTSIDE: Table = {
    "model.embed_tokens.weight": ("embed_tokens.weight",),
    "model.norm.weight": ("norm.weight",),
    "lm_head.weight": ("lm_head.weight",),
    "model.layers.{i}.input_layernorm.weight": ("layers.{i}.input_layernorm.weight",),
    "model.layers.{i}.post_attention_layernorm.weight": ("layers.{i}.post_attention_layernorm.weight",),
}
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


@dataclass(frozen=True)
class Format:
    """The files of a family."""

    table: Table
    prefix: str = "model."
    """Left out of the names in files of the model without its head."""
    transposed: tuple[str, ...] = ()
    """Tensors that hold [in, out] where ours hold [out, in]."""
    by_head: tuple[str, ...] = ()
    """Tensors that join the rows of our parameters head by head."""


FORMATS = dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "gemma"), Format(_LLAMA)) | {
    "phi3": Format(_PHI3),
    "gpt_neox": Format(_GPT_NEOX, prefix="gpt_neox.", by_head=(".query_key_value.",)),
    "gpt2": Format(_GPT2, prefix="transformer.", transposed=(".c_attn.", ".c_proj.", ".c_fc.")),
}

BUFFERS = (
    ".attn.bias",
    ".attn.masked_bias",
    ".attention.bias",
    ".attention.masked_bias",
    ".rotary_emb.inv_freq",
)
"""Endings of the names of tensors in older files that are not weights."""

HEAD = "lm_head.weight"

VOCABULARY = ("embed_tokens.weight", HEAD)
"""Parameters with a row for every token; ours are padded, theirs not."""


@dataclass(frozen=True)
class Piece:
    """A parameter of ours inside a tensor of theirs: ``rows`` of the output dim, in ``groups`` of equal size.

    The first group begins at ``first``, the next ``stride`` rows further. Rows of ours beyond these are padding.
    """

    name: str
    first: int
    rows: int
    groups: int
    stride: int

    def runs(self, rows: slice) -> Iterator[tuple[slice, slice]]:
        """Rows of ours (all of them inside ``self.rows``) as consecutive ones: here, counted from the first, there."""
        size = self.rows // self.groups
        for group in range(rows.start // size, math.ceil(rows.stop / size)):
            begin, end = max(rows.start, group * size), min(rows.stop, (group + 1) * size)
            theirs = self.first + group * self.stride - group * size
            yield slice(begin - rows.start, end - rows.start), slice(theirs + begin, theirs + end)


@dataclass(frozen=True)
class TheirTensor:
    """A tensor of a Hugging Face model, and the parameters of ours that it joins."""

    name: str
    shape: tuple[int, ...]
    transposed: bool
    pieces: tuple[Piece, ...]

    def joined(self, ours: Sequence[Tensor]) -> Tensor:
        """The tensor made of its pieces: without padding, one below the other, transposed where theirs is."""
        groups = [t[: piece.rows].unflatten(0, (piece.groups, -1)) for piece, t in zip(self.pieces, ours, strict=True)]
        whole = (groups[0] if len(groups) == 1 else torch.cat(groups, dim=1)).flatten(0, 1)
        return whole.T.contiguous() if self.transposed else whole


def head_of(kind: str) -> str:
    """Their name of the head."""
    return next(theirs for theirs, ours in FORMATS[kind].table.items() if ours == (HEAD,))


def name_map(kind: str, model: ModelConfig) -> list[TheirTensor]:
    """The tensors of a Hugging Face model of the family ``kind``, layer by layer."""
    shapes = parameter_shapes(model)
    rows = [row for row in FORMATS[kind].table.items() if "{i}" not in row[0]]
    layered = [row for row in FORMATS[kind].table.items() if "{i}" in row[0]]
    for i in range(model.num_hidden_layers):
        rows += [(theirs.format(i=i), tuple(name.format(i=i) for name in ours)) for theirs, ours in layered]
    found = [_their_tensor(FORMATS[kind], theirs, ours, shapes, model) for theirs, ours in rows if ours[0] in shapes]
    placed = [piece.name for tensor in found for piece in tensor.pieces]
    assert sorted(placed) == sorted(shapes), f"no place in {kind}: {set(shapes) ^ set(placed)}"
    return found


def _their_tensor(
    files: Format, theirs: str, ours: tuple[str, ...], shapes: dict[str, tuple[int, ...]], model: ModelConfig
) -> TheirTensor:
    groups = model.num_attention_heads if any(part in theirs for part in files.by_head) else 1
    rows = [model.vocab_size if name in VOCABULARY else shapes[name][0] for name in ours]
    stride = sum(rows) // groups
    firsts = [sum(rows[:i]) // groups for i in range(len(rows))]
    pieces = [Piece(name, first, n, groups, stride) for name, first, n in zip(ours, firsts, rows, strict=True)]
    shape = (sum(rows), *shapes[ours[0]][1:])
    transposed = len(shape) == 2 and any(part in theirs for part in files.transposed)
    return TheirTensor(theirs, shape[::-1] if transposed else shape, transposed, tuple(pieces))
