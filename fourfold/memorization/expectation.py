"""What the laws say of a mask, for the sizes that people ask for."""

from __future__ import annotations

from typing import Any

from fourfold.config.loss_masks import GoldfishConfig
from fourfold.memorization.laws import exact_match_law, near_duplicate_law

SUFFIXES = (10, 50, 100, 500)
NOISES = (0.01, 0.05)


def expectation(config: GoldfishConfig) -> dict[str, Any] | None:
    """The share of suffixes of S tokens without a gap, and the share of near-duplicate copies that train a token which
    the original leaves out; None without a mask, and for one that no two copies share.
    """
    if config.strategy in ("none", "random"):
        return None
    hashed = config.strategy != "static"
    return {
        "exact_match": {str(suffix): exact_match_law(config.k, suffix) for suffix in SUFFIXES},
        "near_duplicates_train": {
            str(noise): near_duplicate_law(noise, config.preceding, config.k) for noise in NOISES if hashed
        },
    }
