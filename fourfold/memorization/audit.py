"""The audit from a checkpoint and documents to one record, top to bottom."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray

from fourfold.config.load import apply_override, load_run, make_run
from fourfold.config.masks import GoldfishConfig
from fourfold.config.run import RunConfig
from fourfold.data.build import ensure_builtin
from fourfold.data.manifest import corpus_tokenizer, read_manifest
from fourfold.data.tokenizer import Tokenizer, load_tokenizer
from fourfold.errors import UserError
from fourfold.memorization.documents import AuditDocument, read_documents, with_others_before
from fourfold.memorization.forward import AuditedModel, GridModel, HuggingFaceModel, HuggingFaceTokenizer
from fourfold.memorization.generation import continue_greedily
from fourfold.memorization.record import Evidence, audit_record
from fourfold.memorization.replay import REPLAYABLE, check_replayable
from fourfold.memorization.scores import Sampling, TokenScores
from fourfold.training.checkpoint import STATE_FILE, list_checkpoints, read_state
from fourfold.training.environment import Place
from fourfold.training.launch import device_of

LONGEST_UNKNOWN = 2048
"""Tokens of a document that a Hugging Face model without a stated context is given."""


@dataclass(frozen=True)
class AuditRequest:
    """What to audit.

    model, reference: a checkpoint, the folder of a run, or a Hugging Face folder or name; suffix: tokens at the end
    that must be repeated; prefix: the fewest before them; offset: tokens of other documents before each; run: a run
    file whose goldfish mask is replayed (default: that of the checkpoint); overrides: of the run, such as
    parallel.z=2; generate: documents that are continued token by token.
    """

    model: str
    documents: Path
    control: Path | None = None
    reference: str | None = None
    run: Path | None = None
    tokenizer: str | None = None
    suffix: int = 50
    prefix: int = 50
    offset: int = 0
    sampling: Sampling = field(default_factory=Sampling)
    generate: int = 0
    micro_batch_size: int = 8
    text_key: str = "text"
    count_key: str = "count"
    overrides: tuple[str, ...] = ()

    def check(self) -> None:
        """Raise UserError for sizes that cannot be audited."""
        if self.suffix < 1 or self.prefix < 1:
            raise UserError(f"--suffix {self.suffix} and --prefix {self.prefix} must both be at least 1 token")
        if self.generate < 0 or self.offset < 0 or self.micro_batch_size < 1:
            raise UserError("--generate and --offset are at least 0, and --micro-batch-size at least 1")
        self.sampling.check()


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


def subject_of(name: str, request: AuditRequest) -> Subject:
    """Find the model, and the run that describes it on the grid that the overrides ask for."""
    path = Path(name)
    if not path.exists():
        if name.count("/") == 1 and not name.startswith((".", "/")):
            return Subject(name)  # a name on the Hugging Face hub
        raise UserError(
            f"--model {name} does not exist; give a checkpoint, the folder of a run, or a Hugging Face model"
        )
    if (path / "config.json").is_file():
        return Subject(name)
    checkpoint = _checkpoint_in(path)
    run_file = checkpoint.parent.parent / "run.toml"
    return Subject(name, checkpoint, _run_of(checkpoint, run_file, request), run_file.is_file())


def audit_of_place(place: Place, request: AuditRequest, subject: Subject) -> dict[str, Any] | None:
    """Audit on every process of the grid of ``subject``; the record on rank 0, None elsewhere."""
    request.check()
    run = subject.run
    device = device_of(place, run.training.device if run is not None else "auto")
    goldfish = _goldfish(request, run)
    tokenizer = _tokenizer(request, subject)
    model = _model(subject, request, device)
    documents, truncated = _documents(request, model, tokenizer, run)
    inputs = with_others_before(documents, request.offset, None if tokenizer is None else tokenizer.eod_id)
    scores = _scores(model, inputs, request.offset)
    generated = _generated(model, documents, inputs, request)
    reference = None
    if request.reference is not None:
        del model  # before the other takes its place
        reference = _scores(_reference_model(request, device, inputs), inputs, request.offset)
    if scores is None:
        return None
    if tokenizer is not None and not isinstance(tokenizer, HuggingFaceTokenizer):
        documents = [_with_text(document, tokenizer) for document in documents]
    special = () if tokenizer is None else tokenizer.special_ids
    return audit_record(
        Evidence(
            model=str(subject.checkpoint or subject.name),
            documents=documents,
            scores=scores,
            reference=reference,
            generated=generated,
            suffix=request.suffix,
            offset=request.offset,
            sampling=request.sampling,
            goldfish=goldfish,
            exempt=tuple(sorted({*special, *(goldfish.exempt if goldfish else [])})),
            tokenizer=tokenizer,
            truncated=truncated,
        )
    )


def _checkpoint_in(path: Path) -> Path:
    if (path / STATE_FILE).is_file():
        return path
    inside = list_checkpoints(path / "checkpoints" if (path / "checkpoints").is_dir() else path)
    if not inside:
        raise UserError(
            f"--model {path} holds neither a checkpoint ({STATE_FILE}) nor a Hugging Face model (config.json)"
        )
    return inside[-1]


def _run_of(checkpoint: Path, run_file: Path, request: AuditRequest) -> RunConfig:
    """The run that wrote the checkpoint, as far as it is known, on one process unless overrides say more."""
    state = read_state(checkpoint)
    table: dict[str, Any] = {"data": {"source": "python-stdlib"}}
    if run_file.is_file():
        table = tomllib.loads(run_file.read_text(encoding="utf-8"))
    table["model"] = dict(state.model)
    table["parallel"] = {}
    training = {"seq_length": state.training["seq_length"], "micro_batch_size": request.micro_batch_size}
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


def _goldfish(request: AuditRequest, run: RunConfig | None) -> GoldfishConfig | None:
    """The mask to replay: the one that is asked for must be replayable, the model's own is left out where it is not."""
    if request.run is not None:
        config = load_run(request.run).masks.goldfish
        if config.strategy == "none":
            raise UserError(f"{request.run} has no goldfish mask to replay; set masks.goldfish.strategy in it")
        check_replayable(config)
        return config
    if run is None or run.masks.goldfish.strategy not in REPLAYABLE:
        return None
    return run.masks.goldfish


