"""List the machines that come with fourfold, without importing NumPy."""

import difflib
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable

FOLDER: Traversable = files("fourfold.planning.machines")


@cache
def machine_names() -> list[str]:
    """Return the names of the machines that come with fourfold, sorted."""
    return sorted(file.name.removesuffix(".toml") for file in FOLDER.iterdir() if file.name.endswith(".toml"))


def similar_machines(name: str) -> list[str]:
    """Return the machines whose name contains ``name`` (such as ``dgx-h100`` for ``h100``), or is a part of ``name``.

    If there are none, return the machine with the most similar name, or an empty list if no name is similar.
    """
    words = name.lower()
    containing = [machine for machine in machine_names() if words and (words in machine or machine in words)]
    return containing or difflib.get_close_matches(words, machine_names(), n=1)
