"""Run the linear layers of attention and MLP: all-gather the input, multiply, and sum the output over ranks.

This is AxoNN's 4D algorithm (arXiv 2502.08145, section V) with one change: each rank holds only its own part of the
residual stream.

Two axes of the grid, called a and b here, split the weight. Each rank holds a tile W [out/a, in/b] and computes

    forward     x   = all_gather_a(x)       backward    g  = all_gather_b(g)
                out = reduce_b(x Wᵀ)                    dx = reduce_a(g W)
                                                        dW = gᵀ x

A *normal* layer (qkv, up) reads the residual stream. Its axes are (a, b) = (x, y). A *transposed* layer (o_proj, down)
writes to the residual stream. Its axes are (a, b) = (y, x). The output of a normal layer is split like the input of a
transposed layer, so no data moves between the two. For an MLP with inner width F, T = S/x, and h = H/y:

    [B, T, h] ─ all-gather over x → [x·B, T, h] ─ W [F/x, h] → [x·B, T, F/x] ─ all-reduce over y ┐
    [B, T, h] ← reduce-scatter over x ─ [x·B, T, h] ← W [h, F/x] ─ [x·B, T, F/x] ← activation ────┘

The module ``linear_steps`` computes the same result in steps, for batch parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Literal, TypeVar

import torch
from torch import Tensor, nn

from fourfold.config.run import OverlapConfig
from fourfold.models.autograd import Context, FunctionOfMany, not_compiled
from fourfold.models.lora import LoRALinear
from fourfold.parallel.grid.communicate import Pending
from fourfold.parallel.grid.grid import Grid
from fourfold.parallel.tensor.matmuls import (
    Matmuls,
    adapter_gradients,
    adapter_tiles,
    add_to_input_gradient,
    add_to_output,
)
from fourfold.parallel.tensor.sharding import Tile, Tiled
from fourfold.parallel.tensor.spread import Spread, Tensors

T = TypeVar("T")

Layers = Sequence["Linear4D"]

OverY = Literal["replicate", "features", "batch", "sequence"]
"""How the ranks of y hold the tensors between a normal and a transposed layer: each rank has a copy ("replicate"), or y
splits the named dim."""

SHARED_DIM: dict[OverY, int | None] = {"replicate": None, "batch": 0, "sequence": 1, "features": 2}
"""The dim that y splits, or None if each rank of y has a copy."""

TOKEN_DIM: dict[OverY, int] = {"replicate": 0, "features": 0, "batch": 1, "sequence": 1}
"""The dim along which the all-gather over x concatenates the ranks' tokens.

Dim 0, [x·B, T, …], needs no copy. The MLP always uses it. Attention uses it if y splits the heads. Each rank then
rearranges only its own heads into sequences. If y splits the batch or the queries, attention uses dim 1, [B, x·T, …].
Concatenating along dim 1 copies all channels.
"""

NORMAL_BIAS: dict[OverY, Tile] = {
    "replicate": Tile(x=0),
    "features": Tile(x=0, y=0),
    "batch": Tile(x=0, partial_over=("y",)),
    "sequence": Tile(x=0, partial_over=("y",)),
}
"""The tile of a normal layer's bias."""


@not_compiled
def linear_4d(x: Tensor, layers: Layers) -> Tensors:
    """Run layers that read the same input. One collective gathers the input, and one collective sums its gradient.

    Args:
        x: this rank's share of the input.

    Returns:
        This rank's share of each layer's output, without the bias.
    """
    first, matrices = layers[0], [matrix for layer in layers for matrix in layer.matrices()]
    share = x.detach()
    whole = first.reads.start_gather(share, f"{first.name}: {first.reads_what}").wait()
    places = _Backward.apply(x, share if first.gather_again else whole, whole.shape, layers, *matrices)
    return _Forward.apply(whole, layers, *(matrix.detach() for matrix in matrices), *places)


