"""The two linear layers of the 4D algorithm (AxoNN, arXiv 2502.08145, section V, with a non-redundant residual).

The residual stream arrives as [B, T, h]: T = S/x tokens and h = H/y channels on each rank. A *normal* layer has its
input features over y and its output features over x; a *transposed* layer the reverse, so that one follows the other
with no redistribution. S, and features without a slash, are whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal, TypeVar

import torch
from torch import Tensor, nn

from fourfold.config.run import OverlapConfig
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
    """One weight of the 4D algorithm, how it is multiplied, where its gradient is put off to, perhaps a LoRA adapter.

    x Aᵀ Bᵀ is summed where x Wᵀ is, so that an adapter needs no collective of its own. Each of its gradients is a share
    of a sum over the axis that its matrix does not lie on.
    """

    products = Products()
    later: WeightGradients | None = None
    lora_scale: float = 0.0

    def add_adapter(
        self, linear: nn.Linear, out_over: Literal["x", "y"], in_over: Literal["x", "y"], grid: Grid
    ) -> None:
        """Take over the adapter of a linear layer that has one."""
        if not isinstance(linear, LoRALinear):
            return
        self.lora_scale = linear.scale
        self.add_tile("lora_A", linear.lora_A, Tile(**{in_over: 1}, partial_over=(out_over,)), grid)
        self.add_tile("lora_B", linear.lora_B, Tile(**{out_over: 0}, partial_over=(in_over,)), grid)

    def matrices(self) -> tuple[Tensor, ...]:
        """The weight, and the adapter's A and B where there is one."""
        return (self.weight, self.lora_A, self.lora_B) if self.lora_scale else (self.weight,)

    def product(self, x: Tensor, matrices: Sequence[Tensor]) -> Tensor:
        """x Wᵀ + α/r · (x Aᵀ) Bᵀ, of this rank's share of the inputs."""
        weight, *adapter = matrices
        out = self.products.output(x, weight)
        if adapter:
            a, b = adapter
            out.view(-1, out.shape[-1]).addmm_((x @ a.T).flatten(0, 1), b.T, alpha=self.lora_scale)
        return out

    def add_adapter_gradient(self, total: Tensor, grad: Tensor, matrices: Sequence[Tensor]) -> None:
        """Add the adapter's part, α/r · (grad B) A, to the gradient of the input."""
        if len(matrices) > 1:
            _, a, b = matrices
            total.view(-1, total.shape[-1]).addmm_((grad @ b).flatten(0, 1), a, alpha=self.lora_scale)

    def weight_gradients(
        self, grad: Tensor, x: Tensor, matrices: Sequence[Tensor], needed: Sequence[bool]
    ) -> list[Tensor | None]:
        """Of the matrices, None for a frozen one and one that is put off."""
        gradients: list[Tensor | None] = [None] * len(matrices)
        if needed[0]:
            if self.later is None:
                gradients[0] = self.products.weight_gradient(grad, x)
            else:
                self.later.add(self, grad, x)
        if len(matrices) > 1:
            _, a, b = matrices
            plain = Products()
            gradients[1] = plain.weight_gradient(grad @ b, x).mul_(self.lora_scale)
            gradients[2] = plain.weight_gradient(grad, x @ a.T).mul_(self.lora_scale)
        return gradients


class NormalLayer(Tiled):
    """What the computation of normal layers must know. x: the axis over which the tokens of its input lie."""

    products = Products()
    gather_again = False
    """Keep this rank's tokens for the backward instead of those of all ranks of x, and gather them again."""

    x: Axis
    y: Axis
    over_y: OverY
    overlap = OverlapConfig()
    name: str

    def linears(self) -> list[Linear4D]:
        """The layers that read one input."""
        raise NotImplementedError


BIAS_TILES: dict[OverY, Tile] = {
    "replicate": Tile(x=0),
    "features": Tile(x=0, y=0),
    "batch": Tile(x=0, partial_over=("y",)),
    "sequence": Tile(x=0, partial_over=("y",)),
}
"""Of a normal layer's bias."""


