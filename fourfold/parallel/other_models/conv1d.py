"""Support linear layers that store their weight as [in, out], such as GPT-2's ``Conv1D`` in transformers."""

from dataclasses import replace

from torch import Tensor, nn

from fourfold.models.lora import LoRALinear
from fourfold.parallel.tensor.sharding import Tile

INPUT_FIRST = "Conv1D"
"""The name of GPT-2's class. We compare names, because transformers may not be installed."""


class InputFirst(nn.Linear):
    """Describes an unsplit layer that stores its weight as [in, out]. This class computes nothing.

    The weight is [in, out] and the bias is [out]. One layer may compute several kinds of features, such as queries,
    keys, and values. Each kind is then a *part*. With several parts, the weight is viewed as [in, parts,
    out/parts], and the bias as [parts, out/parts]. So a slice of the last dim has the same heads of all parts.
    """

    def __init__(self, layer: nn.Module, parts: int = 1) -> None:
        weight, bias = layer.get_parameter("weight"), layer.get_parameter("bias")
        super().__init__(weight.shape[0], weight.shape[1], device="meta")
        self.parts = parts
        self.weight = nn.Parameter(in_parts(weight.detach(), parts), weight.requires_grad)
        self.bias = nn.Parameter(in_parts(bias.detach(), parts), bias.requires_grad)


def as_linear(module: nn.Module) -> nn.Linear | None:
    """Return linear layers with and without LoRA adapters unchanged, an ``InputFirst`` for a ``Conv1D``, and None for
    other modules."""
    if type(module).__name__ == INPUT_FIRST:
        return InputFirst(module)
    return module if isinstance(module, nn.Linear) and type(module) in (nn.Linear, LoRALinear) else None


def in_parts(tensor: Tensor, parts: int) -> Tensor:
    """View the last dim as parts, [..., out] → [..., parts, out/parts], if there are several parts."""
    return tensor.unflatten(-1, (parts, -1)) if parts > 1 else tensor


def weight_tile(tile: Tile, parts: int) -> Tile:
    """Convert the tile of a weight [out, in] to the tile of the same weight stored as [in, out]."""
    out = 2 if parts > 1 else 1
    places = {0: out, 1: 0, None: None}
    return replace(tile, x=places[tile.x], y=places[tile.y])


def bias_tile(tile: Tile, parts: int) -> Tile:
    """Convert the tile of a bias [out] to the tile of the same bias stored in parts."""
    places = {0: 1 if parts > 1 else 0, None: None}
    return replace(tile, x=places[tile.x], y=places[tile.y])


def output_first(weight: Tensor, ranks: int) -> Tensor:
    """Return a weight tile [in, out] or [in, parts, out/parts] as [out, in].

    The output of the matmul is later divided evenly among ``ranks`` ranks of y. So the rows for the first rank come
    first, with a slice of every part, and then the rows for the next rank. With several parts and several ranks, the
    result is a copy, which stays in memory until the backward pass. Otherwise it is a view.
    """
    if weight.dim() == 3:
        weight = weight.unflatten(-1, (ranks, -1)).transpose(1, 2).flatten(1)
    return weight.T
