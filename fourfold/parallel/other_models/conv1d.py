"""Support linear layers that store their weight as [in, out], such as GPT-2's ``Conv1D`` in transformers."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor, nn

from fourfold.parallel.tensor.sharding import Tile

INPUT_FIRST = "Conv1D"
"""The name of GPT-2's class. Compare names, because transformers need not be installed."""


class InputFirst(nn.Linear):
    """The sizes and weights of an input-first layer before it is put on the grid. It computes nothing.

    The weight is [in, out] and the bias is [out]. If one layer computes several kinds of features (such as queries,
    keys, and values), each kind is a part. With parts, the tensors are [in, parts, out/parts] and [parts, out/parts],
    so cutting the last dim gives each rank its heads of all parts.
    """

    def __init__(self, layer: nn.Module, parts: int = 1) -> None:
        weight, bias = layer.get_parameter("weight"), layer.get_parameter("bias")
        super().__init__(weight.shape[0], weight.shape[1], device="meta")
        self.parts = parts
        self.weight = nn.Parameter(in_parts(weight.detach(), parts), weight.requires_grad)
        self.bias = nn.Parameter(in_parts(bias.detach(), parts), bias.requires_grad)


def as_linear(module: nn.Module) -> nn.Linear | None:
    """Return a torch linear layer unchanged, an ``InputFirst`` for an input-first layer, or None for any other
    module."""
    if type(module).__name__ == INPUT_FIRST:
        return InputFirst(module)
    return module if type(module) is nn.Linear else None


def in_parts(tensor: Tensor, parts: int) -> Tensor:
    """View the last dim as consecutive parts if there are several: [..., parts, out/parts]."""
    return tensor.unflatten(-1, (parts, -1)) if parts > 1 else tensor


def weight_tile(tile: Tile, parts: int) -> Tile:
    """Convert a weight's tile [out, in] to the way the weight is stored here."""
    out = 2 if parts > 1 else 1
    places = {0: out, 1: 0, None: None}
    return replace(tile, x=places[tile.x], y=places[tile.y])


def bias_tile(tile: Tile, parts: int) -> Tile:
    """Convert a bias's tile [out] to the way the bias is stored here."""
    places = {0: 1 if parts > 1 else 0, None: None}
    return replace(tile, x=places[tile.x], y=places[tile.y])


def output_first(weight: Tensor, ranks: int) -> Tensor:
    """Return a tile [in, out] or [in, parts, out/parts] as [out, in].

    If there are several parts and several ``ranks``, each rank's rows hold a slice of every part. The result is then a
    copy, which stays in memory until the backward pass. With one rank, the result is a view.
    """
    if weight.dim() == 3:
        weight = weight.unflatten(-1, (ranks, -1)).transpose(1, 2).flatten(1)
    return weight.T
