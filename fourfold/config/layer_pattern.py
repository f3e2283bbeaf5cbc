"""Shorten a list of layer settings to the pattern that repeats."""

from typing import TypeVar

T = TypeVar("T")


def pattern_of(entries: list[T], layers: int) -> list[T]:
    """Return the shortest list that means the same as ``entries``. If a model has more layers than a list has entries,
    the list repeats. For example, [0, 1, 0, 1] becomes [0, 1].

    Args:
        entries: A setting for each layer.
        layers: Number of layers of the model.
    """
    of_layers = [entries[layer % len(entries)] for layer in range(layers)]
    period = next(n for n in range(1, layers + 1) if of_layers[n:] == of_layers[:-n])
    return of_layers[:period]
