"""Checksums of a checkpoint's files: made while they are written, compared before anything in them is used.

    manifest-<checksum of the manifest>.json    size and checksum of every file beside it

Checksums are XXH3 (128 bits), which is faster than memory. They find damage, not an attacker.
"""

from __future__ import annotations

import json
import mmap
import os
import stat
from collections.abc import Mapping
from pathlib import Path

import xxhash

from fourfold.errors import UserError
from fourfold.models.tensor_files import Written
from fourfold.parsing import parse_json
from fourfold.untrusted_files import regular

TENSORS = ".safetensors"
PIECE = 2**24
"""Bytes of a file that are mapped at a time, to keep this process's memory small; a multiple of the page size."""


ELSEWHERE = "; resume from another checkpoint"
"""The end of a message about damage as long as no other checkpoint has been found."""

BESIDE = "huggingface"
"""Subfolder of an imported model, with small files that its export copies; it is not checked."""


class DamagedCheckpoint(UserError):
    """A checkpoint is not what was written."""


def seal(folder: Path, written: Mapping[str, Written] | None = None) -> None:
    """Write the manifest of a folder whose files are all there; ``written`` has those whose checksums are known."""
    known = dict(written or {})
    names = sorted(entry.name for entry in os.scandir(folder) if entry.is_file(follow_symlinks=False))
    entries = {name: known.get(name) or _found(folder / name) for name in names}
    content = (json.dumps({name: entry._asdict() for name, entry in entries.items()}, indent=1) + "\n").encode()
    (folder / f"manifest-{xxhash.xxh3_128_hexdigest(content)}.json").write_bytes(content)


def check_small_file(file: Path) -> None:
    """Compare the checksum of one file. Raises ``DamagedCheckpoint``."""
    entry = _entries(file.parent).get(file.name)
    if entry is None or not file.is_file():
        raise _damaged(file, "it is missing")
    _check_content(file, entry)


def check_listing(folder: Path) -> None:
    """Check that every file of the manifest is there, and nothing that it does not name.

    Raises ``DamagedCheckpoint``.
    """
    entries, found = _entries(folder), {path.name for path in folder.iterdir()}
    for name in entries:
        if name not in found:
            raise _damaged(folder / name, "it is missing")
    for name in sorted(found):
        if name not in entries and not name.startswith("manifest-") and name != BESIDE:
            raise _damaged(folder / name, "it belongs to no file list of this checkpoint")


def check_files(folder: Path, rank: int = 0, ranks: int = 1) -> None:
    """Check a share of the files: their sizes, that none is a link, and the content of small ones.

    Raises ``DamagedCheckpoint``.
    """
    for name, entry in list(_entries(folder).items())[rank::ranks]:
        file = folder / name
        try:
            found = file.lstat()
        except OSError:
            raise _damaged(file, "it is missing") from None
        if not stat.S_ISREG(found.st_mode):
            raise _damaged(file, "it is a link, a folder or a pipe, and a file was written")
        if found.st_size != entry.size:
            raise _damaged(file, f"it has {found.st_size:,} bytes, and {entry.size:,} were written")
        if file.suffix != TENSORS:
            _check_content(file, entry)


def check_contents(folder: Path, rank: int = 0, ranks: int = 1) -> None:
    """Compare the checksums of a share of the tensor files. Raises ``DamagedCheckpoint``.

    On the grid that wrote them, each process checks the file that it reads.
    """
    tensors = [(name, entry) for name, entry in _entries(folder).items() if name.endswith(TENSORS)]
    for name, entry in tensors[rank::ranks]:
        _check_content(folder / name, entry)


def size_of(folder: Path) -> tuple[int, int]:
    """Files and bytes of a checkpoint, by its manifest."""
    entries = _entries(folder).values()
    return len(entries), sum(entry.size for entry in entries)


def _entries(folder: Path) -> dict[str, Written]:
    manifests = list(folder.glob("manifest-*.json"))
    if len(manifests) != 1:
        raise _damaged(folder, "it has no manifest" if not manifests else "it has several manifests")
    (manifest,) = manifests
    if manifest.is_symlink() or not manifest.is_file():
        raise _damaged(manifest, "it is a link or a folder, and a file was written")
    content = manifest.read_bytes()
    if manifest.stem.removeprefix("manifest-") != xxhash.xxh3_128_hexdigest(content):
        raise _damaged(manifest, "its checksum is not the one in its name")
    try:
        entries = {name: Written(int(entry["size"]), str(entry["xxh3"])) for name, entry in parse_json(content).items()}
    except (ValueError, OverflowError, TypeError, KeyError, AttributeError):
        raise _damaged(manifest, "it is no list of files") from None
    for name in entries:
        if Path(name).name != name:
            raise _damaged(manifest, f"it names a file outside the checkpoint, {name}")
    return entries


def _check_content(file: Path, entry: Written) -> None:
    try:
        same = _checksum(file) == entry.xxh3
    except OSError as error:
        raise _damaged(file, f"it cannot be read: {error.strerror or error}") from None
    if not same:
        raise _damaged(file, "its content is not what was written (checksum)")


def _found(file: Path) -> Written:
    return Written(file.stat().st_size, _checksum(file))


def _checksum(file: Path) -> str:
    """XXH3 of a file, mapped and released piece by piece: three times as fast as reading it."""
    checksum = xxhash.xxh3_128()
    with regular(file).open("rb") as opened:
        if size := file.stat().st_size:
            with mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as content, memoryview(content) as view:
                for begin in range(0, size, PIECE):
                    piece = min(PIECE, size - begin)
                    checksum.update(view[begin : begin + piece])
                    content.madvise(mmap.MADV_DONTNEED, begin, piece)
    return checksum.hexdigest()


def _damaged(path: Path, reason: str) -> DamagedCheckpoint:
    return DamagedCheckpoint(f"{path} is damaged: {reason}{ELSEWHERE}")
