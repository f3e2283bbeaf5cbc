"""What a user chooses about Loki."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import logging
import math
import os
from collections.abc import Iterable
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Literal

import torch

from fourfold.errors import UserError

GROUP_REDUCTIONS = ("softmax", "max", "mean")
DEFAULT_D_F, DEFAULT_K_F = 0.25, 0.25

NUMBA_DTYPES = (torch.float32, torch.bfloat16)
"""Of caches that Numba can read, bfloat16 by its bits."""

PACKAGES = {"triton": "triton", "numba": "'fourfold[loki]'"}
"""What kernels need, and what installs it."""


@dataclass(frozen=True)
class LokiConfig:
    """How keys are ranked, and how many are attended to.

    d, d_f, variance: leading dims of the rotated keys that rank them: a number, a share of head_dim, or per layer as
        many as explain this share of the variance in its worst head. One of the three; else a quarter of head_dim.
    k, k_f: keys that a step attends to: a number, or a share of the context, which is then never below ``min_k``. One
        of the two; a quarter of the context by default.
    sink, recent: of these k, the first and the last ones that are always among them.
    skip_layers: layers that stay dense. min_seq: shorter contexts are attended to densely.
    group_reduce: how the query heads of one KV head agree on their keys: by the sum of their softmaxes, the maximum, or
        the mean of their scores.
    prefill: "dense", or "simulate": every row of a prompt sees only its best keys, as in the perplexities of the paper.
    basis: "best" (the one that ranked held-out keys better, layer by layer), "pre" or "post": which keys, before or
        after their rotary embedding, the principal components were taken of.
    cache: "proxy" keeps the keys as they are and their leading rotated dims beside them; "rotated" keeps rotated keys
        only, which takes no more memory than dense attention.
    proxy_dtype: of these leading dims, which only rank: "same" as the keys', or "bf16", half the bytes of float32,
        which torch's operations multiply several times faster on many CPUs.
    kernels: "torch" for torch's operations; for kernels of our own "triton" on a GPU, and on a CPU "numba", which reads
        float32 and bfloat16; "auto" for these where they are installed and can. Where autograd records, torch's are
        used.

    Raises ``UserError`` for values that cannot be.
    """

    d: int | None = None
    d_f: float | None = None
    variance: float | None = None
    k: int | None = None
    k_f: float | None = None
    min_k: int = 128
    sink: int = 0
    recent: int = 0
    skip_layers: tuple[int, ...] = ()
    min_seq: int = 512
    group_reduce: Literal["softmax", "max", "mean"] = "softmax"
    prefill: Literal["dense", "simulate"] = "dense"
    basis: Literal["best", "pre", "post"] = "best"
    cache: Literal["proxy", "rotated"] = "proxy"
    proxy_dtype: Literal["same", "bf16"] = "same"
    kernels: Literal["auto", "torch", "triton", "numba"] = "auto"

    def __post_init__(self) -> None:
        self._check_types()
        self._one_of("d", "d_f", "variance")
        self._one_of("k", "k_f")
        for name in ("d", "k", "min_k"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"loki: {name} = {value}; it must be at least 1")
        for name in ("d_f", "k_f", "variance"):
            value = getattr(self, name)
            if value is not None and not 0 < value <= 1:
                raise UserError(f"loki: {name} = {value} is a share, above 0 and at most 1")
        for name in ("sink", "recent", "min_seq"):
            if getattr(self, name) < 0:
                raise UserError(f"loki: {name} = {getattr(self, name)}; it must be at least 0")
        for name, values in _CHOICES.items():
            if getattr(self, name) not in values:
                raise UserError(f"loki: {name} = {getattr(self, name)!r}; there are {', '.join(values)}")
        if self.proxy_dtype == "bf16" and self.cache == "rotated":
            raise UserError('loki: proxy_dtype = "bf16" needs cache = "proxy"; a rotated cache has no proxy beside it')
        least = self.k if self.k is not None else self.min_k
        if self.sink + self.recent > least:
            name = "k" if self.k is not None else "min_k"
            raise UserError(
                f"loki: sink + recent = {self.sink + self.recent} are among the {name} = {least} keys of a step; raise "
                f"{name} to at least {self.sink + self.recent}"
            )

    def keys_of(self, length: int) -> int:
        """How many of ``length`` keys a step attends to; all where there are no more."""
        if self.k is not None:
            return min(self.k, length)
        share = DEFAULT_K_F if self.k_f is None else self.k_f
        return min(max(math.ceil(share * length), self.min_k), length)

    def most_keys_of(self, length: int) -> int:
        """The most that any of these tokens' sequences attends to, where some of the tokens are padding.

        A sequence below ``min_seq`` attends to all that it has.
        """
        return min(max(self.keys_of(length), self.min_seq - 1), length)

    def dims_of(self, head_dim: int) -> int:
        """Leading dims that rank keys of this size, where ``variance`` does not say."""
        if self.d is None:
            share = DEFAULT_D_F if self.d_f is None else self.d_f
            return max(1, math.ceil(share * head_dim))
        if self.d > head_dim:
            raise UserError(f"loki: d = {self.d} is more than the {head_dim} dims of a head; give at most {head_dim}")
        return self.d

    def is_dense_at(self, length: int) -> bool:
        """Whether a step at this context attends to everything."""
        return length < self.min_seq or self.keys_of(length) >= length

    def kernels_for(self, device: torch.device, *dtypes: torch.dtype) -> Literal["torch", "triton", "numba"]:
        """By what steps with caches of these types are computed there. Raises ``UserError`` where they cannot be."""
        is_read = device.type == "cpu" and all(dtype in NUMBA_DTYPES for dtype in dtypes)
        if self.kernels == "auto":
            if device.type == "cuda" and torch.version.cuda is not None and _why_not("triton") is None:
                return "triton"
            return "numba" if is_read and _why_not("numba") is None else "torch"
        if self.kernels in PACKAGES and (why := _why_not(self.kernels)) is not None:
            raise UserError(f'loki: kernels = "{self.kernels}" needs {self.kernels}, which {why}')
        if self.kernels == "triton" and device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
            raise UserError('loki: kernels = "triton" needs a GPU (on a CPU Triton only has an interpreter)')
        if self.kernels == "numba" and not is_read:
            where = f"{' and '.join(str(dtype).removeprefix('torch.') for dtype in dtypes)} on {device.type}"
            raise UserError(f'loki: kernels = "numba" computes float32 and bfloat16 on a CPU, not {where}; use torch')
        return self.kernels

    def but(self, **changes: object) -> LokiConfig:
        """The same with some fields changed."""
        return dataclasses.replace(self, **changes)

    def _check_types(self) -> None:
        whole = {name: getattr(self, name) for name in ("d", "k", "min_k", "sink", "recent", "min_seq")}
        if not isinstance(self.skip_layers, Iterable):
            raise UserError(f"loki: skip_layers = {self.skip_layers!r}; give several, as in (0, 1)")
        whole |= {f"skip_layers[{i}]": layer for i, layer in enumerate(self.skip_layers)}
        for name, value in whole.items():
            optional = value is None and name in ("d", "k")
            if not optional and (isinstance(value, bool) or not isinstance(value, Integral)):
                raise UserError(f"loki: {name} = {value!r} is not a whole number")
        for name in ("d_f", "k_f", "variance"):
            if (value := getattr(self, name)) is not None and not isinstance(value, Real):
                raise UserError(f"loki: {name} = {value!r} is not a number")

    def _one_of(self, *names: str) -> None:
        given = [name for name in names if getattr(self, name) is not None]
        if len(given) > 1:
            raise UserError(
                f"loki: {' and '.join(given)} say the same; leave out {'all but one' if given[2:] else 'one'}"
            )


@functools.cache
def _why_not(package: str) -> str | None:
    """What keeps kernels of this package from running; None where nothing does."""
    if importlib.util.find_spec(package) is None:
        return f"is not installed: pip install {PACKAGES[package]}"
    if package == "numba":
        try:
            import numba
        except ImportError as error:  # as beside a version of NumPy that it does not know
            logging.getLogger("fourfold.loki").warning(
                "loki: steps are not compiled, for Numba cannot be imported: %s", error
            )
            return f"cannot be imported: {error}"
        if numba.config.DISABLE_JIT:
            return "is switched off by NUMBA_DISABLE_JIT"
    return None


_CHOICES = {
    "group_reduce": GROUP_REDUCTIONS,
    "prefill": ("dense", "simulate"),
    "basis": ("best", "pre", "post"),
    "cache": ("proxy", "rotated"),
    "proxy_dtype": ("same", "bf16"),
    "kernels": ("auto", "torch", "triton", "numba"),
}
