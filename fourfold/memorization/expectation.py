"""What the laws say of a mask, for the sizes that people ask for."""

from __future__ import annotations

from typing import Any

from fourfold.config.masks import GoldfishConfig
from fourfold.memorization.laws import exact_match_law, near_duplicate_law

SUFFIXES = (10, 50, 100, 500)
NOISES = (0.01, 0.05)


def expectation(config: GoldfishConfig) -> dict[str, Any] | None:
    """The largest share of suffixes of S tokens that can be repeated exactly, and the share of near-duplicate copies
    that train a token which the original leaves out; None where copies do not share their mask, and nothing is kept.
    """
    if config.strategy in ("none", "random"):
        return None
    hashed = config.strategy != "static"
    return {
        "exact_match": {str(suffix): exact_match_law(config.k, suffix) for suffix in SUFFIXES},
        "near_duplicates_train": {
            str(noise): near_duplicate_law(noise, config.h, config.k) for noise in NOISES if hashed
        },
    }
