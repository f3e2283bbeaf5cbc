"""Goldfish loss: leave about one token in k out of the loss, and leave out the same tokens in every copy of a passage.

Source: Hans et al. 2024, "Be like a Goldfish, Don't Memorize!" (arXiv 2406.10209). A model can only guess a token that
it was never trained on, so it cannot memorize a passage with such a token verbatim. With probability (1 - 1/k)^S, the
mask leaves out no token of a passage of S tokens. The mask does not protect such a passage.

The mask must leave out the same tokens in all copies of a passage. Otherwise the copies together train every token. So
the hash strategies hash h consecutive tokens, because these are the same in every copy.

Masks use only integer arithmetic and comparisons in NumPy, so they are the same on every machine, device, and grid.
"""

from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from fourfold.config.loss_masks import GoldfishConfig
from fourfold.data.dataset import Windows
from fourfold.data.order import hash64
from fourfold.errors import UserError

TABLE_SIZE = 1_000_003
TABLE_SEED = 2_971_215_073


@dataclass(frozen=True)
class Goldfish:
    """The goldfish mask that the run file's section [masks.goldfish] describes. The mask is False for tokens that the
    loss leaves out."""

    config: GoldfishConfig
    exempt: tuple[int, ...] = ()
    """Token ids that are never left out."""
    first_sample: int = 0
    """Index of the first sample that is masked."""

    @property
    def look_back(self) -> int:
        """Return how many tokens before a window the mask reads: h with strategy "hash", and otherwise 0.

        The hash strategy needs these tokens so that its mask does not depend on where the stream is cut into windows.
        """
        return self.config.h if self.config.strategy == "hash" else 0

    def __call__(self, windows: Windows) -> NDArray[np.bool_]:
        """Return True for each target of the windows that stays in the loss [samples, S]."""
        config, targets = self.config, windows.tokens[:, 1:]
        if config.strategy == "hash":
            dropped = hash_drops(windows, config.k, config.h, config.seed)
        elif config.strategy == "hash-table":
            dropped = hash_table_drops(targets, config.k, config.h, config.include_target)
        elif config.strategy == "static":
            dropped = np.broadcast_to(np.arange(targets.shape[1]) % config.k == 0, targets.shape).copy()
        else:
            dropped = random_drops(windows.numbers, targets.shape[1], config.k, config.seed)
        if self.exempt:
            dropped &= ~np.isin(targets, self.exempt)
        dropped[windows.numbers < self.first_sample] = False
        return ~dropped


def build_goldfish_mask(
    config: GoldfishConfig, special_ids: tuple[int, ...], seq_length: int, global_batch_size: int
) -> Goldfish | None:
    """Build the goldfish mask of a run.

    Args:
        config: The section [masks.goldfish].
        special_ids: Special tokens, which are never left out.
        seq_length: Number of tokens per sample.
        global_batch_size: Number of samples per step, for `start_step`.

    Returns:
        The mask, or None if the strategy is "none".

    Raises:
        UserError: The hash-table strategy would drop no token.
    """
    if config.strategy == "none":
        return None
    if config.strategy == "hash-table" and config.h >= seq_length:
        raise UserError(
            f"masks.goldfish.h = {config.h} is not below training.seq_length = {seq_length}, and hash-table sees no "
            "token before the sequence, so it would drop no token; choose a smaller h"
        )
    exempt = tuple(sorted({*special_ids, *config.exempt}))
    return Goldfish(config, exempt, config.start_step * global_batch_size)


def hash_drops(windows: Windows, k: int, h: int, seed: int) -> NDArray[np.bool_]:
    """Choose the dropped targets with strategy "hash", which hashes the h tokens before each target in its document.

    The hash starts from a dot product of the h tokens with odd 64-bit coefficients, so the order of the tokens matters.
    The bits of the product are then mixed, and the target is dropped if the result is below 2^64/k. So every target
    that is dropped with 2k is also dropped with k. The first h tokens of a document are kept. Without look-back, the
    first h tokens of each window are kept too.

    Args:
        windows: The samples, with the tokens before each sample (the look-back).
        k: About one target in k is dropped.
        h: Number of tokens to hash.
        seed: Seed of the hash.

    Returns:
        True for each dropped target [samples, S].
    """
    tokens, documents = windows.stream.astype(np.uint64), windows.stream_documents
    places = tokens.shape[1] - h  # The number of targets that have h tokens before them.
    dropped = np.zeros(tokens.shape, dtype=bool)
    if places > 0:
        coefficients = hash64(np.arange(h), seed) | np.uint64(1)
        keys = np.zeros((len(tokens), places), dtype=np.uint64)
        product = np.empty_like(keys)
        for offset, coefficient in enumerate(coefficients):
            np.multiply(tokens[:, offset : offset + places], coefficient, out=product)
            keys += product
        dropped[:, h:] = hash64(keys, seed) < np.uint64(2**64 // k)
        dropped[:, h:] &= documents[:, h:] == documents[:, :-h]
    return dropped[:, windows.look_back + 1 :]


def hash_table_drops(targets: NDArray[np.int64], k: int, h: int, include_target: bool = True) -> NDArray[np.bool_]:
    """Choose the dropped targets as the published code does (strategy "hash-table", commit 35d29f9).

    The ids of h tokens are multiplied in 64-bit integers, which wrap around. The product modulo 1,000,003 is an index
    into a table of uniform random numbers. The target is dropped if the number at this index is below 1/k. Prefer the
    strategy "hash", because a product ignores the order of the tokens. A product is also 0 if a token has the id 0, and
    it is nearly always 0 if h is large.

    Args:
        targets: Target tokens [samples, S].
        k: About one target in k is dropped.
        h: Number of tokens in the product.
        include_target: Whether the h tokens end with the target (as in the published code) or with the token before it
            (as in the paper).

    Returns:
        True for each dropped target [samples, S].
    """
    first = h - 1 if include_target else h
    places = targets.shape[1] - first
    dropped = np.zeros(targets.shape, dtype=bool)
    if places > 0:
        product = np.ones((len(targets), places), dtype=np.int64)
        for offset in range(h):
            product *= targets[:, offset : offset + places]  # int64 wraps around, as in the published code.
        dropped[:, first:] = published_table()[product % TABLE_SIZE] < np.float32(1 / k)
    return dropped


def random_drops(numbers: NDArray[np.int64], seq_length: int, k: int, seed: int) -> NDArray[np.bool_]:
    """Choose the dropped targets at random. The same text gets a different mask in each epoch.

    Args:
        numbers: Indices of the samples in the order of training [samples].
        seq_length: Number of targets S per sample.
        k: About one target in k is dropped.
        seed: Seed of the choice.

    Returns:
        True for each dropped target [samples, S].
    """
    of_sample = hash64(numbers, seed)[:, None]
    # Hash the sample's number and the position separately, and then add the hashes. Otherwise, sample 5 at position 3
    # would have the same mask as sample 4 at position 4.
    of_place = hash64(np.arange(seq_length), seed + 1)
    with np.errstate(over="ignore"):
        return hash64(of_sample + of_place, seed + 2) < np.uint64(2**64 // k)


@cache
def published_table() -> NDArray[np.float32]:
    """Return the 1,000,003 numbers that torch.rand draws on the CPU with the published seed, without importing torch.

    torch's generator is the Mersenne Twister. torch.rand uses the lower 24 bits of each 32-bit number.
    """
    generator = np.random.RandomState(TABLE_SEED)
    words = generator.randint(0, 2**32, size=TABLE_SIZE, dtype=np.uint32)
    return ((words & 0xFFFFFF) / 2**24).astype(np.float32)
