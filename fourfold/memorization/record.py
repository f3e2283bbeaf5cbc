"""From scores to the record of an audit: JSON values only, every rate with its interval and beside the control."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fourfold.config.loss_masks import GoldfishConfig
from fourfold.data.canaries import Vocabulary
from fourfold.memorization.documents import AuditDocument
from fourfold.memorization.extraction import (
    Extraction,
    exposure,
    extraction,
    matches_after,
    prefix_lengths,
)
from fourfold.memorization.generation import text_likeness
from fourfold.memorization.goldfish_check import replay_report
from fourfold.memorization.membership import CAVEAT, FEWEST, attacks, bag_of_words_guard, membership_scores
from fourfold.memorization.scores import Sampling, TokenScores
from fourfold.memorization.statistics import bootstrap, difference, wilson

QUERIES = (1, 100, 10_000, 1_000_000)
"""Samples that an attacker may draw, for which the share of extractable documents is given."""

CHANCE = 0.5
"""The p of (n, p)-discoverable extraction."""

POSITION_BINS = 10


@dataclass(frozen=True)
class Evidence:
    """All that a record is made of. generated: greedy continuations by the document's number."""

    model: str
    documents: Sequence[AuditDocument]
    scores: Sequence[TokenScores]
    suffix: int
    sampling: Sampling
    reference: Sequence[TokenScores] | None = None
    generated: Mapping[int, NDArray[np.int64]] | None = None
    goldfish: GoldfishConfig | None = None
    exempt: tuple[int, ...] = ()
    tokenizer: Vocabulary | None = None
    truncated: int = 0
    offset: int = 0


def audit_record(evidence: Evidence) -> dict[str, Any]:
    """The record: the members' measures at the top, then by count, prefix and position, the control's, and the rest.

    Members are the documents whose count is not 0; an unknown count is a member's.
    """
    documents, scores, suffix = evidence.documents, evidence.scores, evidence.suffix
    found = [extraction(document_scores, suffix) for document_scores in scores]
    members = [number for number, document in enumerate(documents) if document.count != 0]
    controls = [number for number, document in enumerate(documents) if document.count == 0]
    control = _summary([found[n] for n in controls]) if controls else None
    by_count: dict[str, Any] = {}
    for count in sorted({document.count for document in documents if document.count is not None}):
        these = [found[n] for n in range(len(documents)) if documents[n].count == count]
        by_count[str(count)] = _beside_control(these, [found[n] for n in controls] if count else [])
    member_scores = [scores[n] for n in members]
    replay = None
    if evidence.goldfish is not None:
        replay = replay_report(
            evidence.goldfish,
            evidence.exempt,
            [documents[n] for n in members],
            member_scores,
            suffix,
            evidence.tokenizer,
        )
    membership, guard = _membership(evidence, members, controls)
    record = {
        "model": evidence.model,
        "suffix": suffix,
        "offset": evidence.offset,
        "sampling": asdict(evidence.sampling),
        **_beside_control([found[n] for n in members], [found[n] for n in controls]),
        "by_count": by_count,
        "by_prefix": _by_prefix(member_scores, [scores[n] for n in controls], suffix),
        "by_position": _by_position(member_scores),
        "control": control,
        "reference": _reference(evidence, members),
        "membership": membership,
        "bag_of_words_guard": guard,
        "mask_replay": replay,
        "generation": _generation(evidence),
        "truncated_documents": evidence.truncated,
        "copied_documents": len(documents) - len({document.tokens.tobytes() for document in documents}),
    }
    return {**record, "warnings": _warnings(record)}


def _summary(found: Sequence[Extraction]) -> dict[str, Any]:
    exact = sum(each.exact_match for each in found)
    queries = [each.queries(CHANCE) for each in found]
    log_p = median(each.log_p for each in found)
    return {
        "documents": len(found),
        "exact_match": exact / len(found),
        "exact_match_ci": list(wilson(exact, len(found))),
        "token_agreement": _mean([each.token_agreement for each in found]),
        "extraction_strength": _mean([each.extraction_strength for each in found]),
        "longest_span": {
            "median": median(each.longest_span for each in found),
            "max": max(each.longest_span for each in found),
        },
        "loss": _mean([each.loss for each in found]),
        "median_log10_p": log_p / math.log(10) if math.isfinite(log_p) else None,
        "extractable_within": {str(n): sum(q <= n for q in queries) / len(found) for n in QUERIES},
    }


def _beside_control(found: Sequence[Extraction], controls: Sequence[Extraction]) -> dict[str, Any]:
    """A summary, and how much more is extracted than of the control: what was learned from repetition."""
    summary = _summary(found)
    if controls:
        exact, other = (sum(each.exact_match for each in side) for side in (found, controls))
        losses = [each.loss for each in controls]
        summary["exact_match_above_control"] = exact / len(found) - other / len(controls)
        summary["exact_match_above_control_ci"] = list(difference(exact, len(found), other, len(controls)))
        summary["median_exposure"] = median(exposure(each.loss, losses) for each in found)
        summary["largest_possible_exposure"] = math.log2(len(controls) + 1)
    return summary


