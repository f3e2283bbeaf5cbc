"""Build the full answer of ``fourfold plan`` to a request: ranked layouts, an explanation, and costs."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from fourfold.config.parameter_counts import num_parameters
from fourfold.errors import UserError
from fourfold.planning.budget import Costs, costs
from fourfold.planning.calibration.machine_constants import (
    constants_for,
    kind_of_step,
    outside_calibrated_range,
    shipped_interval,
    shipped_order_factor,
)
from fourfold.planning.cost.optimizer_cost import saved_bytes
from fourfold.planning.machines.machine import load_machine
from fourfold.planning.other_programs.other_run import best_in_program
from fourfold.planning.request import Request
from fourfold.planning.search.explain import explain
from fourfold.planning.search.limits import parse_limits
from fourfold.planning.search.plan import Plan, Prediction, make_plan, predict
from fourfold.planning.search.space import refusal
from fourfold.planning.search.within_error import WithinError, layouts_within_error

TALLEST = 5
"""Charts show the user's own layout only if its step time is at most this many times the best layout's step time."""


@dataclass(frozen=True)
class PlanRecord:
    """A plan, the request that the plan answers, and the results of options such as --explain."""

    request: Request
    plan: Plan
    own: Prediction | None
    """The prediction for the user's own layout, from the run file or from the run of another program. None if there is
    no such layout, or if the run file's layout is illegal."""
    theirs: Prediction | None
    """The best layout in the other program. None if the request has no run of another program, or if no layout fits."""
    own_refused: str
    """Reason why the run file's layout is illegal. Empty if this layout is legal, or if there is no run file."""
    explanation: dict[str, Any] | None
    costs: Costs | None
    extrapolation: list[str]
    """One text for each feature of the best layout's workload that is outside the machine's calibrated range. The text
    names the range."""
    interval_factors: tuple[float, float] | None
    """Factors on predicted seconds that give the 5th and the 95th percentile of measured seconds. None on a machine
    that the user calibrated, because the factors come from fourfold's calibration."""
    within_error: WithinError
    """The layouts that may be as fast as the best layout, because the planner's error is larger than the difference."""

    def labeled(self) -> list[tuple[str, Prediction]]:
        """Return the layouts to show, with their labels. The ranked layouts are first, and their labels are their
        ranks. For a run of another program, the best layout in that program is next. The user's own layout is last, if
        it has a prediction."""
        ranked = [(str(rank), prediction) for rank, prediction in enumerate(self.plan.ranked, start=1)]
        if self.request.other is not None and self.theirs is not None:
            ranked.append((f"best in {self.request.other.row.program}", self.theirs))
        if self.own is None:
            return ranked
        return [*ranked, (self.own_label, self.own)]

    @property
    def own_label(self) -> str:
        """Return the label of the user's own layout in tables. The label includes the layout's number of GPUs if this
        number differs from the requested number."""
        if self.own is None or self.own.gpus == self.request.gpus:
            return "yours"
        return f"yours, on {self.own.gpus} GPU{'s' if self.own.gpus > 1 else ''}"

    @property
    def is_own_drawn(self) -> bool:
        """Return whether charts show the user's own layout.

        Charts show this layout if it has a prediction for the requested number of GPUs, unless its step takes more than
        ``TALLEST`` times as long as the best layout's step. A longer bar would make all other bars too small to read.
        """
        own = self.own
        return own is not None and own.gpus == self.request.gpus and own.seconds <= TALLEST * self.plan.best.seconds

    @property
    def interval(self) -> tuple[float, float] | None:
        """Return the 5th and the 95th percentile of the best layout's step time in seconds, or None without
        ``interval_factors``."""
        if self.interval_factors is None:
            return None
        low, high = self.interval_factors
        return low * self.plan.best.seconds, high * self.plan.best.seconds

    def record(self) -> dict[str, Any]:
        """Return the record as JSON values."""
        return {
            **self.plan.record(),
            "model": self.request.name,
            "machine": self.plan.machine.name,
            "gpus": self.request.gpus,
            "own": None if self.own is None else self.own.record(),
            "own_refused": self.own_refused or None,
            "other": None if self.request.other is None else self.request.other.record(),
            "theirs": None if self.theirs is None else self.theirs.record(),
            "explanation": self.explanation,
            "costs": None if self.costs is None else asdict(self.costs),
            "extrapolation": self.extrapolation,
            "step_seconds_90": None if self.interval is None else list(self.interval),
            "indistinct": asdict(self.within_error),
        }


def plan_request(
    request: Request,
    machine_name: str,
    limit_settings: list[str],
    top: int,
    tokens: float | None,
    explained: bool,
    watch: Callable[[int, int], None] | None = None,
) -> PlanRecord:
    """Plan the request, and explain the plan if ``explained`` is set.

    Args:
        request: The model, its step, and the number of GPUs.
        machine_name: Name of a built-in machine, or path of a machine file.
        limit_settings: Limits of the search, in the format of ``limits.parse_limits``.
        top: Number of layouts to return.
        tokens: Number of tokens to train on, to compute costs. None computes no costs.
        explained: Whether to explain why the best layout is the fastest.
        watch: Called with the number of evaluated layouts and the number of legal layouts.

    Raises:
        UserError: ``tokens``, the machine, or a limit is invalid, no layout is legal and fits, or the GPUs fail too
            often to train.
    """
    if tokens is not None and not 0 < tokens < float("inf"):
        raise UserError(f"--tokens {tokens:g} must be a number above 0, such as 2e12")
    other = request.other
    machine = load_machine(machine_name) if other is None else other.machine
    constants, limits = constants_for(machine), parse_limits(limit_settings)
    plan = make_plan(request.base, machine, constants, request.gpus, top, limits, watch)
    best = plan.best
    refused = "" if request.own is None or other is not None else refusal(request.own, machine)
    own = None if request.own is None or refused else predict(request.own, machine, constants)
    factor = shipped_order_factor()
    saved = float(saved_bytes(request.base, num_parameters(request.model)))
    return PlanRecord(
        request=request,
        plan=plan,
        own=own,
        theirs=None if other is None else best_in_program(other, limit_settings, watch),
        own_refused=refused,
        explanation=explain(plan, factor, own) if explained else None,
        costs=costs(tokens, best.tokens_per_second, request.gpus, saved, machine) if tokens else None,
        extrapolation=outside_calibrated_range(machine, best.work),
        interval_factors=shipped_interval(
            machine, kind_of_step(best.work, best.parts["launch"] / best.seconds), best.work
        ),
        within_error=layouts_within_error(plan, factor),
    )
