"""Describe a job's weights and optimizer moments as parts of global tensors (the full tensors, before the grid cuts
them). Checkpoints save and load these parts."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from fourfold.checkpoints.file_layout import CheckpointTensors, SavedTensor
from fourfold.checkpoints.saved_state import BestValidation, RecentSteps
from fourfold.config.run import AXES, RunConfig
from fourfold.errors import UserError
from fourfold.models.dtypes import SAFETENSORS_NAMES
from fourfold.models.mixture import is_router_bias
from fourfold.parallel.experts.expert_load import ExpertLoad
from fourfold.parallel.grid.communicate import purpose
from fourfold.parallel.grid.grid import Grid
from fourfold.parallel.grid.shared_failure import from_all_ranks, true_on_any_rank
from fourfold.parallel.grid_model import GridModel
from fourfold.parallel.memory.offload import CopyStream
from fourfold.parallel.state import LocalShard


class OptimizerState(Protocol):
    """State that an optimizer keeps between steps. `training.optimizer.ShardedOptimizer` implements it."""

    def moments(self, index: int) -> dict[str, Tensor]: ...

    def steps_taken(self) -> int: ...

    def set_steps_taken(self, steps: int) -> None: ...


class LossScaleState(Protocol):
    """State that loss scaling keeps between steps."""

    scale: float
    steps_since_change: int


class AveragedWeights(Protocol):
    """Moving averages of the trained weights. `training.weight_average.WeightAverage` implements it."""

    averages: list[Tensor]
    has_begun: bool

    def restart(self) -> None: ...


class TrainingState(GridModel):
    """A model on the grid, with everything that a checkpoint saves and loads. `training.job.Job` implements it."""

    run: RunConfig
    trained: list[LocalShard]
    optimizer: OptimizerState
    average: AveragedWeights | None
    loss_scale: LossScaleState | None
    expert_load: ExpertLoad | None
    recent: RecentSteps
    best: BestValidation
    copies: CopyStream | None
    """Copies of tensors to host memory, which an asynchronous save has started, or None. The optimizer waits for these
    copies before it changes the weights."""


class SavedPart(NamedTuple):
    """This process's part of a weight, or of another tensor with the same shape, such as a moment."""

    shard: LocalShard
    local: Tensor


AVERAGE = "average"
"""Prefix of the moving averages' names in a checkpoint: `average.<name>`."""

PartsByName = Mapping[str, SavedPart]
"""Maps names of tensors in a checkpoint to this process's parts of these tensors."""


def trained_parts(job: TrainingState, with_averages: bool) -> PartsByName:
    """Return this process's parts of everything that training changes.

    These are the trained weights with their moments and moving averages, and the biases of routers.

    Args:
        job: The model on the grid, with its optimizer.
        with_averages: Whether to include the moving averages if the job has any.
    """
    parts: dict[str, SavedPart] = {}
    for name, index in _first_copies(job.trained).items():
        shard = job.trained[index]
        parts[f"model.{name}"] = SavedPart(shard, shard.local)
        for moment, local in job.optimizer.moments(index).items():
            parts[f"optimizer.{moment}.{name}"] = SavedPart(shard, local)
        if with_averages and job.average is not None:
            parts[f"{AVERAGE}.{name}"] = SavedPart(shard, job.average.averages[index])
    if not job.run.lora.rank:  # LoRA freezes the routers' biases, so they are not saved.
        parts |= {
            f"model.{shard.name}": SavedPart(shard, shard.local) for shard in job.shards if is_router_bias(shard.name)
        }
    return parts


def weight_parts(job: TrainingState) -> PartsByName:
    """Return this process's parts of all weights."""
    return {
        f"model.{name}": SavedPart(job.shards[index], job.shards[index].local)
        for name, index in _first_copies(job.shards).items()
    }


