"""Shorten a list of layer settings to the pattern that repeats."""

from typing import TypeVar

T = TypeVar("T")


def pattern_of(entries: list[T], layers: int) -> list[T]:
    """Return the shortest list that gives every layer the same setting as ``entries``. A list with fewer entries than
    the model has layers repeats. For example, [0, 1, 0, 1] becomes [0, 1].

    Args:
        entries: Settings of the layers. The list repeats if it is too short.
        layers: Number of layers of the model.
    """
    of_layers = [entries[layer % len(entries)] for layer in range(layers)]
    period = next(n for n in range(1, layers + 1) if of_layers[n:] == of_layers[:-n])
    return of_layers[:period]
