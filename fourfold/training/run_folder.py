"""Open and lock the folder of a run, and tell the user how to continue a stopped run."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fourfold.checkpoints.find_checkpoints import FOLDER as CHECKPOINTS
from fourfold.checkpoints.find_checkpoints import list_checkpoints, step_of
from fourfold.config.run import RunConfig
from fourfold.data.atomic_files import locked_folder
from fourfold.errors import UserError
from fourfold.training.metrics import steps_taken

SAMPLE_FILE, SUMMARY_FILE, RUN_FILE, ATTEMPTS_FILE = "sample.txt", "summary.json", "run.toml", "attempts.jsonl"
PROFILE_FILE = "profile/times.json"
"""File with the times of the steps that `train --profile` has profiled. The traces are in the same folder."""


def folder_of(run: RunConfig) -> Path:
    """Return the folder that a run writes to."""
    return Path(run.output_dir) / run.name


@contextmanager
def open_run_folder(run_dir: Path) -> Iterator[None]:
    """Create the folder of a run, and lock it against other jobs on this machine while the block runs.

    Raises:
        UserError: The folder cannot be created, or another job is training in it.
    """
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot create the run's folder, {run_dir}: {error.strerror}; change output_dir") from None
    with locked_folder(run_dir, f"another job is training in {run_dir}; wait for it, or change the run's name"):
        yield


def where_it_continues(run: RunConfig) -> str:
    """Return sentences that tell the user which checkpoint a stopped run has, how many steps are lost, and which
    command continues the run."""
    folder = folder_of(run)
    taken = steps_taken(folder)
    # Ignore checkpoints of later steps than `taken`. They come from an earlier attempt that got further than this
    # attempt.
    saved = [checkpoint for checkpoint in list_checkpoints(folder / CHECKPOINTS) if step_of(checkpoint) <= taken]
    if not saved:
        return f"There is no checkpoint yet: {_count(taken)} lost, and the same command starts again."
    command = "The same command"
    if run.checkpoint.resume != "auto":
        command += f" with --set checkpoint.resume={saved[-1]}"
    lost = taken - step_of(saved[-1])
    return f"The newest checkpoint is {saved[-1]}: {_count(lost)} lost. {command} continues from it."


def _count(steps: int) -> str:
    return "no step is" if steps == 0 else "1 step is" if steps == 1 else f"{steps:,} steps are"
