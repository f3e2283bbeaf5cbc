"""Choose the layouts for a plan's page: the fastest ones, and even samples of slower and refused layouts."""

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
"""Number of shown layouts: the fastest ones that fit, slower ones that fit, and ones that may not fit."""

WIDEST = 2.0
"""Layouts that hold more than this many times a device's memory are neither drawn nor sampled."""


@dataclass(frozen=True)
class Shown:
    """One layout of the page.

    ``seconds`` and ``memory`` (bytes) are predicted. For a refused layout, they are what the formulas would give.
    ``refused`` is the reason, and is empty for a layout that fits.
    """

    label: str
    """The layout's rank, or ``PlanRecord.own_label``. Empty for a refused layout."""
    work: Workload
    seconds: float
    memory: float
    p_oom: float
    refused: str = ""

    @property
    def is_legal(self) -> bool:
        return self.refused in ("", REASONS[OUT_OF_MEMORY])

    def cells(self, result: PlanRecord) -> dict[str, str]:
        """Return its table row by header. An illegal layout has no figures."""
        machine = result.plan.machine
        mfu = float(self.work.model_flops() / (self.seconds * self.work.layout.gpus * machine.peak))
        numbers = figures(machine, self.seconds, self.memory, self.p_oom, mfu, result.interval_factors)
        rate = self.work.step.batch * self.work.step.seq / (self.seconds * self.work.layout.gpus)
        numbers["tokens/s/GPU"] = f"{rate:,.0f}"
        blank = dict.fromkeys(numbers, "")
        return {"": self.label, **choices(self.work), **(numbers if self.is_legal else blank), "refused": self.refused}


def shown_layouts(result: PlanRecord) -> list[Shown]:
    """Return the fastest layouts, then the run file's layout, the samples, and the refused ones."""
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
