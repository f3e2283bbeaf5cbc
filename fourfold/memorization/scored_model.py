"""Find and open the model that scores documents, with its tokenizer and its context length. The model is a checkpoint
(on a grid of processes) or a Hugging Face model (on one process)."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from fourfold.checkpoints.find_checkpoints import STATE_FILE, newest_checkpoint
from fourfold.checkpoints.saved_state import read_state
from fourfold.config.run import RunConfig
from fourfold.data.run_data import open_run_tokenizer
from fourfold.data.tokenizer import HFTokenizer, load_tokenizer
from fourfold.data.transformers_tokenizer import AnyTokenizer, TransformersTokenizer
from fourfold.errors import UserError, given_as
from fourfold.huggingface.model_folder import SOURCE_FOLDER, TOKENIZER_FILE
from fourfold.launch.job_processes import run_on_grid
from fourfold.memorization.scorers import GridScorer, HuggingFaceScorer, Scorer
from fourfold.memorization.scores import AttackSampling
from fourfold.run_file.load import apply_override, make_run, read_table
from fourfold.untrusted_files import check_no_adapter

LONGEST_UNKNOWN = 2048
"""Context length in tokens of a model that does not state one. It is also the longest default context of an imported
model, because such a model does not state the sequence length that it was trained with."""


@dataclass(frozen=True, kw_only=True)
class ScoringRequest:
    """A request to score documents with a model, and how to run the model."""

    model: str
    """A checkpoint, a run's folder, or a Hugging Face folder or name."""
    tokenizer: str | None = None
    """A tokenizer.json, its folder, or "bytes". For a Hugging Face model, also a name. Default: the model's own
    tokenizer."""
    sampling: AttackSampling = field(default_factory=AttackSampling)
    """How an attacker draws samples from the model: with temperature, top-k, and top-p."""
    micro_batch_size: int = 8
    """Number of documents that one rank scores in one forward pass."""
    overrides: tuple[str, ...] = ()
    """Overrides of the run file, such as parallel.z=2."""


@dataclass(frozen=True)
class ScoredModel:
    """A model that scores documents, and the run that describes it."""

    name: str
    checkpoint: Path | None = None
    """Path of the checkpoint. None for a Hugging Face model."""
    run: RunConfig | None = None
    """The run that loads the checkpoint: it has the model's sizes and the grid. None for a Hugging Face model."""
    knows_data: bool = False
    """Whether the run file of the checkpoint was found. The run file names the training data."""


def find_model(name: str, request: ScoringRequest, option: str = "--model") -> ScoredModel:
    """Find a model. For a checkpoint, also create the run that loads it. The request's overrides choose the grid of
    this run.

    Args:
        name: A checkpoint, a run's folder, or a Hugging Face folder or name.
        request: How to run the model.
        option: The option to name in errors.

    Raises:
        UserError: There is no such model, an override is invalid, or overrides are given for a Hugging Face model.
    """
    path = Path(name)
    is_of_the_hub = name.count("/") == 1 and not path.parent.exists()
    if not path.exists() and not is_of_the_hub:
        raise UserError(
            f"{option} {name} does not exist; give a checkpoint, the folder of a run, or a Hugging Face model"
        )
    if is_of_the_hub or (path / "config.json").exists():
        if request.overrides and option == "--model":
            raise UserError(
                f"--set is for checkpoints of fourfold, but {name} is a Hugging Face model; import it with `fourfold "
                "checkpoint import-hf` to audit it on a grid"
            )
        return ScoredModel(name)
    checkpoint = newest_checkpoint(path)
    if checkpoint is None:
        check_no_adapter(path)
        raise UserError(
            f"{option} {path} holds neither a checkpoint ({STATE_FILE}) nor a Hugging Face model (config.json); give "
            "the folder of a checkpoint or a model"
        )
    run_file = checkpoint.parent.parent / "run.toml"
    return ScoredModel(name, checkpoint, _forward_run(checkpoint, run_file, request), run_file.is_file())


