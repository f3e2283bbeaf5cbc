"""Find checkpoints: in a folder of them, in the folder of a run, and by ``checkpoint.resume``."""

from __future__ import annotations

from pathlib import Path

from fourfold.errors import UserError

STATE_FILE = "state.json"
FOLDER = "checkpoints"
"""Subfolder of a run's folder that holds its checkpoints."""
BEST = "best"
"""Link beside the checkpoints to the one with the lowest validation loss."""


def step_of(checkpoint: Path) -> int:
    """The number of training steps that led to a checkpoint, from its name ``step_<number>``."""
    return int(checkpoint.name.removeprefix("step_"))


def is_step_name(name: str) -> bool:
    """True for the name of a checkpoint of a run. Whatever has it was renamed when it was whole."""
    return name.startswith("step_") and name[5:].isdecimal()


def list_checkpoints(folder: Path) -> list[Path]:
    """List the checkpoints in a folder, oldest first, damaged ones too."""
    return sorted((path for path in folder.glob("step_*") if is_step_name(path.name)), key=step_of)


def checkpoints_at(path: Path) -> list[Path]:
    """The checkpoint at ``path``, or those in a folder of checkpoints or in the folder of a run, oldest first."""
    if (path / STATE_FILE).exists() or (is_step_name(path.name) and path.is_dir()):
        return [path]
    return list_checkpoints(path / FOLDER) or list_checkpoints(path)


def newest_checkpoint(path: Path) -> Path | None:
    """The checkpoint at ``path``, or the newest one in a folder of checkpoints or in the folder of a run."""
    found = checkpoints_at(path)
    return found[-1] if found else None


def best_checkpoint(folder: Path) -> str | None:
    """The name of the checkpoint in a folder that has the lowest validation loss, where one was kept."""
    link = folder / BEST
    return link.readlink().name if link.is_symlink() else None


def mark_best(checkpoint: Path) -> None:
    """Have the link point to this checkpoint."""
    link = checkpoint.with_name(f".{BEST}")
    link.unlink(missing_ok=True)
    link.symlink_to(checkpoint.name)
    link.replace(checkpoint.with_name(BEST))


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
