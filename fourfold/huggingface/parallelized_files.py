"""Read and write the weights and checkpoints of a parallelized model. All processes call these functions together."""

import copy
import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from fourfold.checkpoints.file_layout import write_layout
from fourfold.checkpoints.global_tensors import PartsByName, SavedPart, layout_of
from fourfold.checkpoints.integrity import seal
from fourfold.checkpoints.rank_files import entries_of, gather_written, read_parts, write_file
from fourfold.checkpoints.verify import verified
from fourfold.data.atomic_files import new_folder, swap_in, writing
from fourfold.errors import UserError
from fourfold.huggingface.adapters import ADAPTER_FILE
from fourfold.huggingface.expert_files import RowRanges
from fourfold.huggingface.peft_layers import is_adapter
from fourfold.models.tensor_files import Entry, TensorFiles, write_tensor_files, write_tensors
from fourfold.parallel.grid.grid import Grid
from fourfold.parallel.grid.shared_failure import failing_together
from fourfold.parallel.state import LocalShard, gather_full
from fourfold.parsing import parse_json
from fourfold.untrusted_files import check_regular

PROGRESS_FILE = "parallelized.json"
"""File of a checkpoint for scalars in the optimizer state, such as the number of steps."""

Numbers = dict[str, dict[str, Any]]
"""The optimizer state of each parameter. "numbers" has its scalars, and "tensors" has the names of its tensors."""

Shapes = Mapping[str, tuple[int, ...]]
"""The shape of each weight in files. It can differ from ``shard.global_shape``. An ``InputFirst`` layer that computes
several kinds of features, such as queries, keys, and values, splits the last dim of its weight into two dims."""


@dataclass(frozen=True)
class ParallelizedTensors:
    """How the parameters of a model are stored in files. ``parallelize`` determines this before it puts the model on
    the grid."""

    shapes: Shapes
    rows: Mapping[str, RowRanges]
    """For each name of a parameter, the tensors in files that make up the parameter, and the rows that each tensor
    fills."""
    tied: Sequence[Sequence[str]]
    """For each parameter that has more than one name, its names."""


def read_weights(model: nn.Module, shards: Sequence[LocalShard], layout: ParallelizedTensors, folder: Path) -> None:
    """Fill the shards from a folder of safetensors. Names in files may lack the prefix of the base model.

    Args:
        model: The model.
        shards: This process's part of every parameter.
        layout: How the parameters are stored in files.
        folder: The folder.

    Raises:
        UserError: A tensor is missing, or files have different tensors for one tied weight.
    """
    files = TensorFiles(folder)
    prefix = f"{getattr(model, 'base_model_prefix', '')}."

    def names(own: str, theirs: str) -> list[str]:
        return [each for name in (own, theirs) for each in (name, name.removeprefix(prefix))]

    for shard in shards:
        rows, shape = layout.rows[shard.name], layout.shapes[shard.name]
        if len(rows) > 1 and not any(name in files.shapes for name in names(shard.name, shard.name)):
            _read_experts(files, shard, {files.find(names(n, n), (len(r), shape[-1])): r for n, r in rows.items()})
            continue
        name = files.find(names(shard.name, min(rows)), shape)
        if shard.local.numel():
            for out, slices in _in_file(shard, shape):
                files.read_into(out, name, slices)
    for first, *others in layout.tied:
        stored = [n for each in (first, *others) for n in names(each, min(layout.rows[each])) if n in files.shapes]
        for name in stored[1:]:
            if not files.are_equal(stored[0], name):
                raise UserError(
                    f"{files.file_of[name]}: {name} differs from {stored[0]}, but the model has one weight for both; "
                    "set tie_word_embeddings to false"
                )


def _in_file(shard: LocalShard, shape: tuple[int, ...]) -> Iterator[tuple[Tensor, tuple[slice, ...]]]:
    """Yield the pieces of a shard. With each piece, yield the slices that select it from the tensor in files."""
    if shape == shard.global_shape:
        yield shard.local, shard.slices
        return
    *rows, parts, columns = shard.slices
    width = shard.global_shape[-1]
    for place, part in enumerate(range(parts.start, parts.stop)):
        yield (shard.local.select(-2, place), (*rows, slice(part * width + columns.start, part * width + columns.stop)))


