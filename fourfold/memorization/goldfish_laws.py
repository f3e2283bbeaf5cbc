"""Predict extraction under a goldfish mask before any training.

Both laws assume that a model memorizes every kept token. This holds if a document is repeated often enough.
"""

from typing import Any

from fourfold.config.loss_masks import GoldfishConfig

SUFFIXES = (10, 50, 100, 500)
NOISES = (0.01, 0.05)


def exact_match_law(k: int, suffix: int) -> float:
    """Return (1 - 1/k)^S: the probability that the mask drops no token of a suffix of S tokens, if it drops one token
    in k. A model that has memorized all kept tokens reproduces such a suffix.

    A model can also reproduce a suffix by guessing its dropped tokens. If it guesses a fraction q of them correctly,
    replace 1/k by (1 - q)/k.
    """
    return (1 - 1 / k) ** suffix


def near_duplicate_law(noise: float, h: int, k: int) -> float:
    """Return (1 - (1 - ε)^h) · (1 - 1/k). If the mask of a document drops a token, this is the probability that the
    mask of a near-duplicate of the document keeps the token in the loss.

    Args:
        noise: The fraction ε of tokens that differ between the near-duplicate and the original.
        h: The number of preceding tokens that determine whether the mask drops a token.
        k: The mask drops one token in k.
    """
    return (1 - (1 - noise) ** h) * (1 - 1 / k)


def expected_extraction(config: GoldfishConfig) -> dict[str, Any] | None:
    """Return the predictions of both laws for common sizes: first the fraction of suffixes without a dropped token, and
    then the fraction of dropped tokens that the mask of a near-duplicate keeps. The strategy "static" has no prediction
    for near-duplicates, because its mask does not depend on tokens.

    Return None if there is no mask, or if its strategy is "random", because copies of a document then have different
    masks.
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
