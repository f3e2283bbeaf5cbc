"""Continue some documents with the model, and measure how close the model comes to the true text."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from fourfold.data.transformers_tokenizer import AnyTokenizer
from fourfold.memorization.audit_request import AuditRequest
from fourfold.memorization.documents import AuditDocument, Tokens
from fourfold.memorization.generation import continue_greedily, edit_distance, passage, text_likeness
from fourfold.memorization.intervals import wilson
from fourfold.memorization.near_verbatim import NearVerbatim, near_verbatim
from fourfold.memorization.scorers import Scorer
from fourfold.memorization.scores import TokenScores

TOLERANCES = (0.0, 0.05, 0.1, 0.2)
"""Largest fractions of a suffix's tokens that may differ from the true text. For each fraction, the record has bounds
on the share of extractable documents."""

EXTRACTABLE = 0.001
"""A suffix counts as extractable if a text that an attacker samples is close to the suffix with at least this
probability (arXiv 2505.12546)."""

SHOWN = 20
"""Largest number of passages in the record. They are the continuations of members that are closest to the true text."""


def continuations(
    scorer: Scorer,
    documents: Sequence[AuditDocument],
    inputs: Sequence[Tokens],
    scores: Sequence[TokenScores] | None,
    tokenizer: AnyTokenizer | None,
    request: AuditRequest,
) -> dict[str, Any]:
    """Remove the suffixes (the last ``request.suffix`` tokens) of some documents, and let the model continue the
    remaining texts by greedy decoding. If ``request.beams`` is set, also search for near-verbatim continuations.

    The documents are the first members (the model was trained on them) and the first controls (unseen documents).

    Every process of the model's grid must call this.

    Args:
        scorer: The model.
        documents: The documents.
        inputs: Token ids of each document, with the unrelated tokens before it.
        scores: On rank 0, the scores of each document. None on other ranks.
        tokenizer: The tokenizer that decodes the passages. If it is None, there are no passages.
        request: The options. ``generate`` is the largest number of members, and also the largest number of controls.

    Returns:
        On rank 0, the record's entries "generation", "near_verbatim", and "passages". "generation" is None if
        ``generate`` is 0, and "near_verbatim" is None without a search. On other ranks, both are None, and there are no
        passages.
    """
    suffix = request.suffix
    members, controls = (
        [number for number, document in enumerate(documents) if (document.count == 0) == is_control][: request.generate]
        for is_control in (False, True)
    )
    chosen = members + controls
    texts = [inputs[number] for number in chosen]
    written = continue_greedily(scorer, texts, suffix) if chosen else []
    found = []
    if chosen and request.beams:
        log_p = [] if scores is None else [float(scores[number].sampled[-suffix:].sum()) for number in chosen]
        tolerance = int(max(TOLERANCES) * suffix)
        found = near_verbatim(scorer, texts, log_p, suffix, tolerance, request.beams, request.sampling)
    if scores is None or not chosen:
        return {"generation": None, "near_verbatim": None, "passages": []}
    true = [text[-suffix:] for text in texts]
    agree = [
        np.array_equal(text, tokens) == scores[number].agrees[-suffix:].all()
        for number, text, tokens in zip(chosen, written, true, strict=True)
    ]
    sides = {"members": slice(0, len(members)), "control": slice(len(members), None)}
    sides = {name: side for name, side in sides.items() if chosen[side]}
    edits = list(map(edit_distance, written, true))
    generation = {name: text_likeness(written[side], true[side], edits[side]) for name, side in sides.items()}
    passages = []
    if tokenizer is not None:
        for n in sorted(range(len(members)), key=edits.__getitem__)[:SHOWN]:
            passages.append(passage(documents[chosen[n]].tokens[:-suffix], true[n], written[n], tokenizer))
    return {
        "generation": {**generation, "agrees_with_one_pass": float(np.mean(agree))},
        "near_verbatim": _near_verbatim({name: found[side] for name, side in sides.items()}, suffix) if found else None,
        "passages": passages,
    }


def _near_verbatim(sides: dict[str, list[NearVerbatim]], suffix: int) -> dict[str, Any]:
    """Summarize, for each tolerance, the bounds for members and the bounds for controls."""
    return {
        "cost": float(np.mean([each.cost for side in sides.values() for each in side])),
        "tolerances": [
            {"edits": edits, **{name: _extractable(side, edits) for name, side in sides.items()}}
            for edits in sorted({int(share * suffix) for share in TOLERANCES})
        ],
    }


def _extractable(found: Sequence[NearVerbatim], edits: int) -> dict[str, Any]:
    """Return bounds on the share of documents whose suffix is extractable if a continuation may differ from it by at
    most ``edits`` edits."""
    least = math.log(EXTRACTABLE)
    at_least = sum(each.lower[edits] >= least for each in found)
    at_most = sum(each.upper[edits] >= least for each in found)
    return {
        "documents": len(found),
        "extractable": at_least / len(found),
        "extractable_ci": [wilson(at_least, len(found))[0], wilson(at_most, len(found))[1]],
        "extractable_at_most": at_most / len(found),
        "mean_p": float(np.exp([each.lower[edits] for each in found]).mean()),
    }
