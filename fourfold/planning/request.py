"""What the command line asks for, as workloads."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from fourfold.config.model import ModelConfig
from fourfold.config.run import RunConfig
from fourfold.data.files import write_output
from fourfold.errors import UserError
from fourfold.planning.calibration.fit import Calibration, shipped
from fourfold.planning.machines.constants import NAMES, Constants, moved, prior_constants
from fourfold.planning.machines.machine import Machine
from fourfold.planning.model_file import load_model
from fourfold.planning.run_workload import workload_of, workload_of_model
from fourfold.planning.search.plan import Prediction
from fourfold.planning.search.space import AXES, MOST_GPUS, PIPELINES, RECOMPUTES, Limits
from fourfold.planning.workload import RECOMPUTE, Workload
from fourfold.run_file.dump import to_toml
from fourfold.run_file.load import load_run, make_run

STEP_TOKENS = 4 << 20
"""Tokens of a step where no batch is given: a common size for models of billions of parameters."""
LONGEST_DEFAULT = 8192
PLANNED = ("schedule", "stages_per_rank", "layers_per_stage", "cp_method")
"""Of [parallel] besides the axes: what a plan decides, or what goes with the axes that it replaces."""
MOST = {"--gpus": MOST_GPUS, "--seq": 1 << 26, "--global-batch": (1 << 31) - 1}
"""Beyond, sizes of a layout do not fit the search's 32 bits."""
BITS = {"bf16": 16, "fp16": 16, "fp32": 32, "fp8": 8}
MORE_PIPELINES = (("GPipe", 1), *(("LoopedBFS", chunks) for chunks in (2, 4)), ("DualPipeV", 2))
"""What is searched only where it is asked for."""
CHOICES = {
    "zero": ("0", "1", "2", "3"),
    "recompute": RECOMPUTE,
    "interleave": tuple(str(chunks) for chunks in sorted({chunks for _, chunks in PIPELINES})),
    "schedule": tuple(dict.fromkeys(name for name, _ in (*PIPELINES, *MORE_PIPELINES))),
    "cp_method": Limits().contexts,
}
LIMITS = (
    "write it as x<=8 (axes alone), pp=1, micro_batch=1, zero=0, interleave=2, schedule=1F1B, cp_method=ring or "
    "recompute=full"
)


@dataclass(frozen=True)
class Request:
    """A model with a step, on a number of GPUs of a machine; own: the layout of the run file that was given."""

    name: str
    model: ModelConfig
    base: Workload
    gpus: int
    own: Workload | None
    run: RunConfig | None
    precision: str | None


def request(
    model: str | None,
    run_file: Path | None,
    overrides: list[str],
    gpus: int | None,
    seq: int | None,
    batch: int | None,
    precision: str | None,
) -> Request:
    """From options; raises ``UserError`` for what does not go together."""
    if (model is None) == (run_file is None):
        raise UserError("give either --model (a preset, a config.json or its folder) or a run file")
    if precision is not None and precision not in BITS:
        raise UserError(f"--precision {precision} is unknown; there are {', '.join(BITS)}")
    for name, value in (("--gpus", gpus), ("--seq", seq), ("--global-batch", batch)):
        if value is not None and not 1 <= value <= MOST[name]:
            raise UserError(f"{name} {value} must be from 1 to {MOST[name]:,}")
    run = own = None
    if run_file is not None:
        run = load_run(run_file, overrides)
        sizes, name, own = run.model, run.name, workload_of(run)
        gpus = gpus or run.parallel.world_size
        base = replace(own, **dict.fromkeys(AXES, 1), micro_batch=1, zero=0, recompute=0)
    else:
        assert model is not None
        if gpus is None:
            raise UserError("--gpus is missing: how many GPUs to plan for")
        sizes, name = load_model(model)
        seq = seq or min(sizes.max_position_embeddings, LONGEST_DEFAULT)
        base = replace(workload_of_model(sizes), seq=seq, batch=batch or max(1, round(STEP_TOKENS / seq / gpus)) * gpus)
    changes: dict[str, Any] = {}
    changes |= {"seq": seq} if seq else {}
    changes |= {"batch": batch} if batch else {}
    changes |= {"bits": BITS[precision]} if precision else {}
    base = replace(base, **changes)
    own = replace(own, **changes) if own is not None else None
    if sizes.position_embedding == "learned" and base.seq > sizes.max_position_embeddings:
        raise UserError(
            f"--seq {base.seq} is longer than the model's position table of {sizes.max_position_embeddings}"
        )
    return Request(name, sizes, base, gpus, own, run, precision)


def constants_for(machine: Machine, calibration: Calibration | None = None) -> Constants:
    """Those that the machine's own file holds, else those that come with fourfold."""
    if machine.efficiency:
        logs = dict(machine.efficiency)
        return moved(prior_constants(), np.log([logs.get(name, 1.0) for name in NAMES]))
    return (calibration or shipped()).constants(machine.name)


