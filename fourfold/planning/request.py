"""Turn the command line's options into a request: a model, its step, and a number of GPUs."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fourfold.config.model import ModelConfig
from fourfold.config.presets import with_preset
from fourfold.config.run import RunConfig
from fourfold.errors import UserError
from fourfold.huggingface.architectures.config_json import QUANTIZED, model_of, read_config
from fourfold.planning.other_programs.other_run import OtherRun, read_other_run
from fourfold.planning.run_workload import workload_of, workload_of_model
from fourfold.planning.search.space import LIMITED, MOST_GPUS
from fourfold.planning.workload import OPTIMIZERS, Workload
from fourfold.run_file.load import load_run

STEP_TOKENS = 4 << 20
"""Approximate number of tokens per step if ``--global-batch`` is not given. This is a common size for models with
billions of parameters."""
LONGEST_DEFAULT = 8192
"""Largest default of ``--seq``, in tokens. Models with a shorter context use their context length."""
LARGEST = {"--gpus": MOST_GPUS, "--seq": 1 << 26, "--global-batch": (1 << 31) - 1}
"""Largest value of each option. Larger values could overflow the 32-bit integers that the search uses."""
BITS = {"bf16": 16, "fp16": 16, "fp32": 32, "fp8": 8}
"""For each value of ``--precision``, the value of ``Step.bits``."""


@dataclass(frozen=True)
class Request:
    """A request to plan a model and its step on a number of GPUs."""

    name: str
    model: ModelConfig
    base: Workload
    """The model and its step, on a grid of one process."""
    gpus: int
    own: Workload | None
    """The workload with the user's own layout, from the run file or from ``other``. None if both are None."""
    run: RunConfig | None
    """The run file. None if the request names a model or the run of another program instead."""
    precision: str | None
    """A key of ``BITS``. None if the option is not given."""
    optimizer: str | None
    """One of ``OPTIMIZERS``. None if the option is not given."""
    note: str | None = None
    """A note for the user about the model's config.json. None if there is nothing to say."""
    other: OtherRun | None = None
    """The run of another program, whose layout is ``own``. None if there is no such run."""


def request_from_options(
    model: str | None = None,
    run_file: Path | None = None,
    overrides: Sequence[str] = (),
    gpus: int | None = None,
    seq: int | None = None,
    batch: int | None = None,
    precision: str | None = None,
    optimizer: str | None = None,
) -> Request:
    """Make the request from the options of ``fourfold plan``.

    Args:
        model: Name of a preset, or path of a config.json or its folder. Give either this or ``run_file``.
        run_file: Path of a run file, whose model and batch are planned.
        overrides: Overrides of the run file, ``section.key=value``.
        gpus: Number of GPUs. Default: the run file's number of processes.
        seq: Number of tokens per sequence. Default: the run file's value. Without a run file, the model's context
            length, but at most 8,192.
        batch: Number of sequences per step. Default: the run file's value. Without a run file, the multiple of ``gpus``
            for which a step has about 4M tokens.
        precision: A key of ``BITS``, such as "bf16". Default: the run file's value, or "bf16" without a run file.
        optimizer: One of ``OPTIMIZERS``. Default: the run file's value, or "adamw" without a run file.

    Returns:
        The request.

    Raises:
        UserError: Options are missing, contradict each other, or are out of range, or a file is missing or invalid.
    """
    if (model is None) == (run_file is None):
        raise UserError("give either --model (a preset, a config.json or its folder) or a run file")
    if model is not None and overrides:
        raise UserError(
            f"--set {overrides[0]} changes a run file, but --model {model} is not a run file; give RUN.toml"
        )
    if precision is not None and precision not in BITS:
        raise UserError(f"--precision {precision} is unknown; choose from {', '.join(BITS)}")
    if optimizer is not None and optimizer not in OPTIMIZERS:
        raise UserError(f"--optimizer {optimizer} is unknown; choose from {', '.join(OPTIMIZERS)}")
    _check_counts(gpus, seq, batch)
    run = own = note = None
    if run_file is not None:
        changed = {} if precision is None else training_keys(precision)
        run = load_run(run_file, [*overrides, *(f"training.{key}={value}" for key, value in changed.items())])
        asked = request_for_run(run, gpus or run.parallel.world_size)
        sizes, name, own, base, gpus = run.model, run.name, asked.own, asked.base, asked.gpus
    else:
        assert model is not None
        if gpus is None:
            raise UserError("--gpus is missing; give the number of GPUs to plan for, such as --gpus 8")
        sizes, name, note = _load_model(model, precision or "bf16")
        seq = seq or min(sizes.max_position_embeddings, LONGEST_DEFAULT)
        batch = batch or max(1, round(STEP_TOKENS / seq / gpus)) * gpus
        base = workload_of_model(sizes).but(seq_length=seq, global_batch_size=batch)
    changes: dict[str, int] = {}
    changes |= {"seq_length": seq} if seq else {}
    changes |= {"global_batch_size": batch} if batch else {}
    changes |= {"bits": BITS[precision]} if precision else {}
    changes |= {"optimizer": OPTIMIZERS.index(optimizer)} if optimizer else {}
    base = base.but(**changes)
    own = own.but(**changes) if own is not None else None
    if sizes.position_embedding == "learned" and base.step.seq_length > sizes.max_position_embeddings:
        raise UserError(
            f"--seq {base.step.seq_length} is longer than the position table; "
            f"--seq {sizes.max_position_embeddings} works"
        )
    return Request(name, sizes, base, gpus, own, run, precision, optimizer, note)


