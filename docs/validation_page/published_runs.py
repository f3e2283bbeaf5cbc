"""Compare published figures of large runs with the planner's predictions."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from fourfold.config.model import ModelConfig
from fourfold.config.presets import PRESETS
from fourfold.errors import UserError
from fourfold.planning.calibration.fit import Calibration
from fourfold.planning.machines.constants import Constants
from fourfold.planning.machines.machine import Machine, load_machine
from fourfold.planning.run_workload import workload_of_model
from fourfold.planning.search.plan import Prediction, make_plan, predict
from fourfold.planning.search.space import SearchLimits
from fourfold.planning.workload import Workload
from validation_page.axonn_layouts import tried_layouts
from validation_page.published_table import published_table

AXONN = SearchLimits(
    fixed=(("cp", 1), ("pp", 1)), zeros=(0,), recomputes=((2, 1, False),), pipelines=(("1F1B", 1),), batch_parts=(1,)
)
"""Limits of a search: only layouts that AxoNN supports, which have the axes x, y, z, and dp, and full recompute."""
NOT_OWN = {"is_fourfold": False, "gate_first": False}
AXONN_BLOCKS = (
    dict.fromkeys(("overlap_dp", "split_residual", "recompute_stops_early"), False)
    | NOT_OWN
    | {"flash2": True, "scatter_bytes": 2}
)
"""Features of AxoNN. AxoNN does not overlap the sum of gradients over dp, and does not shard the residual stream over
x. Its recompute always repeats the full forward pass, even the part after the last tensor that the backward pass needs.
AxoNN scatters gradients over z in 16 bits, and sums them over dp in 32 bits."""


@dataclass(frozen=True)
class Figure:
    """A published figure and its predictions."""

    source: str
    machine: str
    model: str
    gpus: int
    published: float
    """Published PFLOP/s of all GPUs together."""
    as_run: Prediction
    """Prediction for the published layout. If the layout was not published, prediction for the fastest layout that the
    program supports."""
    best: Prediction
    """Prediction for the fastest layout of fourfold."""

    @property
    def as_run_pflops(self) -> float:
        """Return the PFLOP/s of ``as_run``, counted as Megatron-LM counts FLOPs. The published figures use the same
        count."""
        return self.as_run.pflops(self.as_run.work.megatron_flops())

    @property
    def best_pflops(self) -> float:
        """Return the PFLOP/s of ``best``, counted as Megatron-LM counts FLOPs."""
        return self.best.pflops(self.as_run.work.megatron_flops())


def base_of(model: str, seq: int, batch: int) -> Workload:
    """Return the workload of a preset with the given sequence length and batch."""
    return workload_of_model(ModelConfig(**PRESETS[model])).but(seq_length=seq, global_batch_size=batch)


def figures(calibration: Calibration) -> list[Figure]:
    """Predict all published figures."""
    found = []
    for row in published_table()["figure"]:
        machine = load_machine(row["machine"])
        constants = calibration.constants(machine.name)
        base = base_of(row["model"], row["seq"], row["batch"])
        if layout := row.get("layout"):
            as_run = predict(base.but(**layout, **MEGATRON), machine, constants)
        else:
            as_run = fastest_of_axonn(row["model"], base, machine, constants, row["gpus"])
        best = make_plan(base, machine, constants, row["gpus"], 1).best
        found.append(Figure(row["source"], row["machine"], row["model"], row["gpus"], row["pflops"], as_run, best))
    return found


def fastest_of_axonn(model: str, base: Workload, machine: Machine, constants: Constants, gpus: int) -> Prediction:
    """Return the fastest layout that AxoNN's authors tried. If we do not know which layouts they tried, return the
    fastest layout that AxoNN supports."""
    base = base.but(**AXONN_BLOCKS)
    hidden, batch = int(base.model.hidden_size), int(base.step.global_batch_size)
    found = []
    for sizes in tried_layouts(model, machine.name, gpus, hidden, batch * int(base.step.seq_length), batch):
        limits = replace(AXONN, fixed=(*AXONN.fixed, *sizes.items()))
        try:
            found.append(make_plan(base, machine, constants, gpus, 1, limits).best)
        except UserError:  # This layout does not fit.
            continue
    if not found:
        return make_plan(base, machine, constants, gpus, 1, AXONN).best
    return min(found, key=lambda prediction: prediction.seconds)


MEGATRON = {
    "split_residual": False,
    "half_weights": True,
    "weights_kept": True,
    "overlap_dp": False,
    "overlap_x": False,
    "recompute_stops_early": False,
    "reduce_bytes": 2,
    **NOT_OWN,
}
"""Fields of a workload that describe Megatron-DeepSpeed without sequence parallelism."""


def weak_scaling(calibration: Calibration) -> list[dict[str, Any]]:
    """Predict the weak scaling of AxoNN on Frontier: the FLOP/s per GPU (counted as in Megatron-LM), and the efficiency
    relative to the smallest run."""
    rows = []
    for curve in published_table()["weak_scaling"]:
        machine = load_machine(curve["machine"])
        constants = calibration.constants(machine.name)
        first = None
        for gpus, model in ((int(g), m) for g, m in curve["models"].items()):
            base = base_of(model, curve["seq"], curve["batch"])
            best = fastest_of_axonn(model, base, machine, constants, gpus)
            rate = best.pflops(best.work.megatron_flops()) / gpus * 1e3
            first = first or rate
            rows.append({
                "source": curve["source"], "machine": machine.name, "model": model, "gpus": gpus,
                "layout": best.describe(), "tflops_per_gpu": rate, "efficiency": rate / first,
                "published": curve["efficiency"].get(str(gpus)),
            })  # fmt: skip
    return rows
