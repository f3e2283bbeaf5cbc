"""Replay a goldfish mask over audited documents: did the model learn what was kept, and miss what was left out?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fourfold.config.loss_masks import GoldfishConfig
from fourfold.data.canaries import Vocabulary, copy_of
from fourfold.data.dataset import Windows
from fourfold.data.goldfish import Goldfish
from fourfold.data.mask_statistics import longest_run
from fourfold.errors import UserError
from fourfold.memorization.documents import AuditDocument
from fourfold.memorization.laws import exact_match_law, near_duplicate_law
from fourfold.memorization.scores import TokenScores
from fourfold.memorization.statistics import bootstrap, wilson

COPIES = 300
"""Of each near-duplicate canary, to see on how many its mask differs."""

REPLAYABLE = ("hash", "hash-table")


@dataclass(frozen=True)
class Replay:
    """The mask of one document, as training saw it.

    known: [T - 1], whether the mask of this token is decided by the document alone; dropped: whether it was left out.
    """

    known: NDArray[np.bool_]
    dropped: NDArray[np.bool_]


def check_replayable(config: GoldfishConfig) -> None:
    """Raise UserError for a mask that depends on where in a sequence a document stood."""
    if config.strategy not in REPLAYABLE:
        raise UserError(
            f"masks.goldfish.strategy = '{config.strategy}' depends on where a document stood in its sequence, so its "
            f"mask cannot be replayed; {' and '.join(REPLAYABLE)} can"
        )


def replay_mask(config: GoldfishConfig, exempt: tuple[int, ...], tokens: NDArray[np.int64], shift: int = 0) -> Replay:
    """The mask of a document. Of its first h tokens hash keeps all, and hash-table's depend on what was before.

    shift: its copies began up to so many tokens late, and each kept first tokens of its own.
    """
    windows = Windows(tokens[None], np.zeros((1, len(tokens)), dtype=np.int64), np.zeros(1, dtype=np.int64))
    dropped = ~Goldfish(config, exempt)(windows)[0]
    known = np.ones_like(dropped)
    if config.strategy == "hash-table":
        known[: config.preceding] = False
    if shift:
        known[: shift + config.h] = False
    return Replay(known, dropped)


def replay_report(
    config: GoldfishConfig,
    exempt: tuple[int, ...],
    documents: Sequence[AuditDocument],
    scores: Sequence[TokenScores],
    suffix: int,
    tokenizer: Vocabulary | None,
) -> dict[str, Any]:
    """What the mask explains of the members' scores; intervals over documents.

    first_divergence_at_dropped: of the documents whose suffix is not repeated, the share that first differs at a
    dropped token; chance alone gives suffix_drop_rate. suffix_kept_whole: the share of suffixes without a dropped
    token, which no mask keeps from being repeated.
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
    return {
        "strategy": config.strategy,
        "k": config.k,
        "h": config.h,
        "drop_rate": sum(int(out.sum()) for out in dropped) / max(1, known),
        "nll_kept": _mean(scores, kept, lambda s: -s.log_prob),
        "nll_dropped": _mean(scores, dropped, lambda s: -s.log_prob),
        "agreement_kept": _mean(scores, kept, lambda s: s.agrees),
        "agreement_dropped": _mean(scores, dropped, lambda s: s.agrees),
        "suffix_drop_rate": float(ends.mean()),
        "first_divergences": len(diverged),
        "first_divergence_at_dropped": sum(diverged) / len(diverged) if diverged else None,
        "first_divergence_at_dropped_ci": list(wilson(sum(diverged), len(diverged))),
        "longest_undropped_span": max(longest_run(~replay.dropped[None]) for replay in replays),
        "expected_exact_match": exact_match_law(config.k, suffix),
        "suffix_kept_whole": whole / len(documents),
        "suffix_kept_whole_ci": list(wilson(whole, len(documents))),
        "near_duplicates": near_duplicates(config, exempt, documents, tokenizer),
    }


def near_duplicates(
    config: GoldfishConfig,
    exempt: tuple[int, ...],
    documents: Sequence[AuditDocument],
    tokenizer: Vocabulary | None,
) -> dict[str, Any] | None:
    """The share of near-duplicate copies that train a token which the clean document leaves out, beside the law.

    Of the copies as they were planted, where the token itself is the same; None without noisy canaries, and without the
    tokenizer whose tokens the noise is.
    """
    if tokenizer is None:
        return None
    per_document = []
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
    pairs = np.array(per_document)

    def share(rows: NDArray) -> float:
        return float(rows[:, 0].sum() / rows[:, 1].sum())

    return {
        "noise": noise,
        "trained_share": share(pairs),
        "trained_share_ci": list(bootstrap(share, pairs)),
        "expected_trained_share": near_duplicate_law(noise, config.preceding, config.k),
    }


def _mean(
    scores: Sequence[TokenScores], where: Sequence[NDArray[np.bool_]], what: Callable[[TokenScores], NDArray]
) -> dict[str, Any] | None:
    """Mean over the tokens at ``where``, with its interval over documents; None where there is no such token."""
    pairs = np.array([(what(s)[at].sum(), at.sum()) for s, at in zip(scores, where, strict=True) if at.any()])
    if not len(pairs):
        return None

    def mean(rows: NDArray) -> float:
        return float(rows[:, 0].sum() / rows[:, 1].sum())

    return {"mean": mean(pairs), "ci": list(bootstrap(mean, pairs))}
