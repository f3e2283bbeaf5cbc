"""Predict extraction under a goldfish mask before any training.

Both laws assume that a model memorizes every kept token. This holds if a document is repeated often enough.
"""

from typing import Any

from fourfold.config.loss_masks import GoldfishConfig

SUFFIXES = (10, 50, 100, 500)
NOISES = (0.01, 0.05)


def exact_match_law(k: int, suffix: int) -> float:
    """Return (1 - 1/k)^S: the probability that no token in a suffix of S tokens is dropped. Such a suffix can be
    extracted.

    A model can also extract a suffix by guessing its dropped tokens. If it guesses a fraction q of them correctly, 1/k
    becomes (1 - q)/k.
    """
    return (1 - 1 / k) ** suffix


def near_duplicate_law(noise: float, h: int, k: int) -> float:
    """Return (1 - (1 - ε)^h) · (1 - 1/k), the probability that a near-duplicate trains a token that the original drops.

    Args:
        noise: The fraction ε of tokens that differ in a near-duplicate.
        h: The number of tokens that determine the mask. The mask changes if one of them differs.
        k: One of k tokens is dropped.
    """
    return (1 - (1 - noise) ** h) * (1 - 1 / k)


def expected_extraction(config: GoldfishConfig) -> dict[str, Any] | None:
    """Return the predictions of both laws for common sizes. These are the fraction of suffixes without a dropped token,
    and the fraction of near-duplicates that train a dropped token. The strategy "static" has no prediction for
    near-duplicates, because its mask does not depend on tokens.

    Return None if there is no mask, or if the mask differs between copies.
    """
    if config.strategy in ("none", "random"):
        return None
    noises = () if config.strategy == "static" else NOISES
    return {
        "exact_match": {str(suffix): exact_match_law(config.k, suffix) for suffix in SUFFIXES},
        "near_duplicates_train": {
            str(noise): near_duplicate_law(noise, config.preceding, config.k) for noise in noises
        },
    }
