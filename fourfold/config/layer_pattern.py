"""Shorten lists with one entry per layer."""

from __future__ import annotations

from typing import TypeVar

T = TypeVar("T")


def pattern_of(entries: list[T], layers: int) -> list[T]:
    """Return the shortest list that gives the same entry for each layer as ``entries``, if both lists are repeated over
    all layers."""
    of_layers = [entries[layer % len(entries)] for layer in range(layers)]
    period = next(n for n in range(1, layers + 1) if of_layers[n:] == of_layers[:-n])
    return of_layers[:period]
