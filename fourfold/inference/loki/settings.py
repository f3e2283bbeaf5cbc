"""The settings of Loki."""

from __future__ import annotations

import functools
import importlib.util
import logging
import math
import os
from collections.abc import Iterable
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Literal, get_args, get_origin, get_type_hints

import torch

from fourfold.errors import UserError

DEFAULT_D_F, DEFAULT_K_F = 0.25, 0.25

NUMBA_DTYPES = (torch.float32, torch.bfloat16)
"""Cache dtypes that the Numba kernels read."""

PACKAGES = {"triton": "triton", "numba": "'fourfold[loki]'"}
"""The package to install for each type of kernel."""


@dataclass(frozen=True)
class LokiConfig:
    """Settings for how keys are ranked and how many keys are attended to. Raises ``UserError`` for invalid values."""

    d: int | None = None
    """Number of leading rotated dims that are used to rank keys. Set at most one of ``d``, ``d_f``, and
    ``variance``."""
    d_f: float | None = None
    """The number of ranking dims as a fraction of head_dim (default 0.25)."""
    variance: float | None = None
    """Rank keys by the fewest leading dims that explain this fraction of the variance in every head of a layer."""
    k: int | None = None
    """Number of keys that a step attends to. Set at most one of ``k`` and ``k_f``."""
    k_f: float | None = None
    """The number of keys as a fraction of the context (default 0.25)."""
    min_k: int = 128
    """Smallest number of keys if ``k_f`` sets it."""
    sink: int = 0
    """Number of keys at the start that are always chosen."""
    recent: int = 0
    """Number of keys at the end that are always chosen."""
    skip_layers: tuple[int, ...] = ()
    """Layers that stay dense."""
    min_seq: int = 512
    """Use dense attention for contexts with fewer tokens than this."""
    group_reduce: Literal["softmax", "max", "mean"] = "softmax"
    """How the scores of one KV head's query heads are combined into one score per key: the sum of their softmaxes,
    or the maximum or mean of the scores."""
    prefill: Literal["dense", "simulate"] = "dense"
    """With "simulate", every row of a prompt sees only its best keys, as in the paper's perplexities."""
    basis: Literal["best", "pre", "post"] = "best"
    """Use components of the keys before ("pre") or after ("post") their rotary embedding. "best" uses, for each
    layer, the kind that ranked held-out keys better."""
    cache: Literal["proxy", "rotated"] = "proxy"
    """"proxy" stores the leading rotated dims in addition to the keys. "rotated" stores only rotated keys and takes no
    more memory than dense attention."""
    proxy_dtype: Literal["same", "bf16"] = "same"
    """Dtype of the proxy, which is only used to rank keys. "bf16" halves its size if keys are float32, and many CPUs
    multiply it several times faster."""
    kernels: Literal["auto", "torch", "triton", "numba"] = "auto"
    """"torch" uses torch's operations, "triton" compiled kernels on a GPU, and "numba" compiled kernels on a CPU
    (float32 and bfloat16). "auto" uses compiled kernels if they are installed and support the caches. While
    autograd records, torch's operations are used."""

    def __post_init__(self) -> None:
        if not isinstance(self.skip_layers, Iterable):
            raise UserError(f"loki: skip_layers = {self.skip_layers!r} is not a tuple; write (0, 1)")
        for i, layer in enumerate(self.skip_layers):
            _check_whole(f"skip_layers[{i}]", layer)
        for name, least in _LEAST.items():
            _check_whole(name, getattr(self, name), least)
        for name in ("d_f", "k_f", "variance"):
            _check_share(name, getattr(self, name))
        for name, values in _CHOICES.items():
            if getattr(self, name) not in values:
                raise UserError(f"loki: {name} = {getattr(self, name)!r}; choose from {', '.join(values)}")
        for names in (("d", "d_f", "variance"), ("k", "k_f")):
            given = [name for name in names if getattr(self, name) is not None]
            if len(given) > 1:
                one = "all but one" if given[2:] else "one"
                raise UserError(f"loki: {' and '.join(given)} exclude each other; leave out {one}")
        if self.proxy_dtype == "bf16" and self.cache == "rotated":
            raise UserError('loki: proxy_dtype = "bf16" needs cache = "proxy"; a rotated cache has no proxy')
        least = self.k if self.k is not None else self.min_k
        if self.sink + self.recent > least:
            name = "k" if self.k is not None else "min_k"
            raise UserError(
                f"loki: sink + recent = {self.sink + self.recent} exceeds the {name} = {least} keys of a step; raise "
                f"{name} to at least {self.sink + self.recent}"
            )

    def key_count(self, length: int) -> int:
        """Return the number of keys that a step attends to.

        Args:
            length: Number of tokens in the context.
        """
        if self.k is not None:
            return min(self.k, length)
        return min(max(math.ceil(self.key_share * length), self.min_k), length)

    @property
    def key_share(self) -> float:
        """Return ``k_f``, or its default if it is not set."""
        return DEFAULT_K_F if self.k_f is None else self.k_f

    def largest_key_count(self, length: int) -> int:
        """Return the largest number of keys that any sequence of a padded batch attends to.

        A sequence shorter than ``min_seq`` attends to all its keys.

        Args:
            length: Number of tokens in the longest context.
        """
        return min(max(self.key_count(length), self.min_seq - 1), length)

    def dim_count(self, head_dim: int) -> int:
        """Return the number of leading dims that rank keys, unless ``variance`` determines it.

        Args:
            head_dim: Size of a head.

        Raises:
            UserError: ``d`` is more than ``head_dim``.
        """
        if self.d is None:
            share = DEFAULT_D_F if self.d_f is None else self.d_f
            return max(1, math.ceil(share * head_dim))
        if self.d > head_dim:
            raise UserError(f"loki: d = {self.d} is more than the {head_dim} dims of a head; give at most {head_dim}")
        return self.d

    def is_dense_at(self, length: int) -> bool:
        """Return whether a step attends to all keys.

        Args:
            length: Number of tokens in the context.
        """
        return length < self.min_seq or self.key_count(length) >= length

    def kernels_for(self, device: torch.device, *dtypes: torch.dtype) -> Literal["torch", "triton", "numba"]:
        """Return which kernels to run.

        Args:
            device: Device of the caches.
            dtypes: Dtypes of the caches.

        Raises:
            UserError: The configured kernels are not installed, or do not support the device or a dtype.
        """
        is_supported = device.type == "cpu" and all(dtype in NUMBA_DTYPES for dtype in dtypes)
        if self.kernels == "auto":
            if device.type == "cuda" and torch.version.cuda is not None and why_unavailable("triton") is None:
                return "triton"
            return "numba" if is_supported and why_unavailable("numba") is None else "torch"
        if self.kernels in PACKAGES and (reason := why_unavailable(self.kernels)) is not None:
            raise UserError(f'loki: kernels = "{self.kernels}" needs {self.kernels}, which {reason}')
        if self.kernels == "triton" and device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
            raise UserError('loki: kernels = "triton" needs a GPU (on a CPU Triton only has an interpreter)')
        if self.kernels == "numba" and not is_supported:
            where = f"{' and '.join(str(dtype).removeprefix('torch.') for dtype in dtypes)} on {device.type}"
            raise UserError(f'loki: kernels = "numba" computes float32 and bfloat16 on a CPU, not {where}; use torch')
        return self.kernels


