"""The linear layers of the 4D algorithm (AxoNN, arXiv 2502.08145, section V, with a non-redundant residual).

The residual stream is [B, T, h] on each rank: T = S/x tokens and h = H/y channels. A *normal* layer reads it; its
weight [out/x, in/y] has input features over y and output features over x. A *transposed* layer writes to it; its weight
[out/y, in/x] has them the other way round, so that one follows the other with no redistribution.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Literal, NamedTuple

from torch import Tensor, nn

from fourfold.config.run import OverlapConfig
from fourfold.models.lora import LoRALinear
from fourfold.overlap_order import Steps
from fourfold.parallel.grid.communicate import Pending, start_all_gather, start_all_reduce, start_reduce_scatter
from fourfold.parallel.grid.grid import Axis, Grid
from fourfold.parallel.tensor.linear_steps import WeightGradientsLater, linear_steps, run
from fourfold.parallel.tensor.products import (
    Products,
    adapter_gradients,
    adapter_tiles,
    add_to_output,
)
from fourfold.parallel.tensor.sharding import Tile, Tiled

if TYPE_CHECKING:
    from fourfold.parallel.tensor.deferred_gradients import WeightGradients

OverY = Literal["replicate", "features", "batch", "sequence"]
"""Placement over y of the tensors between a normal and a transposed layer: a copy on each rank, or shares of a dim."""

SHARED_DIM: dict[OverY, int | None] = {"replicate": None, "batch": 0, "sequence": 1, "features": 2}
TOKEN_DIM: dict[OverY, int] = {"replicate": 0, "features": 0, "batch": 1, "sequence": 1}
"""Dim along which the ranks' tokens are joined. Rank after rank, [x · B, T, …], they stay as they arrive; the MLP needs
nothing else, and attention puts its own heads in order. Where y shares sequences or queries, they must be whole, [B,
x · T, …], and are copied with all channels."""

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
        tokens, shared = Spread(self.token_axis(grid), TOKEN_DIM[over_y]), Spread(grid.y, SHARED_DIM[over_y])
        self.reads, self.writes = (shared, tokens) if transposed else (tokens, shared)
        self.reads_what = "inputs" if transposed else "tokens"
        tile = Tile(x=1, y=0) if transposed else Tile(x=0, y=1)
        self.add_weights(linear, tile, self.transposed_bias() if transposed else NORMAL_BIAS[over_y], grid)
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

    def add_weights(self, linear: nn.Linear, tile: Tile, over_out: Tile, grid: Grid) -> None:
        """Register the tiles of the weight [out, in], and of the bias [out]: ``over_out``."""
        self.add_tile("weight", linear.weight, tile, grid)
        self.add_tile("bias", linear.bias, over_out, grid)

    def forward(self, x: Tensor) -> Tensor:
        return run(self.steps(x))

    def steps(
        self,
        x: Tensor,
        pause: bool = False,
        hidden_by: WeightGradientsLater | None = None,
        before_gather: bool = False,
    ) -> Steps[Tensor]:
        """The forward, in steps: ``linear_steps``."""
        (out,) = yield from linear_steps(x, [self], pause, hidden_by=hidden_by, before_gather=before_gather)
        return self.add_bias(out)

    def add_bias(self, out: Tensor) -> Tensor:
        return out if self.bias is None else out + self.bias

    def turn(self) -> None:
        """Store the weight, which is on the meta device, as its transpose."""
        assert self.weight.is_meta
        self.weight = nn.Parameter(self.weight.detach().T.contiguous(), self.weight.requires_grad)
        self.tiles["weight"] = replace(self.tiles["weight"], turned=True)

    def matrices(self) -> tuple[Tensor, ...]:
        """The weight W, and the adapter's A and B if there is one."""
        weight = self.tiles["weight"].as_tile(self.weight)
        return (weight, self.lora_A, self.lora_B) if self.lora_scale else (weight,)

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

    def layers(self) -> list[Linear4D]:
        return [child for child in self.children() if isinstance(child, Linear4D)]

    def forward(self, x_BTh: Tensor) -> list[Tensor]:
        return run(self.steps(x_BTh))

    def steps(self, x_BTh: Tensor, later: WeightGradientsLater | None = None) -> Steps[list[Tensor]]:
        """The forward, in steps: ``linear_steps``."""
        layers = self.layers()
        outs = yield from linear_steps(x_BTh, layers, later=later)
        return [layer.add_bias(out) for layer, out in zip(layers, outs, strict=True)]
