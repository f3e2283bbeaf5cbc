"""Checksums of a checkpoint's files: made while they are written, compared before anything in them is used.

    manifest-<checksum of the manifest>.json    size and checksum of every file beside it

Checksums are XXH3 (128 bits), which is faster than memory. They find damage, not an attacker.
"""

from __future__ import annotations

import json
import mmap
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist
import xxhash
from torch.distributed.checkpoint.filesystem import FileSystem

from fourfold.errors import UserError
from fourfold.heartbeat import doing
from fourfold.parsing import parse_json

TENSORS = ".safetensors"
NOTE = ".xxh3"
"""End of the name of a small file beside a file that is not yet in a manifest: its checksum."""


PIECE = 2**24
"""Bytes of a file that are in memory at once, lest they count as this process's; a multiple of the page size."""


class DamagedCheckpoint(UserError):
    """A checkpoint is not what was written."""


class Entry(NamedTuple):
    """A file in the manifest."""

    size: int
    xxh3: str


class ChecksummedFiles(FileSystem):
    """Writes files for torch.distributed.checkpoint, and beside each a note of its checksum."""

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        with super().create_stream(path, mode) as stream:
            counted = _Checksummed(stream)
            yield counted
        Path(f"{path}{NOTE}").write_text(counted.checksum.hexdigest(), encoding="ascii")


class _Checksummed:
    """A stream that sums up what is written to it."""

    def __init__(self, stream: Any) -> None:
        self.stream, self.checksum = stream, xxhash.xxh3_128()

    def write(self, content: bytes) -> int:
        doing("writing a checkpoint")
        self.checksum.update(content)
        return int(self.stream.write(content))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def seal(folder: Path) -> None:
    """Write the manifest of a folder whose files are all there, from the notes where there are any."""
    entries = {}
    for file in sorted(path for path in folder.iterdir() if path.is_file() and path.suffix != NOTE):
        note = file.with_name(file.name + NOTE)
        checksum = note.read_text(encoding="ascii") if note.exists() else _checksum(file)
        entries[file.name] = Entry(file.stat().st_size, checksum)._asdict()
        note.unlink(missing_ok=True)
    content = (json.dumps(entries, indent=1) + "\n").encode()
    (folder / f"manifest-{xxhash.xxh3_128_hexdigest(content)}.json").write_bytes(content)


def check_small_file(file: Path) -> None:
    """Compare the checksum of one file. Raises ``DamagedCheckpoint``."""
    entry = _entries(file.parent).get(file.name)
    if entry is None or not file.is_file():
        raise _damaged(file, "it is missing")
    _check_content(file, entry)


def check_files(folder: Path) -> None:
    """Check the manifest, the sizes, that nothing is missing, linked or added, and the content of small files.

    Raises ``DamagedCheckpoint``.
    """
    entries = _entries(folder)
    for name, entry in entries.items():
        file = folder / name
        try:
            found = file.lstat()
        except OSError:
            raise _damaged(file, "it is missing") from None
        if not stat.S_ISREG(found.st_mode):
            raise _damaged(file, "it is a link or a folder, and a file was written")
        if found.st_size != entry.size:
            raise _damaged(file, f"it has {found.st_size:,} bytes, and {entry.size:,} were written")
        if file.suffix != TENSORS:
            _check_content(file, entry)
    for file in folder.glob(f"*{TENSORS}"):
        if file.name not in entries:
            raise _damaged(file, "it belongs to no file list of this checkpoint")


def check_contents(folder: Path, rank: int = 0, ranks: int = 1) -> None:
    """Compare the checksums of this rank's share of the tensor files. Raises ``DamagedCheckpoint``."""
    tensors = [(name, entry) for name, entry in _entries(folder).items() if name.endswith(TENSORS)]
    for name, entry in tensors[rank::ranks]:
        _check_content(folder / name, entry)


def check_together(folder: Path, check_structure: Callable[[Path], None] = check_files) -> None:
    """Check a folder, of whose contents every process reads a share, and the first process the structure.

    Raises the same ``DamagedCheckpoint`` on all processes.
    """
    damage = None
    try:
        if dist.get_rank() == 0:
            check_structure(folder)
        check_contents(folder, dist.get_rank(), dist.get_world_size())
    except DamagedCheckpoint as error:
        damage = str(error)
    everyone: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, damage)
    found = next((each for each in everyone if each is not None), None)
    if found is not None:
        raise DamagedCheckpoint(found)


def size_of(folder: Path) -> tuple[int, int]:
    """Files and bytes of a checkpoint, by its manifest."""
    entries = _entries(folder).values()
    return len(entries), sum(entry.size for entry in entries)


def _entries(folder: Path) -> dict[str, Entry]:
    manifests = list(folder.glob("manifest-*.json"))
    if len(manifests) != 1:
        raise _damaged(folder, "it has no manifest" if not manifests else "it has several manifests")
    (manifest,) = manifests
    if manifest.is_symlink():
        raise _damaged(manifest, "it is a link, and a file was written")
    content = manifest.read_bytes()
    if manifest.stem.removeprefix("manifest-") != xxhash.xxh3_128_hexdigest(content):
        raise _damaged(manifest, "its checksum is not the one in its name")
    try:
        entries = {name: Entry(int(entry["size"]), str(entry["xxh3"])) for name, entry in parse_json(content).items()}
    except (ValueError, TypeError, KeyError, AttributeError):
        raise _damaged(manifest, "it is no list of files") from None
    for name in entries:
        if Path(name).name != name:
            raise _damaged(manifest, f"it names a file outside the checkpoint, {name}")
    return entries


def _check_content(file: Path, entry: Entry) -> None:
    if _checksum(file) != entry.xxh3:
        raise _damaged(file, "its content is not what was written (checksum)")


def _checksum(file: Path) -> str:
    """XXH3 of a file that is mapped, which is three times as fast as reading, and let go piece by piece."""
    checksum = xxhash.xxh3_128()
    with file.open("rb") as opened:
        if size := file.stat().st_size:
            with mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as content, memoryview(content) as view:
                for begin in range(0, size, PIECE):
                    piece = min(PIECE, size - begin)
                    checksum.update(view[begin : begin + piece])
                    content.madvise(mmap.MADV_DONTNEED, begin, piece)
    return checksum.hexdigest()


def _damaged(path: Path, reason: str) -> DamagedCheckpoint:
    return DamagedCheckpoint(f"{path} is damaged: {reason}; resume from another checkpoint")
