"""Compute a model's scaling curve, by planning the model at each number of GPUs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fourfold.errors import UserError
from fourfold.planning.machines.constants import Constants
from fourfold.planning.machines.machine import Machine
from fourfold.planning.search.plan import Prediction, make_plan
from fourfold.planning.search.space import MOST_GPUS, SearchLimits
from fourfold.planning.workload import Workload


@dataclass(frozen=True)
class ScalingPoint:
    """One point of the curve, at one number of GPUs."""

    gpus: int
    best: Prediction | None
    """The prediction for the fastest layout. None if no layout is legal and fits."""
    efficiency: float | None
    """Tokens per second per GPU, relative to the first point that has a layout. None if no layout fits."""
    why_not: str
    """Reason why there is no layout that is legal and fits. Empty if there is such a layout."""

    @property
    def pflops(self) -> tuple[float, float]:
        """Return the PFLOP/s of all GPUs as two values. The first value counts model FLOPs, as MFU does. The second
        value counts FLOPs as Megatron-LM and most publications do. ``best`` must not be None."""
        assert self.best is not None
        return self.best.pflops(self.best.work.model_flops()), self.best.pflops(self.best.work.megatron_flops())

    def record(self) -> dict[str, Any]:
        """Return the point as JSON values."""
        if self.best is None:
            return {"gpus": self.gpus, "why_not": self.why_not}
        record = self.best.record()
        record = {key: value for key, value in record.items() if key not in ("parts", "stages")}
        return {"gpus": self.gpus, "layout": self.best.describe(), **record, "efficiency": self.efficiency,
                "model_pflops": self.pflops[0], "megatron_pflops": self.pflops[1]}  # fmt: skip


def sizes_of(text: str) -> list[int]:
    """Parse a list of GPU counts.

    Args:
        text: ``512:32768`` (512, then doubled as long as the count is at most 32,768), or a list such as ``8,24,64``.

    Raises:
        UserError: The text has another form, or a count is below 1 or above ``MOST_GPUS``.
    """
    try:
        ends = [int(part) for part in text.split(":" if ":" in text else ",")]
        if min(ends) < 1 or (":" in text and (len(ends) != 2 or ends[0] > ends[1])):
            raise ValueError
    except ValueError:
        raise UserError(f"--gpus {text}: write it as 512:32768 (doublings) or 512,768,1024") from None
    if max(ends) > MOST_GPUS:
        raise UserError(f"--gpus {text}: must be at most {MOST_GPUS:,}, such as 512:32768")
    if ":" not in text:
        return ends
    doublings = (ends[1] // ends[0]).bit_length()
    return [ends[0] << i for i in range(doublings)]


def scaling_curve(
    base: Workload,
    machine: Machine,
    constants: Constants,
    sizes: Sequence[int],
    weak: bool,
    limits: SearchLimits | None = None,
    watch: Callable[[int, int], None] | None = None,
) -> list[ScalingPoint]:
    """Plan the model at each number of GPUs.

    Args:
        base: The model and its step at the first number of GPUs.
        machine: The machine to plan for.
        constants: The planner's constants for the machine.
        sizes: GPU counts to plan for.
        weak: Whether the batch grows with the number of GPUs (weak scaling). Otherwise all numbers of GPUs have the
            same batch (strong scaling).
        limits: Limits of the search.
        watch: Called before each plan with the number of finished plans and the number of all plans.

    Returns:
        One point per GPU count. If no layout is legal and fits, the point says why.
    """
    points: list[ScalingPoint] = []
    first: tuple[int, float] | None = None
    for done, gpus in enumerate(sizes):
        if watch is not None:
            watch(done, len(sizes))
        batch = base.step.global_batch_size * gpus // sizes[0] if weak else base.step.global_batch_size
        try:
            best = make_plan(base.but(global_batch_size=batch), machine, constants, gpus, 1, limits).best
        except UserError as error:
            points.append(ScalingPoint(gpus, None, None, str(error)))
            continue
        rate = best.tokens_per_second / gpus
        first = first or (gpus, rate)
        points.append(ScalingPoint(gpus, best, rate / first[1], ""))
    return points