def _forward_run(checkpoint: Path, run_file: Path, request: ScoringRequest) -> RunConfig:
    """Return a run that loads the checkpoint and computes a forward pass. It uses one process unless the request's
    overrides ask for more."""
    state = read_state(checkpoint)
    table: dict[str, Any] = {"data": {"source": "python-stdlib"}}
    if run_file.is_file():
        table = read_table(run_file)
    table["model"] = dict(state.model)
    table["parallel"] = {}
    # An imported model has a largest number of positions, but no record of the sequence length in training.
    longest = state.training.get("seq_length") or min(state.model["max_position_embeddings"], LONGEST_UNKNOWN)
    training = {"seq_length": longest, "micro_batch_size": request.micro_batch_size}
    precision = {key: table.get("training", {}).get(key) for key in ("precision", "master_weights", "device")}
    table["training"] = {**{k: v for k, v in precision.items() if v is not None}, **training, "train_steps": 1}
    # Drop all other sections, because they affect only training.
    table = {key: table[key] for key in ("model", "data", "masks", "parallel", "training") if key in table}
    # The section [data] names the tokenizer. Reset two of its keys: the format "preferences" would require a section
    # [dpo], and the new batch size might not be divisible by the number of streams.
    for override in ("data.format=text", "data.streams=1", *request.overrides):
        apply_override(table, override)
    parallel = table["parallel"]
    ranks = parallel.get("dp", 1) * parallel.get("z", 1)
    table["training"]["global_batch_size"] = table["training"]["micro_batch_size"] * ranks
    return make_run(table, where=str(checkpoint))


def run_on_model_grid(function: str, request: ScoringRequest) -> Any:
    """Find the model that the request names, and call a function on every process of the model's grid.

    Args:
        function: Name of the function, as ``"module:name"``. Its arguments are the process's place in the job, the
            request, and the model.
        request: The request.

    Returns:
        The value that rank 0 returned.
    """
    model = find_model(request.model, request)
    world_size = 1 if model.run is None else model.run.parallel.world_size
    device = "auto" if model.run is None else model.run.training.device
    return run_on_grid(function, [request, model], world_size, wanted_device=device)


def find_tokenizer(request: ScoringRequest, model: ScoredModel, special_tokens: bool = True) -> AnyTokenizer | None:
    """Return the tokenizer that the request names. If the request names none, return the model's own tokenizer, or None
    if that is unknown.

    Args:
        request: The request, which may name a tokenizer.
        model: The model.
        special_tokens: Whether the tokenizer of a Hugging Face model adds its usual special tokens to a text.
            fourfold's own tokenizers never add special tokens.
    """
    if request.tokenizer == "bytes" or (request.tokenizer is not None and model.run is not None):
        with given_as("--tokenizer"):
            return load_tokenizer(request.tokenizer)
    if model.run is None or model.checkpoint is None:
        return TransformersTokenizer(request.tokenizer or model.name, special_tokens)
    if not model.knows_data:
        imported = model.checkpoint / SOURCE_FOLDER / TOKENIZER_FILE
        if not imported.is_file():
            return None
        return HFTokenizer(imported).as_usual()
    return open_run_tokenizer(model.run)


def open_scorer(model: ScoredModel, request: ScoringRequest, device: torch.device) -> Scorer:
    """Load the model, and return its scorer. Every process of the model's grid must call this."""
    if model.run is None or model.checkpoint is None:
        return HuggingFaceScorer(model.name, device, request.sampling, request.micro_batch_size)
    return GridScorer.load(model.run, model.checkpoint, device, request.sampling)


def context_length(scorer: Scorer) -> int:
    """Return the largest number of input tokens of a model. If the model does not state it, return
    ``LONGEST_UNKNOWN``."""
    return scorer.max_length or LONGEST_UNKNOWN
