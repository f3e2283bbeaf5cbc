"""The clients of experiment trackers behind one small interface: TensorBoard, Weights & Biases, Trackio."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from fourfold.config.run import RunConfig
from fourfold.data.files import write_whole
from fourfold.run_file.dump import to_toml

Numbers = Mapping[str, float]


@dataclass(frozen=True)
class TrackedRun:
    """A run as trackers describe it."""

    run: RunConfig
    run_dir: Path
    machine: Callable[[], Mapping[str, str | int | float]]
    """Hardware, versions and git state (``provenance``)."""

    @property
    def project(self) -> str:
        return self.run.metrics.project

    def description(self) -> dict[str, Any]:
        """The resolved run file, section by section, and the machine."""
        return {**self.run.model_dump(mode="json"), "machine": dict(self.machine())}

    def id_file(self, tracker: str) -> Path:
        """Where the tracker's own id of the run is kept, so that a resumed run continues it."""
        return self.run_dir / f"{tracker}-run-id.txt"


class Tracker(Protocol):
    """A client of one tracker, made with a ``TrackedRun`` and the steps taken: above 0 it continues the same run.

    Every call comes from one thread. A client may raise anything.
    """

    def log(self, step: int, numbers: Numbers) -> None:
        """Record the numbers of one step, counted from 1."""
        ...

    def finish(self, failed: bool) -> None:
        """End the tracked run, and deliver what has not been."""
        ...


class TensorBoard:
    """Events in the run's folder, in tensorboard/."""

    def __init__(self, tracked: TrackedRun, first_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # TensorBoard hides the events from purge_step on, which an interrupted run wrote.
        self._writer = SummaryWriter(str(tracked.run_dir / "tensorboard"), purge_step=first_step + 1)
        machine = "\n".join(f"{key} = {value}" for key, value in tracked.machine().items())
        for name, text in (("run file", to_toml(tracked.run)), ("machine", machine)):
            indented = "".join(f"    {line}\n" for line in text.splitlines())  # Markdown's literal text
            self._writer.add_text(name, indented, first_step + 1)
        self._writer.flush()

    def log(self, step: int, numbers: Numbers) -> None:
        for key, value in numbers.items():
            self._writer.add_scalar(key, value, step)

    def finish(self, failed: bool) -> None:
        self._writer.close()


class WeightsAndBiases:
    """A run of Weights & Biases, whose files are in the run's folder, in wandb/; WANDB_MODE=offline keeps them there.

    Steps are a number of their own (``step``), since W&B refuses to go back to an earlier one.
    """

    def __init__(self, tracked: TrackedRun, first_step: int) -> None:
        import wandb

        id_file = tracked.id_file("wandb")
        self._run = wandb.init(
            project=tracked.project,
            name=tracked.run.name,
            id=_known_id(id_file, first_step),
            resume="allow",
            dir=str(tracked.run_dir),
            config=tracked.description(),
            allow_val_change=True,
            # Nobody answers a question about a key, and the terminal belongs to the run's own display.
            settings=wandb.Settings(console="off", login_timeout=1.0, init_timeout=30.0),
        )
        write_whole(id_file, self._run.id.encode())
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, numbers: Numbers) -> None:
        self._run.log({"step": step, **numbers})

    def finish(self, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


class Trackio:
    """A run of Trackio, in the folder that TRACKIO_DIR names, or the Space of TRACKIO_SPACE_ID."""

    def __init__(self, tracked: TrackedRun, first_step: int) -> None:
        import trackio

        self._run = trackio.init(
            project=tracked.project,
            name=tracked.run.name,
            config=tracked.description(),
            resume="allow" if first_step else "never",
            embed=False,
        )

    def log(self, step: int, numbers: Numbers) -> None:
        self._run.log(dict(numbers), step=step)

    def finish(self, failed: bool) -> None:
        self._run.finish()


CLIENTS: Mapping[str, Callable[[TrackedRun, int], Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
    "trackio": Trackio,
}
"""The clients by their keys in [metrics], which are also the names of their libraries and extras."""


def _known_id(file: Path, first_step: int) -> str | None:
    """The tracker's id of a run that goes on; None for one that begins, or was not tracked until now."""
    return file.read_text(errors="replace").strip() if first_step and file.is_file() else None
