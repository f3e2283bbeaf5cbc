"""The layouts that a plan's page shows: the fastest, and even samples of the slower and of the refused ones."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from fourfold.planning.search.refused import even
from fourfold.planning.search.space import OUT_OF_MEMORY, REASONS
from fourfold.reports.layout_columns import choices, figures

if TYPE_CHECKING:
    from fourfold.planning.plan_record import PlanRecord
    from fourfold.planning.workload import Workload

FASTEST, SLOWER, OUT = 200, 200, 60
"""Shown layouts that fit: so many of the fastest, and of all others; and so many of those that may not fit."""

WIDEST = 2.0
"""Layouts that hold more than so many times a device's memory are not drawn, nor in the sample of those."""


@dataclass(frozen=True)
class Shown:
    """One layout of the page. seconds, memory (bytes): as predicted; for a refused layout, as the formulas would put
    it. refused: the reason; empty for a layout that fits."""

    label: str
    """Its rank, or ``PlanRecord.own_label``; empty for a refused one."""
    work: Workload
    seconds: float
    memory: float
    p_oom: float
    refused: str = ""

    @property
    def is_legal(self) -> bool:
        return self.refused in ("", REASONS[OUT_OF_MEMORY])

    def cells(self, result: PlanRecord) -> dict[str, str]:
        """Its row of the table, by header; without figures where it is illegal."""
        machine = result.plan.machine
        mfu = float(self.work.model_flops() / (self.seconds * self.work.layout.gpus * machine.peak))
        numbers = figures(machine, self.seconds, self.memory, self.p_oom, mfu, result.interval_factors)
        rate = self.work.step.batch * self.work.step.seq / (self.seconds * self.work.layout.gpus)
        numbers["tokens/s/GPU"] = f"{rate:,.0f}"
        blank = dict.fromkeys(numbers, "")
        return {"": self.label, **choices(self.work), **(numbers if self.is_legal else blank), "refused": self.refused}


def shown_layouts(result: PlanRecord) -> list[Shown]:
    """The fastest layouts first, then those of the run file, of the samples, and the refused."""
    found, order = result.plan.found, result.plan.found.order
    ranks = np.unique(np.concatenate([np.arange(min(FASTEST, len(order))), even(np.arange(len(order)), SLOWER)]))
    near = found.memory < WIDEST * result.plan.machine.memory
    out = even(np.flatnonzero((found.reason == OUT_OF_MEMORY) & near), OUT)

    def layouts(indices: np.ndarray, labels: Iterable[str], refused: str) -> list[Shown]:
        seconds, memory, p_oom = (
            [float(each[i]) for i in indices] for each in (found.seconds, found.memory, found.p_oom)
        )
        works = map(found.point, indices)
        return [Shown(*each, refused) for each in zip(labels, works, seconds, memory, p_oom, strict=True)]

    rows = layouts(order[ranks], [f"{rank + 1}" for rank in ranks], "")
    if result.own is not None:
        own, label = result.own, result.own_label
        rows.insert(min(FASTEST, len(rows)), Shown(label, own.work, own.seconds, own.memory_bytes, own.p_oom))
    rows += layouts(out, [""] * len(out), REASONS[OUT_OF_MEMORY])
    refused = result.refused
    if refused is not None:
        rows += [
            Shown("", refused.work.point(i), float(seconds), float(memory), float("nan"), REASONS[reason])
            for i, (seconds, memory, reason) in enumerate(
                zip(refused.seconds, refused.memory, refused.reason, strict=True)
            )
        ]
    return rows