class NormalLinears(NormalLayer):
    """Linear layers that read the same part of the residual stream: weights [out/x, in/y].

    Gathers the tokens over x once for all of them, and sums over y what they compute: into every rank
    (``"replicate"``, MLP) or into each rank's share of the features, batch or sequence (attention).
    """

    def __init__(self, linears: nn.ModuleDict, grid: Grid, over_y: OverY, overlap: OverlapConfig, name: str) -> None:
        super().__init__()
        self.x, self.y, self.over_y, self.overlap, self.name = grid.x, grid.y, over_y, overlap, name
        for child_name, linear in linears.items():
            child = Linear4D()
            child.add_tile("weight", linear.weight, Tile(x=0, y=1), grid)
            child.add_tile("bias", linear.bias, BIAS_TILES[over_y], grid)
            child.add_adapter(linear, "x", "y", grid)
            self.add_module(child_name, child)

    def linears(self) -> list[Linear4D]:
        return list(self.children())

    def forward(self, x_BTh: Tensor) -> list[Tensor]:
        linears = self.linears()
        outs = normal_linears(x_BTh, self, *(matrix for linear in linears for matrix in linear.matrices()))
        return [out if linear.bias is None else out + linear.bias for out, linear in zip(outs, linears, strict=True)]


class TransposedLinear(Linear4D):
    """A linear layer that writes to the residual stream: weight [out/y, in/x].

    Gathers over y what the ranks of y hold shares of (nothing for ``"replicate"``), and sums over x into each rank's
    tokens.
    """

    overlap = OverlapConfig()
    gather_again = False
    """Keep this rank's share of the input for the backward instead of the whole, and gather it again."""

    def __init__(self, linear: nn.Linear, grid: Grid, over_y: OverY, overlap: OverlapConfig, name: str) -> None:
        super().__init__()
        self.x, self.y, self.over_y, self.overlap, self.name = grid.x, grid.y, over_y, overlap, name
        self.add_tile("weight", linear.weight, Tile(x=1, y=0), grid)
        self.add_tile("bias", linear.bias, Tile(y=0, partial_over=("x",)), grid)
        self.add_adapter(linear, "y", "x", grid)

    def start_gathering(self, a: Tensor) -> Pending:
        """What the ranks of y hold shares of."""
        if self.over_y == "replicate":
            return Pending(a)
        return start_all_gather(a, self.y, SHARED_DIM[self.over_y], f"{self.name}: inputs")

    def forward(self, a: Tensor) -> Tensor:
        out_BTh = transposed_linear(a, self, *self.matrices())
        return out_BTh if self.bias is None else out_BTh + self.bias


class _NormalLinears(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_BTh: Tensor, layer: NormalLayer, *matrices: Tensor) -> tuple[Tensor, ...]:
        x_BSh = all_gather(x_BTh, layer.x, 1, f"{layer.name}: tokens")
        ctx.save_for_backward(x_BTh if layer.gather_again else x_BSh, *matrices)
        ctx.layer = layer
        linears, why = _by_linear(layer, matrices), f"{layer.name}: outputs"
        if layer.over_y == "replicate":
            # The sum of gate runs behind the product of up.
            sums: list[Pending] = []
            for linear, each in linears:
                started = start_all_reduce(linear.product(x_BSh, each), layer.y, why)
                sums.append(started if layer.overlap.gate_sum else Pending(started.wait()))
            return tuple(started.wait() for started in sums)
        partials = [linear.product(x_BSh, each) for linear, each in linears]
        if layer.y.size == 1:
            return tuple(partials)
        if layer.over_y == "features":
            return _scatter_features(partials, layer.y, why)
        summed = reduce_scatter(_concatenate(partials), layer.y, SHARED_DIM[layer.over_y], why)
        return _split(summed, partials)

    @staticmethod
    def backward(ctx, *grads: Tensor):
        x, *matrices = ctx.saved_tensors
        layer: NormalLayer = ctx.layer
        gathered = start_all_gather(x, layer.x, 1, f"{layer.name}: tokens") if layer.gather_again else Pending(x)
        grads = _gather_output_gradients(grads, layer)
        linears = _by_linear(layer, matrices)
        dx = None
        if ctx.needs_input_grad[0]:
            weights = [each[0] for _, each in linears]
            partial_BSh = layer.products.input_gradient(grads, weights)
            for (linear, each), grad in zip(linears, grads, strict=True):
                linear.add_adapter_gradient(partial_BSh, grad, each)
            dx = start_reduce_scatter(partial_BSh, layer.x, 1, f"{layer.name}: input gradient")
            if not layer.overlap.input_gradients:
                dx = Pending(dx.wait())
        x_BSh = gathered.wait()
        needed = [flags for _, flags in _by_linear(layer, ctx.needs_input_grad[2:])]
        dws: list[Tensor | None] = []
        for (linear, each), grad, flags in zip(linears, grads, needed, strict=True):
            dws += linear.weight_gradients(grad, x_BSh, each, flags)
        return dx.wait() if dx is not None else None, None, *dws


