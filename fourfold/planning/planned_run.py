"""Write a planned layout as a run file."""

from pathlib import Path
from typing import Any

from fourfold.config.run import RunConfig
from fourfold.data.atomic_files import write_output
from fourfold.planning.checkpoint_interval import best_interval
from fourfold.planning.request import Request, training_keys
from fourfold.planning.search.plan import Prediction
from fourfold.run_file.dump import to_toml
from fourfold.run_file.load import make_run

REPLACED = ("schedule", "stages_per_rank", "layers_per_stage", "cp_method")
"""Keys of [parallel] that are dropped from the user's run file, because the plan chooses them or because their values
depend on the axes."""


def planned_run(request: Request, layout: Prediction, tokens: float | None = None) -> RunConfig:
    """Return a run with a planned layout, and with the batch and the sequence length that the layout was planned for.
    If ``tokens`` is given, the run trains on this number of tokens, rounded to whole steps.

    If the request sets a precision or an optimizer, the run uses it. All other keys come from the request's run file.
    Without a run file, the run takes 1,000 steps on built-in text, the precision is bf16 if the request sets none, and
    the other keys have their defaults.
    """
    table: dict[str, Any] = {
        "name": request.name,
        "model": request.model.model_dump(mode="json", exclude_none=True),
        "data": {"source": "python-stdlib"},
        "training": {"train_steps": 1000},
    }
    if request.run is not None:
        table = request.run.model_dump(mode="json", exclude_none=True)
    record, work = layout.record(), layout.work
    kept = {key: value for key, value in table.get("parallel", {}).items() if key not in REPLACED}
    table["parallel"] = kept | record["parallel"]
    table["training"] |= {
        "micro_batch_size": record["micro_batch_size"],
        "global_batch_size": int(work.step.global_batch_size),
        "seq_length": int(work.step.seq_length),
    }
    if tokens is not None:
        table["training"]["train_steps"] = max(1, round(tokens / float(work.tokens_per_step)))
    if request.precision is not None or request.run is None:
        table["training"] |= training_keys(request.precision or "bf16")
    if request.optimizer is not None:
        table["optimizer"] = table.get("optimizer", {}) | {"name": request.optimizer}
    table["overlap"] = table.get("overlap", {}) | {"batch_parts": record["batch_parts"]}
    table["activation_checkpoint"] = table.get("activation_checkpoint", {}) | {
        "mode": record["activation_checkpoint"],
        "every": record["activation_checkpoint_every"],
        "offload": record["activation_checkpoint_offload"],
    }
    return make_run(table, where="the planned layout")


def write_run(path: Path, request: Request, layout: Prediction, tokens: float | None = None) -> None:
    """Write the run file of a planned layout. Comments at the top of the file say what the layout was planned for, and
    what the user should change.

    If the machine file has ``mtbf_gpu_hours`` and the user's run file sets no checkpoint interval, the written file
    gets the interval that loses the least time to failures and checkpoints.
    """
    comment = f"# Planned for {request.gpus} GPUs of {layout.machine.name}: {layout.seconds:.3g} s per step.\n"
    if request.run is None:
        comment += "# [data] names built-in text. Name your own corpora instead.\n"
    run = planned_run(request, layout, tokens)
    interval = best_interval(request.model, layout)
    if interval is not None and not run.checkpoint.interval:
        run.checkpoint.interval = interval
        minutes = interval * layout.seconds / 60
        comment += f"# checkpoint.interval: checkpoints every {minutes:,.0f} min lose the least time to failures.\n"
    write_output(path, comment + to_toml(run))
