"""Compare the bounds of near-verbatim extraction with exact probabilities. The vocabulary is so small that all texts
can be enumerated."""

from __future__ import annotations

import math
from functools import partial
from itertools import product

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from test_measures import levenshtein

from fourfold.memorization.near_verbatim import NearVerbatim, near_verbatim
from fourfold.memorization.scorers import Fields
from fourfold.memorization.scores import AttackSampling, score_logits

VOCAB, SUFFIX = 5, 6
PREFIX = (3, 1)


class RandomModel:
    """A model whose next-token logits depend on the whole text before the token."""

    vocab_size, max_length = VOCAB, 100

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def logits(self, text: tuple[int, ...]) -> torch.Tensor:
        draw = np.random.default_rng([self.seed, *text])
        return torch.from_numpy(2 * draw.standard_normal(VOCAB)).float()

    def score(
        self, documents: list[NDArray[np.int64]], fields: Fields | None = None, last: int | None = None
    ) -> list[NDArray[np.float32]]:
        compute = fields or partial(score_logits, sampling=AttackSampling())
        found = []
        for document in documents:
            text = tuple(document.tolist())
            logits_TV = torch.stack([self.logits(text[:end]) for end in range(1, len(text))])
            found.append(compute(logits_TV, torch.tensor(text[1:])).numpy()[:, -(last or len(text)) :])
        return found

    def log_p(self, suffix: tuple[int, ...], sampling: AttackSampling) -> float:
        """Compute ln p of a suffix from the definition of the sampling scheme."""
        total = 0.0
        for end, token in enumerate(suffix):
            logits_V = self.logits(PREFIX + suffix[:end]) / sampling.temperature
            order = logits_V.argsort(descending=True)[: sampling.top_k or VOCAB]
            p = logits_V[order].double().softmax(0)
            if sampling.top_p is not None:
                count = int((p.cumsum(0) < sampling.top_p).sum()) + 1
                order, p = order[:count], p[:count] / p[:count].sum()
            place = (order == token).nonzero()
            total += math.log(p[place[0, 0]]) if len(place) else -math.inf
        return total


def bounds(
    model: RandomModel, suffix: tuple[int, ...], tolerance: int, width: int, sampling: AttackSampling
) -> NearVerbatim:
    (found,) = near_verbatim(
        model, [np.array(PREFIX + suffix)], [model.log_p(suffix, sampling)], SUFFIX, tolerance, width, sampling
    )
    return found


def by_enumeration(
    model: RandomModel, suffix: tuple[int, ...], tolerance: int, sampling: AttackSampling
) -> list[float]:
    """Return p_ε for ε from 0 to the tolerance."""
    totals = [0.0] * (SUFFIX + 1)
    for text in product(range(VOCAB), repeat=SUFFIX):
        totals[levenshtein(text, suffix)] += math.exp(model.log_p(text, sampling))
    return np.cumsum(totals)[: tolerance + 1].tolist()


@pytest.mark.parametrize(
    "sampling",
    [AttackSampling(), AttackSampling(0.5), AttackSampling(top_k=3), AttackSampling(1.3, 4, 0.8)],
    ids=["plain", "temperature", "top-k", "all"],
)
def test_bounds_enclose_the_sum_over_all_texts(sampling: AttackSampling) -> None:
    model, draw = RandomModel(7), np.random.default_rng(1)
    suffix = tuple(draw.integers(0, VOCAB, SUFFIX).tolist())
    exact = by_enumeration(model, suffix, 3, sampling)
    everything = bounds(model, suffix, 3, VOCAB**SUFFIX, sampling)
    assert np.exp(everything.lower) == pytest.approx(exact, rel=1e-5)
    assert np.exp(everything.upper) == pytest.approx(exact, rel=1e-5)
    for width in (1, 4, 30):
        found = bounds(model, suffix, 3, width, sampling)
        assert (np.exp(found.lower) <= np.array(exact) * (1 + 1e-5)).all()
        assert (np.exp(found.upper) >= np.array(exact) * (1 - 1e-5)).all()
        assert found.lower[0] == found.upper[0] == pytest.approx(model.log_p(suffix, sampling))
        assert found.cost > everything.cost / 1e5


def test_the_probability_outside_the_branches_widens_the_upper_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """The search tries only some tokens. For the upper bound, it assumes that all other tokens lead to the suffix."""
    monkeypatch.setattr("fourfold.memorization.near_verbatim.BRANCHES", 3)
    model, suffix, plain = RandomModel(11), (4, 0, 2, 2, 1, 3), AttackSampling()
    exact = by_enumeration(model, suffix, 2, plain)
    found = bounds(model, suffix, 2, VOCAB**SUFFIX, plain)
    assert (np.exp(found.lower[1:]) < np.array(exact[1:])).all()
    assert (np.exp(found.upper[1:]) > np.array(exact[1:])).all()


def test_a_wider_search_has_tighter_bounds() -> None:
    model, suffix, plain = RandomModel(3), (0, 1, 2, 3, 4, 0), AttackSampling()
    found = [bounds(model, suffix, 2, width, plain) for width in (2, 20, 200)]
    gaps = [each.upper[2] - each.lower[2] for each in found]
    assert gaps[0] > gaps[1] > gaps[2]


def test_a_suffix_that_is_never_drawn_can_still_leak() -> None:
    """The most likely text differs from the suffix by one token, which top-k excludes."""
    model, greedy = RandomModel(5), AttackSampling(top_k=1)
    text = PREFIX
    for _ in range(SUFFIX):
        text += (int(model.logits(text).argmax()),)
    suffix = (*text[2:-1], (text[-1] + 1) % VOCAB)
    found = bounds(model, suffix, 1, 4, greedy)
    assert found.lower.tolist() == found.upper.tolist() == [-math.inf, 0.0]
