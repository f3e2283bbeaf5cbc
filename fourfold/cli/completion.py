"""Complete values of arguments and options with the Tab key. The shell itself completes all other paths."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable


def toml_files(incomplete: str) -> list[str]:
    """Return the .toml files whose paths begin with the text, also inside folders. Return nothing if there are none."""
    folder, start = os.path.split(incomplete)
    found = []
    for entry in _entries(folder or "."):
        if not entry.name.startswith(start) or (not start and entry.name.startswith(".")):
            continue
        path = os.path.join(folder, entry.name)
        if entry.is_dir():
            found += [os.path.join(path, inner.name) for inner in _entries(path) if inner.name.endswith(".toml")]
        elif entry.name.endswith(".toml"):
            found.append(path)
    return sorted(found)


def one_of(names: Callable[[], Iterable[str]]) -> Callable[[str], list[str]]:
    """Make a completion of names."""
    return lambda incomplete: [name for name in names() if name.startswith(incomplete)]


def one_of_or_toml(names: Callable[[], Iterable[str]]) -> Callable[[str], list[str]]:
    """Make a completion of names. If no name matches, complete .toml files."""
    return lambda incomplete: one_of(names)(incomplete) or toml_files(incomplete)


def _entries(folder: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except OSError:  # The folder does not exist or is not readable.
        return []
