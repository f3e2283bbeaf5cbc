"""Clean up after a killed job, and remove checkpoints that are no longer needed."""

import sys
from pathlib import Path
from shutil import rmtree

from fourfold.checkpoints.find_checkpoints import BEST, best_checkpoint, list_checkpoints, step_of
from fourfold.data.atomic_files import swap_in


def tidy(folder: Path) -> None:
    """Remove incomplete checkpoints. If a killed job had moved a checkpoint aside, and had not yet put the
    new checkpoint in its place, restore the old checkpoint.

    Call this only while no other job uses the run's folder.
    """
    remove_unfinished(folder)
    for replaced in folder.glob(".step_*.replaced"):
        name = folder / replaced.name.removeprefix(".").removesuffix(".replaced")
        if name.exists():
            rmtree(replaced, ignore_errors=True)
        else:
            replaced.rename(name)


def set_later_aside(folder: Path, step: int) -> None:
    """Rename the checkpoints of all steps after `step`, because the run starts from `step` again.

    An earlier attempt wrote these checkpoints, and this run will repeat their steps. If the checkpoints kept their
    names, a later resume could load them by mistake.
    """
    for later in list_checkpoints(folder):
        if step_of(later) > step:
            if later.name == best_checkpoint(folder):
                (folder / BEST).unlink()
            swap_in(later, later.with_name(f"{later.name}.superseded"))


def remove_unfinished(folder: Path) -> None:
    """Remove checkpoints that a killed job was writing or removing."""
    for name in (".step_*.partial", ".step_*.removed"):
        for unfinished in folder.glob(name):
            rmtree(unfinished, ignore_errors=True)


def remove(checkpoint: Path) -> None:
    """Remove a checkpoint. If this fails, only print a warning.

    The checkpoint's folder is renamed first. So if the process is killed, no incomplete folder has the name of a
    checkpoint.
    """
    try:
        if checkpoint.is_symlink():
            checkpoint.unlink()
            return
        removed = checkpoint.with_name(f".{checkpoint.name}.removed")
        checkpoint.rename(removed)
        rmtree(removed)
    except OSError as error:
        print(f"warning: cannot remove the old checkpoint {checkpoint}: {error.strerror or error}", file=sys.stderr)