def layout_of(parts: PartsByName, grid: Grid, shards_per_node: int = 1) -> CheckpointTensors:
    """Return the layout of a checkpoint that has the tensors in `parts`. Every pipeline rank must call this.

    If several processes hold the same part of a tensor, the layout says which of them writes it:

    - If several pipeline stages hold a tensor, the first of them writes it.
    - Replicas over dp, cp, and z share the work: replica 0 writes the first tensor, replica 1 the second tensor, and so
      on.
    - If x or y does not cut a tensor, the first rank of this axis writes it. Such tensors are small, and loading them
      then opens only a few files.

    Args:
        parts: This process's parts of the tensors, by tensor name.
        grid: The grid of processes.
        shards_per_node: Number of ranks per node among the ranks that hold the shards of one tile
            (`overlap.shards_per_node`).
    """
    layout = own_layout(parts, grid, shards_per_node)
    if grid.pp.size > 1:
        stages: list[dict[str, SavedTensor]] = [{}] * grid.pp.size
        with purpose("layout of a checkpoint"):
            dist.all_gather_object(stages, layout.tensors, grid.pp.group)
        layout.tensors = {}
        for tensors in stages:
            for name, tensor in tensors.items():
                layout.tensors.setdefault(name, tensor)
    return layout


def own_layout(parts: PartsByName, grid: Grid, shards_per_node: int) -> CheckpointTensors:
    """Return the layout that `layout_of` describes, but only with the tensors of this process's pipeline rank."""
    layout = CheckpointTensors(
        sizes={axis: grid.axis(axis).size for axis in AXES},
        sharded_over=("dp", "cp", "z") if grid.sizes.zero else ("z",),
        shards_per_node=shards_per_node,
        ep=grid.ep.size,
        tensors={},
    )
    for number, (name, (shard, local)) in enumerate(parts.items()):
        dtype, tile = SAFETENSORS_NAMES[local.dtype], shard.tile
        tensor = SavedTensor(dtype=dtype, shape=shard.global_shape, x=tile.x, y=tile.y, ep=tile.ep, pp=grid.pp.rank)
        tensor.sharded_dim, tensor.sharded = tile.sharded_dim, tile.sharded
        turns = layout.token_copies(tensor)
        tensor.copy_number = number % turns * (layout.copies(tensor) // turns)
        layout.tensors[name] = tensor
    return layout


def check_finite(parts: PartsByName, step: int, folder: Path) -> None:
    """Check that all tensors on all processes are finite.

    Raises:
        UserError: A tensor has a value that is NaN or infinite. Every process raises the same error.
    """
    locals_ = {name: part.local for name, part in parts.items() if part.local.numel()}
    extremes = torch.stack([torch.stack(local.aminmax()).float() for local in locals_.values()])
    finite = extremes.isfinite().all(dim=1)
    if true_on_any_rank(not bool(finite.all()), finite.device, "finite weights"):
        bad = [name for name, good in zip(locals_, finite.tolist(), strict=True) if not good]
        everyone = from_all_ranks(bad, "finite weights")
        rank, name = next((rank, names[0]) for rank, names in enumerate(everyone) if names)
        raise UserError(
            f"{name} is not finite on rank {rank} after step {step}; nothing was saved, and the last checkpoint in "
            f"{folder} is unchanged; lower optimizer.lr, and resume from there"
        )


@torch.no_grad()
def fill_second_copies(shards: Sequence[LocalShard], tensors: Callable[[int], Mapping[str, Tensor]]) -> None:
    """If this process has two shards of a tied weight, copy the first shard's tensors to the second shard.

    Args:
        shards: The shards of this process.
        tensors: Returns the tensors of a shard by name, given the shard's index.
    """
    first = _first_copies(shards)
    for index, shard in enumerate(shards):
        if index != first[shard.name]:
            for name, tensor in tensors(index).items():
                tensor.copy_(tensors(first[shard.name])[name])


def _first_copies(shards: Sequence[LocalShard]) -> dict[str, int]:
    """Return the index of the first shard with each name.

    A process can have the first and the last stage of a pipeline (V-shaped schedules). Such a process has two copies of
    a tied weight. A checkpoint saves only the first copy.
    """
    first: dict[str, int] = {}
    for index, shard in enumerate(shards):
        first.setdefault(shard.name, index)
    return first