def _read_experts(files: TensorFiles, shard: LocalShard, matrices: Mapping[str, range]) -> None:
    """Fill a shard of stacked experts from files that have one matrix per expert. Only the first dim is sharded."""
    _, rows, columns = shard.global_shape
    mine = range(*shard.slices[0].indices(shard.global_shape[0]))
    for name, part in matrices.items():
        expert, first = divmod(part.start, rows)
        if expert in mine:
            out = shard.local[expert - mine.start, first : first + len(part)]
            files.read_into(out, name, (slice(0, len(part)), slice(0, columns)))


def write_pretrained(
    model: nn.Module, shards: Sequence[LocalShard], layout: ParallelizedTensors, folder: Path, adapter: Any = None
) -> None:
    """Write a folder for ``from_pretrained``. Rank 0 gathers and writes one tensor at a time.

    Args:
        model: The model.
        shards: This process's part of every parameter.
        layout: How the parameters are stored in files.
        folder: The folder to write. It must not exist.
        adapter: peft's configuration of the model's adapters, if it has any. Then the folder is for peft, and has only
            the adapters.

    Raises:
        UserError: ``folder`` exists or cannot be written. Every process raises this error.
    """
    if adapter is not None:
        shards = [shard for shard in shards if is_adapter(shard.name)]
    waiting = list(shards)
    last: list[tuple[str, Tensor]] = []

    def gather(shard: LocalShard) -> Tensor:
        """Return the full tensor. One tensor can become several entries in files, so keep it in memory until another
        tensor is needed."""
        if not last or last[0][0] != shard.name:
            last.clear()
            last.append((shard.name, _gathered(waiting.pop(0)).view(layout.shapes[shard.name])))
        return last[0][1]

    with failing_together():
        try:
            if dist.get_rank() == 0:
                with new_folder(folder) as unfinished:
                    entries = [entry for shard in shards for entry in _entries(shard, layout, gather)]
                    if adapter is None:
                        _write_configs(model, shards[0].local.dtype, unfinished)
                        write_tensor_files(unfinished, entries)
                    else:
                        adapter.save_pretrained(unfinished)
                        write_tensors(unfinished / ADAPTER_FILE, entries)
        except ValueError as error:
            # transformers raises ValueErrors, so convert them. A UserError is a ValueError too, and keeps its message.
            raise UserError(str(error)) from None
        finally:
            # Rank 0 gathers tensors while it writes them. All other ranks take part here, and so does rank 0 after an
            # error.
            while waiting:
                _gather(waiting.pop(0))


def _entries(shard: LocalShard, layout: ParallelizedTensors, gather: Callable[[LocalShard], Tensor]) -> list[Entry]:
    """Return the tensors to write for a parameter: the parameter itself, or one matrix for each expert in it."""
    dtype, rows, shape = shard.local.dtype, layout.rows[shard.name], layout.shapes[shard.name]
    if len(rows) == 1:
        return [Entry(min(rows), dtype, shape, lambda: gather(shard))]

    def matrix(part: range) -> Tensor:
        expert, first = divmod(part.start, shape[1])
        return gather(shard)[expert, first : first + len(part)]

    return [Entry(name, dtype, (len(part), shape[-1]), partial(matrix, part)) for name, part in rows.items()]


def write_checkpoint(
    shards: Sequence[LocalShard], grid: Grid, folder: Path, optimizer: torch.optim.Optimizer | None
) -> None:
    """Write a checkpoint that any grid can load. It replaces an earlier checkpoint in ``folder``.

    Args:
        shards: This process's part of every parameter, and the buffers that are saved with the parameters.
        grid: The grid.
        folder: The checkpoint's folder.
        optimizer: If given, its state is saved too.

    Raises:
        UserError: ``folder`` exists and is not a checkpoint of a parallelized model, or it cannot be written.
    """
    partial = folder.with_name(f".{folder.name}.partial")
    parts, numbers = _parts(shards, optimizer)
    layout = layout_of(parts, grid)

    with failing_together(), writing(folder):
        if dist.get_rank() == 0:
            if folder.exists() and not (folder / PROGRESS_FILE).is_file():
                raise UserError(
                    f"{folder} exists and is not a checkpoint of a parallelized model; choose another folder"
                )
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            (partial / PROGRESS_FILE).write_text(json.dumps(numbers) + "\n")
    with failing_together(), writing(folder):
        mine = write_file(partial, layout, entries_of(parts, layout))
    written = gather_written(mine)
    with failing_together(), writing(folder):
        if dist.get_rank() == 0:
            write_layout(partial, layout)
            seal(partial, written)
            swap_in(partial, folder)


