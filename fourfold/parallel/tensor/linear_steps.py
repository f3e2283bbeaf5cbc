"""The steps of a linear layer: collectives run between one step and the next, in the forward and in the backward.

    gather (start) → keep (wait, save) → multiply (start the sum) → sum (wait)

Each step is an autograd function. The backward runs them from the last to the first, and mirrors them: it starts to
gather gradients where the forward waits for a sum, and waits for their sum where the forward starts to gather. Between
two steps other work can go on: the steps of another part of the batch (``interleave``), or a block's recomputation. The
planner has the same steps (``planning.cost.turn_events``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from fourfold.models.autograd import Context, Function, FunctionOfMany, not_compiled
from fourfold.overlap_order import Steps, Until
from fourfold.parallel.grid.communicate import Pending, start_all_gather, start_all_reduce, start_reduce_scatter
from fourfold.parallel.tensor.products import add_to_input_gradient

if TYPE_CHECKING:
    from fourfold.parallel.tensor.linear import Linear4D

T = TypeVar("T")


Tensors = tuple[Tensor, ...]


@not_compiled
def run(steps: Steps[T]) -> T:
    """Take all steps, one after the other."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: T = end.value
            return result


def linear_steps(
    x: Tensor,
    layers: Sequence[Linear4D],
    pause: bool = False,
    later: WeightGradientsLater | None = None,
    hidden_by: WeightGradientsLater | None = None,
    before_gather: bool = False,
) -> Steps[Tensors]:
    """The outputs of layers that read the same input, without their biases; a step ends where a collective starts.

    pause: wait for the other parts once all that the backward needs is kept, before the products; later: leave the
    weight gradients to these; hidden_by: weight gradients of later layers, to compute while the backward gathers the
    gradients of the outputs; before_gather: the sum of the outputs leads to the next gather without a product between.
    """
    first = layers[0]
    reading = Transit[Tensors]() if first.reads.axis.size > 1 else None
    writing = Transit[Tensors]() if first.writes.axis.size > 1 else None
    share = x.detach() if first.gather_again else None
    if reading is not None:
        x = _Gather.apply(x, first, reading)
        if first.reads.dim is not None:
            yield Until.GATHERED
    matrices = [matrix for layer in layers for matrix in layer.matrices()]
    gathered, *kept = _Keep.apply(x, share, _Layers(layers, reading, writing, later), *matrices)
    if pause:
        if writing is not None:  # ends here as the forward does, so that parts keep tensors in its order
            yield Until.SUMMED
        yield Until.OTHERS
    outputs = _Multiply.apply(gathered, layers, writing, *kept, *(matrix.detach() for matrix in matrices))
    del x, gathered  # what the backward does not keep is freed before the sum
    if writing is None:
        return outputs
    yield Until.SUMMED_TO_GATHER if before_gather else Until.SUMMED
    return _Sum.apply(*outputs, first, writing, hidden_by, *(hidden_by.matrices if hidden_by is not None else ()))


class Transit(Generic[T]):
    """Work between two steps: one starts it, and the other waits for what it makes.

    Where that is a collective, autograd sees a ticket in its place, a tensor without elements.
    """

    def __init__(self) -> None:
        self._finish: Callable[[], T] | None = None

    def start(self, finish: Callable[[], T]) -> None:
        assert self._finish is None
        self._finish = finish

    def wait(self) -> T:
        finish, self._finish = self._finish, None
        assert finish is not None
        return finish()


class WeightGradientsLater(Transit[list[Tensor | None]]):
    """Gradients of some matrices that one step of the backward leaves to another."""

    def __init__(self, layers: Sequence[Linear4D]) -> None:
        super().__init__()
        self.matrices = [matrix for layer in layers for matrix in layer.matrices()]


class _Layers(NamedTuple):
    layers: Sequence[Linear4D]
    reading: Transit[Tensors] | None
    """None where each rank has its whole input."""
    writing: Transit[Tensors] | None
    """None where each rank has its whole output."""
    later: WeightGradientsLater | None


