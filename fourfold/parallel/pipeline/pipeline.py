"""Run one step of a pipeline. Each rank runs its own list of operations, and exchanges hidden states and gradients with
the ranks of the neighboring stages."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from fourfold.config.run import RunConfig
from fourfold.config.stages import rank_of_stage, splits_backward, stages_per_rank
from fourfold.data.loader import MicroBatch
from fourfold.models.dtypes import DTYPES
from fourfold.parallel.data.data_parallel import DataParallel
from fourfold.parallel.grid.communicate import Pending, start_receive, start_send, swap
from fourfold.parallel.grid.grid import Grid
from fourfold.parallel.pipeline.schedule import Op, schedule_ops, with_transfers
from fourfold.parallel.state import LocalShard
from fourfold.parallel.tensor.deferred_gradients import WeightGradients, weight_gradients_deferred
from fourfold.parallel.tensor.linear import Linear4D

HIDDEN_STATES, THEIR_GRADIENTS = "pipeline: hidden states", "pipeline: hidden states' gradients"


class Pipeline:
    """Runs the pipeline stages of one process in the order of the schedule."""

    def __init__(self, stages: Mapping[int, DataParallel], grid: Grid, run: RunConfig, device: torch.device) -> None:
        self.stages, self.grid, self.run, self.device = stages, grid, run, device
        self.last_stage = run.parallel.pp * stages_per_rank(run.parallel) - 1
        self.linears = {
            stage: [module for module in part.model.modules() if isinstance(module, Linear4D)]
            for stage, part in stages.items()
        }
        self.around_operation: Callable[[Op], AbstractContextManager[object]] = nullcontext
        """Returns a context manager that wraps each operation. Benchmarks use it to time operations."""
        self.around_wait: Callable[[Op], AbstractContextManager[object]] = nullcontext
        """Returns a context manager that wraps each wait for another rank. Benchmarks use it to time waits."""
        self._ops: dict[int, list[Op]] = {}

    def forward_backward(self, micro_batches: Sequence[MicroBatch[Tensor]], loss_scale: Tensor) -> list[Tensor]:
        """Run the forward and backward passes of all micro-batches. The gradients are multiplied by ``loss_scale``.

        Returns:
            The losses of the micro-batches, not multiplied by ``loss_scale``. Only ranks with the last stage get them.
            Other ranks get an empty list.
        """
        count = len(micro_batches)
        if count not in self._ops:
            everyone = with_transfers(schedule_ops(self.run.parallel, count), self.run.parallel)
            self._ops[count] = everyone[self.grid.pp.rank]
        return _PipelineStep(self, micro_batches, loss_scale).run(self._ops[count])

    @torch.no_grad()
    def forward(self, micro_batches: Sequence[MicroBatch[Tensor]]) -> list[Tensor]:
        """Run only forward passes.

        Returns:
            The outputs of the last stage for each micro-batch. Ranks without the last stage get an empty list.
        """
        grid = self.run.parallel
        of_ranks: list[list[Op]] = [[] for _ in range(grid.pp)]
        for number in range(len(micro_batches)):
            for stage in range(self.last_stage + 1):
                of_ranks[rank_of_stage(stage, grid)].append(Op("F", stage, number))
        return _PipelineStep(self, micro_batches).run(with_transfers(of_ranks, grid)[self.grid.pp.rank])

    def hidden_states(self, sequences: int) -> Tensor:
        """Allocate memory for the hidden states of a micro-batch on this rank, [B, S/(cp·x), H/y]. The axes cp and x
        split the tokens, and y splits the channels."""
        training, axes = self.run.training, self.run.parallel
        shape = (sequences, training.seq_length // (axes.cp * axes.x), self.run.model.hidden_size // axes.y)
        return torch.empty(shape, dtype=DTYPES[training.precision], device=self.device)


class _PipelineStep:
    """Runs this rank's operations in one step, and keeps the tensors that later operations of the step need."""

    def __init__(
        self, pipeline: Pipeline, micro_batches: Sequence[MicroBatch[Tensor]], loss_scale: Tensor | float = 1.0
    ) -> None:
        self.pipeline, self.micro_batches, self.loss_scale = pipeline, micro_batches, loss_scale
        self.arriving: dict[Op, Pending] = {}
        self.leaving: dict[tuple[str, int], Pending] = {}
        self.inputs: dict[tuple[int, int], Tensor | None] = {}
        self.results: dict[tuple[int, int], GradientEdge] = {}
        self.to_send: dict[Op, Tensor] = {}
        self.weight_gradients: dict[tuple[int, int], WeightGradients] = {}
        self.backwards: dict[int, int] = dict.fromkeys(pipeline.stages, 0)
        self.outputs: list[Tensor] = []

    def run(self, ops: Sequence[Op]) -> list[Tensor]:
        """Run this rank's operations in order. Return the last stage's outputs, or [] on ranks without this stage."""
        handlers: dict[str, Callable[[Op], Any]] = {
            "F": self._forward,
            "B": self._differentiate,
            "I": self._input_gradients,
            "W": self._weight_gradients,
            "SEND_F": self._send,
            "SEND_B": self._send,
            "RECV_F": self._receive,
            "RECV_B": self._receive,
        }
        for op in ops:
            with self.pipeline.around_operation(op):
                handlers[op.kind](op)
        for pending in self.leaving.values():
            pending.wait()
        return self.outputs

    def _forward(self, op: Op) -> None:
        key = (op.stage, op.micro_batch)
        hidden = None
        if op.stage > 0:
            hidden = self._take(Op("RECV_F", *key), Op("F", op.stage - 1, op.micro_batch))
            hidden.requires_grad_(torch.is_grad_enabled())
        batch, model = self.micro_batches[op.micro_batch], self.pipeline.stages[op.stage].model
        inputs = (batch.tokens, batch.labels, batch.positions, batch.document_ends)
        ahead = (batch.next_tokens, batch.next_labels)
        out = model(*inputs, self.loss_scale, hidden, batch.reference, batch.is_data, *ahead)
        if op.stage == self.pipeline.last_stage:
            self.outputs.append(out.detach())
        else:
            self.to_send[op] = out.detach()
        if torch.is_grad_enabled():
            if op.stage == self.pipeline.last_stage:
                out = (out * self.loss_scale).sum()
            # Keep only the node of autograd's graph, not the tensor. So the output's memory is freed as soon as the
            # output is sent.
            self.inputs[key], self.results[key] = hidden, get_gradient_edge(out)

    def _input_gradients(self, op: Op) -> None:
        with weight_gradients_deferred(self.pipeline.linears[op.stage]) as later:
            self._differentiate(op)
        self.weight_gradients[op.stage, op.micro_batch] = later

    def _weight_gradients(self, op: Op) -> None:
        later = self.weight_gradients.pop((op.stage, op.micro_batch))
        later.compute(self.pipeline.stages[op.stage].add_gradient)

    def _differentiate(self, op: Op) -> None:
        key, stage = (op.stage, op.micro_batch), self.pipeline.stages[op.stage]
        self.backwards[op.stage] += 1
        # W operations compute weight gradients separately. If the schedule has them, the gradients are complete only
        # after the last W operation, and not after the last backward pass.
        last = self.backwards[op.stage] == len(self.micro_batches) and not splits_backward(self.pipeline.run.parallel)
        stage.begin_backward(last)
        gradient = torch.ones((), device=self.pipeline.device)
        if op.stage < self.pipeline.last_stage:
            gradient = self._take(Op("RECV_B", *key), Op("B", op.stage + 1, op.micro_batch))
        torch.autograd.backward(self.results.pop(key), gradient)
        hidden = self.inputs.pop(key)
        if hidden is not None:
            assert hidden.grad is not None
            self.to_send[Op("B", *key)] = hidden.grad

    def _take(self, received: Op, computed_here: Op) -> Tensor:
        """Return the tensor that an operation needs from another stage.

        If this rank also has the other stage, the tensor is already here. Otherwise, wait until it is received.
        """
        if computed_here in self.to_send:
            return self.to_send.pop(computed_here)
        with self.pipeline.around_wait(received):
            return self.arriving.pop(received).wait()

    def _send(self, op: Op) -> None:
        forward = op.kind == "SEND_F"
        tensor = self.to_send.pop(Op("F" if forward else "B", op.stage, op.micro_batch))
        to = self._rank(op.stage + 1 if forward else op.stage - 1)
        # Sent tensors must not pile up in memory, so wait until the previous tensor to this rank is sent. This cannot
        # deadlock, because the receiver takes the previous tensor without needing this one.
        if (before := self.leaving.pop((op.kind, to), None)) is not None:
            before.wait()
        why = HIDDEN_STATES if forward else THEIR_GRADIENTS
        self.leaving[op.kind, to] = start_send(tensor, self.pipeline.grid.neighbors[to], why)

    def _receive(self, op: Op) -> None:
        forward = op.kind == "RECV_F"
        from_rank = self._rank(op.stage - 1 if forward else op.stage + 1)
        why = HIDDEN_STATES if forward else THEIR_GRADIENTS
        hidden = self.pipeline.hidden_states(sequences=len(self.micro_batches[0].tokens))
        self.arriving[op] = start_receive(hidden, self.pipeline.grid.neighbors[from_rank], why)

    def _rank(self, stage: int) -> int:
        return rank_of_stage(stage, self.pipeline.run.parallel)


