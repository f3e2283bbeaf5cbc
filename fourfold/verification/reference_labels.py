"""Compute labels and masks from the documents, token by token. This is a second implementation that shares no code with
the loader."""

import functools
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from fourfold.config.loss_masks import GoldfishConfig
from fourfold.data.dataset import Windows

WORD = 2**64


def kept_tokens(windows: Windows, goldfish: GoldfishConfig, is_masked: Sequence[bool]) -> Tensor:
    """Return which predictions are in the loss, as bool [B, S]. Entry i is the prediction of token i + 1 from token i.

    Args:
        windows: The samples. If they have answers, only the tokens of answers are in the loss.
        goldfish: The goldfish mask.
        is_masked: For each sample, whether the goldfish mask applies. It applies from the step
            ``goldfish.start_step`` on.
    """
    marks = np.ones(windows.tokens.shape, dtype=bool) if windows.answers is None else windows.answers
    found = torch.tensor([row[1:] for row in marks.tolist()])
    ahead = windows.look_back
    for row, number in enumerate(windows.numbers.tolist()):
        tokens, documents = windows.stream[row].tolist(), windows.stream_documents[row].tolist()
        for target in range(ahead + 1, len(tokens)):
            drops = is_masked[row] and tokens[target] not in goldfish.exempt
            drops = drops and _dropped(goldfish, tokens, documents, target, ahead, number)
            if drops or documents[target] != documents[target - 1]:
                found[row, target - ahead - 1] = False
    return found


def later_tokens(
    tokens_BS: Tensor, targets_BS: Tensor, kept_BS: Tensor, documents_BS: Tensor, depths: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the input tokens and the targets of the layers for multi-token prediction.

    Args:
        tokens_BS: Token ids of each sequence.
        targets_BS: The target of each token: the next token.
        kept_BS: Whether each target is in the loss.
        documents_BS: Index of each token's document.
        depths: Number of prediction layers D.

    Returns:
        Three tensors [B, S, D], with values for each position s and each layer d = 0, 1, …: the token that the layer
        reads (token s + d + 1), the target of this token, and whether this target is in the loss. If token s + d + 1
        is in another document or does not exist, the values are -1, 0, and False.
    """
    shape = (*tokens_BS.shape, depths)
    tokens, targets, kept = torch.full(shape, -1), torch.zeros(shape, dtype=torch.long), torch.zeros(shape) > 0
    for row, documents in enumerate(documents_BS.tolist()):
        for place, document in enumerate(documents):
            for depth in range(depths):
                later = place + depth + 1
                if later < len(documents) and documents[later] == document:
                    tokens[row, place, depth] = tokens_BS[row, later]
                    targets[row, place, depth] = targets_BS[row, later]
                    kept[row, place, depth] = kept_BS[row, later]
    return tokens.to(tokens_BS.device), targets.to(tokens_BS.device), kept.to(tokens_BS.device)


def positions(documents_BS: Tensor) -> Tensor:
    """Return the position of each token in its document, as int64 [B, S]: the number of earlier tokens of the document
    in this sequence."""
    same_BSS = documents_BS[:, :, None] == documents_BS[:, None, :]
    return same_BSS.tril(-1).sum(dim=2)


def document_ends(documents_BS: Tensor) -> Tensor:
    """Return where each sequence's documents end, as int64 [B, E]. An end is the index after a document's last token.

    E is the largest number of documents in a sequence. A sequence with fewer documents repeats its last end, S.
    """
    ends = [documents_S.unique_consecutive(return_counts=True)[1].cumsum(0) for documents_S in documents_BS]
    return pad_sequence(ends, batch_first=True, padding_value=documents_BS.shape[1])


def _dropped(
    goldfish: GoldfishConfig, tokens: list[int], documents: list[int], target: int, ahead: int, number: int
) -> bool:
    """Return whether the goldfish mask drops ``tokens[target]``. The first ``ahead`` tokens come before the sequence,
    and are not part of it. ``number`` is the sequence's index in the data."""
    k, h, place = goldfish.k, goldfish.h, target - ahead - 1
    if goldfish.strategy == "static":
        return place % k == 0
    if goldfish.strategy == "random":
        mixed = _hash(number, goldfish.seed) + _hash(place, goldfish.seed + 1)
        return _hash(mixed % WORD, goldfish.seed + 2) < WORD // k
    if goldfish.strategy == "hash":
        if target < h or documents[target] != documents[target - h]:
            return False
        before = tokens[target - h : target]
        key = sum(token * (_hash(i, goldfish.seed) | 1) for i, token in enumerate(before))
        return _hash(key % WORD, goldfish.seed) < WORD // k
    last = target + 1 if goldfish.include_target else target
    if last - h < ahead + 1:
        return False
    product = int(np.prod(np.array(tokens[last - h : last], dtype=np.int64)))
    return bool(_published_table()[product % 1_000_003] < 1 / k)


def _hash(value: int, seed: int) -> int:
    """Return a 64-bit hash of a number and a seed (SplitMix64, Steele et al. 2014)."""
    golden = 0x9E3779B97F4A7C15
    return _mix((value * golden + _mix((seed + golden) % WORD)) % WORD)


def _mix(bits: int) -> int:
    bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9 % WORD
    bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EB % WORD
    return bits ^ (bits >> 31)


@functools.cache
def _published_table() -> Tensor:
    """Return the table of uniform random numbers in the published code of the goldfish loss (commit 35d29f9)."""
    return torch.rand(1_000_003, generator=torch.Generator().manual_seed(2_971_215_073))
