"""The hardware, the software and the source code that a run is made with, as experiment trackers keep it."""

from __future__ import annotations

import os
import platform
import subprocess

import torch

import fourfold
from fourfold.processes import available_cores

_GIT_SECONDS = 20.0
"""A repository on a slow file system is left out after so long."""


def provenance(device_name: str, processes: int) -> dict[str, str | int | float]:
    """Name and value of each fact: of the first rank's machine, and of the git repository that it runs in, if any.

    ``git_changes`` counts the files that differ from the commit, or that git does not know.
    """
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    facts: dict[str, str | int | float] = {
        "device": device_name,
        "processes": processes,
        "host": platform.node(),
        "platform": platform.platform(),
        "cores": available_cores(),
        "memory_gib": round(memory / 2**30, 1),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "fourfold": fourfold.__version__,
    }
    if torch.version.cuda is not None:
        facts["cuda"] = torch.version.cuda
    if torch.version.hip is not None:
        facts["hip"] = torch.version.hip
    commit = _git("rev-parse", "HEAD")
    changes = _git("status", "--porcelain")
    if commit is not None and changes is not None:
        facts |= {"git_commit": commit, "git_changes": len(changes.splitlines())}
        branch = _git("branch", "--show-current")
        if branch:  # none where a commit is checked out
            facts["git_branch"] = branch
    return facts


def _git(*arguments: str) -> str | None:
    """Output of a git command in the current folder; None without git or a repository."""
    try:
        done = subprocess.run(
            ["git", *arguments], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_GIT_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
