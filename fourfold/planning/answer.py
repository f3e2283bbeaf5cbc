"""The whole answer to a request: ranked layouts, explanation, costs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fourfold.errors import UserError
from fourfold.planning.costs import Costs, costs
from fourfold.planning.explain import explain
from fourfold.planning.machine import load_machine
from fourfold.planning.plan import Plan, Prediction, make_plan, predict
from fourfold.planning.request import Request, constants_for, limits_of, outside_calibration
from fourfold.planning.scaling import Point, scaling


@dataclass(frozen=True)
class Answer:
    """A plan and what was asked; own: the run file's layout as it stands; explanation, costs and strong-scaling
    curve where asked for."""

    asked: Request
    plan: Plan
    own: Prediction | None
    explanation: dict[str, Any] | None
    costs: Costs | None
    extrapolation: list[str]
    curve: list[Point]

    def record(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            **self.plan.record(),
            "model": self.asked.name,
            "machine": self.plan.machine.name,
            "gpus": self.asked.gpus,
            "own": None if self.own is None else self.own.record(),
            "explanation": self.explanation,
            "costs": None if self.costs is None else self.costs.record(),
            "extrapolation": self.extrapolation,
        }


def answer(
    asked: Request,
    machine_name: str,
    limit_settings: list[str],
    top: int,
    tokens: float | None,
    explained: bool,
    with_curve: bool = False,
) -> Answer:
    """Plan, and explain where wanted; raises ``UserError`` where nothing is legal or fits."""
    if tokens is not None and not 0 < tokens < float("inf"):
        raise UserError(f"--tokens {tokens:g} must be a number above 0")
    machine = load_machine(machine_name)
    constants, limits = constants_for(machine), limits_of(limit_settings)
    plan = make_plan(asked.base, machine, constants, asked.gpus, top, limits)
    own = predict(asked.own, machine, constants) if asked.own is not None else None
    best = plan.best
    money = costs(tokens, best.tokens_per_second, asked.gpus, asked.model.num_parameters, machine) if tokens else None
    explanation = explain(plan, own, limits) if explained else None
    curve: list[Point] = []
    if with_curve:
        sizes = [int(asked.gpus * factor) for factor in (0.25, 0.5, 1, 2, 4) if asked.gpus * factor >= 1]
        curve = scaling(asked.base, machine, constants, sizes, False, limits, asked.name)
    return Answer(asked, plan, own, explanation, money, outside_calibration(machine, best.work), curve)
