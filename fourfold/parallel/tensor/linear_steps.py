"""Run a tensor-parallel linear layer as four steps, so that other work can run while its collectives are in flight.

    1. start the all-gather of the input
    2. wait for the all-gather, and save the tensors that the backward pass needs
    3. multiply, and start the reduction of the outputs
    4. wait for the reduction

Each step is one autograd function. So the backward pass runs steps 4 to 1. In the backward pass, step 4 starts the
all-gather of the output gradient, and step 1 waits for the reduction of the input gradient.

Between two steps, the caller can run steps of another batch part (``overlap.batch_parts``). ``linear.linear_4d``
computes the same result without steps. In the planner, ``planning.cost.batch_part_events`` models these steps.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from torch import Tensor

from fourfold.models.autograd import Context, Function, FunctionOfMany
from fourfold.overlap_order import Steps, Until
from fourfold.parallel.tensor.linear import (
    Linear4D,
    by_layer,
    gather_kept,
    output_matmuls,
    start_input_gradient,
    weight_gradients,
)
from fourfold.parallel.tensor.spread import Tensors

T = TypeVar("T")


class InFlight(Generic[T]):
    """Holds work that one step starts and another step finishes."""

    def __init__(self) -> None:
        self._finish: Callable[[], T] | None = None

    def start(self, finish: Callable[[], T]) -> None:
        assert self._finish is None
        self._finish = finish

    def wait(self) -> T:
        finish, self._finish = self._finish, None
        assert finish is not None
        return finish()


class PostponedGradients(InFlight[list[Tensor | None]]):
    """Weight gradients that an earlier layer's backward pass computes while that layer's own collective is in flight.

    Args:
        layers: the layers whose weight gradients are postponed.
    """

    def __init__(self, layers: Sequence[Linear4D]) -> None:
        super().__init__()
        self.matrices = [matrix for layer in layers for matrix in layer.matrices()]


@dataclass(frozen=True)
class Schedule:
    """Options that adapt the steps of a layer to the layers before and after it."""

    waits_before_matmul: bool = False
    """Whether the layer waits before its matmul until all batch parts have saved their inputs."""
    gather_follows: bool = False
    """Whether an all-gather follows the sum of the outputs directly, with no matmul in between."""
    leaves_weight_gradients_to: PostponedGradients | None = None
    """If set, this layer's backward pass does not compute weight gradients, but stores the work in this object."""
    computes_weight_gradients_of: PostponedGradients | None = None
    """If set, this layer's backward pass computes these weight gradients of a later layer, while it gathers the
    gradients of its own outputs."""


def linear_steps(x: Tensor, layers: Sequence[Linear4D], schedule: Schedule) -> Steps[list[Tensor]]:
    """Run layers that read the same input, in steps. The caller can run other batch parts between two steps.

    A step ends when it has started a collective, or when it must wait for the other batch parts.

    Returns:
        This rank's share of each layer's output, with its bias.
    """
    first = layers[0]
    reading = InFlight[Tensors]() if first.reads.axis.size > 1 else None
    writing = InFlight[Tensors]() if first.writes.axis.size > 1 else None
    state, share = _State(layers, reading, writing, schedule), x.detach() if first.gather_again else None
    if reading is not None:
        x = _Gather.apply(x, state)
        if first.reads.dim is not None:
            yield Until.GATHERED
    matrices = [matrix for layer in layers for matrix in layer.matrices()]
    gathered, *places = _Keep.apply(x, share, state, *matrices)
    if schedule.waits_before_matmul:
        # In the forward pass, a step ends after the matmul if there is a sum. In the recomputation, this step ends here
        # instead, so that the batch parts save their tensors in the same order as in the forward pass.
        if writing is not None:
            yield Until.SUMMED
        yield Until.ALL_PARTS
    outputs = _Multiply.apply(gathered, state, *(matrix.detach() for matrix in matrices), *places)
    # If the backward pass does not need these tensors, their memory is free while the sum is in flight.
    del x, gathered
    if writing is not None:
        yield Until.SUMMED_TO_GATHER if schedule.gather_follows else Until.SUMMED
        postponed = schedule.computes_weight_gradients_of
        outputs = _Sum.apply(*outputs, state, *(postponed.matrices if postponed is not None else ()))
    return [layer.add_bias(out) for layer, out in zip(layers, outputs, strict=True)]


class _State(NamedTuple):
    """State that the four steps share."""

    layers: Sequence[Linear4D]
    reading: InFlight[Tensors] | None
    """The collective in flight over the input's axis. In the forward pass, it gathers the input. In the backward pass,
    it sums the input's gradient. None if the axis has one rank."""
    writing: InFlight[Tensors] | None
    """The collective in flight over the outputs' axis. In the forward pass, it sums the outputs. In the backward pass,
    it gathers the outputs' gradients. None if the axis has one rank."""
    schedule: Schedule