def read_numbers(folder: Path, with_optimizer: bool) -> Numbers:
    """Read the scalars of the optimizer state in a checkpoint. Raise ``UserError`` if the folder is not a checkpoint,
    or if an optimizer needs a state and the checkpoint has none."""
    try:
        numbers: Numbers = parse_json(check_regular(folder / PROGRESS_FILE).read_text())
        if not isinstance(numbers, dict) or any(set(of_one) != {"numbers", "tensors"} for of_one in numbers.values()):
            raise ValueError(f"{PROGRESS_FILE} does not list the numbers and tensors of each parameter")
    except (OSError, ValueError) as error:
        raise UserError(f"{folder} is not a checkpoint of a parallelized model: {error}") from None
    if with_optimizer and not numbers:
        raise UserError(f"{folder} was saved without an optimizer; load it without one, and start with a new optimizer")
    return numbers


def read_checkpoint(
    shards: Sequence[LocalShard], folder: Path, optimizer: torch.optim.Optimizer | None, numbers: Numbers
) -> None:
    """Fill the shards from a checkpoint that any grid has written.

    Args:
        shards: This process's part of every parameter, and the buffers that are saved with the parameters.
        folder: The checkpoint's folder.
        optimizer: If given, its state is filled too.
        numbers: The result of ``read_numbers``.
    """
    if optimizer is not None:
        _make_state(shards, optimizer, numbers)
    parts, _ = _parts(shards, optimizer)
    with verified(folder, {name: part.shard.global_shape for name, part in parts.items()}) as layout:
        read_parts(folder, layout, parts)


def _write_configs(model: Any, dtype: torch.dtype, folder: Path) -> None:
    """Write the same configuration files as transformers' ``save_pretrained``, if the model has them."""
    if not hasattr(model, "config"):
        return
    config = copy.deepcopy(model.config)
    config.dtype = dtype
    # FSDP2 changes the class of each sharded module to a subclass. Save the name of the original class.
    config.architectures = [next(c.__name__ for c in type(model).__mro__ if not issubclass(c, FSDPModule))]
    config.save_pretrained(folder)
    if getattr(model, "generation_config", None) is not None:
        model.generation_config.save_pretrained(folder)


def _gather(shard: LocalShard) -> dict[str, Tensor] | None:
    return gather_full([shard], [shard.local])


def _gathered(shard: LocalShard) -> Tensor:
    """Gather a tensor on rank 0. Only rank 0 calls this, while all other ranks call ``_gather``."""
    whole = _gather(shard)
    assert whole is not None
    return whole[shard.name]


def _parts(shards: Sequence[LocalShard], optimizer: torch.optim.Optimizer | None) -> tuple[PartsByName, Numbers]:
    """Return the tensors of a checkpoint by name (weights and optimizer state). Also return the scalars and the names
    of the tensors in the optimizer state, by parameter.

    Raises:
        UserError: The optimizer keeps a tensor that has neither the weight's shape nor one element.
    """
    parts = {f"model.{shard.name}": SavedPart(shard, shard.local) for shard in shards}
    numbers: Numbers = {}
    if optimizer is None:
        return parts, numbers
    for shard in shards:
        if not shard.parameter.requires_grad:
            continue
        numbers[shard.name] = {"numbers": {}, "tensors": []}
        for key, value in optimizer.state.get(shard.parameter, {}).items():
            if isinstance(value, Tensor) and value.shape == shard.parameter.shape:
                local = value.to_local() if isinstance(value, DTensor) else value
                parts[f"optimizer.{key}.{shard.name}"] = SavedPart(shard, local)
                numbers[shard.name]["tensors"].append(key)
            elif isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.numel() == 1):
                numbers[shard.name]["numbers"][key] = float(value)
            else:
                raise UserError(
                    f"{type(optimizer).__name__} keeps {key} of {shard.name}, which has neither the weight's shape nor "
                    "one element, so another grid could not load it; save the model without the optimizer"
                )
    return parts, numbers


def _make_state(
    shards: Sequence[LocalShard], optimizer: torch.optim.Optimizer, numbers: Mapping[str, dict[str, Any]]
) -> None:
    for shard in shards:
        if shard.name not in numbers:
            continue
        state = optimizer.state[shard.parameter]
        for key in numbers[shard.name]["tensors"]:
            state[key] = torch.zeros_like(shard.parameter, requires_grad=False)
        for key, value in numbers[shard.name]["numbers"].items():
            state[key] = torch.tensor(value)
