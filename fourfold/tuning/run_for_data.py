"""Choose a run for a model and some data, so that training needs no run file."""

import copy
import math
import os
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fourfold.config.parameter_counts import num_parameters
from fourfold.config.presets import PRESETS
from fourfold.config.run import AXES, RunConfig
from fourfold.data.atomic_files import write_output
from fourfold.data.indexed import IndexedDataset, idx_path
from fourfold.data.manifest import corpus_tokenizer, read_manifest, validation_prefix
from fourfold.data.prepare_with_defaults import prepare_with_defaults
from fourfold.data.sources import list_inputs
from fourfold.errors import UserError, given_as
from fourfold.huggingface.architectures.config_json import local_folder
from fourfold.planning.calibration.machine_constants import constants_for
from fourfold.planning.machines.machine import load_machine
from fourfold.planning.planned_run import planned_run
from fourfold.planning.request import request_for_run
from fourfold.planning.search.limits import parse_limits
from fourfold.planning.search.plan import predict
from fourfold.run_file.dump import table_to_toml
from fourfold.run_file.load import apply_override, make_run
from fourfold.training.machine_memory import GPUS
from fourfold.tuning.candidates import search_candidates

SEQUENCES = {"cpu": 16, "cuda": 64}
"""For each device, the default number of sequences per step. It is rounded up to a multiple of the number of
processes."""
LONGEST = {"cpu": 256, "cuda": 1024}
"""For each device, the largest default of training.seq_length."""
EPOCHS = 4
"""Passes over the data if a model is trained from scratch. Up to four passes are almost as good as new data
(Muennighoff et al. 2023, arXiv 2305.16264). A pretrained model is trained for one pass."""
TOKENS_PER_PARAMETER = 20
"""Largest number of tokens per parameter if a model is trained from scratch. This number is about compute-optimal
(Hoffmann et al. 2022, arXiv 2203.15556)."""
LEAST_STEPS = 100
PROMPT_TOKENS = 8
PRETRAINED_LR = 2e-5
LIMITS = ("y=1", "cp=1", "pp=1", "batch_parts=1")
"""Limits of the search for a grid. Layouts beyond these limits are rarely the fastest ones on one machine."""