def limits_of(settings: list[str]) -> Limits:
    """``x<=8``, ``pp=1``, ``zero=0``, ``recompute=full``, ``schedule=1F1B`` as limits of the search."""
    most, fixed, choices = [], [], {}
    for setting in settings:
        name, sign, text = setting.partition("<=") if "<=" in setting else setting.partition("=")
        try:
            if name in AXES and sign:
                (most if sign == "<=" else fixed).append((name, _from(1, int(text))))
            elif sign == "=":
                kind, chosen = _choices(name, text)
                choices[kind] = tuple(choice for choice in choices.get(kind, chosen) if choice in chosen)
            else:
                raise ValueError
        except ValueError:
            known = f"{name}= takes one of {', '.join(CHOICES[name])}" if name in CHOICES else LIMITS
            raise UserError(f"--limit {setting}: {known}") from None
    if "pipelines" in choices and not any(setting.startswith("schedule") for setting in settings):
        choices["pipelines"] = tuple(pipeline for pipeline in choices["pipelines"] if pipeline in PIPELINES)
    impossible = [name for name, size in fixed if any(name == n and size > m for n, m in most)]
    impossible += [name for name, size in fixed if any(name == n and size != s for n, s in fixed)]
    impossible += [kind for kind, chosen in choices.items() if not chosen]
    if impossible:
        given = " --limit ".join(settings)
        raise UserError(f"--limit {given}: nothing is all of this ({impossible[0]}); leave one out")
    return Limits(at_most=tuple(most), fixed=tuple(fixed), **choices)


def _choices(name: str, text: str) -> tuple[str, tuple]:
    """A field of ``Limits`` and what is left of it; raises ``ValueError`` for what there is not."""
    if name == "zero":
        return "zeros", (_from(0, int(text), 3),)
    if name == "micro_batch":
        return "micro_batches", (_from(1, int(text)),)
    found: tuple = ()
    if name == "recompute":
        kind, found = "recomputes", tuple(mode for mode in RECOMPUTES if RECOMPUTE[mode[0]] == text)
    elif name == "interleave":
        kind, found = "pipelines", tuple(p for p in (*PIPELINES, *MORE_PIPELINES) if p[1] == int(text))
    elif name == "schedule":
        kind, found = "pipelines", tuple(p for p in (*PIPELINES, *MORE_PIPELINES) if p[0] == text)
    elif name == "cp_method":
        kind, found = "contexts", tuple(c for c in Limits().contexts if c == text)
    if not found:
        raise ValueError(name)
    return kind, found


def _from(least: int, value: int, most: int = 1 << 24) -> int:
    if not least <= value <= most:
        raise ValueError(value)
    return value


def run_of(asked: Request, layout: Prediction) -> RunConfig:
    """A run with a planned layout: the given run file's other keys, or defaults and built-in text."""
    work = layout.work
    table = asked.run.model_dump(mode="json", exclude_none=True) if asked.run is not None else {
        "name": asked.name,
        "model": asked.model.model_dump(mode="json", exclude_none=True),
        "data": {"source": "python-stdlib"},
        "training": {"train_steps": 1000},
    }  # fmt: skip
    record = layout.record()
    own = {key: value for key, value in table.get("parallel", {}).items() if key not in PLANNED}
    table["parallel"] = own | record["parallel"]
    table["training"] |= {
        "micro_batch_size": record["micro_batch_size"],
        "global_batch_size": int(work.batch),
        "seq_length": int(work.seq),
    }
    if asked.precision is not None or asked.run is None:
        eight = asked.precision == "fp8"
        table["training"] |= {"precision": "bf16" if eight else asked.precision or "bf16",
                              "float8": "tensorwise" if eight else "none"}  # fmt: skip
    table["activation_checkpoint"] = dict(table.get("activation_checkpoint", {})) | {
        "mode": record["activation_checkpoint"],
        "every": record["activation_checkpoint_every"],
        "offload": record["activation_checkpoint_offload"],
    }
    return make_run(table, where="the planned layout")


def write_run(path: Path, asked: Request, layout: Prediction) -> None:
    """Write the run file of a planned layout."""
    comment = f"# Planned for {asked.gpus} GPUs of {layout.machine.name}: {layout.seconds:.3g} s a step.\n"
    if asked.run is None:
        comment += "# [data] is built-in text: name your own corpora.\n"
    write_output(path, comment + to_toml(run_of(asked, layout)))


def outside_calibration(machine: Machine, work: Workload) -> list[str]:
    """What of a prediction lies outside the range that the machine's constants were calibrated in."""
    values = features(work)
    return [
        f"{name} {values[name]:,.0f} (calibrated from {low:,.0f} to {high:,.0f})"
        for name, (low, high) in machine.calibrated_range
        if name in values and not low <= values[name] <= high
    ]


def features(work: Workload) -> dict[str, float]:
    """What a calibration's range is told in."""
    return {"gpus": float(work.gpus), "hidden": float(work.hidden), "seq": float(work.seq),
            "tokens of a micro-batch": float(work.micro_batch * work.seq)}  # fmt: skip
