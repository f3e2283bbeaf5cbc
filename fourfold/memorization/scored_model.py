"""The model that is scored: a checkpoint on a grid, or a model of Hugging Face, with its tokenizer and its context."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from fourfold.checkpoints.find import STATE_FILE, newest_checkpoint
from fourfold.checkpoints.saved_state import read_state
from fourfold.config.run import RunConfig
from fourfold.data.build import ensure_builtin
from fourfold.data.manifest import corpus_tokenizer, read_manifest
from fourfold.data.tokenizer import Tokenizer, load_tokenizer
from fourfold.errors import UserError
from fourfold.huggingface.convert import SOURCE_FOLDER, TOKENIZER_FILE
from fourfold.launch.job_processes import run_on_grid
from fourfold.memorization.forward import AuditedModel, GridModel, HuggingFaceModel, HuggingFaceTokenizer
from fourfold.memorization.scores import Sampling
from fourfold.run_file.load import apply_override, make_run

LONGEST_UNKNOWN = 2048
"""Tokens of a document that a model without a stated context is given, and at most one that was imported."""


@dataclass(frozen=True, kw_only=True)
class ScoringRequest:
    """A model and how to run it.

    model: a checkpoint, the folder of a run, or a Hugging Face folder or name; overrides: of the run, such as
    parallel.z=2; micro_batch_size: documents that one rank scores at once.
    """

    model: str
    tokenizer: str | None = None
    sampling: Sampling = field(default_factory=Sampling)
    micro_batch_size: int = 8
    overrides: tuple[str, ...] = ()


@dataclass(frozen=True)
class Subject:
    """The model as the request names it.

    checkpoint: None for a Hugging Face model; run: its sizes and its grid; knows_data: whether the run's own file was
    beside the checkpoint, and says what the model was trained on.
    """

    name: str
    checkpoint: Path | None = None
    run: RunConfig | None = None
    knows_data: bool = False


def subject_of(name: str, request: ScoringRequest, option: str = "--model") -> Subject:
    """Find the model, and the run that describes it on the grid that the overrides ask for.

    option: by which it was asked for. Raises UserError where there is none.
    """
    path = Path(name)
    is_of_the_hub = name.count("/") == 1 and not path.parent.exists()
    if not path.exists() and not is_of_the_hub:
        raise UserError(
            f"{option} {name} does not exist; give a checkpoint, the folder of a run, or a Hugging Face model"
        )
    if is_of_the_hub or (path / "config.json").is_file():
        if request.overrides and option == "--model":
            raise UserError(
                f"--set is for checkpoints of fourfold, and {name} is a Hugging Face model; bring it in with "
                "`fourfold import-hf` to audit it on a grid"
            )
        return Subject(name)
    checkpoint = _checkpoint_in(path)
    run_file = checkpoint.parent.parent / "run.toml"
    return Subject(name, checkpoint, _run_of(checkpoint, run_file, request), run_file.is_file())


def _checkpoint_in(path: Path) -> Path:
    checkpoint = newest_checkpoint(path)
    if checkpoint is None:
        raise UserError(
            f"--model {path} holds neither a checkpoint ({STATE_FILE}) nor a Hugging Face model (config.json)"
        )
    return checkpoint


def _run_of(checkpoint: Path, run_file: Path, request: ScoringRequest) -> RunConfig:
    """The run that wrote the checkpoint, as far as it is known, on one process unless overrides say more."""
    state = read_state(checkpoint)
    table: dict[str, Any] = {"data": {"source": "python-stdlib"}}
    if run_file.is_file():
        table = tomllib.loads(run_file.read_text(encoding="utf-8"))
    table["model"] = dict(state.model)
    table["parallel"] = {}
    # A model that was imported was never trained here, and says only what it can see.
    longest = state.training.get("seq_length") or min(state.model["max_position_embeddings"], LONGEST_UNKNOWN)
    training = {"seq_length": longest, "micro_batch_size": request.micro_batch_size}
    precision = {key: table.get("training", {}).get(key) for key in ("precision", "master_weights", "device")}
    table["training"] = {**{k: v for k, v in precision.items() if v is not None}, **training, "train_steps": 1}
    # The loop's other sections say nothing of a forward pass.
    table = {key: table[key] for key in ("model", "data", "masks", "parallel", "training") if key in table}
    for override in request.overrides:
        apply_override(table, override)
    parallel = table["parallel"]
    ranks = parallel.get("dp", 1) * parallel.get("z", 1)
    table["training"]["global_batch_size"] = table["training"]["micro_batch_size"] * ranks
    return make_run(table, where=str(checkpoint))


def run_on_its_grid(function: str, request: ScoringRequest) -> Any:
    """Call ``"module:name"`` with (place, request, subject) on every process of the grid of the request's model; what
    the first one returned."""
    subject = subject_of(request.model, request)
    world_size = 1 if subject.run is None else subject.run.parallel.world_size
    device = "auto" if subject.run is None else subject.run.training.device
    return run_on_grid(function, [request, subject], world_size, wanted_device=device)


def tokenizer_of(
    request: ScoringRequest, subject: Subject, special_tokens: bool = True
) -> Tokenizer | HuggingFaceTokenizer | None:
    """The one that is asked for, else the model's own; None where nobody knows it.

    special_tokens: of a Hugging Face model's, put around a text what it puts there; ours never do.
    """
    if subject.run is None and request.tokenizer != "bytes":
        return HuggingFaceTokenizer(request.tokenizer or subject.name, special_tokens)
    if request.tokenizer is not None:
        return load_tokenizer(request.tokenizer)
    if not subject.knows_data:
        imported = subject.checkpoint / SOURCE_FOLDER / TOKENIZER_FILE
        return load_tokenizer(imported) if imported.is_file() else None
    data = subject.run.data
    if data.source is not None:
        prefix = ensure_builtin(data.source, data.tokenizer, data.cache_dir, subject.run.model.vocab_size)
        return corpus_tokenizer(prefix)
    if data.tokenizer is not None:
        return load_tokenizer(data.tokenizer)
    prefix = data.train[0].path
    return corpus_tokenizer(prefix) if read_manifest(prefix) is not None else None


def open_model(subject: Subject, request: ScoringRequest, device: torch.device) -> AuditedModel:
    """The model, on this process of its grid."""
    if subject.run is None or subject.checkpoint is None:
        return HuggingFaceModel(subject.name, device, request.sampling, request.micro_batch_size)
    return GridModel.load(subject.run, subject.checkpoint, device, request.sampling)


def context_of(model: AuditedModel, run: RunConfig | None) -> int:
    """The longest input."""
    if run is not None:
        return run.training.seq_length
    return getattr(model, "max_length", None) or LONGEST_UNKNOWN
