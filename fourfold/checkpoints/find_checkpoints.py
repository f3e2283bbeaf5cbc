"""Find the checkpoints of a run, and the checkpoint that a run resumes from."""

from pathlib import Path

from fourfold.errors import UserError

STATE_FILE = "state.json"
FOLDER = "checkpoints"
"""Subfolder of a run's folder that holds its checkpoints."""
BEST = "best"
"""Name of a link next to the checkpoints. The link points to the checkpoint with the lowest validation loss."""


def step_of(checkpoint: Path) -> int:
    """Return the number of finished training steps from a checkpoint's name, `step_<number>`."""
    return int(checkpoint.name.removeprefix("step_"))


def is_step_name(name: str) -> bool:
    """Return whether a name has the form `step_<number>`. Only complete checkpoints have such names."""
    return name.startswith("step_") and name[5:].isdecimal()


def list_checkpoints(folder: Path) -> list[Path]:
    """List the checkpoints in a folder, oldest first. The list includes damaged checkpoints."""
    return sorted((path for path in folder.glob("step_*") if is_step_name(path.name)), key=step_of)


def checkpoints_at(path: Path) -> list[Path]:
    """List the checkpoints at a path, oldest first.

    Args:
        path: One checkpoint, a folder of checkpoints, or a run's folder.
    """
    if (path / STATE_FILE).exists() or (is_step_name(path.name) and path.is_dir()):
        return [path]
    return list_checkpoints(path / FOLDER) or list_checkpoints(path)


def newest_checkpoint(path: Path) -> Path | None:
    """Return the newest checkpoint at a path, or None if there is none.

    Args:
        path: One checkpoint, a folder of checkpoints, or a run's folder.
    """
    found = checkpoints_at(path)
    return found[-1] if found else None


def best_checkpoint(folder: Path) -> str | None:
    """Return the name of the checkpoint with the lowest validation loss, or None if the link `best` is missing."""
    link = folder / BEST
    return link.readlink().name if link.is_symlink() else None


def mark_best(checkpoint: Path) -> None:
    """Make the link `best` point to this checkpoint."""
    link = checkpoint.with_name(f".{BEST}")
    link.unlink(missing_ok=True)
    link.symlink_to(checkpoint.name)
    link.replace(checkpoint.with_name(BEST))


def find_checkpoint(resume: str, folder: Path) -> Path | None:
    """Return the checkpoint that a run resumes from, or None if the run starts from the beginning.

    Args:
        resume: The value of `checkpoint.resume`: "never", "auto", or a path.
        folder: Folder of the run's own checkpoints.

    Raises:
        UserError: `resume` is a path without a checkpoint.
    """
    if resume == "never":
        return None
    if resume == "auto":
        return newest_checkpoint(folder)
    checkpoint = newest_checkpoint(Path(resume))
    if checkpoint is None:
        known = f"there is no checkpoint (a folder with {STATE_FILE})"
        raise UserError(f"checkpoint.resume = '{resume}': {known}; give the path of a checkpoint, or 'auto'")
    return checkpoint
