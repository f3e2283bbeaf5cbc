"""Detect silent data corruption: compute some steps twice, and compare the replicas of the weights."""

import platform
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from fourfold.data.loader import MicroBatch
from fourfold.errors import UserError, first_line
from fourfold.parallel.grid.checksums import CollectiveInputs, Given, checksum, first_to_differ
from fourfold.parallel.grid.communicate import purpose
from fourfold.parallel.grid.grid import Axis
from fourfold.parallel.grid.shared_failure import from_all_ranks, true_on_any_rank
from fourfold.parallel.state import LocalShard
from fourfold.training.job import Job


class Replay:
    """Computes the gradients of every ``checks.replay_interval``-th step twice, and compares them bit for bit.

    If the two results differ, this class computes the gradients a third time before it blames a device. It also
    compares what each process sends in collectives. This shows which process computed a wrong result, and which
    processes only received the result. Before the two passes, the class compares the replicas of weights and optimizer
    moments. This is needed because a wrong weight gives the same result in both passes. Every process calls the
    methods.

    Args:
        job: The model and its optimizer.
        publish: Function that is called before each check. It should wait for a checkpoint that is still being
            written, because the check may end the run.
    """

    def __init__(self, job: Job, publish: Callable[[], object] = lambda: None) -> None:
        self.job, self.interval, self._publish = job, job.run.checks.replay_interval, publish
        self.seconds = 0.0
        """Seconds that the check added to the most recent step: the comparison of replicas and one extra pass."""

    def forward_backward(self, step: int, micro_batches: Sequence[MicroBatch[Tensor]], kept: Tensor) -> Tensor:
        """Run ``Job.forward_backward`` once, or twice if this step is due for a check. Return the loss.

        Args:
            step: Index of the step. The first step is 0.
            micro_batches: This rank's micro-batches.
            kept: Number of tokens in the loss over all ranks (see ``Job.forward_backward``).

        Raises:
            UserError: The two passes gave different results, replicas hold different bits, or the GPU has no
                deterministic kernel for an operation.
        """
        self.seconds = 0.0
        if not self.interval or (step + 1) % self.interval:
            return self.job.forward_backward(micro_batches, kept)
        started = time.perf_counter()
        self._publish()
        self._compare_replicas(step)
        _, first = self._computed(step, micro_batches, kept)
        self.seconds = time.perf_counter() - started
        loss, second = self._computed(step, micro_batches, kept)
        if self._on_any(first != second):
            self._blame(step, first, second, self._computed(step, micro_batches, kept)[1])
        return loss

    def _computed(
        self, step: int, micro_batches: Sequence[MicroBatch[Tensor]], kept: Tensor
    ) -> tuple[Tensor, list[Given]]:
        self.job.optimizer.drop_gradients()
        try:
            with _deterministic(self.job.device):
                return self._watched(micro_batches, kept)
        except RuntimeError as error:
            if "deterministic" not in str(error).lower():
                raise
            raise UserError(
                f"checks.replay_interval = {self.interval} needs a deterministic step, and step {step + 1} is not "
                f"deterministic on this GPU ({first_line(error)}); set it to 0"
            ) from error

    def _watched(self, micro_batches: Sequence[MicroBatch[Tensor]], kept: Tensor) -> tuple[Tensor, list[Given]]:
        inputs = CollectiveInputs()
        # If the model is compiled, do not record collectives, because recording would run the model uncompiled.
        if self.job.run.training.compile:
            loss = self.job.forward_backward(micro_batches, kept)
        else:
            with inputs:
                loss = self.job.forward_backward(micro_batches, kept)
        for shard in self.job.trained:
            if shard.grad is not None:
                inputs.note(shard.grad, f"the gradient of {shard.name}")
        inputs.note(loss, "the loss")
        return loss, inputs.given()

    def _blame(self, step: int, first: list[Given], second: list[Given], third: list[Given]) -> NoReturn:
        """Raise an error that names the ranks whose passes differ. If the third pass agrees with the first or the
        second pass, a device is at fault."""
        is_rare = not self._on_any(third != first) or not self._on_any(third != second)
        everyone = from_all_ranks((first, second), "replayed step")
        ranks = first_to_differ([one for one, _ in everyone], [two for _, two in everyone])
        hosts = from_all_ranks(platform.node(), "replayed step")
        named = "; ".join(f"rank {rank} ({hosts[rank]}), in {what}" for rank, what in sorted(ranks.items()))
        if is_rare:
            raise UserError(
                f"step {step + 1} was computed three times and once gave different bits on {named}; no weight has "
                "changed: take that device out of the job, and resume from the newest checkpoint"
            )
        raise UserError(
            f"step {step + 1} was computed three times and gave three different results, first on {named}: either an "
            "operation there has no fixed order, or the device is wrong each time; run the same file on another "
            "device, and if the results differ there too, set checks.replay_interval = 0"
        )

    def _compare_replicas(self, step: int) -> None:
        tensors = list(self._stored())
        sums = torch.stack([checksum(tensor) for _, _, tensor in tensors])
        differing = torch.zeros(len(sums), dtype=torch.bool, device=sums.device)
        for axis, is_copied in self._axes_of_copies():
            places = [index for index, (_, shard, _) in enumerate(tensors) if is_copied(shard)]
            mine = sums[places]
            # The maximum of ~x is ~(the minimum of x). So one all-reduce gives both maximum and minimum.
            both = torch.cat([mine, ~mine])
            with purpose("checksums of replicas", axis=axis):
                dist.all_reduce(both, dist.ReduceOp.MAX, group=axis.group)
            largest, smallest = both[: len(places)], ~both[len(places) :]
            differing[places] |= largest != smallest
        if not self._on_any(bool(differing.any())):
            return
        values = {(name, str(shard.slices)): int(s) for (name, shard, _), s in zip(tensors, sums, strict=True)}
        everyone, hosts = from_all_ranks(values, "replayed step"), from_all_ranks(platform.node(), "replayed step")
        name, ranks = _odd_ones(everyone)
        named = ", ".join(f"rank {rank} ({hosts[rank]})" for rank in ranks)
        raise UserError(
            f"before step {step + 1} the replicas of {name} differ, on {named}; resume from the newest checkpoint, "
            "without that device if it happens again"
        )

    def _on_any(self, flag: bool) -> bool:
        return true_on_any_rank(flag, self.job.device, "replayed step")

    def _stored(self) -> Iterator[tuple[str, LocalShard, Tensor]]:
        for shard in self.job.shards:
            yield shard.name, shard, shard.local
        for index, shard in enumerate(self.job.trained):
            for moment, tensor in self.job.optimizer.moments(index).items():
                yield f"{moment} of {shard.name}", shard, tensor
            if self.job.average is not None:
                yield f"the average of {shard.name}", shard, self.job.average.averages[index]

    def _axes_of_copies(self) -> Iterator[tuple[Axis, Any]]:
        """Yield each axis whose ranks hold replicas of some shards, together with a function. The function returns
        whether a given shard has replicas on this axis."""
        grid = self.job.grid
        split = grid.ep.size > 1
        if grid.sizes.zero == 0 and grid.replicas.size > 1:
            yield grid.replicas, lambda shard: shard.tile.ep is None or not split
        if grid.sizes.zero == 0 and split and grid.expert_copies.size > 1:
            yield grid.expert_copies, lambda shard: shard.tile.ep is not None
        if grid.tokens.size > 1 and (grid.sizes.zero or grid.z.size > 1):
            yield grid.tokens, lambda shard: not shard.tile.sharded
        if grid.x.size > 1:
            yield grid.x, lambda shard: shard.tile.x is None
        if grid.y.size > 1:
            yield grid.y, lambda shard: shard.tile.y is None


