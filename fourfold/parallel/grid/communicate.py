"""Collectives over an axis of the grid. In all functions, ``axis`` contains the ranks that take part, ``dim`` is the
dim that is split or joined, and ``why`` says what the collective is for (``Purpose``).

The ``start_*`` functions return immediately, so that computation can continue until ``wait``. The functions from
``gather`` to the end of the module are differentiable: their backward passes run collectives on gradients.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fourfold.heartbeat import doing, is_watched
from fourfold.models.autograd import differentiable
from fourfold.parallel.grid.grid import Axis

# torch 2.13 renamed these two functions, and torch 2.11 has only the old names.
all_gather_single: Callable[..., dist.Work] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter_single: Callable[..., dist.Work] = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)

NCCL_TYPES = frozenset(
    {torch.float32, torch.bfloat16, torch.float16, torch.float64}
    | {torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool}
)


class Purpose(NamedTuple):
    """What a collective is for (``why``), and a name for the operation if torch's own name would mislead."""

    why: str
    operation: str | None


ON_WAIT: ContextVar[Callable[[Tensor], None] | None] = ContextVar("on_wait", default=None)
"""A function that ``Pending.wait`` calls with the result of each collective. ``fourfold trace`` sets it."""

PURPOSE: ContextVar[Purpose | None] = ContextVar("purpose", default=None)
"""The purpose of the collectives that start now. ``fourfold trace`` and the module ``checksums`` read it."""


@contextmanager
def purpose(
    why: str, operation: str | None = None, axis: Axis | str = "all ranks", sender: int | None = None
) -> Iterator[None]:
    """Name the purpose of the collectives in the ``with`` block, and tell the watchdog about them.

    The watchdog compares how often each rank has entered this context. So all ranks of the axis must enter it equally
    often.

    Args:
        why: What the collectives are for, such as "gradient norm". Reports use this name.
        operation: What to call the operation in reports, if torch's own name would mislead.
        axis: The axis, or its name. "" if the block has no collectives.
        sender: For a message between two ranks, the sender's position on the axis.
    """
    if is_watched() and isinstance(axis, Axis):
        doing(why, axis.name, axis.members if sender is None else f"{axis.members} from {sender}")
    elif is_watched():
        doing(why, str(axis), str(axis))
    token = PURPOSE.set(Purpose(why, operation))
    try:
        yield
    finally:
        PURPOSE.reset(token)


class Pending(NamedTuple):
    """A collective in flight. When ``works`` are complete, ``finish`` converts ``out`` to the result."""

    out: Tensor
    works: Sequence[dist.Work] = ()
    finish: Callable[[Tensor], Tensor] | None = None

    def wait(self) -> Tensor:
        """Wait for the result, and return it. On a GPU, only the current stream waits, and the host continues."""
        for work in self.works:
            work.wait()
        if self.works and (notify := ON_WAIT.get()) is not None:
            notify(self.out)
        return self.out if self.finish is None else self.finish(self.out)


def check_for_nccl(given: Tensor, received: Tensor | None = None, ranks: tuple[int, int] = (1, 1)) -> None:
    """Assert that tensors meet NCCL's requirements. So tests on gloo fail if a run on GPUs would fail.

    Args:
        given: The tensor that this rank contributes.
        received: The tensor for the result.
        ranks: The required ratio of the tensors' sizes. ``received`` must have ranks[0] elements for every ranks[1]
            elements of ``given``.
    """
    for tensor in (given,) if received is None else (given, received):
        assert tensor.dtype in NCCL_TYPES, f"NCCL does not support {tensor.dtype}"
        assert tensor.is_contiguous(), f"NCCL needs a contiguous tensor, not strides {tensor.stride()}"
    if received is not None:
        assert (received.dtype, received.device) == (given.dtype, given.device), (received, given)
        assert received.numel() * ranks[1] == given.numel() * ranks[0], f"{given.shape} becomes {received.shape}"


