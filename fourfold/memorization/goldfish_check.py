"""Compute which tokens of the audited documents a goldfish mask dropped in training. Then compare the model's scores of
kept tokens and of dropped tokens."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fourfold.config.loss_masks import GoldfishConfig
from fourfold.data.canaries import copy_of
from fourfold.data.dataset import Windows
from fourfold.data.goldfish import Goldfish
from fourfold.data.mask_preview import longest_run
from fourfold.data.transformers_tokenizer import AnyTokenizer
from fourfold.errors import UserError
from fourfold.memorization.documents import AuditDocument, Tokens
from fourfold.memorization.goldfish_laws import exact_match_law, near_duplicate_law
from fourfold.memorization.intervals import pooled_ratio, wilson
from fourfold.memorization.scores import TokenScores

COPIES = 300
"""Largest number of noisy copies per canary whose masks are compared with the original's mask."""

REPLAYABLE = ("hash", "hash-table")
"""Strategies whose mask depends on the document's tokens, and not on the document's position in the training data. At
the document's start, the mask may also depend on the previous document (see ``replay_mask``)."""


@dataclass(frozen=True)
class MaskReplay:
    """The goldfish mask that one document of T tokens had in training. Both fields are [T - 1], because the first token
    is never predicted."""

    known: NDArray[np.bool_]
    """For each token, True if the document's tokens alone determine whether the mask dropped it."""
    dropped: NDArray[np.bool_]
    """For each token, whether the mask dropped it. The value has a meaning only if ``known`` is True for the token."""


def is_replayable(config: GoldfishConfig) -> bool:
    """Return whether a mask can be replayed (computed again) on single documents. A document's tokens alone must
    determine its mask, and the mask must be in effect from the first step."""
    return config.strategy in REPLAYABLE and config.start_step == 0


def check_replayable(config: GoldfishConfig) -> None:
    """Check that a mask can be replayed (computed again) on single documents.

    Raises:
        UserError: The mask depends on the document's position in its sequence, or on the step.
    """
    if config.start_step:
        raise UserError(
            f"masks.goldfish.start_step = {config.start_step}: earlier steps had no mask, so it is unknown which masks "
            "a document had; use a run with start_step = 0"
        )
    if config.strategy not in REPLAYABLE:
        raise UserError(
            f"masks.goldfish.strategy = '{config.strategy}' depends on where a document is in its sequence, so its "
            f"mask cannot be replayed; use {' or '.join(REPLAYABLE)}"
        )


def replay_mask(config: GoldfishConfig, exempt: tuple[int, ...], tokens: Tokens, shift: int = 0) -> MaskReplay:
    """Compute again which tokens of a document the mask dropped in training.

    The first h tokens of a document are special. The strategy "hash" drops none of them. With "hash-table", the
    previous document in the training sequence determines which of them are dropped. So their mask is unknown.

    Args:
        config: The goldfish mask.
        exempt: Token ids that the mask never drops.
        tokens: Token ids of the document [T].
        shift: The largest number of tokens that were cut off the start of a copy. In a cut copy, the first h tokens
            that remain are special. So the mask of the document's first ``shift`` + h tokens is unknown.
    """
    windows = Windows(tokens[None], np.zeros((1, len(tokens)), dtype=np.int64), np.zeros(1, dtype=np.int64))
    dropped = ~Goldfish(config, exempt)(windows)[0]
    known = np.ones_like(dropped)
    if config.strategy == "hash-table":
        known[: config.preceding] = False
    if shift:
        known[: shift + config.h] = False
    return MaskReplay(known, dropped)


