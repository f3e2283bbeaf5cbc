"""The linear layers of the 4D algorithm (AxoNN, arXiv 2502.08145, section V, with a non-redundant residual).

The residual stream is [B, T, h] on each rank: T = S/x tokens and h = H/y channels. A *normal* layer reads it; its
weight [out/x, in/y] has input features over y and output features over x. A *transposed* layer writes to it; its weight
[out/y, in/x] has them the other way round, so that one follows the other with no redistribution.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from fourfold.config.run import OverlapConfig
from fourfold.models.autograd import Context, FunctionOfMany, not_compiled
from fourfold.models.lora import LoRALinear
from fourfold.parallel.communicate import (
    Pending,
    all_gather,
    reduce_scatter,
    start_all_gather,
    start_all_reduce,
    start_reduce_scatter,
)
from fourfold.parallel.grid import Axis, Grid
from fourfold.parallel.products import (
    Products,
    adapter_gradients,
    adapter_tiles,
    add_to_input_gradient,
    add_to_output,
)
from fourfold.parallel.sharding import Tile, Tiled

if TYPE_CHECKING:
    from fourfold.parallel.deferred import WeightGradients

T = TypeVar("T")
OverY = Literal["replicate", "features", "batch", "sequence"]
"""Placement over y of the tensors between a normal and a transposed layer: a copy on each rank, or shares of a dim."""

SHARED_DIM: dict[OverY, int | None] = {"replicate": None, "batch": 0, "sequence": 1, "features": 2}
NORMAL_BIAS: dict[OverY, Tile] = {
    "replicate": Tile(x=0),
    "features": Tile(x=0, y=0),
    "batch": Tile(x=0, partial_over=("y",)),
    "sequence": Tile(x=0, partial_over=("y",)),
}


class Spread(NamedTuple):
    """Placement of a tensor over the ranks of an axis: a share of ``dim`` on each, or a copy where that is None."""

    axis: Axis
    dim: int | None

    def start_gather(self, share: Tensor, why: str) -> Pending:
        """Gather the whole tensor from the ranks' shares."""
        return Pending(share) if self.dim is None else start_all_gather(share, self.axis, self.dim, why)

    def start_sum(self, partial: Tensor, why: str) -> Pending:
        """Sum the ranks' whole tensors: this rank's share of the sum, or all of it."""
        if self.dim is None:
            return start_all_reduce(partial, self.axis, why)
        return start_reduce_scatter(partial, self.axis, self.dim, why)


class Linear4D(Tiled):
    """One linear layer, with weight tile W [out/a, in/b] for (a, b) = (x, y), or (y, x) if it is transposed:

        out = sum_b(gather_a(in) Wᵀ) + bias

    ``gather_a`` makes the whole input from the shares of the ranks of a, placed as in ``reads``; ``sum_b`` leaves each
    rank of b its share of the sum, placed as in ``writes``. The backward is the mirror image:

        d_in = sum_a(gather_b(d_out) W),  dW = gather_b(d_out)ᵀ gather_a(in)
    """

    weight: nn.Parameter
    bias: nn.Parameter | None
    lora_A: nn.Parameter
    lora_B: nn.Parameter

    products = Products()
    deferred: WeightGradients | None = None
    """Takes the operands of the weight gradient, where a schedule computes it later."""

    gather_again = False
    """Keep this rank's share of the input for the backward instead of the whole, and gather it again."""

    lora_scale: float = 0.0
    """α/r of its adapter; 0 without one."""

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
        tokens, shared = Spread(self.token_axis(grid), 1), Spread(grid.y, SHARED_DIM[over_y])
        self.reads, self.writes = (shared, tokens) if transposed else (tokens, shared)
        self.reads_what = "inputs" if transposed else "tokens"
        tile = Tile(x=1, y=0) if transposed else Tile(x=0, y=1)
        self.add_tile("weight", linear.weight, tile, grid)
        self.add_tile("bias", linear.bias, self.transposed_bias() if transposed else NORMAL_BIAS[over_y], grid)
        if isinstance(linear, LoRALinear):
            self.lora_scale = linear.scale
            tile_a, tile_b = adapter_tiles(tile)
            self.add_tile("lora_A", linear.lora_A, tile_a, grid)
            self.add_tile("lora_B", linear.lora_B, tile_b, grid)

    def token_axis(self, grid: Grid) -> Axis:
        """The axis whose ranks share the tokens of the residual stream."""
        return grid.x

    def transposed_bias(self) -> Tile:
        """The tile of a transposed layer's bias, which is added to the residual stream."""
        return Tile(y=0, partial_over=("x",))

    def forward(self, x: Tensor) -> Tensor:
        (out,) = linear_layers(x, [self])
        return self.add_bias(out)

    def add_bias(self, out: Tensor) -> Tensor:
        return out if self.bias is None else out + self.bias

    def matrices(self) -> tuple[Tensor, ...]:
        """The weight, and the adapter's A and B if there is one."""
        return (self.weight, self.lora_A, self.lora_B) if self.lora_scale else (self.weight,)

    def product(self, x: Tensor, weight: Tensor, *adapter: Tensor) -> Tensor:
        """x Wᵀ, with the adapter's addition."""
        out = self.products.output(x, weight)
        if adapter:
            add_to_output(out, x, adapter, self.lora_scale)
        return out

    def gradients(
        self, grad: Tensor, x: Tensor, needed: Sequence[bool], weight: Tensor, *adapter: Tensor
    ) -> list[Tensor | None]:
        """Gradients of the matrices; None for a frozen or deferred one."""
        gradients: list[Tensor | None] = [None]
        if needed[0] and self.deferred is not None:
            self.deferred.add(self, grad, x)
        elif needed[0]:
            gradients = [self.products.weight_gradient(grad, x)]
        if adapter:
            gradients += adapter_gradients(grad, x, adapter, self.lora_scale)
        return gradients