class _TransposedLinear(torch.autograd.Function):
    """A transposed layer's backward. The forward gathers and saves what that reads, and leaves the product to the next.

    At the end of a block that is recomputed nothing reads the product, nor its sum over x: the recomputation stops as
    soon as all that was saved is there again.
    """

    @staticmethod
    def forward(ctx, a: Tensor, layer: TransposedLinear, *matrices: Tensor) -> tuple[Tensor, Tensor]:
        gathered = layer.start_gathering(a).wait().detach()
        ctx.save_for_backward(a if layer.gather_again else gathered, *matrices)
        ctx.layer = layer
        ctx.mark_non_differentiable(gathered)
        ctx.set_materialize_grads(False)  # no zeros for the gradient of ``gathered``
        batch, tokens, _ = gathered.shape
        out_to_come = a.new_empty(()).expand(batch, tokens // layer.x.size, len(matrices[0]))
        return out_to_come, gathered

    @staticmethod
    def backward(ctx, grad_BTh: Tensor, _: None):
        a, *matrices = ctx.saved_tensors
        layer: TransposedLinear = ctx.layer
        gathered = layer.start_gathering(a) if layer.gather_again else Pending(a)
        grad_BSh = all_gather(grad_BTh, layer.x, 1, f"{layer.name}: output gradient")
        da = None
        if ctx.needs_input_grad[0]:
            why = f"{layer.name}: input gradient"
            partial = layer.products.input_gradient([grad_BSh], matrices[:1])
            layer.add_adapter_gradient(partial, grad_BSh, matrices)
            if layer.over_y == "replicate":
                da = start_all_reduce(partial, layer.y, why)
            else:
                da = start_reduce_scatter(partial, layer.y, SHARED_DIM[layer.over_y], why)
            if not layer.overlap.input_gradients:
                da = Pending(da.wait())
        a = gathered.wait()
        dws = layer.weight_gradients(grad_BSh, a, matrices, ctx.needs_input_grad[2:])
        return da.wait() if da is not None else None, None, *dws


class _SummedProduct(torch.autograd.Function):
    """The product of a transposed layer, summed over x into each rank's tokens."""

    @staticmethod
    def forward(ctx, out_to_come: Tensor, a: Tensor, layer: TransposedLinear, *matrices: Tensor) -> Tensor:
        return reduce_scatter(layer.product(a, matrices), layer.x, 1, f"{layer.name}: outputs")

    @staticmethod
    def backward(ctx, grad_BTh: Tensor):
        return grad_BTh, *(None for _ in ctx.needs_input_grad[1:])


# Asynchronous collectives cannot be traced into a compiled graph: the compiler stops at these two and goes on behind.
@torch.compiler.disable
def normal_linears(x_BTh: Tensor, layer: NormalLayer, *matrices: Tensor) -> tuple[Tensor, ...]:
    return _NormalLinears.apply(x_BTh, layer, *matrices)


@torch.compiler.disable
def transposed_linear(a: Tensor, layer: TransposedLinear, *matrices: Tensor) -> Tensor:
    out_to_come, gathered = _TransposedLinear.apply(a, layer, *matrices)
    return _SummedProduct.apply(out_to_come, gathered, layer, *(matrix.detach() for matrix in matrices))


T = TypeVar("T")


def _by_linear(layer: NormalLayer, flat: Sequence[T]) -> list[tuple[Linear4D, Sequence[T]]]:
    """What was given for all matrices of a layer, by linear."""
    found, first = [], 0
    for linear in layer.linears():
        count = 3 if linear.lora_scale else 1
        found.append((linear, flat[first : first + count]))
        first += count
    return found


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


def _gather_output_gradients(grads: Sequence[Tensor], layer: NormalLayer) -> Sequence[Tensor]:
    """The mirror of the sum over y: gradients of whole outputs from the shares that the ranks of y hold."""
    if layer.y.size == 1 or layer.over_y == "replicate":
        return grads
    why, sizes = f"{layer.name}: output gradient", [grad.shape[-1] for grad in grads]
    if layer.over_y == "features":
        shares_BSyf = all_gather(_concatenate(grads).unsqueeze(2), layer.y, 2, why)
        return [part.flatten(2) for part in shares_BSyf.split(sizes, dim=-1)]
    return all_gather(_concatenate(grads), layer.y, SHARED_DIM[layer.over_y], why).split(sizes, dim=-1)