def goldfish_check(
    config: GoldfishConfig,
    exempt: tuple[int, ...],
    documents: Sequence[AuditDocument],
    scores: Sequence[TokenScores],
    suffix: int,
    tokenizer: AnyTokenizer | None,
) -> dict[str, Any]:
    """Compare the scores of the members' kept tokens and dropped tokens. Members are documents that the model was
    trained on. Intervals come from resampling documents.

    Two of the results need an explanation:

    - ``first_divergence_at_dropped``: the fraction of documents whose first wrongly predicted suffix token was dropped
      by the mask. Documents without a wrong token in the suffix do not count. If the mask had no effect, this fraction
      would equal ``suffix_drop_rate``.
    - ``suffix_kept_whole``: the fraction of suffixes without a dropped token. The mask does not protect such suffixes.

    Args:
        config: The goldfish mask.
        exempt: Token ids that the mask never drops.
        documents: The members.
        scores: The scores of each member.
        suffix: Number of tokens at the end of a document that count as its suffix.
        tokenizer: The model's tokenizer, to draw the noise of canaries again. None if unknown.

    Raises:
        UserError: The mask cannot be replayed.
    """
    check_replayable(config)
    replays = [replay_mask(config, exempt, document.tokens, document.shift) for document in documents]
    dropped = [replay.dropped & replay.known for replay in replays]
    kept = [~replay.dropped & replay.known for replay in replays]
    diverged = []
    for document_scores, out in zip(scores, dropped, strict=True):
        wrong = np.flatnonzero(~document_scores.agrees[-suffix:])
        if len(wrong):
            diverged.append(bool(out[-suffix:][wrong[0]]))
    whole = sum(not out[-suffix:].any() for out in dropped)
    ends = np.concatenate([out[-suffix:] for out in dropped])
    known = sum(int(replay.known.sum()) for replay in replays)
    losses, agrees = [-each.log_prob for each in scores], [each.agrees for each in scores]
    return {
        "strategy": config.strategy, "k": config.k, "h": config.h,
        "drop_rate": sum(int(out.sum()) for out in dropped) / max(1, known),
        "nll_kept": _mean_at(kept, losses),
        "nll_dropped": _mean_at(dropped, losses),
        "agreement_kept": _mean_at(kept, agrees),
        "agreement_dropped": _mean_at(dropped, agrees),
        "suffix_drop_rate": float(ends.mean()),
        "first_divergences": len(diverged),
        "first_divergence_at_dropped": sum(diverged) / len(diverged) if diverged else None,
        "first_divergence_at_dropped_ci": list(wilson(sum(diverged), len(diverged))),
        "longest_undropped_span": max(longest_run(~replay.dropped[None]) for replay in replays),
        "expected_exact_match": exact_match_law(config.k, suffix),
        "suffix_kept_whole": whole / len(documents),
        "suffix_kept_whole_ci": list(wilson(whole, len(documents))),
        "near_duplicates": near_duplicates(config, exempt, documents, tokenizer),
    }  # fmt: skip


def near_duplicates(
    config: GoldfishConfig, exempt: tuple[int, ...], documents: Sequence[AuditDocument], tokenizer: AnyTokenizer | None
) -> dict[str, Any] | None:
    """Look at the tokens that the mask of a document drops. Measure how often the mask of a noisy copy of the document
    keeps such a token in the loss. Also return the rate that ``near_duplicate_law`` predicts.

    Only tokens that the noise left unchanged count. To find these tokens, the function draws the noise of each copy
    again, which needs the tokenizer's vocabulary. Without a tokenizer or without noisy canaries, it returns None.

    Args:
        config: The goldfish mask.
        exempt: Token ids that the mask never drops.
        documents: The members (documents that the model was trained on).
        tokenizer: The model's tokenizer, or None.
    """
    if tokenizer is None:
        return None
    per_document: list[tuple[float, float]] = []
    noise = 0.0
    for document in documents:
        if document.planted is None or document.canary is None or document.planted.noise == 0:
            continue
        variation = replace(document.planted, shift=0)
        noise = variation.noise
        clean = replay_mask(config, exempt, document.tokens)
        counted = trained = 0
        for number in range(min(COPIES, document.count or COPIES)):
            copy = copy_of(document.tokens, document.canary, number, variation, tokenizer)
            same = (copy == document.tokens)[1:] & clean.dropped & clean.known
            counted += int(same.sum())
            trained += int((same & ~replay_mask(config, exempt, copy).dropped).sum())
        if counted:
            per_document.append((trained, counted))
    if not per_document:
        return None
    share = pooled_ratio(per_document)
    return {
        "noise": noise,
        "trained_share": share["mean"],
        "trained_share_ci": share["ci"],
        "expected_trained_share": near_duplicate_law(noise, config.preceding, config.k),
    }


def _mean_at(where: Sequence[NDArray[np.bool_]], values: Sequence[NDArray[Any]]) -> dict[str, Any] | None:
    """Return the mean of ``values`` over the tokens that ``where`` selects, with an interval from resampling documents.
    Return None if ``where`` selects no token."""
    pairs = [(each[at].sum(), at.sum()) for at, each in zip(where, values, strict=True) if at.any()]
    return pooled_ratio(pairs) if pairs else None
