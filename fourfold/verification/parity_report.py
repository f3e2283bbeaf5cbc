"""Hold the result of parity. This module does not import torch, so the process that starts local workers can receive
the report without torch."""

import math
from dataclasses import dataclass, field
from typing import NamedTuple

LIMIT = 10.0
"""The largest allowed ratio of the grid's rounding error to one process's rounding error. The two errors differ because
the grid sums in a different order."""

INITIAL_LIMIT = 10.0
"""Largest allowed error of the moments of initial weights, in standard errors. The limit is generous, because the
fourth moment has long tails."""


OWN_TYPES_LIMIT = 1.5
"""The largest allowed ratio of the grid's error to one process's error, if both compute in the run's own dtypes. The
grid's error may be larger, because the grid also rounds partial sums."""


class Deviation(NamedTuple):
    """The error of one tensor, on the grid and on one process: usually the largest absolute difference from the float64
    reference."""

    tensor: str
    grid: float
    one_process: float
    """The error of the float32 reference, but at least one unit in the last place of the tensor's largest value."""

    @property
    def ratio(self) -> float:
        """Return the grid's error divided by one process's error. The ratio is infinite if one of the errors is not
        finite."""
        if not (math.isfinite(self.grid) and math.isfinite(self.one_process)):
            return math.inf
        if self.grid == 0:
            return 0.0
        return self.grid / self.one_process if self.one_process else math.inf


@dataclass(frozen=True)
class ParityReport:
    """The result of parity: the errors on the grid and on one process in float32, and the allowed limits."""

    deviations: dict[str, list[Deviation]]
    """Lists of deviations by quantity:

    - "loss", "grad_norm" (before clipping), "gradients", "weights", and "averages" (moving averages of weights): every
      step
    - "validation" and "audit": the first step
    - "resumed": the metrics and the weights of a short run that the trainer resumed on another grid
    - "imported": the losses and the tokens of an imported model
    """

    replicas: float
    """The largest difference between two processes that hold the same part of a weight or a gradient. It must be 0."""

    initial: float
    """The largest deviation of the initial weights from their documented distributions, in standard errors."""

    resumed_on: str
    """A description of the grid that the short run was resumed on."""

    not_compared: dict[str, str]
    """The keys and sections of the run file that parity replaces or ignores, each with the reason."""

    own_types: list[Deviation] = field(default_factory=list)
    """Relative errors of gradients and weights in the run's own dtypes, on the grid and on one process. Empty if the
    run computes in float32, or if parity cannot compare its dtypes."""

    limit: float = LIMIT
    """The largest allowed ratio of the grid's error to one process's error in ``deviations``."""

    initial_limit: float = INITIAL_LIMIT
    own_types_limit: float = OWN_TYPES_LIMIT
    """The largest allowed ratio for ``own_types``."""

    def worst(self, quantity: str) -> Deviation:
        """Return the deviation with the largest ratio among all deviations of a quantity."""
        return max(self.deviations[quantity], key=lambda deviation: deviation.ratio)

    @property
    def ok(self) -> bool:
        within = all(self.worst(quantity).ratio <= self.limit for quantity in self.deviations)
        within = within and all(each.ratio <= self.own_types_limit for each in self.own_types)
        return within and self.replicas == 0 and self.initial <= self.initial_limit

    def record(self) -> dict[str, object]:
        """Return the report as JSON values. Of each quantity, it has only the deviation with the largest ratio."""
        worst = {quantity: self.worst(quantity) for quantity in self.deviations}
        quantities = {name: {**each._asdict(), "ratio": each.ratio} for name, each in worst.items()}
        return {"ok": self.ok, "limit": self.limit, **quantities, "replicas": self.replicas, "initial": self.initial,
                "own_types": {each.tensor: {**each._asdict(), "ratio": each.ratio} for each in self.own_types},
                "not_compared": self.not_compared}  # fmt: skip
