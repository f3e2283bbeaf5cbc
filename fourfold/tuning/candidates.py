"""List the layouts that the tuner may try. For each layout, the planner predicts the step time and the memory."""

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from fourfold.errors import UserError
from fourfold.planning.cost.memory import peak_memory
from fourfold.planning.cost.out_of_memory import needed_bytes, runtime_bytes
from fourfold.planning.cost.step import PARTS, step_parts
from fourfold.planning.machines.constants import Constants
from fourfold.planning.machines.machine import Machine
from fourfold.planning.search.fastest import Found, search
from fourfold.planning.search.space import SearchLimits
from fourfold.planning.workload import Workload

KNOBS = ("x", "y", "z", "dp", "cp", "pp", "ep", "micro_batch_size", "schedule", "stages_per_rank", "cp_method", "zero",
         "recompute", "recompute_every", "offload", "batch_parts")  # fmt: skip
"""Fields of a layout that the tuner varies. We call these fields knobs."""
SIZES = ("x", "y", "z", "dp", "cp", "pp", "ep", "micro_batch_size", "stages_per_rank", "recompute_every", "batch_parts")
"""Knobs that are sizes. ``Candidates.features`` compares two sizes by their ratio. For all other knobs,
``Candidates.features`` only checks whether two values are equal."""
MOST = 4096
"""Largest number of candidates. If there are more legal layouts, only the layouts with the fastest predictions are
kept. The limit saves time, because all predictions are updated after each trial."""
MOST_LIKELY_OUT = 0.5
"""On GPUs, a layout is dropped before the first trial if its probability of running out of memory is higher than
this."""

DOUBT_ON_CPU = 2.5
"""Value of ``Candidates.doubt`` on a CPU. Predictions are less certain on a CPU, because processes share cores, and the
planner does not model this sharing."""


@dataclass(frozen=True)
class Candidates:
    """The legal layouts of one model, step, and machine, as arrays [n]."""

    work: Workload
    machine: Machine
    seconds_by_part: np.ndarray
    """Predicted seconds of each part of a step [n, parts]. ``planning.cost.step.PARTS`` has the parts in this order."""
    needed: np.ndarray
    """Predicted bytes on the rank that needs the most memory [n]."""
    doubt: float = 1.0
    """How uncertain the predictions are: a factor on the standard deviations of their errors. Predictions for published
    runs on GPUs have the factor 1."""

    @property
    def count(self) -> int:
        """Return the number of candidates."""
        return len(self.needed)

    @cached_property
    def seconds(self) -> np.ndarray:
        """Return the predicted seconds of a step [n]."""
        return np.asarray(self.seconds_by_part.sum(axis=1))

    @cached_property
    def shares(self) -> np.ndarray:
        """Return the fraction of the predicted step time that each part of the step takes [n, parts]. The fractions of
        a layout sum to one."""
        return np.asarray(self.seconds_by_part / self.seconds[:, None])

    @cached_property
    def knobs(self) -> dict[str, np.ndarray]:
        """Return the values of each knob [n], by the knob's name."""
        return {name: np.broadcast_to(getattr(self.work.layout, name), self.needed.shape) for name in KNOBS}

    @cached_property
    def features(self) -> np.ndarray:
        """Return each layout as a point [n, features]. The Euclidean distance between two points measures how different
        the layouts are.

        If two layouts differ only in one size, and by a factor of two, their distance is 1. If they differ only in one
        knob that is not a size, their distance is also 1.
        """
        columns = []
        for name, values in self.knobs.items():
            if name in SIZES:
                columns.append(np.log2(values.astype(float)))
            elif len(kinds := np.unique(values)) > 1:
                columns += [np.where(values == kind, np.sqrt(0.5), 0.0) for kind in kinds]
        return np.stack(columns, axis=1)

    def point(self, index: int) -> Workload:
        """Return the workload of the candidate at ``index``."""
        return self.work.point(index)


def candidates_of(work: Workload, machine: Machine, constants: Constants) -> Candidates:
    """Return the layouts in ``work`` as candidates with predictions. All layouts in ``work`` must be legal."""
    needed = needed_bytes(peak_memory(work, machine), work, machine)
    needed = np.broadcast_to(needed, np.shape(work.layout.micro_batch_size))
    parts = step_parts(work, machine, constants)
    seconds_by_part = np.stack([np.broadcast_to(parts[name], needed.shape) for name in PARTS], axis=1)
    return Candidates(work, machine, seconds_by_part, needed)


def search_candidates(
    base: Workload, machine: Machine, constants: Constants, gpus: int, limits: SearchLimits, on_gpu: bool = True
) -> Candidates:
    """Return at most ``MOST`` legal layouts within the limits that may fit into memory, fastest prediction first.

    Args:
        base: The model and its step.
        machine: The machine that the trials run on.
        constants: The planner's constants for the machine.
        gpus: Number of devices of a trial.
        limits: Limits on the layouts.
        on_gpu: Whether trials run on GPUs. If they run on a CPU, layouts that might not fit are returned too, process
            groups are assumed to take no memory, and ``Candidates.doubt`` is larger.

    Raises:
        UserError: No layout is left.
    """
    found = search(base, machine, constants, gpus, limits)
    # With recompute_every = num_hidden_layers, only the first block recomputes. Larger values have the same effect, so
    # drop them.
    same = found.work.layout.recompute_every > base.model.num_hidden_layers
    legal = np.flatnonzero(np.isfinite(found.seconds) & ~same)
    fastest = legal[np.argsort(found.seconds[legal], kind="stable")]
    may_fit = found.p_oom[fastest] <= MOST_LIKELY_OUT
    fastest = (fastest[may_fit] if on_gpu else fastest)[:MOST]
    if not len(fastest):
        raise UserError(_nothing_left(found, machine, gpus))
    candidates = candidates_of(found.work.take(fastest).with_float_arrays(), machine, constants)
    if on_gpu:
        return candidates
    # Do not count buffers of process groups, because gloo allocates almost none. Count the memory of the runtime
    # itself.
    needed = candidates.needed - runtime_bytes(candidates.work, machine) + machine.reserved
    return replace(candidates, needed=needed, doubt=DOUBT_ON_CPU)


def _nothing_left(found: Found, machine: Machine, gpus: int) -> str:
    reasons = found.rejected()
    most = max(reasons, key=lambda reason: reasons[reason])
    return f"no layout of {gpus} devices of {machine.name} is left to try: most often {most}; allow more with --space"