def start_all_gather(part: Tensor, axis: Axis, dim: int, why: str) -> Pending:
    """Start an all-gather. The result is the parts of all ranks of ``axis``, concatenated along ``dim``."""
    if axis.size == 1:
        return Pending(part)
    part = part.contiguous()
    out = part.new_empty((axis.size, *part.shape))
    check_for_nccl(part, out, (axis.size, 1))
    with purpose(why, axis=axis):
        work = all_gather_single(out.view(-1), part.view(-1), group=axis.group, async_op=True)
    return Pending(out, [work], lambda parts: _join(parts, dim))


def start_reduce_scatter(partial: Tensor, axis: Axis, dim: int, why: str) -> Pending:
    """Start a reduce-scatter, which sums the tensors of all ranks of ``axis``. The result is this rank's part of the
    sum, cut along ``dim``."""
    if axis.size == 1:
        return Pending(partial)
    parts = partial.unflatten(dim, (axis.size, -1)).movedim(dim, 0).contiguous()
    if by_all_to_all(axis.group):
        received = torch.empty_like(parts)
        check_for_nccl(parts, received)
        with purpose(why, axis=axis):
            work = dist.all_to_all_single(received.view(-1), parts.view(-1), group=axis.group, async_op=True)
        return Pending(received, [work], sum_parts)
    out = parts.new_empty(parts.shape[1:])
    check_for_nccl(parts, out, (1, axis.size))
    with purpose(why, axis=axis):
        work = reduce_scatter_single(out.view(-1), parts.view(-1), group=axis.group, async_op=True)
    return Pending(out, [work])


def start_all_reduce(partial: Tensor, axis: Axis, why: str) -> Pending:
    """Start an all-reduce. It may overwrite ``partial``, so the caller must not use ``partial`` again."""
    if axis.size == 1:
        return Pending(partial)
    partial = partial.contiguous()
    check_for_nccl(partial)
    with purpose(why, axis=axis):
        work = dist.all_reduce(partial, group=axis.group, async_op=True)
    return Pending(partial, [work])


def start_rotate(tensor: Tensor, axis: Axis, why: str, operation: str | None = None) -> Pending:
    """Start to send a tensor to the next rank of ``axis``, and to receive the previous rank's tensor. ``operation`` is
    as in ``purpose``."""
    tensor = tensor.contiguous()
    received = torch.empty_like(tensor)
    check_for_nccl(tensor, received)
    after, before = (dist.get_global_rank(axis.group, (axis.rank + step) % axis.size) for step in (1, -1))
    operations = [
        dist.P2POp(dist.isend, tensor, after, axis.group),
        dist.P2POp(dist.irecv, received, before, axis.group),
    ]
    with purpose(why, operation, axis):
        return Pending(received, dist.batch_isend_irecv(operations))


def swap(tensor: Tensor, pair: Axis, why: str) -> Tensor:
    """Exchange tensors with the other rank of a pair, and return the other rank's tensor. Both ranks must call this.

    A swap sends as many bytes as an all-reduce over two ranks, so ``fourfold trace`` counts it as an all-reduce.
    """
    assert pair.size == 2, f"{pair.name} has {pair.size} ranks"
    return start_rotate(tensor, pair, why, "all_reduce").wait()


def start_send(tensor: Tensor, pair: Axis, why: str) -> Pending:
    """Start to send a tensor to the other rank of a pair. The tensor must not change until ``wait`` returns it."""
    tensor = tensor.contiguous()
    check_for_nccl(tensor)
    with purpose(why, axis=pair, sender=pair.rank):
        return Pending(tensor, [_started(dist.isend(tensor, _other(pair), group=pair.group))])


def start_receive(out: Tensor, pair: Axis, why: str) -> Pending:
    """Start to receive into ``out`` from the other rank of a pair."""
    check_for_nccl(out)
    with purpose(why, axis=pair, sender=1 - pair.rank):
        return Pending(out, [_started(dist.irecv(out, _other(pair), group=pair.group))])


