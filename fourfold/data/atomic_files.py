"""Write files and folders that appear completely or not at all, and lock them between processes."""

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fourfold.errors import UserError

_LOCKS_UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EBADF)
"""Errors that `flock` raises on file systems without locks. NFS raises EBADF if the locked path is a folder."""

_REMEDIES = {
    errno.ENOENT: "make its folder first, or choose another path",
    errno.EISDIR: "add a file name",
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "free some space, or choose another path"),
}


def temporary_name(path: Path) -> Path:
    """Return a temporary path in the folder of `path`. The caller writes there, and then renames the file to `path`."""
    return path.with_name(f".{path.name}.{os.getpid()}.tmp")


def is_file_name(name: str) -> bool:
    """Return whether `name` is a plain file name, not a path."""
    return name not in ("", ".", "..") and Path(name).name == name and "\0" not in name and len(os.fsencode(name)) < 256


def write_whole(path: Path, content: bytes) -> None:
    """Write `content` to a temporary file and rename the file to `path`, so that no reader sees an incomplete file."""
    temporary = temporary_name(path)
    try:
        temporary.write_bytes(content)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


class WriteFailed(UserError):
    """A file or folder could not be written, often because the disk is full."""


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an OSError in the block, such as a full disk, into a `WriteFailed` that names `path`.

    Raises:
        WriteFailed: The block raised an OSError, or `path` has no file name.
    """
    if not path.name:
        raise WriteFailed(f"cannot write {path}: it is a folder; add a file name")
    try:
        yield
    except OSError as error:
        remedy = _REMEDIES.get(error.errno or 0, "choose another path")
        raise WriteFailed(f"cannot write {path}: {error.strerror or error}; {remedy}") from error


def check_writable(path: Path, option: str, name: str) -> None:
    """Check that the output file that a command-line option names can be written. Call this before a long computation.

    Args:
        path: The output file.
        option: Name of the option for the error message, such as "--out".
        name: Example of a file name. The error message suggests it if `path` is a folder.

    Raises:
        UserError: The file is a folder, or its folder is missing or read-only.
    """
    if path.is_dir():
        raise UserError(f"{option} {path} is a folder; add a file name, such as {option} {path / name}")
    if not os.access(path.parent, os.W_OK):
        raise UserError(f"{option} {path}: there is no folder {path.parent}, or it is read-only; choose another folder")


def write_output(path: Path, content: str | bytes) -> None:
    """Write an output file, completely or not at all. Text is written as UTF-8.

    Raises:
        WriteFailed: The file cannot be written.
    """
    with writing(path):
        write_whole(path, content.encode() if isinstance(content, str) else content)


def swap_in(partial: Path, folder: Path) -> None:
    """Rename the folder `partial` to `folder`. If `folder` already exists, the old folder is removed. No reader sees an
    incomplete folder."""
    replaced = folder.with_name(f".{folder.name}.replaced")
    shutil.rmtree(replaced, ignore_errors=True)
    if folder.exists():
        os.replace(folder, replaced)
    os.replace(partial, folder)
    shutil.rmtree(replaced, ignore_errors=True)


def flush(folder: Path) -> None:
    """Flush a folder's list of entries and its JSON files to disk (fsync). Tensor files need no flush here: they are
    flushed when they are written."""
    for path in (*folder.glob("*.json"), folder):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Yield a temporary folder to write to. If the block succeeds, the folder is renamed to `path`. If the block raises
    an error, the folder is removed.

    Raises:
        UserError: `path` exists or cannot be written.
    """
    if path.exists():
        raise UserError(f"{path} exists; choose another folder, or remove it")
    with writing(path):
        unfinished = temporary_name(path)
        shutil.rmtree(unfinished, ignore_errors=True)  # An earlier process with the same id may have left this folder.
        unfinished.mkdir(parents=True)
        try:
            yield unfinished
            os.replace(unfinished, path)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)


@contextmanager
def locked(path: Path, *, wait: bool) -> Iterator[None]:
    """Hold an exclusive lock on `path` during the block. The file is created if it does not exist.

    The kernel releases the lock when the process dies, so a lock is never stale. On file systems without locks, the
    block runs without a lock. So use this function only to avoid repeated work, not for correctness.

    Args:
        path: File to lock.
        wait: Whether to wait for another process that holds the lock.

    Raises:
        UserError: Another process holds the lock and `wait` is false.
    """
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            file = path.open("a")
        except FileNotFoundError:  # The process that held the lock removed the folder. Try again.
            continue
        with file:
            _lock(file.fileno(), wait, f"{path} is locked by another process; wait until it has finished")
            if _is_at(path, file.fileno()):
                yield
                return


@contextmanager
def locked_folder(folder: Path, refusal: str) -> Iterator[None]:
    """Hold an exclusive lock on a folder during the block. No lock file is created.

    If the file system has no locks, the block runs without one.

    Raises:
        UserError: Another process holds the lock. The message is `refusal`.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        _lock(descriptor, wait=False, refusal=refusal)
        yield
    finally:
        os.close(descriptor)


def _lock(descriptor: int, wait: bool, refusal: str) -> None:
    import fcntl  # fcntl exists only on POSIX, but this module must be importable on every system.

    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(refusal) from None
    except OSError as error:
        if error.errno not in _LOCKS_UNSUPPORTED:
            raise


def _is_at(path: Path, descriptor: int) -> bool:
    """Return whether the open file is still at `path`. Another process may have removed or replaced the file."""
    try:
        return path.stat().st_ino == os.fstat(descriptor).st_ino
    except FileNotFoundError:
        return False
