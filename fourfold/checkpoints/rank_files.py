"""Write and read the tensor files of a checkpoint. Each process writes at most one file, and reads the files that
contain its parts."""

import json
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from fourfold.checkpoints.file_layout import Box, CheckpointTensors, file_of, inside, intersection
from fourfold.checkpoints.global_tensors import PartsByName
from fourfold.checkpoints.integrity import ELSEWHERE, DamagedCheckpoint, damaged
from fourfold.errors import UserError
from fourfold.heartbeat import doing
from fourfold.models.dtypes import SAFETENSORS_DTYPES
from fourfold.models.tensor_files import Entry, Written, opened_tensors, write_tensors
from fourfold.parallel.grid.shared_failure import from_all_ranks
from fourfold.parallel.memory.offload import CopyStream

OFFSETS = "DCP_SHARDING_INFO"
"""Metadata key for the position of each part in its full tensor. torch.distributed.checkpoint uses the same key."""


def entries_of(parts: PartsByName, layout: CheckpointTensors, copies: CopyStream | None = None) -> list[Entry]:
    """Return the tensors that this process writes.

    Args:
        parts: This process's parts of all tensors, by tensor name.
        layout: The content of the checkpoint's `layout.json`.
        copies: If given, start to copy the tensors to host memory now, so that training can continue while the copies
            are written. Call `copies.join` before the tensors change, and `copies.finish` before you write the copies.
    """
    entries = []
    for name, box in layout.held_by(dist.get_rank()).items():
        shard, local = parts[name]
        assert box == shard.slices, f"{name}: the layout says {box}, but this process holds {shard.slices}"
        make: Callable[[], Tensor] = partial(_announce, local)
        if copies is not None:
            copy = torch.empty_like(local, device="cpu", pin_memory=local.is_cuda, requires_grad=False)
            copies.start(copy, local.detach())
            make = copy.detach
        entries.append(Entry(name, local.dtype, tuple(local.shape), make))
    return entries


def write_file(
    folder: Path, layout: CheckpointTensors, entries: list[Entry], copies: CopyStream | None = None
) -> Written | None:
    """Write this process's file.

    Args:
        folder: The checkpoint's folder.
        layout: The content of the checkpoint's `layout.json`.
        entries: The tensors to write, from `entries_of`.
        copies: The copies to host memory that `entries_of` has started, if any. This function waits for them first.

    Returns:
        Size and checksum of the file, or None if there is nothing to write.

    Raises:
        OSError: The file cannot be written.
    """
    if not entries:
        return None
    if copies is not None:
        copies.finish()
    boxes = layout.held_by(dist.get_rank())
    offsets = {name: {"saved_offsets": [each.start for each in box]} for name, box in boxes.items()}
    return write_tensors(folder / file_of(dist.get_rank()), entries, {OFFSETS: json.dumps(offsets)})


def gather_written(written: Written | None) -> dict[str, Written]:
    """Return the size and checksum of every file that any process has written.

    Every process must call this. Each process sends only a few bytes.
    """
    everyone = from_all_ranks(written, "checksums of a checkpoint")
    return {file_of(rank): each for rank, each in enumerate(everyone) if each is not None}


def read_parts(folder: Path, layout: CheckpointTensors, parts: PartsByName) -> None:
    """Read this process's parts from the files of a checkpoint.

    Raises:
        UserError: A file cannot be read.
    """
    read_boxes(folder, layout, {name: (part.local, part.shard.slices) for name, part in parts.items()})


@torch.no_grad()
def read_boxes(folder: Path, layout: CheckpointTensors, wanted: dict[str, tuple[Tensor, Box]]) -> None:
    """Read boxes (parts given as one slice per dim) of global tensors. Each file is opened only once.

    Args:
        folder: The checkpoint's folder.
        layout: The content of the checkpoint's `layout.json`.
        wanted: For each name of a global tensor, the local tensor to fill, and the box to read into the local tensor.

    Raises:
        UserError: A file cannot be read.
    """
    by_file: dict[int, list[tuple[str, Box]]] = defaultdict(list)
    for name, (local, slices) in wanted.items():
        if local.numel():
            for rank, box in layout.parts(name, slices):
                by_file[rank].append((name, box))
    for rank, boxes in sorted(by_file.items()):
        doing("reading a checkpoint")
        with opened_tensors(folder / file_of(rank)) as opened:
            for name, box in boxes:
                local, slices = wanted[name]
                common = intersection(box, slices)
                saved = opened.get_tensor(name) if common == box else opened.get_slice(name)[inside(common, box)]
                local[inside(common, slices)].copy_(saved)


def check_header(folder: Path, layout: CheckpointTensors, rank: int) -> None:
    """Check that the file of a process has exactly the parts that the layout assigns to this file.

    Args:
        folder: The checkpoint's folder.
        layout: The content of the checkpoint's `layout.json`.
        rank: Rank of the process that wrote the file.

    Raises:
        DamagedCheckpoint: The file does not match the layout.
    """
    held, file = layout.held_by(rank), folder / file_of(rank)
    if not held:
        return
    expected = {
        name: ([each.stop - each.start for each in box], layout.tensors[name].dtype) for name, box in held.items()
    }
    found = {}
    try:
        with opened_tensors(file) as opened:
            for name in opened.keys():  # noqa: SIM118 (not a dictionary)
                view = opened.get_slice(name)
                found[name] = (view.get_shape(), view.get_dtype())
    except UserError as error:
        raise DamagedCheckpoint(f"{error}{ELSEWHERE}") from None
    if found != expected:
        name = next(name for name in (*expected, *found) if found.get(name) != expected.get(name))
        raise damaged(file, f"it does not hold {name} as the layout says")


def dtype_of(layout: CheckpointTensors, name: str) -> torch.dtype:
    """Return the dtype that a tensor has in the checkpoint."""
    return SAFETENSORS_DTYPES[layout.tensors[name].dtype]


def _announce(local: Tensor) -> Tensor:
    doing("writing a checkpoint")
    return local