def _other(pair: Axis) -> int:
    assert pair.size == 2, f"{pair.name} has {pair.size} ranks"
    return dist.get_global_rank(pair.group, 1 - pair.rank)


def _started(work: dist.Work | None) -> dist.Work:
    assert work is not None, "this process is not in the group"
    return work


def all_to_all(parts: Tensor, axis: Axis, why: str) -> Tensor:
    """Send part i of the first dim to rank i of ``axis``. Return the received parts in rank order."""
    parts = parts.contiguous()
    received = torch.empty_like(parts)
    check_for_nccl(parts, received)
    with purpose(why, "all_to_all", axis):
        work = dist.all_to_all_single(received.view(-1), parts.view(-1), group=axis.group, async_op=True)
    return Pending(received, [work]).wait()


def send_rows(rows: Tensor, axis: Axis, sent: Sequence[int], received: Sequence[int], why: str) -> Tensor:
    """Send the first ``sent[0]`` rows to rank 0 of ``axis``, the next ``sent[1]`` rows to rank 1, and so on.

    Args:
        rows: The rows to send, ordered by receiving rank.
        axis: The ranks that exchange rows.
        sent: Number of rows that this rank sends to each rank.
        received: Number of rows that this rank receives from each rank.
        why: What the collective is for (``Purpose``).

    Returns:
        The received rows, ordered by sending rank.
    """
    rows = rows.contiguous()
    assert sum(sent) == len(rows) and len(sent) == len(received) == axis.size, f"{len(rows)} rows are sent as {sent}"
    out = rows.new_empty(sum(received), *rows.shape[1:])
    check_for_nccl(rows)
    with purpose(why, "all_to_all", axis):
        work = dist.all_to_all_single(out, rows, list(received), list(sent), group=axis.group, async_op=True)
    return Pending(out, [work]).wait()


def by_all_to_all(group: dist.ProcessGroup) -> bool:
    """Return whether to replace a reduce-scatter by an all-to-all and a local sum. This is True on gloo.

    gloo's reduce-scatter is implemented as an all-reduce, blocks the caller, and rounds bf16 sums after every addition.
    """
    return dist.get_backend(group) == "gloo"


def all_gather(part: Tensor, axis: Axis, dim: int, why: str) -> Tensor:
    return start_all_gather(part, axis, dim, why).wait()


def reduce_scatter(partial: Tensor, axis: Axis, dim: int, why: str) -> Tensor:
    return start_reduce_scatter(partial, axis, dim, why).wait()


def all_reduce(partial: Tensor, axis: Axis, why: str) -> Tensor:
    return start_all_reduce(partial, axis, why).wait()


def sum_parts(parts: Tensor, out: Tensor | None = None) -> Tensor:
    """Sum over the first dim. For two parts, use an addition, which is several times faster than torch's sum."""
    return torch.add(parts[0], parts[1], out=out) if len(parts) == 2 else torch.sum(parts, 0, out=out)


def _join(parts: Tensor, dim: int) -> Tensor:
    """Concatenate n parts along ``dim``, [n, …, d, …] → […, n·d, …]. If all dims before ``dim`` have size 1, nothing is
    copied."""
    return parts.movedim(0, dim).flatten(dim, dim + 1)


def _over_ranks(
    axis: Axis, tensor: Tensor, forward: Callable[[Tensor], Tensor], backward: Callable[[Tensor], Tensor]
) -> Tensor:
    """Run ``forward`` in the forward pass, and ``backward`` in the backward pass. If the axis has one rank, do
    nothing."""
    return tensor if axis.size == 1 else differentiable(tensor, forward, backward)


def gather(part: Tensor, axis: Axis, dim: int, why: str) -> Tensor:
    """All-gather in the forward pass, and reduce-scatter in the backward pass."""
    return _over_ranks(axis, part, lambda t: all_gather(t, axis, dim, why), lambda g: reduce_scatter(g, axis, dim, why))


