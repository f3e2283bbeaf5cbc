"""Files and folders that appear whole or not at all, and a lock between processes."""

import errno
import glob
import os
import platform
import shutil
import tempfile
import uuid
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from fourfold.errors import UserError

_LOCKS_UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EBADF)
"""EBADF is NFS's answer for a folder."""


def temporary_name(path: Path) -> Path:
    """The name beside `path` under which this process writes before it renames."""
    return path.with_name(f".{path.name}.{os.getpid()}.tmp")


def is_file_name(name: str) -> bool:
    """True for the name of a file in a folder, as opposed to a path."""
    return name not in ("", ".", "..") and Path(name).name == name and "\0" not in name and len(os.fsencode(name)) < 256


def write_whole(path: Path, content: bytes) -> None:
    """Write `content` to `path` by way of a temporary name, so that no reader ever sees a part of it."""
    temporary = temporary_name(path)
    try:
        temporary.write_bytes(content)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


class WriteFailed(UserError):
    """A file could not be written; often the disk is full."""


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an OSError of the block, such as a full disk, into a ``WriteFailed`` that names ``path``.

    A path that ends in no name is refused before.
    """
    if not path.name:
        raise WriteFailed(f"cannot write {path}: it is a folder; add the name of a file")
    try:
        yield
    except OSError as error:
        raise WriteFailed(f"cannot write {path}: {error.strerror or error}") from error


def write_output(path: Path, content: str | bytes) -> None:
    """Write a file for the user, whole or not at all; raises ``UserError`` where it cannot be written."""
    with writing(path):
        write_whole(path, content.encode() if isinstance(content, str) else content)


def swap_in(partial: Path, folder: Path) -> None:
    """Rename the folder `partial` to `folder`, in place of one that is there: no reader sees half of either."""
    replaced = folder.with_name(f".{folder.name}.replaced")
    shutil.rmtree(replaced, ignore_errors=True)
    if folder.exists():
        os.replace(folder, replaced)
    os.replace(partial, folder)
    shutil.rmtree(replaced, ignore_errors=True)


def flush(folder: Path) -> None:
    """Flush a folder's directory entries, and the content of its small files, to the disk.

    Tensor files are flushed when they are written.
    """
    for path in (*folder.glob("*.json"), folder):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Yield a folder to write into; it is renamed to `path` when the block ends, and removed when the block fails.

    Raises ``UserError`` when `path` exists or cannot be written.
    """
    if path.exists():
        raise UserError(f"{path} exists; choose another folder, or remove it")
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary_folder(path.parent, f".{path.name}.", ".partial") as unfinished:
            yield unfinished
            os.replace(unfinished, path)


@contextmanager
def temporary_folder(parent: Path | None = None, prefix: str = "fourfold-", suffix: str = "") -> Iterator[Path]:
    """Yield a new folder in ``parent`` (by default the system's for temporary files), and remove it after the block.

    Folders of the same prefix and suffix are removed too if a process of this machine has left them, as after
    ``kill -9``. Their owners hold a lock, which the kernel frees: unlike a process id, it is never someone else's.
    Folders of other machines stay, since their locks may not be visible here.
    """
    mode = 0o700 if parent is None else 0o777
    parent = Path(tempfile.gettempdir()) if parent is None else parent
    prefix += f"{zlib.crc32(platform.node().encode()):08x}-"
    for folder in parent.glob(f"{glob.escape(prefix)}*{glob.escape(suffix)}"):
        _remove_abandoned(folder)
    while True:
        folder = parent / f"{prefix}{uuid.uuid4().hex[:12]}{suffix}"
        folder.mkdir(mode)
        try:
            descriptor = os.open(folder, os.O_RDONLY)
        except FileNotFoundError:  # another process found it before it was locked
            continue
        _lock(descriptor, wait=True, refusal="")
        if _is_at(folder, descriptor):
            break
        os.close(descriptor)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(descriptor)


def _remove_abandoned(folder: Path) -> None:
    """Remove a folder that nobody has locked. It stays if its file system has no locks, or it is another user's."""
    import fcntl

    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(descriptor).st_uid == os.getuid():
                shutil.rmtree(folder)
        finally:
            os.close(descriptor)


@contextmanager
def locked(path: Path, *, wait: bool) -> Iterator[None]:
    """Hold an exclusive lock on `path` (created if absent) for the duration of the block.

    The kernel frees the lock when the process dies, so it is never stale. On a file system without locks (some
    parallel ones) the block runs without: callers use the lock to save work, not to be correct.

    Raises UserError if `wait` is false and another process holds it.
    """
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            file = path.open("a")
        except FileNotFoundError:  # removed, with its folder, by the process that held it
            continue
        with file:
            _lock(file.fileno(), wait, f"{path} is locked by another process; wait until that one has finished")
            if _is_at(path, file.fileno()):
                yield
                return


@contextmanager
def locked_folder(folder: Path, refusal: str) -> Iterator[None]:
    """Hold an exclusive lock on a folder for the duration of the block, without a file in it.

    Raises UserError(refusal) if another process holds it; on a file system without locks the block runs without.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        _lock(descriptor, wait=False, refusal=refusal)
        yield
    finally:
        os.close(descriptor)


def _lock(descriptor: int, wait: bool, refusal: str) -> None:
    import fcntl  # POSIX only; the rest of this file should import anywhere

    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(refusal) from None
    except OSError as error:
        if error.errno not in _LOCKS_UNSUPPORTED:
            raise


def _is_at(path: Path, descriptor: int) -> bool:
    """Return whether an open file is still the one at its path."""
    try:
        return path.stat().st_ino == os.fstat(descriptor).st_ino
    except FileNotFoundError:
        return False
