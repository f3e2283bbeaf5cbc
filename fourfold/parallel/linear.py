"""The two linear layers of the 4D algorithm (AxoNN, arXiv 2502.08145, section V, with a non-redundant residual).

The residual stream arrives as [B, T, h]: T = S/x tokens and h = H/y channels on each rank. A *normal* layer has its
input features over y and its output features over x; a *transposed* layer the reverse, so that one follows the other
with no redistribution. S, and features without a slash, are whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

import torch
from torch import Tensor, nn

from fourfold.parallel.communicate import (
    Pending,
    all_gather,
    all_reduce,
    reduce_scatter,
    start_all_gather,
    start_all_reduce,
    start_reduce_scatter,
)
from fourfold.parallel.grid import Axis, Grid
from fourfold.parallel.sharding import Tile, Tiled

OverY = Literal["replicate", "features", "batch", "sequence"]
"""How the y ranks hold what lies between a normal and a transposed layer: all the same, or each its share of a dim."""

SHARED_DIM = {"batch": 0, "sequence": 1, "features": 2}


class Products:
    """The three matrix products of a linear layer, in the type of the operands; float8.py has others."""

    def output(self, x: Tensor, weight: Tensor) -> Tensor:
        return x @ weight.T

    def input_gradient(self, grads: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor:
        """Of layers that read one input: Σ grad @ weight, accumulated inside the products."""
        total = grads[0] @ weights[0]
        flat = total.flatten(0, -2)
        for grad, weight in zip(grads[1:], weights[1:], strict=True):
            flat.addmm_(grad.flatten(0, -2), weight)
        return total

    def weight_gradient(self, grad: Tensor, x: Tensor) -> Tensor:
        return grad.flatten(0, -2).T @ x.flatten(0, -2)


class WeightGradients:
    """Weight gradients that zero-bubble schedules compute apart, when a rank would wait.

    Asking autograd for input gradients alone would run a layer's backward, collectives and all, once more for the
    weights'.
    """

    def __init__(self) -> None:
        self._products: list[tuple[Linear4D, Tensor, Tensor]] = []

    def add(self, linear: Linear4D, grad: Tensor, x: Tensor) -> None:
        self._products.append((linear, grad, x))

    @torch.no_grad()
    def compute(self, give: Callable[[nn.Parameter, Tensor], None]) -> None:
        """Compute them, and ``give`` each with its parameter."""
        for linear, grad, x in self._products:
            give(linear.weight, linear.products.weight_gradient(grad, x))
        self._products.clear()


@contextmanager
def weight_gradients_put_off(linears: Iterable[Linear4D]) -> Iterator[WeightGradients]:
    """Backwards run inside leave the weight gradients of these layers for later."""
    later = WeightGradients()
    for linear in linears:
        linear.later = later
    try:
        yield later
    finally:
        for linear in linears:
            linear.later = None


class Linear4D(Tiled):
    """One weight of the 4D algorithm, how it is multiplied, and where its gradient is put off to."""

    products = Products()
    later: WeightGradients | None = None


class NormalLinears(Tiled):
    """Linear layers that read the same part of the residual stream: weights [out/x, in/y].

    Gathers the tokens over x once for all of them, and sums over y what they compute: into every rank
    (``"replicate"``, MLP) or into each rank's share of the features, batch or sequence (attention).
    """

    products = Products()
    gather_again = False
    """Keep this rank's tokens for the backward instead of those of all ranks of x, and gather them again."""

    def __init__(self, linears: nn.ModuleDict, grid: Grid, over_y: OverY, overlap: bool, name: str) -> None:
        super().__init__()
        self.x, self.y, self.over_y, self.overlap, self.name = grid.x, grid.y, over_y, overlap, name
        bias_tile = {
            "replicate": Tile(x=0),
            "features": Tile(x=0, y=0),
            "batch": Tile(x=0, partial_over=("y",)),
            "sequence": Tile(x=0, partial_over=("y",)),
        }[over_y]
        for child_name, linear in linears.items():
            child = Linear4D()
            child.add_tile("weight", linear.weight, Tile(x=0, y=1), grid)
            child.add_tile("bias", linear.bias, bias_tile, grid)
            self.add_module(child_name, child)

    def forward(self, x_BTh: Tensor) -> list[Tensor]:
        linears = list(self.children())
        outs = normal_linears(x_BTh, self, *(linear.weight for linear in linears))
        return [out if linear.bias is None else out + linear.bias for out, linear in zip(outs, linears, strict=True)]