def scatter_sum(partial: Tensor, axis: Axis, dim: int, why: str) -> Tensor:
    """Reduce-scatter in the forward pass, and all-gather in the backward pass."""
    return _over_ranks(
        axis, partial, lambda t: reduce_scatter(t, axis, dim, why), lambda g: all_gather(g, axis, dim, why)
    )


def exchange(parts: Tensor, axis: Axis, why: str) -> Tensor:
    """Run an all-to-all along the first dim, in the forward and in the backward pass."""
    return _over_ranks(axis, parts, lambda t: all_to_all(t, axis, why), lambda g: all_to_all(g, axis, why))


def exchange_rows(rows: Tensor, axis: Axis, sent: Sequence[int], received: Sequence[int], why: str) -> Tensor:
    """Run ``send_rows`` in the forward pass, and send the gradients back in the backward pass."""
    return _over_ranks(
        axis, rows, lambda t: send_rows(t, axis, sent, received, why), lambda g: send_rows(g, axis, received, sent, why)
    )


def gather_rows(rows: Tensor, axis: Axis, sizes: Sequence[int], why: str) -> Tensor:
    """All-gather rows, with ``sizes[i]`` rows from rank i. In the backward pass, reduce-scatter their gradients."""
    return _over_ranks(
        axis, rows, lambda t: _rows_of_all(t, axis, sizes, why), lambda g: _sum_of_own_rows(g, axis, sizes, why)
    )


def scatter_sum_rows(rows: Tensor, axis: Axis, sizes: Sequence[int], why: str) -> Tensor:
    """Reduce-scatter rows. Rank i gets ``sizes[i]`` rows of the sum. In the backward pass, all-gather their
    gradients."""
    return _over_ranks(
        axis, rows, lambda t: _sum_of_own_rows(t, axis, sizes, why), lambda g: _rows_of_all(g, axis, sizes, why)
    )


def _rows_of_all(rows: Tensor, axis: Axis, sizes: Sequence[int], why: str) -> Tensor:
    copies = rows.expand(axis.size, *rows.shape).flatten(0, 1)
    return send_rows(copies, axis, [len(rows)] * axis.size, sizes, why)


def _sum_of_own_rows(rows: Tensor, axis: Axis, sizes: Sequence[int], why: str) -> Tensor:
    own = sizes[axis.rank]
    parts = send_rows(rows, axis, sizes, [own] * axis.size, why)
    return sum_parts(parts.unflatten(0, (axis.size, own)))


# The functions above are for computation that is split over the ranks. In such computation, each rank computes only a
# part of the gradient of a tensor that all ranks hold. So the backward passes above sum gradients over the ranks.
#
# The functions below connect split computation with computation that every rank repeats. In repeated computation, each
# rank already computes the full gradient.


def share(whole: Tensor, axis: Axis, dim: int, why: str) -> Tensor:
    """Return this rank's part of a tensor that all ranks hold. In the backward pass, all-gather the gradients."""
    return _over_ranks(axis, whole, lambda t: _own_part(t, axis, dim), lambda g: all_gather(g, axis, dim, why))


def whole(part: Tensor, axis: Axis, dim: int, why: str) -> Tensor:
    """All-gather in the forward pass. In the backward pass, keep this rank's part of the gradient."""
    return _over_ranks(axis, part, lambda t: all_gather(t, axis, dim, why), lambda g: _own_part(g, axis, dim))


def sum_of(partial: Tensor, axis: Axis, why: str) -> Tensor:
    """All-reduce in the forward pass. In the backward pass, do nothing, because each rank has the full gradient."""
    return _over_ranks(axis, partial, lambda t: all_reduce(t.clone(), axis, why), lambda g: g)


def sum_gradient(tensor: Tensor, axis: Axis, why: str) -> Tensor:
    """Return the tensor unchanged. In the backward pass, all-reduce the ranks' partial gradients."""
    return _over_ranks(axis, tensor, lambda t: t.view_as(t), lambda g: all_reduce(g.clone(), axis, why))


def _own_part(whole: Tensor, axis: Axis, dim: int) -> Tensor:
    return whole.chunk(axis.size, dim)[axis.rank].contiguous()
