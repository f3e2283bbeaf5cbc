"""A job's weights and moments as global tensors, the way torch.distributed.checkpoint reads and writes them."""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor

from fourfold.checkpoints.integrity import ChecksummedFiles
from fourfold.checkpoints.saved_state import RecentSteps
from fourfold.config.run import RunConfig
from fourfold.data.files import WriteFailed
from fourfold.errors import UserError
from fourfold.parallel.communicate import purpose
from fourfold.parallel.grid import Grid
from fourfold.parallel.state import GlobalView, LocalShard


class OptimizerState(Protocol):
    """The state that an optimizer keeps between steps; ``training.optimizer.ShardedAdamW`` is one."""

    def moments(self, index: int) -> dict[str, Tensor]: ...

    def steps_taken(self) -> int: ...

    def set_steps_taken(self, steps: int) -> None: ...


class LossScaleState(Protocol):
    """The state that loss scaling keeps between steps."""

    scale: float
    steps_since_change: int


class TrainingState(Protocol):
    """The job that a checkpoint saves and fills; ``training.job.Job`` is one."""

    recent: RecentSteps

    @property
    def run(self) -> RunConfig: ...

    @property
    def grid(self) -> Grid: ...

    @property
    def shards(self) -> Sequence[LocalShard]: ...

    @property
    def trained(self) -> Sequence[LocalShard]: ...

    @property
    def optimizer(self) -> OptimizerState: ...

    @property
    def loss_scale(self) -> LossScaleState | None: ...

    def publish(self) -> None: ...


def trained_tensors(job: TrainingState, view: GlobalView) -> dict[str, Tensor]:
    """Trained weights and their moments as global tensors that alias the job's memory."""
    tensors: dict[str, Tensor] = {}
    for name, index in _first_copies(job.trained).items():
        shard = job.trained[index]
        tensors[f"model.{name}"] = view.of(shard)
        for moment, local in job.optimizer.moments(index).items():
            tensors[f"optimizer.{moment}.{name}"] = view.of(shard, local)
    return tensors


def weight_tensors(job: TrainingState, view: GlobalView) -> dict[str, Tensor]:
    """All weights as global tensors that alias the job's memory."""
    return {f"model.{name}": view.of(job.shards[index]) for name, index in _first_copies(job.shards).items()}


def check_finite(tensors: Mapping[str, Tensor], step: int, folder: Path) -> None:
    """Raise the same ``UserError`` on every process when a part of a tensor anywhere is not finite."""
    locals_ = {name: t.to_local() for name, t in tensors.items() if isinstance(t, DTensor) and t.to_local().numel()}
    largest = torch.stack(torch._foreach_norm(list(locals_.values()), math.inf, dtype=torch.float32))
    flag = (~largest.isfinite()).any().float()
    with purpose("finite weights"):
        dist.all_reduce(flag, dist.ReduceOp.MAX)
    if flag.item():
        bad = [name for name, value in zip(locals_, largest.tolist(), strict=True) if not math.isfinite(value)]
        everyone: list[list[str]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(everyone, bad)
        rank, name = next((rank, names[0]) for rank, names in enumerate(everyone) if names)
        raise UserError(
            f"{name} is not finite on rank {rank} after step {step}; nothing was saved, and the last checkpoint in "
            f"{folder} is as it was; lower optimizer.lr, and resume from there"
        )


@torch.no_grad()
def fill_second_copies(shards: Sequence[LocalShard], tensors: Callable[[int], Mapping[str, Tensor]]) -> None:
    """Copy ``tensors(index)`` of a tied weight's first shard to those of its second."""
    first = _first_copies(shards)
    for index, shard in enumerate(shards):
        if index != first[shard.name]:
            for name, tensor in tensors(index).items():
                tensor.copy_(tensors(first[shard.name])[name])


def _first_copies(shards: Sequence[LocalShard]) -> dict[str, int]:
    """The index of the first shard of each name.

    With both ends of a V-shaped pipeline on one process a tied weight is there twice; it is saved and loaded once.
    """
    first: dict[str, int] = {}
    for index, shard in enumerate(shards):
        first.setdefault(shard.name, index)
    return first


def load_tensors(tensors: dict[str, Tensor], path: Path, no_dist: bool = False) -> None:
    """Fill global tensors from the files of a checkpoint; ``UserError`` where those are damaged."""
    with checkpoint_errors(UserError, f"the checkpoint {path} is damaged"), _quiet():
        load(tensors, storage_reader=HuggingFaceStorageReader(str(path)), no_dist=no_dist)


def save_tensors(tensors: dict[str, Tensor], folder: Path) -> None:
    """Write the parts of global tensors that this process holds; a collective of all processes."""
    with checkpoint_errors(WriteFailed, f"cannot write the checkpoint {folder}"):
        save(tensors, storage_writer=tensor_writer(folder))


def tensor_writer(folder: Path) -> HuggingFaceStorageWriter:
    """A writer of safetensors files, one for each process, with a note of the checksum beside each."""
    writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
    writer.fs = ChecksummedFiles()
    return writer


@contextmanager
def checkpoint_errors(kind: type[UserError], what: str) -> Iterator[None]:
    """Turn torch's CheckpointException, which is a BaseException that no handler expects, into a ``UserError``.

    It has the failures of all processes, and is raised on all of them.
    """
    try:
        yield
    except CheckpointException as error:
        reason, _ = next(iter(error.failures.values()))
        text = reason.strerror if isinstance(reason, OSError) else str(reason).partition("\n")[0]
        raise kind(f"{what}: {text or type(reason).__name__}") from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence torch's reader: it warns of each file of a distributed save, warns of a load without processes, and
    logs the traceback of the error that it then raises."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logging.disable(before)