def copies_as_one(shards: Sequence[LocalShard], is_tied: bool) -> list[LocalShard]:
    """Mark the two copies of the embedding, in the first and in the last stage, as replicas of one parameter.

    Both copies get the same name and twice as many replicas. So the gradient norm counts the embedding once. If head
    and embedding are tied, the copy in the last stage is the head. Otherwise the copy is the embedding that the
    multi-token prediction layers read.
    """
    ends = ("embed_tokens.weight", *(["lm_head.weight"] if is_tied else []))
    return [
        replace(shard, name=ends[0], replicas=2 * shard.replicas) if shard.name in ends else shard for shard in shards
    ]


class EmbeddingCopies:
    """Sums the gradients of an embedding that has two copies, one in the first stage and one in the last stage.

    The last stage has a copy if the embedding is tied to the head, or if multi-token prediction layers read the
    embedding.
    """

    def __init__(self, copies: Sequence[LocalShard], grid: Grid, run: RunConfig) -> None:
        """Find the rank that holds the other copy.

        Args:
            copies: the copies on this process: none, one, or two.
            grid: the grid.
            run: the run file.
        """
        self.copies = copies
        last_stage = run.parallel.pp * stages_per_rank(run.parallel) - 1
        ends = [rank_of_stage(stage, run.parallel) for stage in (0, last_stage)]
        apart = len(set(ends)) == 2 and grid.pp.rank in ends
        self.holders = grid.neighbors[sum(ends) - grid.pp.rank] if apart else None
        """The two ranks that hold one copy each, as an axis. None if this rank holds both copies or none."""

    def sum_gradients(self) -> None:
        """Replace the gradient of each copy by the sum of both gradients."""
        gradients = [copy.grad for copy in self.copies if copy.grad is not None]
        assert len(gradients) == len(self.copies)
        if self.holders is not None:
            (gradient,) = gradients
            # Both ranks compute the same bits, because a + b equals b + a exactly.
            gradient.add_(swap(gradient, self.holders, "gradients of the embedding's copies"))
        elif gradients:
            first, last = gradients
            first.add_(last)
            last.copy_(first)