def _odd_ones(everyone: Sequence[dict[tuple[str, str], int]]) -> tuple[str, list[int]]:
    """Return the name of the first tensor whose replicas differ, and the ranks with a wrong replica.

    The most common value counts as right. If no value is more common than all others, return all ranks with a replica.
    """
    for key in dict.fromkeys(key for values in everyone for key in values):
        holders = {rank: values[key] for rank, values in enumerate(everyone) if key in values}
        counts = Counter(holders.values()).most_common()
        if len(counts) > 1:
            is_draw = counts[0][1] == counts[1][1]
            return key[0], [rank for rank, value in holders.items() if is_draw or value != counts[0][0]]
    raise AssertionError("some replicas differ")


@contextmanager
def _deterministic(device: torch.device) -> Iterator[None]:
    """Make GPU kernels add numbers in a fixed order. By default, the order varies in some kernels, such as attention's
    backward pass."""
    if device.type != "cuda":
        yield
        return
    before, warn = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    settings: Any = torch.utils.deterministic
    fills = settings.fill_uninitialized_memory
    # Do not only warn, because with a warning, attention would keep its nondeterministic backward pass. Do not fill
    # uninitialized memory, because the job overwrites it anyway.
    torch.use_deterministic_algorithms(True, warn_only=False)
    settings.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn)
        settings.fill_uninitialized_memory = fills
