"""Linear layers that store their weight as [in, out]: the ``Conv1D`` of transformers, in GPT-2."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor, nn

from fourfold.parallel.tensor.sharding import Tile

INPUT_FIRST = "Conv1D"
"""The name of the class in transformers, which need not be installed here."""


class InputFirst(nn.Linear):
    """Sizes and weights of such a layer, before it is laid out; it computes nothing.

    Its weight is [in, out] and its bias [out]. With several ``parts``, which are features of one kind one after the
    other (queries, keys, values), they are [in, parts, out/parts] and [parts, out/parts], so that a cut of the last
    dim gives each rank its heads of all parts.
    """

    def __init__(self, layer: nn.Module, parts: int = 1) -> None:
        weight, bias = layer.get_parameter("weight"), layer.get_parameter("bias")
        super().__init__(weight.shape[0], weight.shape[1], device="meta")
        self.parts = parts
        self.weight = nn.Parameter(in_parts(weight.detach(), parts), weight.requires_grad)
        self.bias = nn.Parameter(in_parts(bias.detach(), parts), bias.requires_grad)


def as_linear(module: nn.Module) -> nn.Linear | None:
    """Return a linear layer of torch as it is, and of one that is stored input first the sizes; None for others."""
    if type(module).__name__ == INPUT_FIRST:
        return InputFirst(module)
    return module if type(module) is nn.Linear else None


def in_parts(tensor: Tensor, parts: int) -> Tensor:
    """View the last dim as parts one after the other, where there are several: [..., parts, out/parts]."""
    return tensor.unflatten(-1, (parts, -1)) if parts > 1 else tensor


def weight_tile(tile: Tile, parts: int) -> Tile:
    """The tile of a weight as it is stored here, from that of [out, in]."""
    out = 2 if parts > 1 else 1
    places = {0: out, 1: 0, None: None}
    return replace(tile, x=places[tile.x], y=places[tile.y])


def bias_tile(tile: Tile, parts: int) -> Tile:
    """The tile of a bias as it is stored here, from that of [out]."""
    places = {0: 1 if parts > 1 else 0, None: None}
    return replace(tile, x=places[tile.x], y=places[tile.y])


def output_first(weight: Tensor, ranks: int) -> Tensor:
    """A tile [in, out] or [in, parts, out/parts] as [out, in].

    With parts, each of ``ranks`` equal shares of ``out`` has a share of every part. With several ranks that is a copy,
    which lives until the backward; else it is a view.
    """
    if weight.dim() == 3:
        weight = weight.unflatten(-1, (ranks, -1)).transpose(1, 2).flatten(1)
    return weight.T