def _by_prefix(members: Sequence[TokenScores], controls: Sequence[TokenScores], suffix: int) -> dict[str, Any]:
    """Exact match of the suffix that follows the first n tokens, for each n; documents that are too short left out."""
    found = {}
    for prefix in prefix_lengths(members, suffix):
        row = {}
        for name, side in (("members", members), ("control", controls)):
            matches = [m for scores in side if (m := matches_after(scores, prefix, suffix)) is not None]
            if matches:
                rate = sum(matches) / len(matches)
                row[name] = {
                    "documents": len(matches),
                    "exact_match": rate,
                    "exact_match_ci": list(wilson(sum(matches), len(matches))),
                }
        found[str(prefix)] = row
    return found


def _by_position(members: Sequence[TokenScores]) -> list[dict[str, Any]]:
    """Token agreement and loss by the token's place in its document, in ten stretches of equal length."""
    longest = max(len(scores.agrees) for scores in members)
    edges = np.unique(np.linspace(0, longest, POSITION_BINS + 1).round().astype(int))
    rows = []
    for begin, end in pairwise(edges.tolist()):
        agrees = np.concatenate([scores.agrees[begin:end] for scores in members])
        losses = np.concatenate([-scores.log_prob[begin:end] for scores in members])
        rows.append(
            {
                "from": begin + 1,
                "to": end,
                "token_agreement": float(agrees.mean()),
                "loss": float(losses.mean()),
            }
        )
    return rows


def _membership(
    evidence: Evidence, members: Sequence[int], controls: Sequence[int]
) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    def of(number: int) -> dict[str, float]:
        reference = None if evidence.reference is None else evidence.reference[number]
        return membership_scores(evidence.scores[number], evidence.documents[number].text, reference)

    found = attacks([of(n) for n in members], [of(n) for n in controls])
    if not found:
        return None, None
    tokens = ([evidence.documents[n].tokens for n in side] for side in (members, controls))
    return {"attacks": found, "caveat": CAVEAT}, bag_of_words_guard(*tokens)


def _reference(evidence: Evidence, members: Sequence[int]) -> dict[str, Any] | None:
    """The reference model on the members, and where the two differ: a paired comparison of the same documents."""
    if evidence.reference is None:
        return None
    found = [extraction(evidence.reference[n], evidence.suffix) for n in members]
    ours = [extraction(evidence.scores[n], evidence.suffix).exact_match for n in members]
    theirs = [each.exact_match for each in found]
    return {
        **_summary(found),
        "only_the_model_repeats": sum(a and not b for a, b in zip(ours, theirs, strict=True)),
        "only_the_reference_repeats": sum(b and not a for a, b in zip(ours, theirs, strict=True)),
    }


def _generation(evidence: Evidence) -> dict[str, Any] | None:
    """ROUGE-L and the like of greedy continuations, and whether they confirm the one pass."""
    if not evidence.generated:
        return None
    texts = list(evidence.generated.values())
    true = [evidence.documents[n].tokens[-evidence.suffix :] for n in evidence.generated]
    one_pass = [bool(evidence.scores[n].agrees[-evidence.suffix :].all()) for n in evidence.generated]
    agree = sum(
        np.array_equal(text, tokens) == exact for text, tokens, exact in zip(texts, true, one_pass, strict=True)
    )
    return {**text_likeness(texts, true), "agrees_with_one_pass": agree / len(texts)}


def _warnings(record: Mapping[str, Any]) -> list[str]:
    found = []
    if record["control"] is None:
        found.append(
            "There is no control: documents that the model may know from elsewhere count as memorized. Give --control, "
            "or documents with a count of 0."
        )
    elif record["membership"] is None:
        found.append(f"Membership attacks need at least {FEWEST} members and {FEWEST} controls.")
    elif record["control"]["documents"] < 1000:
        found.append(
            f"With {record['control']['documents']} controls no true-positive rate at 0.1 % false positives can be "
            + ("given, nor at 1 %." if record["control"]["documents"] < 100 else "given.")
        )
    guard = record["bag_of_words_guard"]
    if guard is not None and guard["differs"]:
        found.append(
            f"Members and controls differ in their words alone (AUC {guard['auc']:.2f} without any model): membership "
            "attacks may have noticed no more than that."
        )
    if record["truncated_documents"]:
        found.append(f"{record['truncated_documents']} documents were cut to the model's context.")
    if record["copied_documents"]:
        found.append(
            f"{record['copied_documents']} documents are copies of others here: they count again, and intervals are "
            "too narrow. Give each document once, with its count."
        )
    generation = record["generation"]
    if generation is not None and generation["agrees_with_one_pass"] < 1:
        found.append(
            f"Greedy generation agrees with the one pass on {generation['agrees_with_one_pass']:.1%} of the documents: "
            "two tokens are as likely as each other there, up to rounding."
        )
    return found


def _mean(values: Sequence[float]) -> dict[str, Any]:
    array = np.array(values)
    return {"mean": float(array.mean()), "ci": list(bootstrap(lambda rows: float(rows.mean()), array))}
