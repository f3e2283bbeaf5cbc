"""Hold one process's part of a model on the grid. Sum the gradients, clip them, and gather weights or gradients.

Both fourfold's trainer and ``fourfold.parallelize`` use this module.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, share_comm_ctx

from fourfold.errors import UserError
from fourfold.parallel.data.data_parallel import DataParallel, StepTypes, Units
from fourfold.parallel.data.fully_sharded import FullySharded
from fourfold.parallel.data.replicated import Replicated
from fourfold.parallel.grid.grid import Grid
from fourfold.parallel.pipeline.pipeline import EmbeddingCopies
from fourfold.parallel.state import LocalShard, clip_gradients, gather_full, sum_partial_gradients


def replicate_or_shard(
    model: nn.Module,
    units: Units,
    grid: Grid,
    types: StepTypes,
    prefetch: int,
    per_node: int = 1,
    working_copies: bool = True,
) -> DataParallel:
    """Add data parallelism to a model: use FSDP2 if z or ``zero`` shards the weights, and full copies otherwise.

    Args:
        model: This process's tiles, on the meta device.
        units: The groups of modules. The weights of one group are gathered together.
        grid: The grid.
        types: The dtypes of weights, computation, and gradient sums.
        prefetch: Number of blocks whose weights are gathered ahead of time.
        per_node: Number of ranks that a shard group has on each node. A shard group is the ranks that store the
            shards of one tile.
        working_copies: Whether the model's parameters may be copies of the stored weights, in the dtype that the step
            computes in. Pass False if the optimizer updates the model's own parameters. With False, FSDP2 is used
            even if nothing is sharded, unless the step computes in the dtype of the stored weights.
    """
    is_whole = grid.z.size == 1 and (grid.sizes.zero == 0 or grid.replicas.size == 1)
    if is_whole and (working_copies or types.working == types.stored):
        return Replicated(model, units, grid, types)
    return FullySharded(model, units, grid, types, prefetch, per_node)


class GridModel:
    """This process's part of a model. Every process must call the same methods, because they contain collectives."""

    def __init__(self, stages: Mapping[int, DataParallel], grid: Grid, device: torch.device) -> None:
        """Allocate memory for the stages. The caller must then fill the weights."""
        self.grid, self.device, self.stages = grid, device, stages
        """This process's pipeline stages, by index. Without a pipeline, stage 0 is the whole model."""
        # FSDP2 keeps the buffer of its most recent sum of gradients. Let all stages share FSDP2's buffers and streams,
        # because otherwise each stage would keep a buffer.
        share_comm_ctx([stage.model for stage in stages.values() if isinstance(stage.model, FSDPModule)])
        for stage in stages.values():
            stage.materialize(device)
        self.shards: list[LocalShard] = [shard for stage in stages.values() for shard in stage.shards()]
        """This process's part of every parameter."""
        self.embedding_copies: EmbeddingCopies | None = None
        """Sums the gradients of the embedding, if both the first and the last pipeline stage have a copy of it."""

    def finish_gradients(self) -> None:
        """Complete the gradients after the last backward pass of a step.

        Sum each gradient over micro-batches and over the ranks that each computed a part of it. If the first and the
        last pipeline stage both have a copy of the embedding, also sum the gradients of the two copies.
        """
        for stage in self.stages.values():
            stage.finish_gradients()
        if self.embedding_copies is not None:
            self.embedding_copies.sum_gradients()
        sum_partial_gradients(self.shards, self.grid)

    def clip_gradients(self, max_norm: float, loss_scale: float = 1.0) -> Tensor:
        """Divide the gradients by ``loss_scale``, and clip their norm to ``max_norm``. Return the norm before
        clipping."""
        return clip_gradients(self.shards, max_norm, loss_scale)

    def gather(self, gradients: bool = False) -> dict[str, Tensor] | None:
        """Return the full weights, or the full gradients, by name on rank 0. Return None on other ranks.

        Rank 0 must have enough memory for all of them, so use this only for small models.

        Raises:
            UserError: ``gradients`` is True, and a weight has no gradient.
        """
        tensors = [shard.grad if gradients else shard.local for shard in self.shards]
        present = [tensor for tensor in tensors if tensor is not None]
        if len(present) < len(tensors):
            raise UserError("some weights have no gradient to gather; call backward(loss) first")
        return gather_full(self.shards, present)

    def publish(self) -> None:
        """Make the next forward pass use the stored weights as they are now, for example after an optimizer step."""
        for stage in self.stages.values():
            stage.publish()

    def free_gathered(self) -> None:
        """Free gathered weights after a forward pass without a backward pass."""
        for stage in self.stages.values():
            stage.free_gathered()

    @contextmanager
    def replacing_weights(self) -> Iterator[None]:
        """Let the ``with`` block overwrite the stored weights. Then make the next forward pass use the new weights."""
        with torch.no_grad():
            self.free_gathered()
            yield
            self.publish()
