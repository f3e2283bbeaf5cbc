"""Define and check the settings of Loki."""

from __future__ import annotations

import functools
import importlib.util
import logging
import math
import os
from difflib import get_close_matches
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

import torch
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from torch import Tensor

from fourfold.config.expected_values import mistake
from fourfold.errors import UserError

MOST_SINKS, MOST_RECENT = 4, 64
"""By default, a step always chooses this many of the first keys and this many of the last keys. Each of the two numbers
is at most a quarter of the keys that the step attends to."""

NUMBA_DTYPES = (torch.float32, torch.bfloat16)
"""Cache dtypes that the Numba kernels read."""

PACKAGES = {"triton": "triton", "numba": "'fourfold[loki]'"}
"""The package to install for each type of kernel."""


Share = Annotated[float, Field(gt=0, le=1)]
LayerNumbers = Annotated[
    tuple[int, ...], BeforeValidator(lambda given: given.split(",") if isinstance(given, str) else given)
]
"""Indices of layers. They can also be given as text, such as "0,1"."""


class LokiConfig(BaseModel):
    """Settings of Loki: how it ranks the keys, and to how many keys a step attends.

    Args:
        values: The settings, by name.

    Raises:
        UserError: A setting is unknown, or its value is impossible.
    """

    model_config = ConfigDict(frozen=True)

    d: Annotated[int, Field(ge=1)] | None = None
    """Number of leading components that rank the keys. Set at most one of ``d`` and ``d_f``. None means that ``d_f``
    applies."""
    d_f: Share = 0.25
    """If ``d`` is not set, the number of components that rank the keys, as a fraction of head_dim (default 0.25)."""
    k: Annotated[int, Field(ge=1)] | None = None
    """Number of keys that a step attends to. Set at most one of ``k`` and ``k_f``. None means that ``k_f`` applies."""
    k_f: Share = 0.03
    """If ``k`` is not set, the number of keys that a step attends to, as a fraction of the context (default 0.03)."""
    min_k: int = Field(256, ge=1)
    """If ``k`` is not set, the smallest number of keys that a step attends to (default 256)."""
    sink: Annotated[int, Field(ge=0)] | None = None
    """Number of keys at the start of the context that are always chosen (default 4, but at most a quarter of a step's
    keys)."""
    recent: Annotated[int, Field(ge=0)] | None = None
    """Number of keys at the end of the context that are always chosen (default 64, but at most a quarter of a step's
    keys)."""
    bits: Literal[2, 16] = 2
    """Bits of a component in a key's code. With 16, a simulation ranks keys by the components themselves, as in the
    Loki paper. Decoding steps support only 2."""
    skip_layers: LayerNumbers = ()
    """Indices of the layers that keep dense attention, counted from 0."""
    min_seq: int = Field(512, ge=0)
    """Use dense attention for contexts with fewer tokens than this."""
    prefill: Literal["dense", "simulate"] = "dense"
    """How the tokens of a prompt attend: to all keys ("dense"), or each token only to its best keys ("simulate"). The
    Loki paper measures perplexity with the second way."""
    basis: Literal["best", "pre", "post", "scores"] = "best"
    """Use components of the keys before ("pre") or after ("post") their rotary embedding, or components of the scores
    ("scores"). "best" uses, for each layer, the kind that ranked held-out keys best."""
    kernels: Literal["auto", "torch", "triton", "numba"] = "auto"
    """What runs a decoding step: torch's operations ("torch"), compiled kernels on a GPU ("triton"), or compiled
    kernels on a CPU for float32 and bfloat16 ("numba"). "auto" uses compiled kernels if they are installed and support
    the caches. While autograd records, torch's operations are always used."""

    if not TYPE_CHECKING:  # Type checkers know the constructor's arguments from the fields.

        def __init__(self, **values: Any) -> None:
            known = LokiConfig.model_fields
            if unknown := next((name for name in values if name not in known), None):
                near = get_close_matches(unknown, known, 1)
                raise UserError(f"loki: there is no key {unknown}; use {near[0] if near else ', '.join(known)}")
            try:
                super().__init__(**values)
            except ValidationError as error:
                raise UserError(f"loki: {mistake(error.errors()[0], LokiConfig)}") from None

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        for names in (("d", "d_f"), ("k", "k_f")):
            if getattr(self, names[0]) is not None and names[1] in self.model_fields_set:
                raise ValueError(f"{' and '.join(names)} cannot be combined; leave one out")
        name, least = ("min_k", self.min_k) if self.k is None else ("k", self.k)
        ends = (self.sink or 0) + (self.recent or 0)
        if ends > least:
            raise ValueError(
                f"sink + recent = {ends} exceeds the {name} = {least} keys of a step; raise {name} to at least {ends}"
            )
        return self

    def key_count(self, length: int) -> int:
        """Return the number of keys that a step attends to.

        Args:
            length: Number of tokens in the context.
        """
        if self.k is not None:
            return min(self.k, length)
        return min(max(math.ceil(self.k_f * length), self.min_k), length)

    def largest_key_count(self, length: int) -> int:
        """Return the largest number of keys that any sequence of a padded batch attends to.

        A sequence shorter than ``min_seq`` attends to all its keys.

        Args:
            length: Number of tokens in the longest context.
        """
        return min(max(self.key_count(length), self.min_seq - 1), length)

    def dim_count(self, head_dim: int) -> int:
        """Return the number of leading components that rank keys.

        Args:
            head_dim: Number of dims of an attention head.

        Raises:
            UserError: ``d`` is more than ``head_dim``.
        """
        if self.d is None:
            return max(1, math.ceil(self.d_f * head_dim))
        if self.d > head_dim:
            raise UserError(f"loki: d = {self.d} is more than the {head_dim} dims of a head; give at most {head_dim}")
        return self.d

    def ends(self, k: Tensor) -> tuple[Tensor, Tensor]:
        """Return how many of the first keys are always chosen, and then how many of the last keys.

        Args:
            k: Number of keys that each sequence attends to.
        """
        sink, recent = (k // 4).clamp(max=MOST_SINKS), (k // 4).clamp(max=MOST_RECENT)
        if self.sink is not None:
            sink = torch.full_like(k, self.sink)
            recent = recent.minimum(k - sink)
        if self.recent is not None:
            recent = torch.full_like(k, self.recent)
            sink = sink.minimum(k - recent)
        return sink, recent

    def is_dense_at(self, length: int) -> bool:
        """Return whether a step attends to all keys.

        Args:
            length: Number of tokens in the context.
        """
        return length < self.min_seq or self.key_count(length) >= length

    def kernels_for(self, device: torch.device, *dtypes: torch.dtype) -> Literal["torch", "triton", "numba"]:
        """Return the kind of kernels that runs a decoding step.

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


@functools.cache
def why_unavailable(package: str) -> str | None:
    """Return the reason why kernels of this package cannot run, or None if they can run."""
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
