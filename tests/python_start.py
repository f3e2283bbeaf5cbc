"""Run code at the start of every Python process of a test."""

from __future__ import annotations

import os
from pathlib import Path


def run_at_start(folder: Path, code: str, *paths: Path) -> dict[str, str]:
    """Return an environment for processes. In it, Python runs this code before anything else, because Python imports
    the module ``sitecustomize`` when it starts.

    Args:
        folder: Folder for the file with the code.
        code: The code.
        paths: More folders that the processes can import modules from.
    """
    (folder / "sitecustomize.py").write_text(code)
    places = [str(folder), *map(str, paths), os.environ.get("PYTHONPATH", "")]
    return {"PYTHONPATH": os.pathsep.join(places)}