class _Gather(Function):
    """Starts to gather the input; backward, waits for the sum of its gradient."""

    @staticmethod
    def forward(ctx: Context[Transit[Tensors]], x: Tensor, first: Linear4D, reading: Transit[Tensors]) -> Tensor:
        ctx.kept = reading
        gathering = first.reads.start_gather(x, _why(first, first.reads_what))
        reading.start(lambda: (gathering.wait(),))
        return x.new_empty(0)

    @staticmethod
    def backward(ctx: Context[Transit[Tensors]], ticket: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = ctx.kept.wait()
        return gradient, None, None


class _Keep(FunctionOfMany):
    """Keeps the gathered input for the backward, which computes the gradients of input and weights.

    The product follows as a function of its own: when a block is recomputed, nothing reads the output of its last
    layer, and the recomputation stops before it, once every saved tensor is there again.
    """

    @staticmethod
    def forward(ctx: Context[_Layers], x: Tensor, share: Tensor | None, kept: _Layers, *matrices: Tensor) -> Tensors:
        gathered = x if kept.reading is None else kept.reading.wait()[0]
        gathered = gathered.detach()
        ctx.kept = kept
        ctx.save_for_backward(gathered if share is None else share, *matrices)
        ctx.mark_non_differentiable(gathered)
        ctx.set_materialize_grads(False)  # no zeros for the gradient of ``gathered``
        if kept.writing is not None:
            return gathered, x.new_empty(0)
        weights = [own[0] for own in _by_layer(kept.layers, matrices)]
        return gathered, *(gathered.new_empty(()).expand(*gathered.shape[:-1], len(weight)) for weight in weights)

    @staticmethod
    def backward(ctx: Context[_Layers], _: Tensor, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, *matrices = ctx.saved_tensors
        (layers, reading, writing, later), first = ctx.kept, ctx.kept.layers[0]
        by_layer = list(_by_layer(layers, matrices))
        again = first.gather_again
        gathering = first.reads.start_gather(x, _why(first, first.reads_what)) if again else Pending(x)
        whole_grads = grads if writing is None else writing.wait()
        d_input = None
        if ctx.needs_input_grad[0]:
            for layer, grad, (weight, *adapter) in zip(layers, whole_grads, by_layer, strict=True):
                d_input = layer.products.input_gradient(grad, weight, d_input)
                if adapter:
                    add_to_input_gradient(d_input, grad, adapter, layer.lora_scale)
            assert d_input is not None
            if reading is not None:
                d_input = _start_input_gradient(d_input, first, reading)
        needed = ctx.needs_input_grad[3:]

        def weight_gradients() -> list[Tensor | None]:
            gathered, gradients = gathering.wait(), list[Tensor | None]()
            for layer, grad, flags, own in zip(layers, whole_grads, _by_layer(layers, needed), by_layer, strict=True):
                gradients += layer.gradients(grad, gathered, flags, *own)
            return gradients

        if later is None:
            return d_input, None, None, *weight_gradients()
        later.start(weight_gradients)
        return d_input, None, None, *[None] * len(needed)


class _Multiply(FunctionOfMany):
    """The layers' products with the gathered input; where ranks hold parts of them, starts their sum.

    The gradient passes through to ``_Keep``.
    """

    @staticmethod
    def forward(
        ctx: Context[int],
        gathered: Tensor,
        layers: Sequence[Linear4D],
        writing: Transit[Tensors] | None,
        *kept_and_matrices: Tensor,
    ) -> Tensors:
        matrices = kept_and_matrices[len(layers) if writing is None else 1 :]
        ctx.kept = len(matrices)
        by_layer = zip(layers, _by_layer(layers, matrices), strict=True)
        products = (layer.product(gathered, *own) for layer, own in by_layer)
        if writing is None:
            return tuple(products)
        writing.start(_start_sum(products, len(layers), layers[0]))
        return (gathered.new_empty(0),)

    @staticmethod
    def backward(ctx: Context[int], *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, None, *grads, *[None] * ctx.kept


class _Sum(FunctionOfMany):
    """Waits for the sums of the outputs; backward, starts to gather their gradients."""

    @staticmethod
    def forward(
        ctx: Context[_Summed],
        ticket: Tensor,
        first: Linear4D,
        writing: Transit[Tensors],
        hidden_by: WeightGradientsLater | None,
        *matrices: Tensor,
    ) -> Tensors:
        ctx.kept = _Summed(first, writing, hidden_by)
        return writing.wait()

    @staticmethod
    def backward(ctx: Context[_Summed], *grads: Tensor) -> tuple[Tensor | None, ...]:
        first, writing, hidden_by = ctx.kept
        ticket = None
        if ctx.needs_input_grad[0]:
            writing.start(_start_gather_of_gradients(grads, first))
            ticket = grads[0].new_empty(0)
        return ticket, None, None, None, *(hidden_by.wait() if hidden_by is not None else ())


class _Summed(NamedTuple):
    first: Linear4D
    writing: Transit[Tensors]
    hidden_by: WeightGradientsLater | None


def _why(first: Linear4D, what: str) -> str:
    return f"{first.name}: {what}"


def _by_layer(layers: Sequence[Linear4D], flat: Sequence[T]) -> Iterator[Sequence[T]]:
    """Values of all matrices in one sequence, layer by layer."""
    first = 0
    for layer in layers:
        count = len(layer.matrices())
        yield flat[first : first + count]
        first += count


def _start_input_gradient(partial: Tensor, first: Linear4D, reading: Transit[Tensors]) -> Tensor:
    """Start to sum the input's gradient over the ranks; the ticket of the sum."""
    summing = first.reads.start_sum(partial, _why(first, "input gradient"))
    if not first.overlap.input_gradients:
        summing = Pending(summing.wait())
    reading.start(lambda: (summing.wait(),))
    return partial.new_empty(0)


def _start_sum(partials: Iterator[Tensor], count: int, first: Linear4D) -> Callable[[], Tensors]:
    """Sum ``count`` products over the ranks: one by one behind the next product, or this rank's shares together."""
    (axis, dim), why = first.writes, _why(first, "outputs")
    if dim is None:
        sums: list[Pending] = []
        for number, partial in enumerate(partials, 1):  # the sum of gate runs behind the product of up
            started = start_all_reduce(partial, axis, why)
            runs_on = number == count or first.overlap.gate_sum
            sums.append(started if runs_on else Pending(started.wait()))
        return lambda: tuple(started.wait() for started in sums)
    products = tuple(partials)
    sizes = [product.shape[-1] for product in products]
    if dim < 2:
        started = start_reduce_scatter(_joined(products), axis, dim, why)
        return lambda: started.wait().split(sizes, -1)
    shares_BSyf = _joined([product.unflatten(-1, (axis.size, -1)) for product in products])
    started = start_reduce_scatter(shares_BSyf, axis, 2, why)
    return lambda: started.wait().squeeze(2).split([size // axis.size for size in sizes], -1)


def _start_gather_of_gradients(grads: Sequence[Tensor], first: Linear4D) -> Callable[[], Tensors]:
    """The mirror of ``_start_sum``: gradients of whole outputs from the ranks' shares, in one collective."""
    (axis, dim), why = first.writes, _why(first, "output gradient")
    if dim is None:
        return lambda: tuple(grads)
    sizes = [grad.shape[-1] for grad in grads]
    if dim < 2:
        started = start_all_gather(_joined(grads), axis, dim, why)
        return lambda: started.wait().split(sizes, -1)
    started = start_all_gather(_joined(grads).unsqueeze(2), axis, 2, why)
    return lambda: tuple(part.flatten(2) for part in started.wait().split(sizes, -1))


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    """Tensors side by side along their last dim."""
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors), -1)
