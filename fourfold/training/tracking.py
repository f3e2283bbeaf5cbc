"""Send metrics to TensorBoard and Weights & Biases. A tracker that fails never stops the run."""

import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from fourfold.config.run import RunConfig
from fourfold.data.atomic_files import write_whole
from fourfold.extras import require_extra
from fourfold.run_file.dump import to_toml

FINISH_SECONDS = 60.0
"""At the end of a run, all trackers together get this number of seconds to send the remaining metrics."""


Numbers = Mapping[str, float]


class Tracker(Protocol):
    """A client that sends a run's metrics to one tracker, such as TensorBoard.

    Each client class is called with the run, the run's folder, and the number of steps taken. If this number is above
    0, the client continues the earlier tracked run. A client may raise any exception.
    """

    def log(self, step: int, numbers: Numbers) -> None:
        """Record the metrics of one step. The first step is 1."""

    def finish(self, failed: bool) -> None:
        """Send all metrics that are still waiting, and end the tracked run."""


class TensorBoard:
    """Writes event files to tensorboard/ in the run's folder."""

    def __init__(self, run: RunConfig, run_dir: Path, first_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # An interrupted run may have written events of later steps. purge_step hides these old events.
        self._writer = SummaryWriter(str(run_dir / "tensorboard"), purge_step=first_step + 1)
        # TensorBoard shows text as Markdown, and in Markdown, indented lines are a code block.
        indented = "".join(f"    {line}\n" for line in to_toml(run).splitlines())
        self._writer.add_text("run file", indented, first_step + 1)
        self._writer.flush()

    def log(self, step: int, numbers: Numbers) -> None:
        for key, value in numbers.items():
            self._writer.add_scalar(key, value, step)

    def finish(self, failed: bool) -> None:
        self._writer.close()


class WeightsAndBiases:
    """Logs to Weights & Biases. Local files are in wandb/ in the run's folder. With WANDB_MODE=offline, nothing is
    uploaded.

    W&B itself records the hardware, the versions of libraries, and the git commit. A resumed run reads its W&B id from
    a file, so it continues the same tracked run.

    The step is logged as a separate metric (``step``), because W&B's own step cannot go back.
    """

    def __init__(self, run: RunConfig, run_dir: Path, first_step: int) -> None:
        import wandb

        id_file = run_dir / "wandb-run-id.txt"
        self._run = wandb.init(
            project=run.metrics.project,
            name=run.name,
            # A run that is new, or that was not tracked before, has no id yet, so W&B creates an id.
            id=id_file.read_text(errors="replace").strip() if first_step and id_file.is_file() else None,
            resume="allow",
            dir=str(run_dir),
            config=run.model_dump(mode="json"),
            allow_val_change=True,
            # Do not let W&B capture the console, because the run draws its own display. With W&B's default timeouts,
            # the run would wait long at a login prompt, or for a server that does not answer.
            settings=wandb.Settings(console="off", login_timeout=1.0, init_timeout=30.0),
        )
        write_whole(id_file, self._run.id.encode())
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, numbers: Numbers) -> None:
        self._run.log({"step": step, **numbers})

    def finish(self, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


CLIENTS: Mapping[str, Callable[[RunConfig, Path, int], Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
}
"""The client class for each key of [metrics] that turns a tracker on. A key is also the name of the tracker's library,
and of the extra (optional dependencies) that installs the library with fourfold."""


def check_trackers(run: RunConfig) -> None:
    """Raise ``UserError`` if the library of one of the run file's trackers is not installed."""
    for name in _wanted(run):
        require_extra(name, name, f"metrics.{name} = true needs")


class Tracking:
    """The trackers of a run, on rank 0. If a tracker fails, the run prints one warning and continues without it."""

    def __init__(self, run: RunConfig, run_dir: Path, first_step: int) -> None:
        """Start the trackers. If ``first_step`` is above 0, they continue their earlier tracked runs."""
        self._clients = {name: partial(CLIENTS[name], run, run_dir) for name in _wanted(run)}
        self._trackers: dict[str, Tracker] = {}
        self._start(list(self._clients), first_step)

    def log(self, step: int, record: dict[str, Any]) -> None:
        """Log one line of metrics.jsonl. Metrics that are null because they are not finite are not logged."""
        numbers = {key: value for key, value in record.items() if key != "step" and value is not None}
        for name, tracker in list(self._trackers.items()):
            with self._dropping(name):
                tracker.log(step, numbers)

    def go_back(self, steps: int) -> None:
        """Go back to the state after the first ``steps`` steps. All later steps will be logged again."""
        names = list(self._trackers)
        self.close()
        self._start(names, steps)

    def close(self, failed: bool = False) -> None:
        """End the tracked runs, and wait a limited time for them. A second call does nothing."""
        # A daemon thread cannot keep the process alive, even if a client waits for its network.
        threads = {
            name: threading.Thread(target=self._finish, args=(name, tracker, failed), daemon=True)
            for name, tracker in self._trackers.items()
        }
        for thread in threads.values():
            thread.start()
        latest = time.monotonic() + FINISH_SECONDS
        for name, thread in threads.items():
            thread.join(max(latest - time.monotonic(), 0))
            if thread.is_alive():
                self._drop(name, f"it did not accept the last metrics within {FINISH_SECONDS:g} s")
        self._trackers = {}

    def _start(self, names: list[str], steps: int) -> None:
        for name in names:
            with self._dropping(name):
                self._trackers[name] = self._clients[name](steps)

    def _finish(self, name: str, tracker: Tracker, failed: bool) -> None:
        with self._dropping(name):
            tracker.finish(failed)

    @contextmanager
    def _dropping(self, name: str) -> Iterator[None]:
        """If the ``with`` block fails, print a warning, and continue the run without this tracker."""
        try:
            yield
        except Exception as error:  # Clients raise all kinds of errors.
            self._drop(name, f"{type(error).__name__}: {error}")

    def _drop(self, name: str, reason: str) -> None:
        self._trackers.pop(name, None)
        print(f"warning: {name} no longer records this run: {reason}", file=sys.stderr, flush=True)


def _wanted(run: RunConfig) -> list[str]:
    return [name for name in CLIENTS if getattr(run.metrics, name)]
