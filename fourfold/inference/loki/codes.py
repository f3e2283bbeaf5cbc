"""Encode the leading components of keys in 2 bits each. Loki ranks the keys by these codes.

A code says in which of four intervals a component lies. A component outside all intervals gets the nearest interval.
The intervals are as wide as the component's standard deviation, which is nearly the best width for 4 intervals of a
normal distribution. The codes of eight components take as many bytes as one component in bfloat16. For
the same number of bytes, the codes of many components rank the keys better than the exact values of few components.

Shape letters as in attend.py. C bytes hold the codes of d components.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag, pad

BITS = 2
INTERVALS = 1 << BITS
PER_BYTE = 8 // BITS
"""Number of codes in a byte."""


@dataclass(frozen=True, eq=False)
class Encoder:
    """The leading directions of one layer, scaled so that every interval of the codes has a width of 1."""

    queries_KDd: Tensor
    """For each KV head, a matrix that projects queries. Columns of zeros at the end make d a multiple of four, so that
    the codes fill whole bytes."""
    keys_KDd: Tensor
    """For each KV head, a matrix that projects keys. Its last columns are zeros too, as in ``queries_KDd``."""
    shift_K1d: Tensor
    """A constant to add to projected keys. It moves the mean of the keys to the middle of the intervals."""

    @classmethod
    def of(cls, queries_KDd: Tensor, keys_KDd: Tensor, mean_KD: Tensor, covariance_KDD: Tensor) -> Encoder:
        """Return an encoder for the given directions of one layer.

        Args:
            queries_KDd: For each KV head, a matrix whose columns are the directions of the queries.
            keys_KDd: For each KV head, a matrix whose columns are the directions of the keys.
            mean_KD: Mean of the keys after their rotary embedding.
            covariance_KDD: Covariance of the keys after their rotary embedding.
        """
        width_K1d = (keys_KDd * (covariance_KDD @ keys_KDd)).sum(-2, keepdim=True).clamp(min=1e-20).sqrt()
        keys_KDd = keys_KDd / width_K1d
        shift_K1d = INTERVALS / 2 - mean_KD[:, None] @ keys_KDd
        missing = (0, -keys_KDd.shape[-1] % PER_BYTE)
        return cls(pad(queries_KDd * width_K1d, missing), pad(keys_KDd, missing), pad(shift_K1d, missing))

    def to(self, device: torch.device) -> Encoder:
        return Encoder(self.queries_KDd.to(device), self.keys_KDd.to(device), self.shift_K1d.to(device))

    def project_queries(self, query_BKxD: Tensor) -> Tensor:
        """Return projected queries, [B, K, x, d] in float32. The products of projected queries and codes are the keys'
        scores, up to rounding and up to a constant that is the same for all keys. So the products rank the keys."""
        return torch.matmul(query_BKxD.float(), self.queries_KDd)

    def project_keys(self, key_BKSD: Tensor) -> Tensor:
        """Return the components of keys, [B, K, S, d] in float32. A component's code is the component rounded down, at
        least 0 and at most 3."""
        return torch.matmul(key_BKSD.float(), self.keys_KDd).add(self.shift_K1d)

    @torch.no_grad()
    def encode(self, key_BKSD: Tensor) -> Tensor:
        """Return the codes of keys, [B, K, S, C] in uint8. Byte c holds the codes of the components c, c + C, c + 2C,
        and c + 3C."""
        interval_BKS4C = self.project_keys(key_BKSD).floor().clamp(0, INTERVALS - 1).unflatten(-1, (PER_BYTE, -1))
        place_41 = torch.pow(INTERVALS, torch.arange(PER_BYTE, device=key_BKSD.device))[:, None]
        return torch.mul(interval_BKS4C, place_41).sum(-2).to(torch.uint8)


def scores_of_codes(query_BKGd: Tensor, code_BKSC: Tensor) -> Tensor:
    """Return the products of projected queries with codes, [B, K, G, S] in float32.

    A byte has only 256 values. So compute the products of each value with the queries once, and look them up.
    """
    batch, heads, length, size = code_BKSC.shape
    values = decoded(torch.arange(256, dtype=torch.uint8, device=code_BKSC.device)[:, None], torch.float32)
    table_BKCVG = torch.einsum("bkgpc,vp->bkcvg", query_BKGd.float().unflatten(-1, (PER_BYTE, -1)), values)
    tables = torch.arange(batch * heads * size, dtype=torch.int32, device=code_BKSC.device)
    rows = (code_BKSC + 256 * tables.view(batch, heads, 1, size)).flatten(0, 2)
    return embedding_bag(rows, table_BKCVG.flatten(0, 3), mode="sum").view(batch, heads, length, -1).transpose(-1, -2)


def decoded(code_BKSC: Tensor, dtype: torch.dtype) -> Tensor:
    """Split each byte into its codes, and return them as numbers from 0 to 3, [B, K, S, d]."""
    shift_41 = torch.arange(0, 8, BITS, dtype=torch.uint8, device=code_BKSC.device)[:, None]
    return ((code_BKSC[..., None, :] >> shift_41) & (INTERVALS - 1)).flatten(-2).to(dtype)
