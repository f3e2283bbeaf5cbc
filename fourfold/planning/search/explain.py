"""Explain why a layout is the fastest: which layouts it beats, and by how much."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fourfold.planning.cost.step import PARTS
from fourfold.planning.search.fastest import score, with_batch_parts
from fourfold.planning.search.plan import Plan, Prediction, of_blocks, predict
from fourfold.planning.search.space import AXES, PIPELINES, REASONS, refusal, rejections
from fourfold.planning.workload import RECOMPUTE, SCHEDULES


@dataclass(frozen=True)
class Neighbor:
    """A layout that differs from the best layout by one ``change``. ``slower`` says how much longer its step takes than
    the best layout's step, as a fraction of the best layout's step. If the neighbor is refused, ``slower`` is None and
    ``reason`` says why."""

    change: str
    slower: float | None
    reason: str


def runner_up(plan: Plan) -> Prediction | None:
    """Return the prediction for the fastest layout whose grid differs from the best layout's grid. Return None if all
    layouts that fit have the same grid."""
    best = plan.best.work
    work, order = plan.found.work, plan.found.order
    other = np.zeros(len(order), dtype=bool)
    for axis in AXES:
        other |= np.asarray(getattr(work.layout, axis))[order] != getattr(best.layout, axis)
    places = np.flatnonzero(other)
    return predict(plan.found.point(order[places[0]]), plan.machine, plan.constants) if len(places) else None


def waterfall(predictions: Sequence[Prediction]) -> dict[str, list[float]]:
    """Return the seconds of each part of a step, by the part's name, as a list with one entry per prediction. Parts
    that are 0 in all predictions are skipped."""
    rows = {part: [p.parts[part] for p in predictions] for part in PARTS}
    return {part: row for part, row in rows.items() if max(row) > 0}


def neighbors(plan: Plan) -> list[Neighbor]:
    """Compare the best layout with its neighbors. In a neighbor, one axis is halved and another axis is doubled, or one
    choice changes by one step.

    Some neighbors change only the number of batch parts. Every other neighbor uses the number of batch parts that makes
    it fastest.
    """
    found, best = plan.found, plan.best
    ep = ["ep"] if best.work.model.num_experts else []
    columns = {name: np.asarray(getattr(found.work.layout, name))[: found.first_round]
               for name in (*AXES, *ep, "micro_batch_size", "stages_per_rank", "schedule", "cp_method", "zero",
                            "recompute", "recompute_every", "offload")}  # fmt: skip
    here = {name: int(getattr(best.work.layout, name)) for name in columns}

    def look(changes: dict[str, int], text: str, parts: Sequence[int] = found.batch_parts) -> Neighbor:
        there = here | changes
        # These choices may differ from ``there``, because they have no effect, or because they follow from the change.
        free = {"zero"} if there["dp"] * there["cp"] == 1 else set()
        free |= {"stages_per_rank", "schedule"} if there["pp"] == 1 else set()
        free |= {"cp_method"} if there["cp"] == 1 else set()
        free |= {"recompute_every", "offload"} if "recompute" in changes else set()
        same = [columns[name] == there[name] for name in columns if name not in free]
        places = np.flatnonzero(np.logical_and.reduce(same))
        if not len(places):
            return Neighbor(text, None, refusal(best.work.but(**changes), plan.machine) or "not searched")
        near = with_batch_parts(found.work.take(places), parts)
        scores = score(near, plan.machine, plan.constants, rejections(near, plan.machine))
        if not len(scores.fits):
            return Neighbor(text, None, REASONS[scores.reason[np.argmin(scores.seconds)]])
        place = scores.fits[np.argmin(scores.seconds[scores.fits])]
        if "recompute" in changes:
            text += of_blocks(int(near.point(place).layout.recompute_every))
        turns = int(near.point(place).active_parts)
        if len(parts) > 1 and turns not in (1, best.work.active_parts):
            text += f", in {turns} parts"
        return Neighbor(text, float(scores.seconds[place] / best.seconds - 1), "")

    table = []
    for taken in AXES:
        for given in AXES:
            if taken != given and here[taken] % 2 == 0:
                change = {taken: here[taken] // 2, given: here[given] * 2}
                text = f"{taken} {here[taken]} → {change[taken]}, {given} {here[given]} → {change[given]}"
                table.append(look(change, text))
    for name, values in (
        ("micro_batch_size", (here["micro_batch_size"] // 2, here["micro_batch_size"] * 2)),
        ("zero", (here["zero"] - 1, here["zero"] + 1)),
        ("recompute", (here["recompute"] - 1, here["recompute"] + 1)),
        *((name, (here[name] // 2, here[name] * 2)) for name in ep),
    ):
        for value in values:
            if value >= (name in ("micro_batch_size", "ep")) and value in columns[name]:
                table.append(look({name: value}, f"{name} {_shown(name, here[name])} → {_shown(name, value)}"))
    parts, hides = int(best.work.active_parts), best.work.layout.x * best.work.layout.y > 1
    for value in _beside(found.batch_parts, parts) if hides else ():
        table.append(look({}, f"batch_parts {parts} → {value}", [value]))
    return table + [look(change, text) for change, text in _other_pipelines(here)]


def in_nodes(plan: Plan) -> list[Neighbor]:
    """Predict the best layout with another value of ``overlap.shards_per_node``.

    If the best layout's weight collectives run in one level, predict the layout with two levels (inside nodes, and
    across nodes). If they run in two levels, predict the layout with one level.

    Return an empty list if the change is illegal, or if no shard group (ranks that shard the same weights) has several
    ranks on each of several nodes.
    """
    work, machine = plan.best.work, plan.machine
    fast = max(machine.domain, machine.gpus_per_node)
    per_node, now = int(fast // (work.layout.x * work.layout.y)), work.program.shards_per_node
    other = work.but(shards_per_node=1 if now > 1 else per_node)
    shards = work.layout.z * (work.layout.dp * work.layout.cp if work.layout.zero else 1)
    if not 1 < per_node < shards or refusal(other, machine):
        return []
    slower = predict(other, machine, plan.constants).seconds / plan.best.seconds - 1
    return [Neighbor(f"overlap.shards_per_node {now} → {other.program.shards_per_node}", slower, "")]


def _shown(name: str, value: int) -> str:
    return RECOMPUTE[value] if name == "recompute" else f"{value}"


def _beside(values: Sequence[Any], here: Any) -> Sequence[Any]:
    """Return the values directly before and after ``here`` in ``values``."""
    at = values.index(here)
    return [*values[max(at - 1, 0) : at], *values[at + 1 : at + 2]]


def _other_pipelines(here: dict[str, int]) -> list[tuple[dict[str, int], str]]:
    """Return the changes from the best layout's pipeline to the previous and to the next entry of ``space.PIPELINES``,
    each with a text that describes the change."""
    pipelines = [(SCHEDULES.index(schedule), chunks) for schedule, chunks in PIPELINES]
    now = (here["schedule"], here["stages_per_rank"])
    if here["pp"] == 1 or now not in pipelines:
        return []
    return [
        ({"schedule": schedule, "stages_per_rank": chunks},
         f"{SCHEDULES[now[0]]}, {now[1]} stages a rank → {SCHEDULES[schedule]}, {chunks}")
        for schedule, chunks in _beside(pipelines, now)
    ]  # fmt: skip


def basin(table: Sequence[Neighbor], factor: float) -> str:
    """Return a sentence that says how many neighbors take less than ``factor`` times as long as the best layout.
    ``factor`` is the planner's error."""
    known = [n.slower for n in table if n.slower is not None]
    if not known:
        return "None of the changed layouts is legal and fits."
    near = sum(1 + slower < factor for slower in known)
    return (
        f"{near} of the {len(known)} changed layouts that fit are less than {factor - 1:.0%} slower than the best: too "
        "close to tell apart."
    )


def explain(plan: Plan, factor: float, own: Prediction | None = None) -> dict[str, Any]:
    """Return the explanation of a plan as JSON values.

    Args:
        plan: The plan.
        factor: The planner's error. If two predicted times differ by a smaller factor, the order of the layouts is
            uncertain.
        own: The prediction for the user's own layout, to show next to the best layout. None shows no such layout.
    """
    second = runner_up(plan)
    shown = {"best": plan.best} | ({"runner_up": second} if second else {}) | ({"yours": own} if own else {})
    table = [*neighbors(plan), *in_nodes(plan)]
    return {
        "layouts": {name: p.describe() for name, p in shown.items()},
        "waterfall": {"columns": list(shown), "seconds": waterfall(list(shown.values()))},
        "neighbors": [vars(n) for n in table],
        "basin": basin(table, factor),
    }
