"""Compute checksums of a checkpoint's files while they are written, and compare them when the files are loaded.

The manifest stores the checksums. It is one more file in the checkpoint's folder:

    manifest-<checksum of the manifest>.json    size and checksum of every other file in the folder

The checksums are XXH3 (128 bits), because a CPU core computes them faster than it can read memory. They detect
accidental damage, but do not protect against an attacker.
"""

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
from fourfold.untrusted_files import check_regular

TENSORS = ".safetensors"
PIECE = 2**24
"""Number of bytes of a file that are in memory at a time. It must be a multiple of the page size."""


ELSEWHERE = "; resume from another checkpoint"
"""Advice at the end of an error message about damage. A run that falls back to another checkpoint removes this advice
from the message."""

BESIDE = "huggingface"
"""Subfolder of an imported model's checkpoint, with files that a later export copies, such as config.json and the
tokenizer. These files are not checked."""


class DamagedCheckpoint(UserError):
    """A checkpoint is incomplete, or has changed since it was written."""


def damaged(path: Path, reason: str) -> DamagedCheckpoint:
    """Return the error for a damaged file or checkpoint."""
    return DamagedCheckpoint(f"{path} is damaged: {reason}{ELSEWHERE}")


def seal(folder: Path, written: Mapping[str, Written] | None = None) -> None:
    """Write the manifest of a checkpoint. All other files of the checkpoint must be complete.

    Args:
        folder: The checkpoint's folder.
        written: Sizes and checksums that are already known, by file name. The function computes all other sizes and
            checksums.
    """
    known = dict(written or {})
    names = sorted(entry.name for entry in os.scandir(folder) if entry.is_file(follow_symlinks=False))
    entries = {name: known.get(name) or _measure(folder / name) for name in names}
    content = (json.dumps({name: entry._asdict() for name, entry in entries.items()}, indent=1) + "\n").encode()
    (folder / f"manifest-{xxhash.xxh3_128_hexdigest(content)}.json").write_bytes(content)


def check_small_file(file: Path) -> None:
    """Compare the checksum of one file with the manifest in the file's folder.

    Raises:
        DamagedCheckpoint: The file or the manifest is missing or has changed.
    """
    entry = _read_manifest(file.parent).get(file.name)
    if entry is None or not file.is_file():
        raise damaged(file, "it is missing, or it is not a file")
    _check_content(file, entry)


def check_listing(folder: Path) -> None:
    """Check that the folder has every file of the manifest, and no other files.

    Raises:
        DamagedCheckpoint: A file is missing or unknown, or the manifest is damaged.
    """
    entries, found = _read_manifest(folder), {path.name for path in folder.iterdir()}
    for name in entries:
        if name not in found:
            raise damaged(folder / name, "it is missing")
    for name in sorted(found):
        if name not in entries and not name.startswith("manifest-") and name != BESIDE:
            raise damaged(folder / name, "it is not in the manifest of this checkpoint")


def check_files(folder: Path, rank: int = 0, ranks: int = 1) -> None:
    """Check the size of each file, and the content of each file that is not a tensor file. A link is an error.

    ``check_contents`` checks the contents of tensor files. Several processes can divide the files among them.

    Args:
        folder: The checkpoint's folder.
        rank: Index of this process. It checks every ``ranks``-th file, starting with this index.
        ranks: Number of processes that divide the files.

    Raises:
        DamagedCheckpoint: A file has changed since it was written.
    """
    for name, entry in list(_read_manifest(folder).items())[rank::ranks]:
        file = folder / name
        try:
            found = file.lstat()
        except OSError:
            raise damaged(file, "it is missing") from None
        if not stat.S_ISREG(found.st_mode):
            raise damaged(file, "it is a link, a folder or a pipe instead of a file")
        if found.st_size != entry.size:
            raise damaged(file, f"it has {found.st_size:,} bytes, but {entry.size:,} were written")
        if file.suffix != TENSORS:
            _check_content(file, entry)


def check_contents(folder: Path, rank: int = 0, ranks: int = 1) -> None:
    """Compare the checksums of the tensor files with the manifest. Several processes can divide the files among them.

    If every process wrote a file, and the same grid loads the checkpoint, each process checks the file that it reads.

    Args:
        folder: The checkpoint's folder.
        rank: Index of this process. It checks every ``ranks``-th tensor file, starting with this index.
        ranks: Number of processes that divide the files.

    Raises:
        DamagedCheckpoint: A checksum differs.
    """
    tensors = [(name, entry) for name, entry in _read_manifest(folder).items() if name.endswith(TENSORS)]
    for name, entry in tensors[rank::ranks]:
        _check_content(folder / name, entry)


def size_of(folder: Path) -> tuple[int, int]:
    """Return the number of files in a checkpoint, and their total size in bytes, according to the manifest."""
    entries = _read_manifest(folder).values()
    return len(entries), sum(entry.size for entry in entries)


def _read_manifest(folder: Path) -> dict[str, Written]:
    manifests = list(folder.glob("manifest-*.json"))
    if len(manifests) != 1:
        raise damaged(folder, "it has no manifest" if not manifests else "it has several manifests")
    (manifest,) = manifests
    if manifest.is_symlink() or not manifest.is_file():
        raise damaged(manifest, "it is a link or a folder instead of a file")
    content = manifest.read_bytes()
    if manifest.stem.removeprefix("manifest-") != xxhash.xxh3_128_hexdigest(content):
        raise damaged(manifest, "its checksum differs from the one in its name")
    try:
        entries = {name: Written(int(entry["size"]), str(entry["xxh3"])) for name, entry in parse_json(content).items()}
    except (ValueError, OverflowError, TypeError, KeyError, AttributeError):
        raise damaged(manifest, "it is not a list of files") from None
    for name in entries:
        if Path(name).name != name:
            raise damaged(manifest, f"it names a file outside the checkpoint, {name}")
    return entries


def _check_content(file: Path, entry: Written) -> None:
    try:
        same = _compute_checksum(file) == entry.xxh3
    except OSError as error:
        raise damaged(file, f"it cannot be read: {error.strerror or error}") from None
    if not same:
        raise damaged(file, "its content is not what was written (checksum)")


def _measure(file: Path) -> Written:
    return Written(file.stat().st_size, _compute_checksum(file))


def _compute_checksum(file: Path) -> str:
    """Return the XXH3 checksum of a file. Memory-mapping the file is three times as fast as reading it."""
    checksum = xxhash.xxh3_128()
    with check_regular(file).open("rb") as opened:
        if size := file.stat().st_size:
            with mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as content, memoryview(content) as view:
                for begin in range(0, size, PIECE):
                    piece = min(PIECE, size - begin)
                    checksum.update(view[begin : begin + piece])
                    content.madvise(mmap.MADV_DONTNEED, begin, piece)
    return checksum.hexdigest()
