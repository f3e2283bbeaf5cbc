"""The audit from a checkpoint and documents to one record, top to bottom."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fourfold.config.loss_masks import GoldfishConfig
from fourfold.config.run import RunConfig
from fourfold.data.tokenizer import Tokenizer
from fourfold.environment import Place
from fourfold.errors import UserError
from fourfold.launch.job_processes import device_of
from fourfold.memorization.documents import AuditDocument, read_documents, with_others_before
from fourfold.memorization.forward import AuditedModel, HuggingFaceTokenizer
from fourfold.memorization.generation import continue_greedily
from fourfold.memorization.goldfish_check import REPLAYABLE, check_replayable
from fourfold.memorization.record import Evidence, audit_record
from fourfold.memorization.scored_model import (
    ScoringRequest,
    Subject,
    context_of,
    open_model,
    subject_of,
    tokenizer_of,
)
from fourfold.memorization.scores import FIELDS, TokenScores
from fourfold.run_file.load import load_run


@dataclass(frozen=True, kw_only=True)
class AuditRequest(ScoringRequest):
    """What to audit.

    reference: a model to compare with; suffix: tokens at the end that must be repeated; prefix: the fewest before
    them; offset: tokens of other documents before each; run: a run file whose goldfish mask is replayed (default: that
    of the checkpoint); generate: documents that are continued token by token.
    """

    documents: Path
    control: Path | None = None
    reference: str | None = None
    run: Path | None = None
    suffix: int = 50
    prefix: int = 50
    offset: int = 0
    generate: int = 0
    text_key: str = "text"
    count_key: str = "count"

    def check(self) -> None:
        """Raise UserError for sizes that cannot be audited."""
        if self.suffix < 1 or self.prefix < 1:
            raise UserError(f"--suffix {self.suffix} and --prefix {self.prefix} must both be at least 1 token")
        if self.generate < 0 or self.offset < 0 or self.micro_batch_size < 1:
            raise UserError("--generate and --offset are at least 0, and --micro-batch-size at least 1")
        self.sampling.check()


def audit_of_place(place: Place, request: AuditRequest, subject: Subject) -> dict[str, Any] | None:
    """Audit on every process of the grid of ``subject``; the record on rank 0, None elsewhere."""
    request.check()
    run = subject.run
    device = device_of(place, run.training.device if run is not None else "auto")
    goldfish = _goldfish(request, run)
    compared = None if request.reference is None else subject_of(request.reference, request, "--reference")
    tokenizer = tokenizer_of(request, subject)
    model = open_model(subject, request, device)
    documents, truncated = _documents(request, model, tokenizer, run)
    inputs = with_others_before(documents, request.offset, None if tokenizer is None else tokenizer.eod_id)
    scores = _scores(model, inputs, request.offset)
    generated = _generated(model, documents, inputs, request)
    reference = None
    if compared is not None:
        del model  # before the other takes its place
        reference = _scores(_reference_model(request, compared, device, inputs), inputs, request.offset)
    if scores is None:
        return None
    if tokenizer is not None:
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


def _reference_model(
    request: AuditRequest, subject: Subject, device: torch.device, inputs: Sequence[NDArray]
) -> AuditedModel:
    """The model to compare with; it must read the same tokens."""
    model = open_model(subject, request, device)
    largest, longest = max(int(tokens.max()) for tokens in inputs), max(len(tokens) for tokens in inputs)
    if largest >= model.vocab_size:
        raise UserError(
            f"--reference {request.reference} has a vocabulary of {model.vocab_size}, and the documents have token "
            f"{largest}; a reference model needs the audited model's tokenizer"
        )
    if longest > context_of(model, subject.run) + 1:
        raise UserError(
            f"--reference {request.reference} sees {context_of(model, subject.run)} tokens, and the documents have up "
            f"to {longest}; give shorter documents, or another reference model"
        )
    return model


def _documents(
    request: AuditRequest,
    model: AuditedModel,
    tokenizer: Tokenizer | HuggingFaceTokenizer | None,
    run: RunConfig | None,
) -> tuple[list[AuditDocument], int]:
    """The documents, then those of the control file with count 0; and how many were cut to the model's context."""
    shortest, context = request.prefix + request.suffix, context_of(model, run)
    if request.offset >= context:
        raise UserError(f"--offset {request.offset} leaves nothing of the {context} tokens that the model sees")
    longest = context + 1 - request.offset  # the last token is never an input
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
    _check_groups(request, found)
    cut = [document.cut(longest) for document in found]
    return cut, sum(len(document.tokens) > longest for document in found)


def _check_groups(request: AuditRequest, documents: Sequence[AuditDocument]) -> None:
    """Raise UserError where members and controls are not what the options say, or are the same."""
    if request.count_key != AuditRequest.count_key and all(d.count is None for d in documents):
        raise UserError(f'--counts {request.count_key}: no document of {request.documents} has "{request.count_key}"')
    members, controls = (
        {document.tokens.tobytes() for document in documents if (document.count == 0) == is_control}
        for is_control in (False, True)
    )
    if not members:
        raise UserError(f"every document in {request.documents} has a count of 0: there is none that was trained on")
    if both := len(members & controls):
        raise UserError(f"{both} of the documents are members and controls at once; a control was never trained on")


def _scores(model: AuditedModel, inputs: Sequence[NDArray], offset: int) -> list[TokenScores] | None:
    """Of every document, without the `offset` tokens that stand before it."""
    fields = model.score(list(inputs))
    if fields is None:
        return None
    excluded = FIELDS.index("sampled")  # minus infinity where the attacker never draws the token
    if not all(np.isfinite(np.delete(each, excluded, 0)).all() for each in fields):
        raise UserError("the model's probabilities are not numbers (NaN or infinite): its weights are damaged")
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


def _with_text(document: AuditDocument, tokenizer: Tokenizer | HuggingFaceTokenizer) -> AuditDocument:
    """With the text of just the tokens that were scored: what was cut off must not count towards its length."""
    return replace(document, text=tokenizer.decode(document.tokens.tolist()))