def request_for_run(run: RunConfig, gpus: int) -> Request:
    """Make the request to plan a run's model and batch on ``gpus`` GPUs. Raise ``UserError`` if the planner cannot
    predict the run."""
    own = workload_of(run)
    base = own.but(**dict.fromkeys(LIMITED, 1), micro_batch_size=1, batch_parts=1, zero=0, recompute=0)
    return Request(run.name, run.model, base, gpus, own, run, None, None)


def _check_counts(gpus: float | None, seq: float | None, batch: float | None) -> None:
    for name, value in (("--gpus", gpus), ("--seq", seq), ("--global-batch", batch)):
        if value is not None and not 1 <= value <= LARGEST[name]:
            raise UserError(f"{name} {value:.15g} must be from 1 to {LARGEST[name]:,}, such as 8")


def request_from_other(path: Path, model: str | None, given: Mapping[str, object]) -> Request:
    """Make the request to plan a run of another training program.

    Args:
        path: The configuration of the other program.
        model: Name of a preset, or path of a config.json or its folder. Default: the model in the file.
        given: Values that replace the file's values, by column name (``columns.MeasuredRow``). None keeps the file's
            value. ``step_seconds`` is the step time that the user measured.

    Raises:
        UserError: The file is invalid, neither the file nor ``given`` has a value that a prediction needs, or the
            planner cannot predict the run.
    """
    columns = {name: str(value) for name, value in given.items() if value is not None}
    other = read_other_run(path, columns, _load_model(model, "bf16")[0] if model else None)
    row, sizes, step = other.row, other.model, other.own.work.step
    _check_counts(row.gpus, row.seq_len, row.global_batch)
    changes = {name: int(getattr(step, name)) for name in ("seq_length", "global_batch_size", "bits", "optimizer")}
    base = workload_of_model(sizes).but(**changes)
    precision = "fp8" if row.precision == "mxfp8" else row.precision
    name = path.stem.replace(" ", "-")
    return Request(name, sizes, base, int(row.gpus), other.own.work, None, precision, row.optimizer, None, other)


def training_keys(precision: str) -> dict[str, str]:
    """Return the keys of the run file's [training] section that set a precision of ``BITS``."""
    if precision == "fp8":
        return {"precision": "bf16", "float8": "tensorwise"}
    return {"precision": precision, "float8": "none"}


def _load_model(name: str, precision: str) -> tuple[ModelConfig, str, str | None]:
    """Load the sizes of a preset, of a config.json, or of a folder that has a config.json. Return the sizes, a short
    name, and a note for the user (or None)."""
    path = Path(name)
    if not path.is_dir() and path.suffix != ".json":
        if os.sep in name:
            raise UserError(
                f"--model {name} does not exist; give the folder of a config.json, or a preset such as gpt2"
            )
        return ModelConfig.model_validate(with_preset({"preset": name}, "--model")), name, None
    folder = path if path.is_dir() else path.parent
    config, note = read_config(path), None
    # This key says how the weights are stored. The model to train does not depend on it.
    if config.pop(QUANTIZED, None):
        note = f"{name} has quantized weights ({QUANTIZED}), but the plan trains in {precision} (--precision)"
    return model_of(config, name), folder.resolve().name, note