class TransposedLinear(Linear4D):
    """A linear layer that writes to the residual stream: weight [out/y, in/x].

    Gathers over y what the ranks of y hold shares of (nothing for ``"replicate"``), and sums over x into each rank's
    tokens.
    """

    gather_again = False
    """Keep this rank's share of the input for the backward instead of the whole, and gather it again."""

    def __init__(self, linear: nn.Linear, grid: Grid, over_y: OverY, overlap: bool, name: str) -> None:
        super().__init__()
        self.x, self.y, self.over_y, self.overlap, self.name = grid.x, grid.y, over_y, overlap, name
        self.add_tile("weight", linear.weight, Tile(x=1, y=0), grid)
        self.add_tile("bias", linear.bias, Tile(y=0, partial_over=("x",)), grid)

    def start_gathering(self, a: Tensor) -> Pending:
        """What the ranks of y hold shares of."""
        if self.over_y == "replicate":
            return Pending(a)
        return start_all_gather(a, self.y, SHARED_DIM[self.over_y], f"{self.name}: inputs")

    def forward(self, a: Tensor) -> Tensor:
        out_BTh = transposed_linear(a, self, self.weight)
        return out_BTh if self.bias is None else out_BTh + self.bias


class _NormalLinears(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_BTh: Tensor, layer: NormalLinears, *weights: Tensor) -> tuple[Tensor, ...]:
        x_BSh = all_gather(x_BTh, layer.x, 1, f"{layer.name}: tokens")
        ctx.save_for_backward(x_BTh if layer.gather_again else x_BSh, *weights)
        ctx.layer = layer
        partials = [layer.products.output(x_BSh, weight) for weight in weights]
        why = f"{layer.name}: outputs"
        if layer.y.size == 1:
            return tuple(partials)
        if layer.over_y == "replicate":
            return _split(all_reduce(_concatenate(partials), layer.y, why), partials)
        if layer.over_y == "features":
            return _scatter_features(partials, layer.y, why)
        summed = reduce_scatter(_concatenate(partials), layer.y, SHARED_DIM[layer.over_y], why)
        return _split(summed, partials)

    @staticmethod
    def backward(ctx, *grads: Tensor):
        x, *weights = ctx.saved_tensors
        layer: NormalLinears = ctx.layer
        gathered = start_all_gather(x, layer.x, 1, f"{layer.name}: tokens") if layer.gather_again else Pending(x)
        grads = _gather_output_gradients(grads, layer)
        dx = None
        if ctx.needs_input_grad[0]:
            partial_BSh = layer.products.input_gradient(grads, weights)
            dx = start_reduce_scatter(partial_BSh, layer.x, 1, f"{layer.name}: input gradient")
            if not layer.overlap:
                dx = Pending(dx.wait())
        x_BSh, linears = gathered.wait(), zip(layer.children(), grads, ctx.needs_input_grad[2:], strict=True)
        dws = [_weight_gradient_or_later(linear, grad, x_BSh) if needed else None for linear, grad, needed in linears]
        return dx.wait() if dx is not None else None, None, *dws


