"""Files that appear whole or not at all, and a lock between processes."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fourfold.errors import UserError

_LOCKS_UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


def temporary_name(path: Path) -> Path:
    """The name beside `path` under which this process writes before it renames."""
    return path.with_name(f".{path.name}.{os.getpid()}.tmp")


def write_whole(path: Path, content: bytes) -> None:
    """Write `content` to `path` by way of a temporary name, so that no reader ever sees half of it."""
    temporary = temporary_name(path)
    try:
        temporary.write_bytes(content)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_output(path: Path, content: str | bytes) -> None:
    """Write what a user has asked for, whole or not at all; raises ``UserError`` where it cannot be."""
    try:
        write_whole(path, content.encode() if isinstance(content, str) else content)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}") from None


@contextmanager
def locked(path: Path, *, wait: bool) -> Iterator[None]:
    """Hold an exclusive lock on `path` (created if absent) for the duration of the block.

    The kernel frees the lock when the process dies, so it is never stale. Where the file system knows no locks
    (some parallel file systems) the block runs without: callers use the lock to save work, not to be correct.

    Raises UserError if `wait` is false and another process holds it.
    """
    import fcntl  # POSIX only; the rest of the room should import anywhere

    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            file = path.open("a")
        except FileNotFoundError:  # removed, with its folder, by the one that held it
            continue
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise UserError(f"{path} is locked by another process; wait until that one has finished") from error
            except OSError as error:
                if error.errno not in _LOCKS_UNSUPPORTED:
                    raise
            if _is_at(path, file.fileno()):
                yield
                return


def _is_at(path: Path, descriptor: int) -> bool:
    """Whether an open file is still what its path names."""
    try:
        return path.stat().st_ino == os.fstat(descriptor).st_ino
    except FileNotFoundError:
        return False
