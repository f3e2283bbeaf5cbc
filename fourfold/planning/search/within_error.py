"""Find the layouts whose predicted times are so close that any of them may be the fastest. Also propose limits for
``fourfold tune``, so that it compares these layouts in real trials."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fourfold.planning.search.plan import Plan
from fourfold.planning.search.space import AXES
from fourfold.planning.workload import CP_METHODS, RECOMPUTE, SCHEDULES, Workload

NAMED = {"recompute": RECOMPUTE, "schedule": SCHEDULES, "cp_method": CP_METHODS}
"""Names of the choices that a layout stores as indices."""
MEASURED = 10
"""Number of the fastest layouts that the proposed limits must allow. The limits may also allow a few other layouts."""


@dataclass(frozen=True)
class WithinError:
    """The layouts whose predicted times are so close to the best layout's time that any of them may be the fastest."""

    factor: float
    """If two predicted times differ by more than this factor, the measured times have the predicted order with a
    probability of 95 %."""
    count: int
    """Number of layouts that fit into memory and whose predicted time is below ``factor`` times the best layout's time.
    The best layout counts too."""
    ranked: int
    """Number of these layouts that are also in the plan's ranking."""
    space: list[str]
    """Limits for ``fourfold tune`` that allow the fastest of these layouts (at most ``MEASURED``) and few other
    layouts."""


def layouts_within_error(plan: Plan, factor: float) -> WithinError:
    """Find the layouts with predicted times below ``factor`` times the best layout's time."""
    found = plan.found
    seconds = found.seconds[found.order]
    count = max(1, int(np.count_nonzero(seconds < factor * seconds[0])))
    closest = [found.point(index) for index in found.order[: min(count, MEASURED)]]
    return WithinError(factor, count, min(count, len(plan.ranked)), tuning_space(closest))


def tuning_space(works: Sequence[Workload]) -> list[str]:
    """Return limits that allow the layouts of all ``works``, in the format of ``limits.parse_limits``. For each choice,
    the limits list all values that occur."""
    layouts = [work.layout for work in works]
    pipelined, shared = ([layout for layout in layouts if getattr(layout, axis) > 1] for axis in ("pp", "cp"))
    some = {"schedule": pipelined, "stages_per_rank": pipelined, "cp_method": shared}
    space = []
    experts = ["ep"] if works[0].model.num_experts else []
    for knob in (*AXES, *experts, "zero", "recompute", "micro_batch_size", "schedule", "stages_per_rank", "cp_method"):
        values = sorted({int(getattr(layout, knob)) for layout in some.get(knob, layouts)})
        if values:
            names = [NAMED[knob][value] if knob in NAMED else str(value) for value in values]
            space.append(f"{knob}={','.join(names)}")
    parts = sorted({int(work.active_parts) for work in works})
    return [*space, f"batch_parts={','.join(map(str, parts))}"]
