"""The whole answer to a request: ranked layouts, explanation, costs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fourfold.errors import UserError
from fourfold.planning.budget import Costs, costs
from fourfold.planning.machines.machine import load_machine
from fourfold.planning.request import Request, constants_for, limits_of, outside_calibration
from fourfold.planning.scaling import Point, scaling
from fourfold.planning.search.explain import explain
from fourfold.planning.search.plan import Plan, Prediction, make_plan, predict
from fourfold.planning.search.space import refusal


@dataclass(frozen=True)
class Answer:
    """A plan and what was asked; own: the run file's layout as it stands, or why not (own_refused); explanation, costs
    and strong-scaling curve where asked for."""

    asked: Request
    plan: Plan
    own: Prediction | None
    own_refused: str
    explanation: dict[str, Any] | None
    costs: Costs | None
    extrapolation: list[str]
    curve: list[Point]

    def named(self) -> list[tuple[str, Prediction]]:
        """The ranked layouts and the run file's, each with what it is called in front of its description."""
        ranked = [("", prediction) for prediction in self.plan.ranked]
        if self.own is None:
            return ranked
        where = "" if self.own.gpus == self.asked.gpus else f", on {self.own.gpus} GPUs"
        return [*ranked, (f"yours{where}: ", self.own)]

    def record(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            **self.plan.record(),
            "model": self.asked.name,
            "machine": self.plan.machine.name,
            "gpus": self.asked.gpus,
            "own": None if self.own is None else self.own.record(),
            "own_refused": self.own_refused or None,
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
    refused = "" if asked.own is None else refusal(asked.own, machine)
    own = None if asked.own is None or refused else predict(asked.own, machine, constants)
    best = plan.best
    money = costs(tokens, best.tokens_per_second, asked.gpus, asked.model.num_parameters, machine) if tokens else None
    explanation = explain(plan, own, limits) if explained else None
    curve: list[Point] = []
    if with_curve:
        sizes = [int(asked.gpus * factor) for factor in (0.25, 0.5, 1, 2, 4) if asked.gpus * factor >= 1]
        curve = scaling(asked.base, machine, constants, sizes, False, limits, asked.name)
    return Answer(asked, plan, own, refused, explanation, money, outside_calibration(machine, best.work), curve)
