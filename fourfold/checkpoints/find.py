"""Find checkpoints: in a folder of them, in the folder of a run, and by ``checkpoint.resume``."""

from __future__ import annotations

from pathlib import Path

from fourfold.errors import UserError

STATE_FILE = "state.json"
"""The file that makes a folder a checkpoint: it is written last."""
FOLDER = "checkpoints"
"""Subfolder of a run's folder that holds its checkpoints."""


def step_of(checkpoint: Path) -> int:
    """The number of training steps that led to a checkpoint, from its name ``step_<number>``."""
    return int(checkpoint.name.removeprefix("step_"))


def list_checkpoints(folder: Path) -> list[Path]:
    """List the finished checkpoints in a folder, oldest first."""
    found = [p for p in folder.glob("step_*") if p.name[5:].isdecimal() and (p / STATE_FILE).exists()]
    return sorted(found, key=step_of)


def newest_checkpoint(path: Path) -> Path | None:
    """The checkpoint at ``path``, or the newest one in a folder of checkpoints or in the folder of a run."""
    if (path / STATE_FILE).exists():
        return path
    inside = list_checkpoints(path / FOLDER) or list_checkpoints(path)
    return inside[-1] if inside else None


def find_checkpoint(resume: str, folder: Path) -> Path | None:
    """The checkpoint from which a run resumes, whose own checkpoints are in ``folder``; None: it starts afresh.

    Raises ``UserError`` for a path without a checkpoint.
    """
    if resume == "never":
        return None
    if resume == "auto":
        return newest_checkpoint(folder)
    checkpoint = newest_checkpoint(Path(resume))
    if checkpoint is None:
        raise UserError(f"checkpoint.resume = '{resume}': there is no checkpoint (a folder with {STATE_FILE})")
    return checkpoint