class _TransposedLinear(torch.autograd.Function):
    """A transposed layer's backward. The forward gathers and saves what that reads, and leaves the product to the next.

    At the end of a block that is recomputed nothing reads the product, nor its sum over x: the recomputation stops as
    soon as all that was saved is there again.
    """

    @staticmethod
    def forward(ctx, a: Tensor, layer: TransposedLinear, weight: Tensor) -> tuple[Tensor, Tensor]:
        gathered = layer.start_gathering(a).wait().detach()
        ctx.save_for_backward(a if layer.gather_again else gathered, weight)
        ctx.layer = layer
        ctx.mark_non_differentiable(gathered)
        ctx.set_materialize_grads(False)  # no zeros for the gradient of ``gathered``
        batch, tokens, _ = gathered.shape
        out_to_come = a.new_empty(()).expand(batch, tokens // layer.x.size, len(weight))
        return out_to_come, gathered

    @staticmethod
    def backward(ctx, grad_BTh: Tensor, _: None):
        a, weight = ctx.saved_tensors
        layer: TransposedLinear = ctx.layer
        gathered = layer.start_gathering(a) if layer.gather_again else Pending(a)
        grad_BSh = all_gather(grad_BTh, layer.x, 1, f"{layer.name}: output gradient")
        da = None
        if ctx.needs_input_grad[0]:
            why = f"{layer.name}: input gradient"
            partial = layer.products.input_gradient([grad_BSh], [weight])
            if layer.over_y == "replicate":
                da = start_all_reduce(partial, layer.y, why)
            else:
                da = start_reduce_scatter(partial, layer.y, SHARED_DIM[layer.over_y], why)
            if not layer.overlap:
                da = Pending(da.wait())
        a = gathered.wait()
        dw = _weight_gradient_or_later(layer, grad_BSh, a) if ctx.needs_input_grad[2] else None
        return da.wait() if da is not None else None, None, dw


class _SummedProduct(torch.autograd.Function):
    """The product of a transposed layer, summed over x into each rank's tokens."""

    @staticmethod
    def forward(ctx, out_to_come: Tensor, a: Tensor, weight: Tensor, layer: TransposedLinear) -> Tensor:
        return reduce_scatter(layer.products.output(a, weight), layer.x, 1, f"{layer.name}: outputs")

    @staticmethod
    def backward(ctx, grad_BTh: Tensor):
        return grad_BTh, None, None, None


# Asynchronous collectives cannot be traced into a compiled graph: the compiler stops at these two and goes on behind.
@torch.compiler.disable
def normal_linears(x_BTh: Tensor, layer: NormalLinears, *weights: Tensor) -> tuple[Tensor, ...]:
    return _NormalLinears.apply(x_BTh, layer, *weights)


@torch.compiler.disable
def transposed_linear(a: Tensor, layer: TransposedLinear, weight: Tensor) -> Tensor:
    out_to_come, gathered = _TransposedLinear.apply(a, layer, weight)
    return _SummedProduct.apply(out_to_come, gathered, weight.detach(), layer)


def _concatenate(tensors: Sequence[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors, dim=-1)


def _split(joined: Tensor, like: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Undo ``_concatenate``: views of one buffer, which nobody writes to."""
    return joined.split([t.shape[-1] for t in like], dim=-1)


def _scatter_features(partials: Sequence[Tensor], y: Axis, why: str) -> tuple[Tensor, ...]:
    """Sum over y; each rank keeps its 1/y of the features of every output, in one collective for all."""
    shares_BSyf = _concatenate([partial.unflatten(-1, (y.size, -1)) for partial in partials])
    kept_BSf = reduce_scatter(shares_BSyf, y, 2, why).squeeze(2)
    return kept_BSf.split([partial.shape[-1] // y.size for partial in partials], dim=-1)


def _gather_output_gradients(grads: Sequence[Tensor], layer: NormalLinears) -> Sequence[Tensor]:
    """The mirror of the sum over y: gradients of whole outputs from the shares that the ranks of y hold."""
    if layer.y.size == 1 or layer.over_y == "replicate":
        return grads
    why, sizes = f"{layer.name}: output gradient", [grad.shape[-1] for grad in grads]
    if layer.over_y == "features":
        shares_BSyf = all_gather(_concatenate(grads).unsqueeze(2), layer.y, 2, why)
        return [part.flatten(2) for part in shares_BSyf.split(sizes, dim=-1)]
    return all_gather(_concatenate(grads), layer.y, SHARED_DIM[layer.over_y], why).split(sizes, dim=-1)


def _weight_gradient_or_later(linear: Linear4D, grad: Tensor, x: Tensor) -> Tensor | None:
    if linear.later is None:
        return linear.products.weight_gradient(grad, x)
    linear.later.add(linear, grad, x)
    return None