def _tokenizer(request: AuditRequest, subject: Subject) -> Tokenizer | HuggingFaceTokenizer | None:
    if subject.run is None:
        return HuggingFaceTokenizer(request.tokenizer or subject.name)
    if request.tokenizer is not None:
        return load_tokenizer(request.tokenizer)
    if not subject.knows_data:
        return None
    data = subject.run.data
    if data.source is not None:
        prefix = ensure_builtin(data.source, data.tokenizer, data.cache_dir, subject.run.model.vocab_size)
        return corpus_tokenizer(prefix)
    if data.tokenizer is not None:
        return load_tokenizer(data.tokenizer)
    prefix = data.train[0].path
    return corpus_tokenizer(prefix) if read_manifest(prefix) is not None else None


def _model(subject: Subject, request: AuditRequest, device: torch.device) -> AuditedModel:
    if subject.run is None or subject.checkpoint is None:
        return HuggingFaceModel(subject.name, device, request.sampling, request.micro_batch_size)
    return GridModel.load(subject.run, subject.checkpoint, device, request.sampling)


def _reference_model(request: AuditRequest, device: torch.device, inputs: Sequence[NDArray]) -> AuditedModel:
    """The model to compare with; it must read the same tokens."""
    subject = subject_of(request.reference, request)
    model = _model(subject, request, device)
    largest, longest = max(int(tokens.max()) for tokens in inputs), max(len(tokens) for tokens in inputs)
    if largest >= model.vocab_size:
        raise UserError(
            f"--reference {request.reference} has a vocabulary of {model.vocab_size}, and the documents have token "
            f"{largest}; a reference model needs the audited model's tokenizer"
        )
    if longest > _context(model, subject.run) + 1:
        raise UserError(
            f"--reference {request.reference} sees {_context(model, subject.run)} tokens, and the documents have up to "
            f"{longest}; give shorter documents, or another reference model"
        )
    return model


def _context(model: AuditedModel, run: RunConfig | None) -> int:
    """The longest input."""
    if run is not None:
        return run.training.seq_length
    return getattr(model, "max_length", None) or LONGEST_UNKNOWN


def _documents(
    request: AuditRequest,
    model: AuditedModel,
    tokenizer: Tokenizer | HuggingFaceTokenizer | None,
    run: RunConfig | None,
) -> tuple[list[AuditDocument], int]:
    """The documents, then those of the control file with count 0; and how many were cut to the model's context."""
    shortest = request.prefix + request.suffix
    longest = _context(model, run) + 1 - request.offset  # the last token is never an input
    if shortest > longest:
        raise UserError(
            f"--prefix {request.prefix} and --suffix {request.suffix} are more than the {longest} tokens that the "
            f"model sees{' after --offset' if request.offset else ''}; lower them, or set training.seq_length"
        )
    options = {
        "vocab_size": model.vocab_size,
        "shortest": shortest,
        "text_key": request.text_key,
        "count_key": request.count_key,
    }
    found = read_documents(request.documents, tokenizer, **options)
    if request.control is not None:
        found += [replace(document, count=0) for document in read_documents(request.control, tokenizer, **options)]
    if all(document.count == 0 for document in found):
        raise UserError(f"every document in {request.documents} has a count of 0: there is none that was trained on")
    cut = [document.cut(longest) for document in found]
    return cut, sum(len(document.tokens) > longest for document in found)


def _scores(model: AuditedModel, inputs: Sequence[NDArray], offset: int) -> list[TokenScores] | None:
    """Of every document, without the `offset` tokens that stand before it."""
    fields = model.score(list(inputs))
    if fields is None:
        return None
    return [TokenScores.of(tokens[offset:], each[:, offset:]) for tokens, each in zip(inputs, fields, strict=True)]


def _generated(
    model: AuditedModel, documents: Sequence[AuditDocument], inputs: Sequence[NDArray], request: AuditRequest
) -> dict[int, NDArray] | None:
    """Greedy continuations of the first members, by the document's number."""
    members = [number for number, document in enumerate(documents) if document.count != 0][: request.generate]
    if not members:
        return None
    texts = continue_greedily(model, [inputs[number] for number in members], request.suffix)
    return dict(zip(members, texts, strict=True))


def _with_text(document: AuditDocument, tokenizer: Tokenizer) -> AuditDocument:
    """With the text of just the tokens that were scored: what was cut off must not count towards its length."""
    return replace(document, text=tokenizer.decode(document.tokens.tolist()))
