"""Clients of experiment trackers (TensorBoard and Weights & Biases) with one small interface."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

from fourfold.config.run import RunConfig
from fourfold.data.files import write_whole
from fourfold.run_file.dump import to_toml

Numbers = Mapping[str, float]


class Tracker(Protocol):
    """A client of one tracker. It is made with a run, its folder, and the number of steps taken.

    If steps were already taken, the client continues the earlier tracked run. All calls come from one thread. A client
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

    def __init__(self, run: RunConfig, run_dir: Path, first_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # An interrupted run may have written events of later steps. TensorBoard hides events from purge_step on.
        self._writer = SummaryWriter(str(run_dir / "tensorboard"), purge_step=first_step + 1)
        indented = "".join(f"    {line}\n" for line in to_toml(run).splitlines())  # In Markdown, this is a code block.
        self._writer.add_text("run file", indented, first_step + 1)
        self._writer.flush()

    def log(self, step: int, numbers: Numbers) -> None:
        for key, value in numbers.items():
            self._writer.add_scalar(key, value, step)

    def finish(self, failed: bool) -> None:
        self._writer.close()


class WeightsAndBiases:
    """Logs to Weights & Biases. Its files are in wandb/ in the run's folder. WANDB_MODE=offline keeps them there.

    W&B itself records the hardware, the versions of libraries, and the git commit. A resumed run reads its id from a
    file, to continue the same tracked run.

    The step is logged as a separate metric (``step``), because W&B's own step cannot go back.
    """

    def __init__(self, run: RunConfig, run_dir: Path, first_step: int) -> None:
        import wandb

        id_file = run_dir / "wandb-run-id.txt"
        self._run = wandb.init(
            project=run.metrics.project,
            name=run.name,
            # A run that is new, or that was not tracked before, gets a new id.
            id=id_file.read_text(errors="replace").strip() if first_step and id_file.is_file() else None,
            resume="allow",
            dir=str(run_dir),
            config=run.model_dump(mode="json"),
            allow_val_change=True,
            # Time out instead of waiting for an answer at a prompt. Do not capture the console, because the run draws
            # its own display there.
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
"""The client of each key in [metrics]. The library and the extra have the same name as the key."""
