"""Build an audit's record from scores. The record holds JSON values. It gives each rate with a confidence interval, and
next to it the rate of the controls."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from fourfold.config.loss_masks import GoldfishConfig
from fourfold.data.transformers_tokenizer import AnyTokenizer
from fourfold.memorization.audit_request import AuditRequest
from fourfold.memorization.documents import AuditDocument
from fourfold.memorization.extraction import Extraction, exposure, extraction, match_rate, matches_after, prefix_lengths
from fourfold.memorization.goldfish_check import goldfish_check
from fourfold.memorization.intervals import difference, mean_with_interval
from fourfold.memorization.membership import FEWEST, attacks, bag_of_words_guard, conclusion, membership_scores
from fourfold.memorization.scores import TokenScores

QUERIES = (1, 100, 10_000, 1_000_000)
"""Numbers of samples that an attacker may draw. For each number, the record gives the fraction of documents that the
attacker can extract."""

CHANCE = 0.5
"""An attacker can extract a document if n samples contain its suffix with at least this probability. This is p in
(n, p)-discoverable extraction (see ``Extraction.queries``)."""


@dataclass(frozen=True)
class AuditInputs:
    """The documents of an audit, their scores, and the options. ``exempt`` has the ids of the tokens that the goldfish
    mask never drops. ``truncated`` is the number of documents that were cut to the model's context."""

    request: AuditRequest
    model: str
    documents: Sequence[AuditDocument]
    scores: Sequence[TokenScores]
    reference: Sequence[TokenScores] | None
    continuations: Mapping[str, Any]
    """The result of ``continuations``."""
    goldfish: GoldfishConfig | None
    exempt: tuple[int, ...]
    tokenizer: AnyTokenizer | None
    truncated: int


def audit_record(inputs: AuditInputs) -> dict[str, Any]:
    """Return the record of an audit.

    Documents with a count of 0 are controls. All other documents are members: the model was trained on them. Documents
    with an unknown count are members too.
    """
    documents, scores, suffix = inputs.documents, inputs.scores, inputs.request.suffix
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
    if inputs.goldfish is not None:
        replay = goldfish_check(
            inputs.goldfish, inputs.exempt, [documents[n] for n in members], member_scores, suffix, inputs.tokenizer
        )
    membership, guard = _membership(inputs, members, controls)
    record = {
        "model": inputs.model,
        "suffix": suffix,
        "offset": inputs.request.offset,
        "sampling": asdict(inputs.request.sampling),
        **_beside_control([found[n] for n in members], [found[n] for n in controls]),
        "by_count": by_count,
        "by_prefix": _by_prefix(member_scores, [scores[n] for n in controls], suffix),
        "control": control,
        "reference": _reference(inputs, members),
        "membership": membership,
        "bag_of_words_guard": guard,
        "mask_replay": replay,
        **inputs.continuations,
        "truncated_documents": inputs.truncated,
        "copied_documents": len(documents) - len({document.tokens.tobytes() for document in documents}),
    }
    return {**record, "warnings": _warnings(record)}


def _summary(found: Sequence[Extraction]) -> dict[str, Any]:
    queries = [each.queries(CHANCE) for each in found]
    log_p = median(each.log_p for each in found)
    return {
        **match_rate([each.exact_match for each in found]),
        "token_agreement": mean_with_interval([each.token_agreement for each in found]),
        "extraction_strength": mean_with_interval([each.extraction_strength for each in found]),
        "longest_span": {
            "median": median(each.longest_span for each in found),
            "max": max(each.longest_span for each in found),
        },
        "loss": mean_with_interval([each.loss for each in found]),
        "median_log10_p": log_p / math.log(10) if math.isfinite(log_p) else None,
        "extractable_within": {str(n): sum(q <= n for q in queries) / len(found) for n in QUERIES},
    }


def _beside_control(found: Sequence[Extraction], controls: Sequence[Extraction]) -> dict[str, Any]:
    """Summarize the results of some documents. If there are controls, also compare the documents with the controls. The
    difference is the effect of training on the documents."""
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
    """For several n, return how often greedy decoding after the first n tokens of a document reproduces the next
    ``suffix`` tokens. Documents with fewer than n + ``suffix`` tokens do not count for n."""
    found = {}
    for prefix in prefix_lengths(members, suffix):
        row = {}
        for name, side in (("members", members), ("control", controls)):
            matches = [m for scores in side if (m := matches_after(scores, prefix, suffix)) is not None]
            if matches:
                row[name] = match_rate(matches)
        found[str(prefix)] = row
    return found


def _membership(
    inputs: AuditInputs, members: Sequence[int], controls: Sequence[int]
) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    """Return the results of the membership attacks, and then the results of the bag-of-words baseline. With too few
    documents for the attacks, both are None."""

    def score(number: int) -> dict[str, float]:
        reference = None if inputs.reference is None else inputs.reference[number]
        return membership_scores(inputs.scores[number], inputs.documents[number].text, reference)

    found = attacks([score(n) for n in members], [score(n) for n in controls])
    if not found:
        return None, None
    tokens = ([inputs.documents[n].tokens for n in side] for side in (members, controls))
    return {"attacks": found, "conclusion": conclusion(found)}, bag_of_words_guard(*tokens)


def _reference(inputs: AuditInputs, members: Sequence[int]) -> dict[str, Any] | None:
    """Summarize how well the reference model reproduces the members. Also count the members that only the audited model
    reproduces, and the members that only the reference model reproduces. Return None if there is no reference
    model."""
    if inputs.reference is None:
        return None
    found = [extraction(inputs.reference[n], inputs.request.suffix) for n in members]
    ours = [extraction(inputs.scores[n], inputs.request.suffix).exact_match for n in members]
    theirs = [each.exact_match for each in found]
    return {
        **_summary(found),
        "only_the_model_repeats": sum(a and not b for a, b in zip(ours, theirs, strict=True)),
        "only_the_reference_repeats": sum(b and not a for a, b in zip(ours, theirs, strict=True)),
    }


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
            f"{record['control']['documents']} controls are too few to measure the true-positive rate at 0.1 % false "
            + ("positives, and also at 1 %." if record["control"]["documents"] < 100 else "positives.")
        )
    guard = record["bag_of_words_guard"]
    if guard is not None and guard["differs"]:
        found.append(
            f"Words alone tell members from controls (AUC {guard['auc']:.2f} without any model): membership "
            "attacks may detect nothing else."
        )
    if record["truncated_documents"]:
        found.append(f"Documents that are cut to the model's context: {record['truncated_documents']}.")
    if record["copied_documents"]:
        found.append(
            f"Documents that are copies of other documents: {record['copied_documents']}. They count repeatedly, which "
            "makes intervals too narrow. Give each document once, with its count."
        )
    generation = record["generation"]
    if generation is not None and generation["agrees_with_one_pass"] < 1:
        found.append(
            f"Greedy generation and the single forward pass agree on {generation['agrees_with_one_pass']:.1%} of the "
            "documents. In all other documents, two tokens are equally likely up to rounding."
        )
    return found
