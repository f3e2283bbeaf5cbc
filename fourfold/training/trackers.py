"""Clients of experiment trackers (TensorBoard and Weights & Biases) with one small interface."""

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
    """The description of a run that trackers receive."""

    run: RunConfig
    run_dir: Path
    machine: Callable[[], Mapping[str, str | int | float]]
    """Returns hardware, versions, and git state (``provenance``)."""

    @property
    def project(self) -> str:
        """Return the tracker's project that the run belongs to."""
        return self.run.metrics.project

    def description(self) -> dict[str, Any]:
        """Return the resolved run file, section by section, and the machine."""
        return {**self.run.model_dump(mode="json"), "machine": dict(self.machine())}

    def id_file(self, tracker: str) -> Path:
        """Return the file that holds the tracker's id of the run. A resumed run reads it to continue the same
        tracked run."""
        return self.run_dir / f"{tracker}-run-id.txt"


class Tracker(Protocol):
    """A client of one tracker. It is made with a ``TrackedRun`` and the number of steps taken.

    If that number is above 0, the client continues the earlier tracked run. All calls come from one thread. A client
    may raise any exception.
    """

    def log(self, step: int, numbers: Numbers) -> None:
        """Record the metrics of one step. The first step is 1."""
        ...

    def finish(self, failed: bool) -> None:
        """Deliver what is pending, and end the tracked run."""
        ...


class TensorBoard:
    """Writes event files to tensorboard/ in the run's folder."""

    def __init__(self, tracked: TrackedRun, first_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # An interrupted run may have written events of later steps. TensorBoard hides events from purge_step on.
        self._writer = SummaryWriter(str(tracked.run_dir / "tensorboard"), purge_step=first_step + 1)
        machine = "\n".join(f"{key} = {value}" for key, value in tracked.machine().items())
        for name, text in (("run file", to_toml(tracked.run)), ("machine", machine)):
            # Indented text is a code block in Markdown.
            indented = "".join(f"    {line}\n" for line in text.splitlines())
            self._writer.add_text(name, indented, first_step + 1)
        self._writer.flush()

    def log(self, step: int, numbers: Numbers) -> None:
        for key, value in numbers.items():
            self._writer.add_scalar(key, value, step)

    def finish(self, failed: bool) -> None:
        self._writer.close()


class WeightsAndBiases:
    """Logs to Weights & Biases. Its files are in wandb/ in the run's folder. WANDB_MODE=offline keeps them there.

    The step is logged as a separate metric (``step``), because W&B's own step cannot go back.
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
            # Do not wait for an answer to a prompt. Leave the console alone, because the run draws its own display
            # there.
            settings=wandb.Settings(console="off", login_timeout=1.0, init_timeout=30.0),
        )
        write_whole(id_file, self._run.id.encode())
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, numbers: Numbers) -> None:
        self._run.log({"step": step, **numbers})

    def finish(self, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


CLIENTS: Mapping[str, Callable[[TrackedRun, int], Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
}
"""The client of each key in [metrics]. The library and the extra have the same name as the key."""


def _known_id(file: Path, first_step: int) -> str | None:
    """Return the tracker's id of a resumed run, or None for a run that is new or was not tracked before."""
    return file.read_text(errors="replace").strip() if first_step and file.is_file() else None