def run_for_data(
    model: str, data: str, processes: int | None = None, steps: int | None = None, overrides: Sequence[str] = ()
) -> tuple[RunConfig, str]:
    """Prepare the data, and choose all settings of a run: length, batch, learning rate, validation, and grid.

    Args:
        model: Name of a preset, folder of a Hugging Face model, or its id on the Hub.
        data: A prepared corpus, or an input that ``prepare_with_defaults`` takes.
        processes: Number of processes. Default: the number of this machine's GPUs, or 1 on a CPU.
        steps: Number of steps. Default: one pass over the data for a pretrained model. Otherwise ``EPOCHS`` passes, but
            at most ``TOKENS_PER_PARAMETER`` tokens per parameter, and at least ``LEAST_STEPS`` steps.
        overrides: Overrides of the chosen run file, ``section.key=value``.

    Returns:
        The run, and the text of its run file without the keys that have their default.

    Raises:
        UserError: The model, the data, or an override is wrong, or no grid fits.
    """
    has_own_grid = any(each.startswith("parallel.") for each in overrides)
    if has_own_grid and processes is not None:
        raise UserError(f"--processes {processes} and --set parallel.… both choose the grid; leave one of them out")
    kind = "from_hf" if model not in PRESETS and (os.sep in model or Path(model).is_dir()) else "preset"
    name = re.sub(r"[^A-Za-z0-9]+", "-", f"{Path(data).name.partition('.')[0]}-{Path(model).name}").strip("-")
    table: dict[str, Any] = {"name": name, "model": {kind: model}, "data": {"train": [{"path": "corpora"}]}}
    table["training"] = dict.fromkeys(("global_batch_size", "seq_length", "train_steps"), 1)
    # The batch and the length are chosen later, so leave out the overrides that depend on them.
    draft = _make(table, [each for each in overrides if each.startswith(("name=", "model.", "training.device="))])
    gpus, memory = local_gpus() if draft.training.device != "cpu" else (0, 0.0)
    device, count = ("cuda", gpus) if gpus else ("cpu", 1)
    count = _world_size(overrides) if has_own_grid else processes or count
    corpus = data if idx_path(data).is_file() else _prepare(data, draft)
    tokens = IndexedDataset(corpus).tokens
    _add_data(table, corpus)
    # The corpus must give at least eight sequences. Limit their length to a power of two that ensures this.
    longest = min(LONGEST[device], 1 << max(0, (tokens // 8).bit_length() - 1))
    batch = {"global_batch_size": count * math.ceil(SEQUENCES[device] / count), "precision": "bf16" if gpus else "fp32"}
    table["training"] |= {**batch, "seq_length": min(longest, draft.model.max_position_embeddings)}
    run = _make(table, overrides)
    _add_schedule(table, run, steps, tokens)
    run = _make(table, overrides)
    if not has_own_grid:
        run = _with_grid(run, count, memory, overrides)
    short = run.model_dump(mode="json", exclude_defaults=True, exclude_none=True)
    for override in overrides:
        apply_override(table, override)
    return run, table_to_toml({**short, "model": table["model"]})


def _make(table: dict[str, Any], overrides: Sequence[str]) -> RunConfig:
    """Return the run of a table, changed by the overrides. Raise ``UserError`` if a key or value is wrong."""
    changed = copy.deepcopy(table)
    for override in overrides:
        apply_override(changed, override)
    return make_run(changed, "the run of --model and --data", overrides)


def _world_size(overrides: Sequence[str]) -> int:
    """Return the number of processes of the grid that the overrides choose. Ignore invalid sizes, because the schema
    checks them later."""
    table: dict[str, Any] = {}
    for override in overrides:
        apply_override(table, override)
    sizes = [table["parallel"].get(axis, 1) for axis in AXES]
    return math.prod(size for size in sizes if isinstance(size, int) and size > 0)


def local_gpus() -> tuple[int, float]:
    """Return the number of GPUs of this machine, and the bytes of memory of the smallest GPU."""
    if not any(Path(file).exists() for file in GPUS):
        return 0, 0.0
    import torch

    sizes = [torch.cuda.get_device_properties(number).total_memory for number in range(torch.cuda.device_count())]
    return len(sizes), float(min(sizes, default=0))


def _prepare(data: str, run: RunConfig) -> str:
    """Prepare the corpus corpora/NAME, where NAME is the run's name. Return the corpus's path without extension."""
    folder, prefix = None, Path("corpora") / run.name
    if run.model.from_hf is not None:
        from fourfold.huggingface.model_folder import SMALL_FILES  # This import takes seconds.

        folder = local_folder(run.model.from_hf, SMALL_FILES)
    with given_as("--data"):
        files = [(file.path, file.size, os.stat(file.path).st_mtime_ns) for file in list_inputs([data])]
    inputs, record = repr((files, folder, run.model.vocab_size)), Path(f"{prefix}.inputs")
    if read_manifest(prefix) is not None and (not record.is_file() or record.read_text(encoding="utf-8") != inputs):
        raise UserError(f"{prefix} was made from other data than {data}; add --set name=NAME, or remove {prefix}*")
    for note in prepare_with_defaults(data, prefix, folder, run.model.vocab_size).notes:
        print(note)
    write_output(record, inputs.encode())
    return str(prefix)


def _add_data(table: dict[str, Any], corpus: str) -> None:
    """Add the section [data] and a prompt for the sample. If the model is trained from scratch, also add its vocabulary
    size."""
    manifest, held_out = read_manifest(corpus), validation_prefix(corpus)
    table["data"] = {"train": [{"path": corpus}]}
    if idx_path(held_out).is_file():
        table["data"]["validation"] = [{"path": held_out}]
    if manifest is None:
        return
    table["data"]["format"] = manifest.format
    if "preset" in table["model"]:
        table["model"]["vocab_size"] = manifest.vocab_size
    start = IndexedDataset(corpus).read(0, min(PROMPT_TOKENS, manifest.tokens)).tolist()
    if manifest.format == "text" and (prompt := corpus_tokenizer(corpus).decode(start).rstrip("\ufffd")).strip():
        table["sample"] = {"prompt": prompt, "max_new_tokens": 100}


def _add_schedule(table: dict[str, Any], run: RunConfig, steps: int | None, tokens: int) -> None:
    """Add the number of steps, the learning rate, and the intervals of validations and checkpoints. The training corpus
    has this many tokens."""
    batch, parameters = run.training.global_batch_size * run.training.seq_length, num_parameters(run.model)
    if run.model.from_hf is not None:
        lr, wanted = PRETRAINED_LR, float(tokens)
    else:  # The learning rate is from Kaplan et al. 2020 (arXiv 2001.08361, equation D.1).
        lr = float(f"{max(1e-4, 0.003239 - 0.0001395 * math.log(parameters)):.2g}")
        wanted = max(min(EPOCHS * tokens, TOKENS_PER_PARAMETER * parameters), LEAST_STEPS * batch)
    steps = steps or math.ceil(wanted / batch)
    table["training"]["train_steps"] = steps
    table |= {"optimizer": {"lr": lr}, "lr_scheduler": {"warmup_steps": steps // 20}}
    table["checkpoint"] = {"interval": max(50, steps // 10)}
    held_out = [IndexedDataset(corpus.path).tokens for corpus in run.data.validation]
    if held_out and held_out[0] > run.training.seq_length:
        table["validation"] = {"interval": max(10, steps // 10), "steps": min(8, held_out[0] // batch + 1)}


def _with_grid(run: RunConfig, processes: int, gpu_memory: float, overrides: Sequence[str]) -> RunConfig:
    """Return the run on the grid that the planner predicts to be the fastest. ``gpu_memory`` is 0 on a CPU."""
    machine = load_machine("dgx-h100" if gpu_memory else "laptop")
    machine = replace(machine, memory=gpu_memory or machine.memory)
    constants, request = constants_for(machine), request_for_run(run, processes)
    chosen = [each.removeprefix("training.") for each in overrides if each.startswith("training.micro_batch_size=")]
    limits = parse_limits([*LIMITS, *chosen[-1:]])
    candidates = search_candidates(request.base, machine, constants, processes, limits, on_gpu=gpu_memory > 0)
    return planned_run(request, predict(candidates.point(0), machine, constants))
