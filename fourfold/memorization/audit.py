"""Audit a model on documents, and return the results as one record."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from fourfold.config.loss_masks import GoldfishConfig
from fourfold.config.run import RunConfig
from fourfold.data.transformers_tokenizer import AnyTokenizer
from fourfold.environment import Place
from fourfold.errors import UserError, given_as
from fourfold.launch.job_processes import choose_device
from fourfold.memorization.audit_record import AuditInputs, audit_record
from fourfold.memorization.audit_request import AuditRequest
from fourfold.memorization.continuations import continuations
from fourfold.memorization.documents import AuditDocument, Tokens, read_documents, with_others_before
from fourfold.memorization.goldfish_check import check_replayable, is_replayable
from fourfold.memorization.scored_model import ScoredModel, context_length, find_model, find_tokenizer, open_scorer
from fourfold.memorization.scorers import Scorer
from fourfold.memorization.scores import FIELDS, TokenScores
from fourfold.run_file.load import load_run


def run_audit(place: Place, request: AuditRequest, model: ScoredModel) -> dict[str, Any] | None:
    """Audit a model. Every process of the model's grid must call this.

    Args:
        place: The rank of this process, and the number of processes.
        request: The documents to audit, and the options of the audit.
        model: The model to audit.

    Returns:
        The record on rank 0, and None on all other ranks.

    Raises:
        UserError: An option is out of range, the goldfish mask of ``run`` cannot be replayed, the documents or the
            reference model do not fit the model, or the model's weights are damaged.
    """
    request.check()
    run = model.run
    device = choose_device(place, run.training.device if run is not None else "auto")
    goldfish = _goldfish(request, run)
    other_model = None if request.reference is None else find_model(request.reference, request, "--reference")
    _check_offset(request, run, None if other_model is None else other_model.run)
    tokenizer = find_tokenizer(request, model)
    scorer = open_scorer(model, request, device)
    documents, truncated = _documents(request, scorer, tokenizer)
    inputs = with_others_before(documents, request.offset)
    scores = _scores(scorer, inputs, request.offset)
    continued = continuations(scorer, documents, inputs, scores, tokenizer, request)
    reference = None
    if other_model is not None:
        del scorer  # Free the first model's memory before the second model is loaded.
        reference = _scores(_reference_scorer(request, other_model, device, inputs), inputs, request.offset)
    if scores is None:
        return None
    # Long documents have been cut off, so decode the tokens that are left.
    if tokenizer is not None:
        documents = [replace(document, text=tokenizer.decode(document.tokens.tolist())) for document in documents]
    special = () if tokenizer is None else tokenizer.special_ids
    found = AuditInputs(
        request=request,
        model=str(model.checkpoint or model.name),
        documents=documents,
        scores=scores,
        reference=reference,
        continuations=continued,
        goldfish=goldfish,
        exempt=tuple(sorted({*special, *(goldfish.exempt if goldfish else [])})),
        tokenizer=tokenizer,
        truncated=truncated,
    )
    return audit_record(found)


def _check_offset(request: AuditRequest, *runs: RunConfig | None) -> None:
    """Raise ``UserError`` if an offset is given, but one of the models was trained with document masking. In training,
    such a model never attended to other documents, so an offset makes no sense."""
    if request.offset and any(run is not None and run.data.mask_documents for run in runs):
        raise UserError(
            f"--offset {request.offset} puts other documents before each document, but a model trained with "
            "data.mask_documents never sees other documents; leave --offset out"
        )


def _goldfish(request: AuditRequest, run: RunConfig | None) -> GoldfishConfig | None:
    """Return the goldfish mask to replay (compute again). With --run, this is the mask of that run file, which must be
    replayable. Otherwise, it is the mask that the model was trained with, or None if that mask is unknown or not
    replayable."""
    if request.run is not None:
        with given_as("--run"):
            config = load_run(request.run).masks.goldfish
        if config.strategy == "none":
            raise UserError(f"{request.run} has no goldfish mask to replay; set masks.goldfish.strategy in that file")
        check_replayable(config)
        return config
    if run is None or not is_replayable(run.masks.goldfish):
        return None
    return run.masks.goldfish


def _reference_scorer(
    request: AuditRequest, model: ScoredModel, device: torch.device, inputs: Sequence[Tokens]
) -> Scorer:
    """Open the reference model. Raise ``UserError`` if the documents do not fit the reference model's vocabulary or
    context."""
    scorer = open_scorer(model, request, device)
    largest, longest = max(int(tokens.max()) for tokens in inputs), max(len(tokens) for tokens in inputs)
    if largest >= scorer.vocab_size:
        raise UserError(
            f"--reference {request.reference} has a vocabulary of {scorer.vocab_size}, but the documents have token "
            f"{largest}; a reference model needs the audited model's tokenizer"
        )
    context = context_length(scorer)
    if longest > context + 1:
        raise UserError(
            f"--reference {request.reference} sees {context} tokens, but the documents have up to {longest} tokens; "
            "give shorter documents, or another reference model"
        )
    return scorer


def _documents(
    request: AuditRequest, scorer: Scorer, tokenizer: AnyTokenizer | None
) -> tuple[list[AuditDocument], int]:
    """Read the documents, and then the documents of the control file, which get the count 0. Cut every document to the
    model's context.

    Returns:
        First the documents, and then the number of documents that were too long for the context.
    """
    shortest, context = request.prefix + request.suffix, context_length(scorer)
    if request.offset >= context:
        raise UserError(f"--offset {request.offset} leaves none of the {context} tokens of the context; lower --offset")
    longest = context + 1 - request.offset  # The last token of a document is never an input.
    if shortest > longest:
        raise UserError(
            f"--prefix {request.prefix} and --suffix {request.suffix} add up to more than the {longest} tokens that "
            f"the model sees{' after --offset' if request.offset else ''}; lower them, or set training.seq_length"
        )
    read = partial(
        read_documents,
        tokenizer=tokenizer,
        vocab_size=scorer.vocab_size,
        shortest=shortest,
        text_key=request.text_key,
    )
    with given_as("--documents"):
        found = read(request.documents)
    if request.control is not None:
        with given_as("--control"):
            found += [replace(document, count=0) for document in read(request.control)]
    _check_groups(request, found)
    cut = [document.cut(longest) for document in found]
    return cut, sum(len(document.tokens) > longest for document in found)


def _check_groups(request: AuditRequest, documents: Sequence[AuditDocument]) -> None:
    """Raise ``UserError`` if no document is a member (the model was trained on it), or if a member has the same tokens
    as a control."""
    members, controls = (
        {document.tokens.tobytes() for document in documents if (document.count == 0) == is_control}
        for is_control in (False, True)
    )
    if not members:
        found = f"every document in {request.documents} has a count of 0, so the model was trained on none of them"
        raise UserError(f"{found}; add documents that the model was trained on")
    if both := len(members & controls):
        raise UserError(
            f"{both} of the documents are both members and controls; remove them from one of the two files, because "
            "the model must not have been trained on a control"
        )


def _scores(scorer: Scorer, inputs: Sequence[Tokens], offset: int) -> list[TokenScores] | None:
    """Score every document. The ``offset`` tokens before a document are in the model's input, but get no scores. Return
    None on all ranks except 0.

    Raises:
        UserError: A score is NaN or infinite.
    """
    fields = scorer.score(list(inputs))
    if fields is None:
        return None
    # Do not check "sampled". It may be -inf, because the attacker's sampling never draws some tokens.
    excluded = FIELDS.index("sampled")
    if not all(np.isfinite(np.delete(each, excluded, 0)).all() for each in fields):
        raise UserError("the model's probabilities are not numbers (NaN or infinite): its weights are damaged")
    return [TokenScores.of(tokens[offset:], each[:, offset:]) for tokens, each in zip(inputs, fields, strict=True)]