class _Forward(FunctionOfMany):
    """Multiplies the gathered input, and sums the output over the axis b. The backward pass hands gradients to
    ``_Backward``."""

    @staticmethod
    def forward(ctx: Context[int], x: Tensor, layers: Layers, *matrices_and_places: Tensor) -> Tensors:
        ctx.kept = len(matrices_and_places) - len(layers)
        first, matrices = layers[0], matrices_and_places[: ctx.kept]
        outputs = output_matmuls(x, layers, matrices)
        return first.writes.start_sums(outputs, f"{first.name}: outputs", first.overlap.gate_sum)()

    @staticmethod
    def backward(ctx: Context[int], *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *[None] * ctx.kept, *grads


class _Backward(FunctionOfMany):
    """Saves the tensors that the backward pass reads, and runs the backward pass.

    The outputs have no data. Their only use is to receive the gradients of the layers' outputs.

    This function is separate from ``_Forward`` and runs before it, to make recomputation cheaper. A recomputation stops
    as soon as it has all saved tensors. So in a recomputation, the last layer of a block neither multiplies nor sums.
    """

    @staticmethod
    def forward(
        ctx: Context[Layers], x: Tensor, kept: Tensor, shape: torch.Size, layers: Layers, *matrices: Tensor
    ) -> Tensors:
        ctx.kept = layers
        ctx.save_for_backward(kept, *matrices)
        wholes = [(*shape[:-1], len(weight)) for weight, *_ in by_layer(layers, matrices)]
        return tuple(x.new_empty(()).expand(layers[0].writes.share_shape(whole)) for whole in wholes)

    @staticmethod
    def backward(ctx: Context[Layers], *grads: Tensor) -> tuple[Tensor | None, ...]:
        layers, first = ctx.kept, ctx.kept[0]
        gathering_grads = first.writes.start_gathers(grads, f"{first.name}: output gradient")
        # With activation checkpointing, reading the saved tensors runs the forward pass again.
        kept, *matrices = ctx.saved_tensors
        gathering_x = gather_kept(first, kept)
        grads = gathering_grads()
        d_x = start_input_gradient(layers, grads, matrices) if ctx.needs_input_grad[0] else None
        d_matrices = weight_gradients(layers, grads, gathering_x.wait(), matrices, ctx.needs_input_grad[4:])
        return None if d_x is None else d_x.wait(), None, None, None, *d_matrices


def output_matmuls(x: Tensor, layers: Layers, matrices: Sequence[Tensor]) -> list[Callable[[], Tensor]]:
    """Return one function per layer. Each function computes the layer's matmul x Wᵀ."""
    return [partial(layer.multiply, x, *own) for layer, own in zip(layers, by_layer(layers, matrices), strict=True)]


def gather_kept(first: Linear4D, kept: Tensor) -> Pending:
    """Return the input that the forward pass saved. If the forward pass saved only this rank's share, start to gather
    the input again."""
    return first.reads.start_gather(kept, f"{first.name}: {first.reads_what}") if first.gather_again else Pending(kept)


def start_input_gradient(layers: Layers, grads: Tensors, matrices: Sequence[Tensor]) -> Pending:
    """Compute the gradient Σ g W of the layers' common input, and start to sum it over the axis a.

    If ``overlap.input_gradients`` is off, also wait for the sum.
    """
    first, d_x = layers[0], None
    for layer, grad, (weight, *adapter) in zip(layers, grads, by_layer(layers, matrices), strict=True):
        d_x = layer.matmuls.input_gradient(grad, weight, d_x)
        if adapter:
            add_to_input_gradient(d_x, grad, adapter, layer.lora_scale)
    assert d_x is not None
    if first.reads.axis.size == 1:
        return Pending(d_x)
    summing = first.reads.start_sum(d_x, f"{first.name}: input gradient")
    return summing if first.overlap.input_gradients else Pending(summing.wait())


def weight_gradients(
    layers: Layers, grads: Tensors, x: Tensor, matrices: Sequence[Tensor], needed: Sequence[bool]
) -> list[Tensor | None]:
    """Compute the gradient of each layer's weight, gᵀ x. If a layer has a LoRA adapter, also compute the adapter's
    gradients.

    A gradient is None if the weight is frozen, or if a pipeline schedule computes the gradient later.

    Args:
        layers: layers that read the same input.
        grads: the gradient g of each layer's output.
        x: the input, gathered over the axis a.
        matrices: the weight of each layer, followed by A and B if the layer has an adapter.
        needed: for each of ``matrices``, whether its gradient is needed.
    """
    gradients = list[Tensor | None]()
    by_layers = zip(layers, grads, by_layer(layers, needed), by_layer(layers, matrices), strict=True)
    for layer, grad, flags, own in by_layers:
        gradients += layer.gradients(grad, x, flags, *own)
    return gradients


def by_layer(layers: Layers, flat: Sequence[T]) -> Iterator[Sequence[T]]:
    """Split ``flat``, which has one value per matrix, into one sequence per layer. A layer has several matrices if it
    has an adapter."""
    first = 0
    for layer in layers:
        count = len(layer.matrices())
        yield flat[first : first + count]
        first += count


class Linear4D(Tiled):
    """A linear layer on the grid, normal or transposed (see the module's docstring).

    Args:
        over_y: how the ranks of y hold the output of a normal layer, or the input of a transposed layer.
        name: the layer's name in ``fourfold trace``, such as "up".
    """

    weight: nn.Parameter
    bias: nn.Parameter | None
    lora_A: nn.Parameter
    lora_B: nn.Parameter

    matmuls = Matmuls()
    deferred: list[tuple[Linear4D, Tensor, Tensor]] | None = None
    """None, unless a pipeline schedule computes weight gradients later. With such a schedule, the backward pass appends
    the layer, the output gradient, and the input to this list."""

    gathers_tokens = True
    """Whether x splits the tokens of the residual stream, so that the layer gathers or sums over x."""

    gather_again = False
    """Whether to save only this rank's share of the input, and gather the input again in the backward pass."""

    lora_scale: float = 0.0
    """The factor α/r of the layer's LoRA adapter. 0 if there is no adapter."""

    def __init__(
        self,
        linear: nn.Linear,
        grid: Grid,
        over_y: OverY,
        name: str,
        overlap: OverlapConfig | None = None,
        transposed: bool = False,
    ) -> None:
        super().__init__()
        self.name, self.overlap, self.transposed = name, overlap or OverlapConfig(), transposed
        x = grid.x if self.gathers_tokens else replace(grid.x, size=1, rank=0)
        tokens, shared = Spread(x, TOKEN_DIM[over_y]), Spread(grid.y, SHARED_DIM[over_y])
        self.reads, self.writes = (shared, tokens) if transposed else (tokens, shared)
        self.reads_what = "inputs" if transposed else "tokens"
        tile = self.weight_tile()
        self.add_weights(linear, tile, self.transposed_bias() if transposed else NORMAL_BIAS[over_y], grid)
        if isinstance(linear, LoRALinear):
            self.lora_scale = linear.scale
            tile_a, tile_b = adapter_tiles(tile)
            self.add_tile("lora_A", linear.lora_A, tile_a, grid)
            self.add_tile("lora_B", linear.lora_B, tile_b, grid)

    def weight_tile(self) -> Tile:
        """Return the tile of the weight [out, in]."""
        return Tile(x=1, y=0) if self.transposed else Tile(x=0, y=1)

    def transposed_bias(self) -> Tile:
        """Return the tile of a transposed layer's bias, which is added to the residual stream."""
        return Tile(y=0, partial_over=("x",))

    def add_weights(self, linear: nn.Linear, tile: Tile, over_out: Tile, grid: Grid) -> None:
        """Register this rank's tiles of the weight and of the bias.

        Args:
            linear: the layer with the weight [out, in] and the bias [out].
            tile: the tile of the weight.
            over_out: the tile of the bias.
            grid: the grid.
        """
        self.add_tile("weight", linear.weight, tile, grid)
        self.add_tile("bias", linear.bias, over_out, grid)

    def forward(self, x: Tensor) -> Tensor:
        (out,) = linear_4d(x, [self])
        return self.add_bias(out)

    def add_bias(self, out: Tensor) -> Tensor:
        return out if self.bias is None else out + self.bias

    def turn(self) -> None:
        """Store the weight as its transpose. The weight must be on the meta device."""
        assert self.weight.is_meta
        self.weight = nn.Parameter(self.weight.detach().T.contiguous(), self.weight.requires_grad)
        self.tiles["weight"] = replace(self.tiles["weight"], turned=True)

    def matrices(self) -> tuple[Tensor, ...]:
        """Return the weight W, and the matrices A and B of the adapter if there is one."""
        weight = self.tiles["weight"].as_tile(self.weight)
        return (weight, self.lora_A, self.lora_B) if self.lora_scale else (weight,)

    def multiply(self, x: Tensor, weight: Tensor, *adapter: Tensor) -> Tensor:
        """Return x Wᵀ, plus the output of the adapter if there is one."""
        out = self.matmuls.output(x, weight)
        if adapter:
            add_to_output(out, x, adapter, self.lora_scale)
        return out

    def gradients(
        self, grad: Tensor, x: Tensor, needed: Sequence[bool], weight: Tensor, *adapter: Tensor
    ) -> list[Tensor | None]:
        """Return the gradients of ``matrices``. The weight's gradient is None if it is not needed, or if a pipeline
        schedule computes it later."""
        gradients: list[Tensor | None] = [None]
        if needed[0] and self.deferred is not None:
            self.deferred.append((self, grad, x))
        elif needed[0]:
            gradients = [self.matmuls.weight_gradient(grad, x)]
        if adapter:
            gradients += adapter_gradients(grad, x, adapter, self.lora_scale)
        return gradients


class LinearGroup(nn.Module):
    """Normal layers that read the same input, such as gate and up. They share the all-gather of their input."""

    def __init__(
        self,
        linears: nn.ModuleDict,
        grid: Grid,
        over_y: OverY,
        name: str,
        overlap: OverlapConfig,
        kind: type[Linear4D] = Linear4D,
    ) -> None:
        super().__init__()
        for child_name, linear in linears.items():
            assert isinstance(linear, nn.Linear)
            self.add_module(child_name, kind(linear, grid, over_y, name, overlap))

    def layers(self) -> list[Linear4D]:
        return [child for child in self.children() if isinstance(child, Linear4D)]

    def forward(self, x_BTh: Tensor) -> list[Tensor]:
        layers = self.layers()
        return [layer.add_bias(out) for layer, out in zip(layers, linear_4d(x_BTh, layers), strict=True)]
