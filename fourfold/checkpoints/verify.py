"""Verify that a checkpoint's files have not changed since they were written, and that all tensors are complete."""

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist

from fourfold.checkpoints.file_layout import LAYOUT_FILE, CheckpointTensors, read_layout
from fourfold.checkpoints.global_tensors import AVERAGE
from fourfold.checkpoints.integrity import check_contents, check_files, check_listing, damaged
from fourfold.checkpoints.rank_files import check_header
from fourfold.checkpoints.saved_state import CheckpointState, read_state
from fourfold.config.low_rank import LoRAConfig
from fourfold.config.model import ModelConfig
from fourfold.config.optimizer_rules import STATES, rule_of
from fourfold.models.lora import trained_shapes
from fourfold.models.transformer import parameter_shapes
from fourfold.parallel.grid.shared_failure import failing_together

Shapes = Mapping[str, tuple[int, ...]]


def verify(path: Path) -> tuple[CheckpointState, CheckpointTensors]:
    """Check every file of a checkpoint in one process. Return the contents of `state.json` and of `layout.json`.

    Raises:
        DamagedCheckpoint: The checkpoint is damaged.
        UserError: The checkpoint has the format of another version of fourfold.
    """
    state = read_state(path)
    layout = check_structure(path, shapes_of(state))
    check_contents(path)
    return state, layout


@contextmanager
def verified(path: Path, expected: Shapes) -> Iterator[CheckpointTensors]:
    """Check a checkpoint while the ``with`` block loads it. The processes divide the files among them.

    `check_structure` runs before the block starts. The contents of tensor files are checked while the block runs. The
    block must not call collectives. After an error, do not use the tensors that the block has loaded.

    Args:
        path: The checkpoint's folder.
        expected: The shape of every tensor that the checkpoint must have, by name.

    Yields:
        The content of the checkpoint's `layout.json`, which says which part of which tensor is in each file.

    Raises:
        DamagedCheckpoint: Any process has found damage. All processes raise this.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    with failing_together():
        layout = check_structure(path, expected, rank, ranks)
    with failing_together(), ThreadPoolExecutor(1) as beside:
        checking = beside.submit(check_contents, path, rank, ranks)
        try:
            yield layout
        finally:
            checking.result()


def shapes_of(state: CheckpointState) -> Shapes:
    """Return the shapes of all tensors that a checkpoint with this state must hold."""
    model = ModelConfig(**state.model)
    expected = {f"model.{name}": shape for name, shape in saved_shapes(model, state.lora).items()}
    if not state.weights_only:
        shapes = trained_shapes(model, state.lora)
        for name, shape in shapes.items():
            for moment in STATES[rule_of(name, len(shape), state.optimizer)]:
                expected[f"optimizer.{moment}.{name}"] = shape
            if state.has_averages:
                expected[f"{AVERAGE}.{name}"] = shape
    return expected


def saved_shapes(model: ModelConfig, lora: LoRAConfig | None) -> Shapes:
    """Return the shapes of the weights in a checkpoint of this model. With LoRA, these are only the adapters."""
    return parameter_shapes(model) if lora is None else trained_shapes(model, lora)


def check_structure(path: Path, expected: Shapes, rank: int = 0, ranks: int = 1) -> CheckpointTensors:
    """Check everything except the contents of tensor files, and return the content of `layout.json`. Several processes
    can divide the files among them.

    Args:
        path: The checkpoint's folder.
        expected: The shape of every tensor that the checkpoint must have, by name.
        rank: Index of this process among the processes that divide the files.
        ranks: Number of processes that divide the files.

    Raises:
        DamagedCheckpoint: The checkpoint is damaged.
    """
    if rank == 0:
        check_listing(path)
    check_files(path, rank, ranks)
    layout = read_layout(path)
    for name, shape in expected.items():
        tensor = layout.tensors.get(name)
        if tensor is None or tensor.shape != tuple(shape):
            raise damaged(path / LAYOUT_FILE, f"it does not have {name} with shape {list(shape)}")
    for writer in range(rank, layout.ranks, ranks):
        check_header(path, layout, writer)
    return layout
