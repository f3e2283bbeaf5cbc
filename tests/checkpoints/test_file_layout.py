"""The layout of a checkpoint: which file has which part, on any grid, and files that other programs can read."""

from __future__ import annotations

import itertools
import math
import random
from pathlib import Path

import pytest
import torch
from pool import Pool
from pydantic import ValidationError
from saved_jobs import new_job, save
from tiny_runs import LLAMA, tiny_run
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import load

from fourfold.checkpoints.file_layout import Box, CheckpointTensors, SavedTensor, intersection, is_empty, read_layout
from fourfold.checkpoints.saved_weights import SavedWeights
from fourfold.config.run import AXES, RunConfig


def random_layout(draw: random.Random) -> CheckpointTensors:
    sizes = {axis: draw.choice([1, 1, 2, 3]) for axis in AXES}
    sharded_over = draw.choice([("z",), ("dp", "cp", "z")])
    shards = math.prod(sizes[axis] for axis in sharded_over)
    per_node = draw.choice([*(n for n in range(1, shards + 1) if shards % n == 0), 2 * shards])
    layout = CheckpointTensors(sizes=sizes, sharded_over=sharded_over, shards_per_node=per_node, tensors={})
    for number in range(4):
        dims = [None, *range(draw.choice([1, 2]))]
        x, y = draw.choice(dims), draw.choice(dims)
        shape = [draw.choice([1, 2, 5]) for _ in range(2)]
        for axis, dim in (("x", x), ("y", y)):
            if dim is not None:
                shape[dim] *= sizes[axis]
        tensor = SavedTensor(dtype="F32", shape=tuple(shape), x=x, y=y, pp=draw.randrange(sizes["pp"]))
        tensor.copy_number = draw.randrange(layout.copies(tensor))
        layout.tensors[f"tensor {number}"] = tensor
    return CheckpointTensors.model_validate_json(layout.model_dump_json(exclude_defaults=True))


def random_box(draw: random.Random, shape: tuple[int, ...]) -> Box:
    begins = [draw.randrange(size) for size in shape]
    return tuple(slice(begin, draw.randint(begin + 1, size)) for begin, size in zip(begins, shape, strict=True))


@pytest.mark.parametrize("seed", range(50))
def test_every_element_is_in_exactly_one_file(seed: int) -> None:
    """Each element is in exactly one file, and the parts of a box come only from files that overlap it."""
    draw = random.Random(seed)
    layout = random_layout(draw)
    held = {rank: layout.held_by(rank) for rank in range(layout.ranks)}
    for name, tensor in layout.tensors.items():
        counts = torch.zeros(tensor.shape, dtype=torch.int)
        for parts in held.values():
            if name in parts:
                counts[parts[name]] += 1
        assert (counts == 1).all()
        for wanted in (random_box(draw, tensor.shape), tuple(slice(0, size) for size in tensor.shape)):
            expected = [
                (rank, parts[name])
                for rank, parts in held.items()
                if name in parts and not is_empty(intersection(parts[name], wanted))
            ]
            assert sorted(layout.parts(name, wanted), key=lambda part: part[0]) == expected


def test_copies_take_turns() -> None:
    layout = CheckpointTensors(sizes=dict.fromkeys(AXES, 1) | {"dp": 4}, sharded_over=("z",), tensors={})
    for number in range(8):
        layout.tensors[str(number)] = SavedTensor(dtype="F32", shape=(2,), copy_number=number % 4)
    assert [list(layout.held_by(rank)) for rank in range(4)] == [["0", "4"], ["1", "5"], ["2", "6"], ["3", "7"]]


@pytest.mark.parametrize(
    "change",
    [
        {"x": 2},
        {"x": -1},
        {"y": 0, "shape": (3, 2)},
        {"dtype": "I8"},
        {"pp": 1},
        {"copy_number": 1},
        {"shape": (-2, 2)},
    ],
)
def test_impossible_layouts_are_refused(change: dict[str, object]) -> None:
    tensor = {"dtype": "F32", "shape": (4, 4), "x": 0, "y": 1}
    sizes = dict.fromkeys(AXES, 1) | {"x": 2, "y": 2}
    CheckpointTensors.model_validate({"sizes": sizes, "sharded_over": ("z",), "tensors": {"w": tensor}})
    with pytest.raises(ValidationError, match="impossible tensor w"):
        CheckpointTensors.model_validate({"sizes": sizes, "sharded_over": ("z",), "tensors": {"w": tensor | change}})


def save_body(rank: int, world_size: int, run: RunConfig, folder: Path) -> list[str]:
    """Save, and return the files that this process opens to read its parts back."""
    job = new_job(run)
    path = save(job, folder, 1)
    layout = read_layout(path)
    parts = itertools.chain.from_iterable(
        layout.parts(f"model.{shard.name}", shard.slices) for shard in job.shards if shard.local.numel()
    )
    return sorted({f"rank_{writer:05}.safetensors" for writer, _ in parts})


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torch_distributed_checkpoint_can_read_a_checkpoint(pool: Pool, tmp_path: Path) -> None:
    run = tiny_run(LLAMA, {"x": 2, "z": 2})
    opened = pool.run(4, save_body, run, tmp_path)
    path = tmp_path / "step_1"
    assert all(f"rank_{rank:05}.safetensors" in files for rank, files in enumerate(opened))
    assert sum(map(len, opened)) < 16  # no process opens all files
    saved = SavedWeights(path)
    tensors = {f"model.{name}": torch.empty(shape) for name, shape in saved.shapes.items()}
    assert sum(map(math.prod, saved.shapes.values())) == sum(tensor.numel() for tensor in tensors.values())
    load(tensors, storage_reader=HuggingFaceStorageReader(str(path)), no_dist=True)
    for name in saved.shapes:
        assert torch.equal(tensors[f"model.{name}"], saved.read(name)), name
