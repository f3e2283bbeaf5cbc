"""Masks: functions that select which tokens are in the loss. A token is in the loss if all masks keep it.

A mask takes windows of the token stream and returns bool [samples, S]. Entry i says whether the loss includes the
prediction of token i + 1. Masks are computed before the sequence or the batch is split, so every grid drops the same
tokens. You can write your own masks and name them in `masks.functions`.
"""

import pkgutil
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from fourfold.config.loss_masks import MasksConfig
from fourfold.config.model import IGNORE_INDEX
from fourfold.data.dataset import Windows
from fourfold.data.goldfish import Goldfish, build_goldfish_mask
from fourfold.data.tokenizer import Tokenizer
from fourfold.errors import UserError

LossMask = Callable[[Windows], NDArray[np.bool_]]


def document_boundary(windows: Windows) -> NDArray[np.bool_]:
    """Drop the first token of each document, because it would be predicted from another document."""
    kept: NDArray[np.bool_] = windows.documents[:, 1:] == windows.documents[:, :-1]
    return kept


def answers_only(windows: Windows) -> NDArray[np.bool_]:
    """In conversations, keep only the tokens of trained answers. In plain text, keep all tokens."""
    if windows.answers is None:
        return np.ones(windows.tokens[:, 1:].shape, dtype=bool)
    return windows.answers[:, 1:]


def labels_of(windows: Windows, masks: Sequence[LossMask]) -> NDArray[np.int64]:
    """Return the next token if every mask keeps it, and IGNORE_INDEX otherwise [samples, S]."""
    labels = windows.tokens[:, 1:].copy()
    for mask in masks:
        labels[~mask(windows)] = IGNORE_INDEX
    return labels


def build_masks(
    config: MasksConfig, tokenizer: Tokenizer | None, seq_length: int, global_batch_size: int
) -> tuple[list[LossMask], Goldfish | None]:
    """Build the masks of a run file.

    Args:
        config: The section [masks].
        tokenizer: The tokenizer of the corpus, if it is known.
        seq_length: Number of tokens per sample.
        global_batch_size: Number of samples per step.

    Returns:
        The list of all masks except goldfish (validation uses only this list), and the goldfish mask (or None).

    Raises:
        UserError: A name in `masks.functions` cannot be imported or is not a function, or `h` of the hash-table
            strategy is not below the sequence length.
    """
    masks: list[LossMask] = [document_boundary, answers_only]
    masks += [_wrap_in_check(name, _import_mask(name)) for name in config.functions]
    special = () if tokenizer is None else tokenizer.special_ids
    return masks, build_goldfish_mask(config.goldfish, special, seq_length, global_batch_size)


def _import_mask(name: str) -> LossMask:
    try:
        found: LossMask = pkgutil.resolve_name(name)
    except (ImportError, AttributeError, ValueError, OSError) as error:
        raise UserError(f"masks.functions: '{name}' cannot be imported: {error}") from error
    if not callable(found):
        raise UserError(f"masks.functions: '{name}' is not a function; write it as 'module:function'")
    return found


def _wrap_in_check(name: str, mask: LossMask) -> LossMask:
    """Return a mask that calls a user's mask, and raises UserError if the result has a wrong type or shape."""

    def checked(windows: Windows) -> NDArray[np.bool_]:
        try:
            kept = mask(windows)
        except OSError as error:
            # Callers report an OSError as a failed write, so raise a UserError instead.
            raise UserError(f"masks.functions: '{name}' failed: {error}") from error
        expected = windows.tokens[:, 1:].shape
        if not isinstance(kept, np.ndarray) or kept.dtype != np.bool_ or kept.shape != expected:
            found = f"{kept.dtype} {kept.shape}" if isinstance(kept, np.ndarray) else type(kept).__name__
            raise UserError(f"masks.functions: '{name}' returned {found}; a mask must be bool {expected}")
        return kept

    return checked