def _check_whole(name: str, value: object, least: float = -math.inf) -> None:
    if value is None and name in ("d", "k"):
        return
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise UserError(f"loki: {name} = {value!r} is not a whole number")
    if int(value) < least:
        raise UserError(f"loki: {name} = {value}; it must be at least {least}")


def _check_share(name: str, value: object) -> None:
    if value is None:
        return
    if not isinstance(value, Real):
        raise UserError(f"loki: {name} = {value!r} is not a number")
    if not 0 < float(value) <= 1:
        raise UserError(f"loki: {name} = {value} is a share, above 0 and at most 1")


@functools.cache
def why_unavailable(package: str) -> str | None:
    """Return why kernels of this package cannot run, or None if they can."""
    if importlib.util.find_spec(package) is None:
        return f"is not installed: pip install {PACKAGES[package]}"
    if package == "numba":
        try:
            import numba
        except ImportError as error:  # For example, Numba may not support the installed version of NumPy.
            logging.getLogger("fourfold.loki").warning(
                "loki: steps are not compiled because Numba cannot be imported: %s", error
            )
            return f"cannot be imported: {error}"
        # Numba fills this module's globals at import, so type checkers do not know the name.
        if numba.config.DISABLE_JIT:  # type: ignore[attr-defined]
            return "is disabled by NUMBA_DISABLE_JIT"
    return None


_LEAST = {"d": 1, "k": 1, "min_k": 1, "sink": 0, "recent": 0, "min_seq": 0}
_CHOICES = {name: get_args(kind) for name, kind in get_type_hints(LokiConfig).items() if get_origin(kind) is Literal}