def _edge(like: Tensor) -> Tensor:
    """Return an empty tensor. It connects two steps in autograd's graph while the real result is still in flight."""
    return like.new_empty(0)


class _Gather(Function):
    """Step 1: start to gather the input. Its backward pass waits for the sum of the input gradient."""

    @staticmethod
    def forward(ctx: Context[InFlight[Tensors]], x: Tensor, state: _State) -> Tensor:
        assert state.reading is not None
        ctx.kept, first = state.reading, state.layers[0]
        gathering = first.reads.start_gather(x, f"{first.name}: {first.reads_what}")
        state.reading.start(lambda: (gathering.wait(),))
        return _edge(x)

    @staticmethod
    def backward(ctx: Context[InFlight[Tensors]], _: Tensor) -> tuple[Tensor, None]:
        (gradient,) = ctx.kept.wait()
        return gradient, None


class _Keep(FunctionOfMany):
    """Step 2: wait for the input, and save it.

    The backward pass computes the input gradient, and starts to sum it. Then it computes the weight gradients, or
    postpones them.
    """

    @staticmethod
    def forward(ctx: Context[_State], x: Tensor, share: Tensor | None, state: _State, *matrices: Tensor) -> Tensors:
        gathered = (x if state.reading is None else state.reading.wait()[0]).detach()
        ctx.kept = state
        ctx.save_for_backward(gathered if share is None else share, *matrices)
        ctx.mark_non_differentiable(gathered)
        ctx.set_materialize_grads(False)  # Do not allocate zeros as the gradient of ``gathered``.
        if state.writing is not None:
            return gathered, _edge(x)
        weights = [own[0] for own in by_layer(state.layers, matrices)]
        return gathered, *(gathered.new_empty(()).expand(*gathered.shape[:-1], len(weight)) for weight in weights)

    @staticmethod
    def backward(ctx: Context[_State], _: Tensor, *grads: Tensor) -> tuple[Tensor | None, ...]:
        kept, *matrices = ctx.saved_tensors
        layers, reading, writing, schedule = ctx.kept
        gathering = gather_kept(layers[0], kept)
        whole_grads = grads if writing is None else writing.wait()
        d_input = None
        if ctx.needs_input_grad[0]:
            summing = start_input_gradient(layers, whole_grads, matrices)
            d_input = summing.out if reading is None else _edge(summing.out)
            if reading is not None:
                reading.start(lambda: (summing.wait(),))
        needed = ctx.needs_input_grad[3:]

        def compute() -> list[Tensor | None]:
            return weight_gradients(layers, whole_grads, gathering.wait(), matrices, needed)

        if (later := schedule.leaves_weight_gradients_to) is None:
            return d_input, None, None, *compute()
        later.start(compute)
        return d_input, None, None, *[None] * len(needed)


class _Multiply(FunctionOfMany):
    """Step 3: multiply, and start to sum over the ranks. Its backward pass hands the gradients to ``_Keep``."""

    @staticmethod
    def forward(ctx: Context[int], gathered: Tensor, state: _State, *matrices_and_places: Tensor) -> Tensors:
        layers, first = state.layers, state.layers[0]
        ctx.kept = len(matrices_and_places) - (len(layers) if state.writing is None else 1)
        compute = output_matmuls(gathered, layers, matrices_and_places[: ctx.kept])
        if state.writing is None:
            return tuple(output() for output in compute)
        state.writing.start(first.writes.start_sums(compute, f"{first.name}: outputs", first.overlap.gate_sum))
        return (_edge(gathered),)

    @staticmethod
    def backward(ctx: Context[int], *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *[None] * ctx.kept, *grads


class _Sum(FunctionOfMany):
    """Step 4: wait for the sums of the outputs.

    The backward pass starts to gather the gradients of the outputs. Meanwhile, it computes postponed weight gradients.
    """

    @staticmethod
    def forward(ctx: Context[_State], edge: Tensor, state: _State, *matrices: Tensor) -> Tensors:
        assert state.writing is not None
        ctx.kept = state
        return state.writing.wait()

    @staticmethod
    def backward(ctx: Context[_State], *grads: Tensor) -> tuple[Tensor | None, ...]:
        layers, _, writing, schedule = ctx.kept
        first, edge, postponed = layers[0], None, schedule.computes_weight_gradients_of
        if ctx.needs_input_grad[0] and writing is not None:
            writing.start(first.writes.start_gathers(grads, f"{first.name}: output gradient"))
            edge = _edge(grads[0])
        return edge, None, *(postponed.wait() if postponed is not None else ())
