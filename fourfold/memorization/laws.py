"""What extractability to expect of a goldfish mask, before any training.

Both laws assume that everything that is kept is learned by heart, as a document is that was repeated often enough.
"""

from __future__ import annotations


def exact_match_law(k: int, suffix: int) -> float:
    """(1 - 1/k)^S: the chance that no token of a suffix of S was left out, and so that all of it can be repeated.

    Suffixes come on top whose gaps can be guessed: if a share q can, 1/k is to be read as (1 - q)/k.
    """
    return (1 - 1 / k) ** suffix


def near_duplicate_law(noise: float, h: int, k: int) -> float:
    """(1 - (1 - ε)^h) · (1 - 1/k): the share of near-duplicates that train a token which the original leaves out.

    noise: the share ε of tokens in which a near-duplicate differs; a mask decided by h tokens is another one as soon as
    one of them differs.
    """
    return (1 - (1 - noise) ** h) * (1 - 1 / k)
