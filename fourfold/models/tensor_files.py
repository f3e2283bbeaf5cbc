"""Read and write a model's safetensors files. At most one tensor is in memory at a time.

A folder has either one file, model.safetensors, or several files and model.safetensors.index.json. The index says which
file has which tensor.
"""

import json
import math
import os
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fourfold.errors import UserError
from fourfold.models.dtypes import SAFETENSORS_DTYPES, SAFETENSORS_NAMES
from fourfold.parsing import parse_json
from fourfold.untrusted_files import check_model_folder, check_regular

INDEX_FILE, SINGLE_FILE = "model.safetensors.index.json", "model.safetensors"
CHUNK_BYTES = 1 << 24
"""Number of bytes to read before the file is closed and opened again. Closing releases the file's pages from memory."""

PIECE_BYTES = 1 << 24
"""Number of bytes that are written at a time."""

SHARD_BYTES = 5 * 10**9
"""Largest size of a written file in bytes, as in Hugging Face's checkpoints."""


class TensorFiles:
    """Reads tensors by name from the safetensors files of a folder.

    Raises:
        UserError: a file is missing, damaged, or not safe to open (``check_model_folder``).
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.file_of: dict[str, Path] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._stored: dict[str, str] = {}
        """The dtype of each tensor, as safetensors names it."""
        check_model_folder(folder)
        listed = self._listed()
        for file in sorted(set(listed.values())) if listed else [folder / SINGLE_FILE]:
            with opened_tensors(file) as opened:
                for name in opened.keys():  # noqa: SIM118 (this is not a dictionary)
                    view = opened.get_slice(name)
                    self.file_of[name], self.shapes[name] = file, tuple(view.get_shape())
                    self._stored[name] = view.get_dtype()
        for name, file in listed.items():
            if self.file_of.get(name) != file:
                raise UserError(f"{file} does not contain the tensor {name}, although {folder / INDEX_FILE} says so")

    def find(self, names: Sequence[str], shape: tuple[int, ...]) -> str:
        """Return the first of ``names`` that a file contains. Call this if a tensor can have one of several names.

        Raises:
            UserError: no file has a tensor with any of these names, or the tensor has a shape other than ``shape``.
        """
        name = next((name for name in names if name in self.shapes), None)
        if name is None:
            raise UserError(f"{self.folder}: no file has the tensor {names[0]}")
        if self.shapes[name] != shape:
            raise UserError(
                f"{self.file_of[name]}: the tensor {name} has the shape {list(self.shapes[name])}, but the model needs "
                f"the shape {list(shape)}"
            )
        return name

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a weight.

        Raises:
            UserError: fourfold cannot read this dtype.
        """
        stored = self._stored[name]
        if stored not in SAFETENSORS_DTYPES:
            raise UserError(
                f"{self.file_of[name]}: the tensor {name} is stored as {stored}; convert it to one of "
                f"{', '.join(SAFETENSORS_DTYPES)}"
            )
        return SAFETENSORS_DTYPES[stored]

    def read_into(self, out: Tensor, name: str, slices: tuple[slice, ...]) -> None:
        """Copy part of a tensor to ``out``, a few rows at a time, and convert it to the dtype of ``out``.

        Args:
            slices: the part to copy, with one slice per dim. Slices can have steps.

        Raises:
            UserError: a value is NaN or infinite, or becomes infinite in the dtype of ``out``.
        """
        rows, every = (slices[0], slices[0].step or 1) if slices else (slice(0, 1), 1)  # A scalar has no slices.
        width = math.prod(self.shapes[name][1:]) * self.dtype(name).itemsize
        step = every * max(1, CHUNK_BYTES // max(1, width * every))
        for begin in range(rows.start, rows.stop, step):
            chunk = slice(begin, min(begin + step, rows.stop))
            with opened_tensors(self.file_of[name]) as opened:
                if slices:
                    part = out[(chunk.start - rows.start) // every :][: len(range(chunk.start, chunk.stop, every))]
                    read = opened.get_slice(name)[(chunk, *(slice(s.start, s.stop) for s in slices[1:]))]
                    part.copy_(read[tuple(slice(None, None, s.step) for s in slices)])
                else:
                    part = out.copy_(opened.get_tensor(name))
            self.check_finite(name, part)

    def check_finite(self, name: str, values: Tensor, problem: str = "values that are NaN or infinite") -> None:
        """Check that all values that were read from a tensor are finite.

        Raises:
            UserError: a value is NaN or infinite. The message names the problem.
        """
        if not values.isfinite().all():
            raise UserError(
                f"{self.file_of[name]}: the tensor {name} has {problem} in {values.dtype}; the file is damaged, or "
                "another dtype is needed"
            )

    def check_bytes(self, name: str, *dtypes: str) -> None:
        """Check that a tensor has one of these one-byte dtypes, named as in safetensors.

        Raises:
            UserError: the tensor has another dtype.
        """
        if self._stored[name] not in dtypes:
            raise UserError(
                f"{self.file_of[name]}: the tensor {name} has the dtype {self._stored[name]}; only "
                f"{' and '.join(dtypes)} can be read"
            )

    def read_bytes(self, name: str, slices: tuple[slice, ...]) -> Tensor:
        """Return part of a tensor that has a one-byte dtype, as uint8."""
        with opened_tensors(self.file_of[name]) as opened:
            part: Tensor = opened.get_slice(name)[tuple(slice(s.start, s.stop) for s in slices)]
        return part.view(torch.uint8)[tuple(slice(None, None, s.step) for s in slices)]

    def are_equal(self, name: str, other: str) -> bool:
        """Return whether two tensors have the same shape and values. At most a few rows are in memory at a time."""
        shape, dtype = self.shapes[name], torch.promote_types(self.dtype(name), self.dtype(other))
        if self.shapes[other] != shape:
            return False
        step = max(1, CHUNK_BYTES // max(1, math.prod(shape[1:]) * dtype.itemsize))
        for begin in range(0, shape[0], step):
            slices = (slice(begin, min(begin + step, shape[0])), *(slice(0, n) for n in shape[1:]))
            pair = [torch.empty(slices[0].stop - begin, *shape[1:], dtype=dtype) for _ in range(2)]
            for out, each in zip(pair, (name, other), strict=True):
                self.read_into(out, each, slices)
            if not torch.equal(*pair):
                return False
        return True

    def _listed(self) -> dict[str, Path]:
        """Return the file of each tensor according to the index, or an empty dictionary if there is a single file."""
        # If a folder has the single file and an index, read the single file, as transformers does.
        if (self.folder / SINGLE_FILE).exists():
            return {}
        index = self.folder / INDEX_FILE
        if not index.exists():
            raise UserError(_nothing_in(self.folder))
        try:
            names = parse_json(index.read_text(encoding="utf-8"))["weight_map"]
            listed = {name: self.folder / file for name, file in names.items()}
        except (ValueError, KeyError, AttributeError, TypeError):
            raise UserError(f"{index} is damaged: it maps no tensor to a file") from None
        for name, file in listed.items():
            if not file.exists():
                raise UserError(f"{file} is missing, but {index} says that it contains {name} and other tensors")
        return listed


@dataclass(frozen=True)
class Entry:
    """A tensor to write. ``make`` computes it just before it is written."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    make: Callable[[], Tensor]

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def write_tensor_files(folder: Path, entries: Sequence[Entry], shard_bytes: int = SHARD_BYTES) -> dict[str, int]:
    """Write tensors into a folder, in the layout of Hugging Face's checkpoints. Return each file's size in bytes."""
    shards = split_into_files(entries, shard_bytes)
    count = len(shards)
    files = [SINGLE_FILE] if count == 1 else [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]
    for file, shard in zip(files, shards, strict=True):
        write_tensors(folder / file, shard)
    if count > 1:
        weight_map = {entry.name: file for file, shard in zip(files, shards, strict=True) for entry in shard}
        total = {"total_size": sum(entry.bytes for entry in entries)}
        (folder / INDEX_FILE).write_text(json.dumps({"metadata": total, "weight_map": weight_map}, indent=2) + "\n")
    return {file: (folder / file).stat().st_size for file in files}


def split_into_files(entries: Sequence[Entry], most_bytes: int = SHARD_BYTES) -> list[list[Entry]]:
    """Assign tensors, in order, to files of at most ``most_bytes``. A larger tensor gets its own file."""
    files: list[list[Entry]] = [[]]
    for entry in entries:
        if files[-1] and sum(each.bytes for each in files[-1]) + entry.bytes > most_bytes:
            files.append([])
        files[-1].append(entry)
    return files


class Written(NamedTuple):
    """The size and checksum of a written file."""

    size: int
    """Size of the file in bytes."""
    xxh3: str
    """The 128-bit XXH3 checksum of the file's content, in hexadecimal."""


def write_tensors(path: Path, entries: Sequence[Entry], metadata: Mapping[str, str] | None = None) -> Written:
    """Write one safetensors file, a tensor at a time, and wait until it is on disk.

    We do not use the safetensors library's own writer, because it needs all tensors of a file in memory at once. The
    format is simple: the header's length in eight bytes, a JSON header padded to a multiple of eight bytes, and the
    tensors.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **(metadata or {})}}
    end = 0
    for entry in entries:
        begin, end = end, end + entry.bytes
        header[entry.name] = {
            "dtype": SAFETENSORS_NAMES[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    checksum, size = xxhash.xxh3_128(), 0
    with path.open("wb") as file, ThreadPoolExecutor(1) as hasher:
        for content in _contents(text, entries):  # Writing and hashing run in parallel, because both release the GIL.
            hashing = hasher.submit(checksum.update, content)
            size += file.write(content)
            hashing.result()
            del content  # Free the piece before creating the next one.
        file.flush()
        os.fsync(file.fileno())
    return Written(size, checksum.hexdigest())


def _contents(header: bytes, entries: Sequence[Entry]) -> Iterator[bytes | memoryview]:
    """Yield the content of a file, piece by piece."""
    yield struct.pack("<Q", len(header)) + header
    for entry in entries:
        tensor = entry.make()
        assert tensor.shape == entry.shape and tensor.dtype == entry.dtype, entry.name
        content = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data
        for begin in range(0, len(content), PIECE_BYTES):
            yield content[begin : begin + PIECE_BYTES]
        del tensor, content  # Free the tensor before creating the next one.


def whole_or_part(shape: Sequence[int], part: int | None) -> tuple[slice, ...]:
    """Return slices that select the full tensor, or only the entry ``part`` of its first dim if ``part`` is given."""
    slices = tuple(slice(0, n) for n in shape)
    return slices if part is None else (slice(part, part + 1), *slices[1:])


@contextmanager
def opened_tensors(file: Path) -> Iterator[Any]:
    """Open a safetensors file.

    Raises:
        UserError: the file cannot be opened, or the code inside the context fails to read it.
    """
    try:
        with safe_open(check_regular(file), framework="pt") as opened:
            yield opened
    except SafetensorError as error:
        raise UserError(f"{file} is damaged or not a safetensors file: {error}") from None
    except OSError as error:
        raise UserError(
            f"cannot read {file}: {error.strerror or error}; give a file that exists and is readable"
        ) from None


def _nothing_in(folder: Path) -> str:
    if any(folder.glob("*.bin")) or any(folder.glob("*.pt*")):
        return (
            f"{folder} has its weights only as pickles, which can run code and are never loaded; save them as "
            "safetensors (in transformers: model.save_pretrained)"
        )
    return f"{folder} has neither {SINGLE_FILE} nor {INDEX_FILE}"
