"""Describe the hardware, software, and source code of a run for experiment trackers."""

from __future__ import annotations

import os
import platform
import subprocess

import torch

import fourfold
from fourfold.processes import available_cores

_GIT_SECONDS = 20.0
"""Give up on git after this many seconds, for example if the repository is on a slow file system."""


def provenance(device_name: str, processes: int) -> dict[str, str | int | float]:
    """Return facts about this machine and the git repository of the current folder, by name.

    ``git_changes`` counts files that are changed or untracked.
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
        if branch:  # The branch is empty if HEAD is detached.
            facts["git_branch"] = branch
    return facts


def _git(*arguments: str) -> str | None:
    """Return the output of a git command in the current folder, or None if there is no git or no repository."""
    try:
        done = subprocess.run(
            ["git", *arguments], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_GIT_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
