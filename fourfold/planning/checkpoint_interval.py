"""Plan how often a run saves checkpoints."""

from dataclasses import dataclass

from fourfold.config.model import ModelConfig
from fourfold.config.parameter_counts import num_parameters
from fourfold.config.run import RunConfig
from fourfold.planning.budget import checkpoint_seconds
from fourfold.planning.calibration.machine_constants import constants_for
from fourfold.planning.cost.optimizer_cost import saved_bytes
from fourfold.planning.machines.machine import Machine
from fourfold.planning.run_workload import workload_of
from fourfold.planning.search.plan import Prediction, predict


@dataclass(frozen=True)
class SavePlan:
    """How often a run saves a checkpoint."""

    steps: int
    """Number of steps between checkpoints. With 0, the run saves only when it ends or is stopped."""
    step_seconds: float
    """Predicted seconds per step."""

    @property
    def seconds(self) -> float:
        """Return the predicted seconds between checkpoints."""
        return self.steps * self.step_seconds


def plan_saves(run: RunConfig, machine: Machine) -> SavePlan:
    """Return how often a run on a machine saves a checkpoint.

    If the run file sets ``checkpoint.interval``, the plan has this interval. Otherwise, the plan has the interval that
    loses the least time (``best_interval``), or 0 if the machine file has no ``mtbf_gpu_hours``.

    Raises:
        UserError: The planner cannot predict the run.
    """
    layout = predict(workload_of(run), machine, constants_for(machine))
    return SavePlan(run.checkpoint.interval or best_interval(run.model, layout) or 0, layout.seconds)


def best_interval(model: ModelConfig, layout: Prediction) -> int | None:
    """Return the number of steps between checkpoints that loses the least time to failures and checkpoints. Return None
    if the machine file has no ``mtbf_gpu_hours``."""
    saved = float(saved_bytes(layout.work, num_parameters(model)))
    _, seconds = checkpoint_seconds(saved, layout.gpus, layout.machine)
    return None if seconds is None else max(1, round(seconds / layout.seconds))