class LinearGroup(nn.Module):
    """Normal layers that read the same input: it is gathered once, and their input gradients are summed once."""

    def __init__(self, linears: nn.ModuleDict, grid: Grid, over_y: OverY, name: str, overlap: OverlapConfig) -> None:
        super().__init__()
        for child_name, linear in linears.items():
            assert isinstance(linear, nn.Linear)
            self.add_module(child_name, Linear4D(linear, grid, over_y, name, overlap))

    def forward(self, x_BTh: Tensor) -> list[Tensor]:
        layers = [child for child in self.children() if isinstance(child, Linear4D)]
        return [layer.add_bias(out) for layer, out in zip(layers, linear_layers(x_BTh, layers), strict=True)]


@not_compiled
def linear_layers(x: Tensor, layers: Sequence[Linear4D]) -> tuple[Tensor, ...]:
    """The outputs of layers that read the same input, without their biases."""
    matrices = [matrix for layer in layers for matrix in layer.matrices()]
    if not layers[0].transposed:
        return _Linear.apply(x, layers, *matrices)
    gathered, *placeholders = _Linear.apply(x, layers, *matrices)
    return _Output.apply(gathered, layers, *placeholders, *(matrix.detach() for matrix in matrices))


class _Linear(FunctionOfMany):
    """The equation of ``Linear4D``. A transposed layer's forward only gathers and saves; ``_Output`` follows it.

    When a block is recomputed, nothing reads the output of its last transposed layer, or the sum of it over the ranks.
    With two functions the recomputation stops before them, once every saved tensor is there again.
    """

    @staticmethod
    def forward(
        ctx: Context[Sequence[Linear4D]], x: Tensor, layers: Sequence[Linear4D], *matrices: Tensor
    ) -> tuple[Tensor, ...]:
        first = layers[0]
        gathered = first.reads.start_gather(x, f"{first.name}: {first.reads_what}").wait()
        ctx.kept = layers
        if not first.transposed:
            ctx.save_for_backward(x if first.gather_again else gathered, *matrices)
            return _outputs(gathered, layers, matrices)
        gathered = gathered.detach()
        ctx.save_for_backward(x if first.gather_again else gathered, *matrices)
        ctx.mark_non_differentiable(gathered)
        ctx.set_materialize_grads(False)  # no zeros for the gradient of ``gathered``
        weights = [own[0] for own in _by_layer(layers, matrices)]
        return gathered, *(_placeholder(gathered, len(weight), first.writes) for weight in weights)

    @staticmethod
    def backward(ctx: Context[Sequence[Linear4D]], *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, *matrices = ctx.saved_tensors
        layers, first = ctx.kept, ctx.kept[0]
        by_layer = list(_by_layer(layers, matrices))
        again = first.gather_again
        gathering = first.reads.start_gather(x, f"{first.name}: {first.reads_what}") if again else Pending(x)
        # A transposed layer's first output is ``gathered``, which has no gradient.
        whole_grads = _gather_gradients(grads[1:] if first.transposed else grads, first)
        summing = None
        if ctx.needs_input_grad[0]:
            partial = first.products.input_gradient(whole_grads, [own[0] for own in by_layer])
            for layer, grad, (_weight, *adapter) in zip(layers, whole_grads, by_layer, strict=True):
                if adapter:
                    add_to_input_gradient(partial, grad, adapter, layer.lora_scale)
            summing = first.reads.start_sum(partial, f"{first.name}: input gradient")
            if not first.overlap.input_gradients:
                summing = Pending(summing.wait())
        gathered = gathering.wait()
        needed = _by_layer(layers, ctx.needs_input_grad[2:])
        gradients: list[Tensor | None] = []
        for layer, grad, flags, own in zip(layers, whole_grads, needed, by_layer, strict=True):
            gradients += layer.gradients(grad, gathered, flags, *own)
        return None if summing is None else summing.wait(), None, *gradients


class _Output(FunctionOfMany):
    """Puts the output of a transposed layer in the place of its placeholder; the gradient passes through."""

    @staticmethod
    def forward(
        ctx: Context[int], gathered: Tensor, layers: Sequence[Linear4D], *placeholders_and_matrices: Tensor
    ) -> tuple[Tensor, ...]:
        matrices = placeholders_and_matrices[len(layers) :]
        ctx.kept = len(matrices)
        return _outputs(gathered, layers, matrices)

    @staticmethod
    def backward(ctx: Context[int], *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *grads, *[None] * ctx.kept


def _outputs(gathered: Tensor, layers: Sequence[Linear4D], matrices: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The layers' products with the gathered input, summed over the ranks."""
    by_layer = zip(layers, _by_layer(layers, matrices), strict=True)
    return _sum_outputs((layer.product(gathered, *own) for layer, own in by_layer), layers[0])


def _by_layer(layers: Sequence[Linear4D], flat: Sequence[T]) -> Iterator[Sequence[T]]:
    """Values of all matrices in one sequence, layer by layer."""
    first = 0
    for layer in layers:
        count = len(layer.matrices())
        yield flat[first : first + count]
        first += count


def _placeholder(gathered: Tensor, features: int, writes: Spread) -> Tensor:
    """A tensor with the shape of an output that takes no memory."""
    shape = [*gathered.shape[:-1], features]
    if writes.dim is not None:
        shape[writes.dim] //= writes.axis.size
    return gathered.new_empty(()).expand(shape)


def _sum_outputs(partials: Iterable[Tensor], first: Linear4D) -> tuple[Tensor, ...]:
    """Sum the layers' products over the ranks: one by one behind the next product, or this rank's shares together."""
    (axis, dim), why = first.writes, f"{first.name}: outputs"
    if dim is None:
        sums: list[Pending] = []
        for partial in partials:  # the sum of gate runs behind the product of up
            started = start_all_reduce(partial, axis, why)
            sums.append(started if first.overlap.gate_sum else Pending(started.wait()))
        return tuple(started.wait() for started in sums)
    products = tuple(partials)
    if axis.size == 1:
        return products
    if len(products) == 1:
        return (reduce_scatter(products[0], axis, dim, why),)
    sizes = [product.shape[-1] for product in products]
    if dim < 2:
        return tuple(reduce_scatter(torch.cat(products, -1), axis, dim, why).split(sizes, -1))
    shares_BSyf = torch.cat([product.unflatten(-1, (axis.size, -1)) for product in products], -1)
    kept_BSf = reduce_scatter(shares_BSyf, axis, 2, why).squeeze(2)
    return tuple(kept_BSf.split([size // axis.size for size in sizes], -1))


def _gather_gradients(grads: Sequence[Tensor], first: Linear4D) -> Sequence[Tensor]:
    """The mirror of ``_sum_outputs``: gradients of whole outputs from the ranks' shares, in one collective."""
    (axis, dim), why = first.writes, f"{first.name}: output gradient"
    if dim is None or axis.size == 1:
        return grads
    if len(grads) == 1:
        return (all_gather(grads[0], axis, dim, why),)
    sizes = [grad.shape[-1] for grad in grads]
    if dim < 2:
        return tuple(all_gather(torch.cat(list(grads), -1), axis, dim, why).split(sizes, -1))
    shares_BSyf = all_gather(torch.cat(list(grads), -1).unsqueeze(2), axis, 2, why)
    return [part.flatten(2) for part in shares_BSyf.split(sizes, -1)]
