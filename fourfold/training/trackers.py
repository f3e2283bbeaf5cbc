"""The clients of experiment trackers behind one small interface: TensorBoard, Weights & Biases, MLflow, Trackio."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from fourfold.config.run import RunConfig
from fourfold.data.files import write_whole
from fourfold.run_file.dump import to_toml

Numbers = Mapping[str, float]

_LONGEST_VALUE = 5000  # characters; MLflow refuses values above 6,000
_PARAMETERS_AT_ONCE = 100  # MLflow's limit of one request


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


class MLflow:
    """A run of MLflow, in the store that MLFLOW_TRACKING_URI names; the project is its experiment.

    Parameters cannot change there: those of a resumed run that differ are tags, ``from_step_N.KEY``.
    """

    def __init__(self, tracked: TrackedRun, first_step: int) -> None:
        from mlflow.entities import Metric, Param, RunTag
        from mlflow.tracking import MlflowClient

        self._metric, self._client = Metric, MlflowClient()
        id_file = tracked.id_file("mlflow")
        known = _known_id(id_file, first_step)
        parameters = {key: str(value)[:_LONGEST_VALUE] for key, value in _flat(tracked.run.model_dump(mode="json"))}
        tags = {f"machine.{key}": str(value)[:_LONGEST_VALUE] for key, value in tracked.machine().items()}
        if known is None:
            experiment = self._client.get_experiment_by_name(tracked.project)
            number = self._client.create_experiment(tracked.project) if experiment is None else experiment.experiment_id
            self._id: str = self._client.create_run(number, run_name=tracked.run.name).info.run_id
            write_whole(id_file, self._id.encode())
        else:
            self._id = known
            self._client.update_run(known, status="RUNNING")
            begun_with = self._client.get_run(known).data.params
            changed = {key: value for key, value in parameters.items() if begun_with.get(key) != value}
            tags |= {f"from_step_{first_step + 1}.{key}": value for key, value in changed.items()}
            parameters = {}
        items = [Param(key, value) for key, value in parameters.items()]
        for begin in range(0, len(items), _PARAMETERS_AT_ONCE):
            self._client.log_batch(self._id, params=items[begin : begin + _PARAMETERS_AT_ONCE])
        self._client.log_batch(self._id, tags=[RunTag(key, value) for key, value in tags.items()])

    def log(self, step: int, numbers: Numbers) -> None:
        now = int(time.time() * 1000)
        metrics = [self._metric(key, float(value), now, step) for key, value in numbers.items()]
        self._client.log_batch(self._id, metrics=metrics)

    def finish(self, failed: bool) -> None:
        self._client.set_terminated(self._id, "FAILED" if failed else "FINISHED")


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
    "mlflow": MLflow,
    "trackio": Trackio,
}
"""The clients by their keys in [metrics], which are also the names of their libraries and extras."""


def _known_id(file: Path, first_step: int) -> str | None:
    """The tracker's id of a run that goes on; None for one that begins, or was not tracked until now."""
    return file.read_text(errors="replace").strip() if first_step and file.is_file() else None


def _flat(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every key of nested tables, as ``section.key``, with its value."""
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
