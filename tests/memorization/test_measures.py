"""The measures of an audit, compared with their definitions."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from fourfold.config.loss_masks import GoldfishConfig
from fourfold.data.canaries import Canaries
from fourfold.data.tokenizer import ByteTokenizer
from fourfold.errors import UserError
from fourfold.inference.generate import check_sampling
from fourfold.memorization.documents import AuditDocument
from fourfold.memorization.extraction import exposure, extraction, matches_after, prefix_lengths
from fourfold.memorization.generation import common_span, common_subsequence, edit_distance, text_likeness
from fourfold.memorization.goldfish_check import goldfish_check, is_replayable, near_duplicates, replay_mask
from fourfold.memorization.goldfish_laws import exact_match_law, near_duplicate_law
from fourfold.memorization.intervals import auc, auc_interval, bootstrap, difference, true_positive_rate, wilson
from fourfold.memorization.membership import attacks, bag_of_words_guard, conclusion, membership_scores
from fourfold.memorization.scores import AttackSampling, TokenScores, score_logits

RANDOM = np.random.default_rng(1)


@pytest.fixture(autouse=True)
def same_draws() -> None:
    """Make each test draw the same numbers, regardless of which tests ran before."""
    RANDOM.bit_generator.state = np.random.default_rng(1).bit_generator.state


def scores_of(agrees: list[int], log_prob: float = -0.5) -> TokenScores:
    """Return scores of a document for which greedy decoding is right at these positions."""
    tokens = np.arange(len(agrees) + 1)
    predicted = np.where(np.array(agrees, dtype=bool), tokens[1:], -1)
    filled = np.full(len(agrees), log_prob)
    return TokenScores(tokens, filled, predicted, filled - 1, np.ones(len(agrees)), filled)


def test_intervals() -> None:
    assert wilson(0, 64) == pytest.approx((0, 0.0566), abs=1e-4)
    assert wilson(5, 10) == pytest.approx((0.2366, 0.7634), abs=1e-4)
    assert wilson(0, 0) == (0, 1)
    assert (wilson(0, 7)[0], wilson(7, 7)[1]) == (0, 1)
    # Example (a) of Newcombe 1998, table II, method 10: 56/70 - 48/80.
    assert difference(56, 70, 48, 80) == pytest.approx((0.0524, 0.3339), abs=1e-4)
    low, high = bootstrap(lambda rows: float(rows.mean()), RANDOM.normal(3, 1, 400))
    assert low < 3 < high
    assert high - low == pytest.approx(2 * 1.96 / 20, rel=0.25)


def test_wilson_covers() -> None:
    for rate in (0.02, 0.3, 0.9):
        intervals = {n: wilson(n, 40) for n in range(41)}
        found = RANDOM.binomial(40, rate, 4000)
        assert np.mean([intervals[n][0] <= rate <= intervals[n][1] for n in found.tolist()]) > 0.92


def test_auc() -> None:
    members, controls = RANDOM.integers(0, 9, 30).astype(float), RANDOM.integers(0, 8, 50).astype(float)
    by_hand = np.mean([(m > c) + (m == c) / 2 for m, c in itertools.product(members, controls)])
    assert auc(members, controls) == pytest.approx(by_hand)
    low, high = auc_interval(members, controls)
    assert low < by_hand < high
    assert auc_interval(members + 100, controls) == (pytest.approx(0.9), 1.0)


def test_true_positives_at_few_false_ones() -> None:
    controls = np.arange(100.0)
    assert true_positive_rate(np.array([98.5, 99.5, 1.0, 200.0]), controls, 100) == 0.75
    assert true_positive_rate(np.array([99.5]), controls, 1000) is None
    assert true_positive_rate(np.array([1.0]), np.zeros(99), 100) is None
    # 1 % of 2,900 is 29, but 2900 * 0.01 is slightly less in floating point.
    assert true_positive_rate(np.array([2870.5, 2870.0]), np.arange(2900.0), 100) == 0.5


@pytest.mark.parametrize(
    "sampling",
    [
        AttackSampling(),
        AttackSampling(0.5),
        AttackSampling(1.0, top_k=3),
        AttackSampling(2.0, top_p=0.7),
        AttackSampling(0.7, 5, 0.8),
    ],
)
def test_scores_of_logits(sampling: AttackSampling) -> None:
    logits, targets = torch.randn(60, 11, dtype=torch.float64) * 3, torch.randint(0, 11, (60,))
    log_prob, predicted, mean, variance, sampled = score_logits(logits.clone(), targets, sampling).double()
    log_p = logits.log_softmax(1)
    assert torch.equal(predicted.long(), logits.argmax(1))
    assert torch.allclose(log_prob, log_p.gather(1, targets[:, None])[:, 0], atol=1e-5)
    expected = (log_p.exp() * log_p).sum(1)
    assert torch.allclose(mean, expected, atol=1e-5)
    assert torch.allclose(variance, (log_p.exp() * (log_p - expected[:, None]).square()).sum(1), atol=1e-4)
    for row in range(60):
        p = (logits[row] / sampling.temperature).softmax(0)
        order = p.argsort(descending=True).tolist()[: sampling.top_k]
        p = p / p[order].sum()
        kept, total = [], 0.0
        for token in order:
            if sampling.top_p is None or total < sampling.top_p:
                kept.append(token)
            total += p[token].item()
        target = int(targets[row])
        expected_p = math.log(p[target] / p[kept].sum()) if target in kept else -math.inf
        assert sampled[row].item() == pytest.approx(expected_p, abs=1e-4)


def test_extraction() -> None:
    found = extraction(scores_of([0, 1, 1, 1, 0, 1, 1]), 2)
    assert (found.exact_match, found.longest_span) == (True, 3)
    assert found.token_agreement == pytest.approx(5 / 7)
    assert found.extraction_strength == pytest.approx(2 / 8)
    assert found.log_p == pytest.approx(-1.0)
    assert found.loss == pytest.approx(0.5)
    found = extraction(scores_of([0, 1, 1, 1, 0, 1, 1]), 4)
    assert not found.exact_match
    assert matches_after(scores_of([0, 1, 1, 1, 0, 1, 1]), 2, 3) is True
    assert matches_after(scores_of([0, 1, 1, 1, 0, 1, 1]), 1, 3) is False
    assert matches_after(scores_of([0, 1, 1]), 2, 3) is None
    assert prefix_lengths([scores_of([1] * 99)], 50) == [1, 2, 4, 8, 16, 32, 50]
    assert prefix_lengths([scores_of([1] * 9)], 5) == [1, 2, 4]


@pytest.mark.parametrize(
    ("log_p", "n"), [(-1.0, 1.51), (-10.0, 15267.3), (-40.0, 1.63154e17), (0.0, 1), (-800, math.inf)]
)
def test_queries_until_extraction(log_p: float, n: float) -> None:
    found = extraction(scores_of([1, 1], log_p / 2), 2)
    assert found.queries(0.5) == pytest.approx(n, rel=1e-3)


def test_exposure() -> None:
    assert exposure(1.0, [2.0] * 15) == 4
    assert exposure(3.0, [2.0] * 15) == 0
    assert exposure(2.5, [2.0, 3.0, 4.0]) == 1


def longest_common_subsequence(a: list[int], b: list[int]) -> int:
    """Follow the definition: the longest subsequence of ``a`` that is also a subsequence of ``b``."""
    for size in range(len(a), 0, -1):
        for chosen in itertools.combinations(a, size):
            rest = iter(b)
            if all(token in rest for token in chosen):
                return size
    return 0


def levenshtein(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    if not a or not b:
        return len(a) + len(b)
    if a[0] == b[0]:
        return levenshtein(a[1:], b[1:])
    return 1 + min(levenshtein(a[1:], b), levenshtein(a, b[1:]), levenshtein(a[1:], b[1:]))


def test_likeness_of_texts() -> None:
    for _ in range(60):
        a, b = (RANDOM.integers(0, 3, RANDOM.integers(1, 8)) for _ in range(2))
        assert common_subsequence(a, b) == longest_common_subsequence(a.tolist(), b.tolist())
        assert edit_distance(a, b) == levenshtein(tuple(a), tuple(b))
        spans = [n for n in range(8) for i in range(8) for j in range(8)
                 if i + n <= len(a) and j + n <= len(b) and (a[i : i + n] == b[j : j + n]).all()]  # fmt: skip
        assert common_span(a, b) == max(spans)
    a, b = np.arange(50), np.arange(50) + 25
    found = text_likeness([a, a], [a, b], [edit_distance(a, a), edit_distance(a, b)])
    assert found["rouge_l"]["mean"] == 0.75
    assert found["edit_similarity"]["mean"] == 0.5
    assert found["exact_match"]["mean"] == 0.5


def test_membership_scores() -> None:
    scores = TokenScores(
        np.arange(11), -np.arange(10.0), np.zeros(10), np.full(10, -2.0), np.full(10, 4.0), np.zeros(10)
    )
    reference = TokenScores(np.arange(11), np.full(10, -1.0), *(np.zeros(10) for _ in range(4)))
    found = membership_scores(scores, "abc", reference)
    assert found["loss"] == -4.5
    assert found["min_k"] == -8.5  # the mean of the two lowest of ten numbers
    assert found["min_k_plus_plus"] == (-8.5 + 2) / 2
    assert found["zlib"] == pytest.approx(-4.5 / 11)
    assert found["reference"] == -3.5
    assert "zlib" not in membership_scores(scores, None)


def test_attacks_need_enough_documents() -> None:
    members, controls = ([{"loss": float(n)} for n in RANDOM.normal(mean, 1, 200)] for mean in (1, 0))
    assert attacks(members[:9], controls) == {}
    [attack] = attacks(members, controls).values()
    assert attack["auc_ci"][0] < attack["auc"] < attack["auc_ci"][1]
    assert attack["auc"] == pytest.approx(0.76, abs=0.06)
    assert attack["tpr_at_0_1_percent_fpr"] is None
    assert 0 < attack["tpr_at_1_percent_fpr"] < 0.3


def test_the_conclusion_is_what_the_intervals_show() -> None:
    def words(**intervals: tuple[float, float]) -> str:
        return conclusion({name: {"auc": sum(ends) / 2, "auc_ci": [*ends]} for name, ends in intervals.items()})

    above = words(loss=(0.51, 0.9), min_k=(0.4, 0.7))
    assert above.startswith("Members can be distinguished from controls by loss (")
    assert "does not protect membership" in above
    unclear = words(loss=(0.3, 0.6), zlib=(0.5, 0.7))
    assert unclear.startswith("No evidence that members can be distinguished")
    assert "loss" not in unclear
    inverted = words(loss=(0.1, 0.4), min_k=(0.2, 0.5))
    assert inverted.startswith("The result is inverted for loss (")
    assert "distinguished" not in inverted
    assert words(loss=(0.9, 1.0), min_k_plus_plus=(0.0, 0.1)).count("min-k %++") == 1


def test_the_guard_notices_other_words_and_nothing_else() -> None:
    alike = [RANDOM.integers(0, 200, 60) for _ in range(200)]
    guard = bag_of_words_guard(alike[:100], alike[100:])
    assert not guard["differs"]
    assert guard["auc"] == pytest.approx(0.5, abs=0.12)
    other = [RANDOM.integers(20, 220, 60) for _ in range(100)]
    guard = bag_of_words_guard(alike[:100], other)
    assert guard["differs"]
    assert guard["auc"] > 0.95
    assert bag_of_words_guard(alike[:9], alike) is None
    copies = bag_of_words_guard(alike[:13] * 3, alike[100:114])  # a repeated document counts once
    assert copies == bag_of_words_guard(alike[:13], alike[100:114])


@pytest.mark.slow
def test_the_guard_rarely_raises_a_false_alarm() -> None:
    """The guard raises a false alarm about one time in twenty, also with few documents."""
    draws = [[RANDOM.integers(0, 60, 40) for _ in range(40)] for _ in range(100)]
    assert sum(bag_of_words_guard(draw[:26], draw[26:])["differs"] for draw in draws) <= 12


def test_laws_of_extraction() -> None:
    assert exact_match_law(32, 50) == pytest.approx(0.204, abs=1e-3)
    assert near_duplicate_law(0.05, 13, 4) == pytest.approx(0.365, abs=1e-3)
    assert near_duplicate_law(0, 13, 4) == 0


def members(count: int, length: int, noise: float = 0.0) -> list[AuditDocument]:
    planted = Canaries(1, (1,), noise=noise)
    return [AuditDocument(RANDOM.integers(0, 250, length), None, 50, number, planted) for number in range(count)]


@pytest.mark.slow
def test_the_near_duplicate_law_is_what_happens() -> None:
    table = {"strategy": "hash-table", "include_target": True}  # the target is one of the h hashed tokens
    for noise, h, k, options in (
        (0.05, 13, 4, {}), (0.05, 4, 4, {}), (0.01, 50, 3, {}), (0.05, 2, 4, table), (0.05, 4, 4, table),
        (0.05, 4, 4, table | {"include_target": False}),
    ):  # fmt: skip
        config = GoldfishConfig(**{"strategy": "hash", "k": k, "h": h, **options})
        found = near_duplicates(config, (), members(60, 160, noise), ByteTokenizer())
        low, high = found["trained_share_ci"]
        assert low - 0.01 <= found["expected_trained_share"] <= high + 0.01
        assert high - low < 0.05


def test_the_exact_match_law_is_what_masks_do() -> None:
    documents = members(600, 80)
    scores = [scores_of([1] * 79) for _ in documents]
    config = GoldfishConfig(strategy="hash", k=32, h=5)
    found = goldfish_check(config, (), documents, scores, 50, ByteTokenizer())
    low, high = found["suffix_kept_whole_ci"]
    assert low <= found["expected_exact_match"] <= high


def test_replay_parts_kept_from_dropped() -> None:
    """The model predicts every kept token correctly, and every dropped token wrong."""
    documents = members(12, 90)
    config = GoldfishConfig(strategy="hash", k=3, h=7)
    scores = [scores_of((~replay_mask(config, (), d.tokens).dropped).astype(int).tolist()) for d in documents]
    found = goldfish_check(config, (), documents, scores, 40, None)
    assert found["agreement_kept"]["mean"] == 1
    assert found["agreement_dropped"]["mean"] == 0
    assert found["first_divergence_at_dropped"] == 1
    assert found["first_divergences"] == 12
    assert found["suffix_drop_rate"] == pytest.approx(1 / 3, abs=0.1)
    assert found["near_duplicates"] is None
    table = replay_mask(GoldfishConfig(strategy="hash-table", h=7), (), documents[0].tokens)
    assert table.known.tolist() == [False] * 6 + [True] * 83
    shifted = replay_mask(GoldfishConfig(strategy="hash", h=7), (), documents[0].tokens, shift=5)
    assert shifted.known.tolist() == [False] * 12 + [True] * 77


def test_a_mask_that_depends_on_the_place_is_not_replayed() -> None:
    with pytest.raises(UserError, match="'static' depends on where a document is"):
        goldfish_check(GoldfishConfig(strategy="static"), (), members(2, 80), [scores_of([1] * 79)] * 2, 50, None)


def test_a_mask_that_begins_during_training_is_not_replayed() -> None:
    late = GoldfishConfig(strategy="hash", start_step=100)
    assert not is_replayable(late)
    with pytest.raises(UserError, match="start_step = 100: earlier steps had no mask"):
        goldfish_check(late, (), members(2, 80), [scores_of([1] * 79)] * 2, 50, None)


@pytest.mark.parametrize(
    "sampling", [AttackSampling(0.0), AttackSampling(1, 0), AttackSampling(1, None, 0.0), AttackSampling(1, None, 1.1)]
)
def test_sampling_that_draws_nothing(sampling: AttackSampling) -> None:
    with pytest.raises(UserError):
        check_sampling(sampling.temperature, sampling.top_k, sampling.top_p)
