"""Choose Loki's settings for a calibrated model. Of all settings that keep the perplexity of a text close to dense
attention, choose the settings that read the fewest bytes."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fourfold.errors import UserError
from fourfold.inference.loki.basis import LokiBasis
from fourfold.inference.loki.codes import BITS
from fourfold.inference.loki.enable import disable_loki, enable_loki
from fourfold.inference.loki.quality import Predictions, TokenLists, predict
from fourfold.inference.loki.settings import LokiConfig

if TYPE_CHECKING:
    from transformers import PreTrainedModel

GRID = tuple((d_f, k_f) for k_f in (0.03, 0.06, 0.12, 0.25) for d_f in (0.25, 0.5))
"""Pairs of values of d_f and k_f to try, from the fewest bytes read to the most. The first pair is Loki's defaults.
Perplexity barely shows whether Loki finds a single fact in a long context, so we never choose settings that read fewer
bytes than the defaults."""

STANDARD_ERRORS = 2
"""The bound on the increase of the perplexity is this many standard errors above the measured increase."""

LEAST_TOKENS = 2
"""Smallest number of losses from which a standard error can be computed."""

VALUE_BITS = 16


@torch.no_grad()
def choose_settings(
    model: PreTrainedModel, windows: TokenLists, basis: LokiBasis, tolerance: float = 0.01
) -> LokiBasis:
    """Find the cheapest settings that increase the perplexity by at most ``tolerance``, and store them in the basis.

    ``enable_loki`` uses the stored settings by default. Loki is disabled afterwards, even if it was enabled before.

    Args:
        model: A transformers model.
        windows: Lists of token ids that ``calibrate`` has not seen. A window should be as long as your contexts.
        basis: The result of ``calibrate`` for this model.
        tolerance: Largest relative increase of the perplexity over dense attention (default 0.01). The measured
            increase plus two standard errors must not exceed it.

    Returns:
        The basis with ``gate``: the settings that were tried, and the settings that were chosen. If no settings
        passed, ``gate["chosen"]`` is empty.

    Raises:
        UserError: ``enable_loki`` refuses the model, or the windows are too short to measure settings.
    """
    if sum(max(0, len(window) - 1 - _largest_k(len(window))) for window in windows) < LEAST_TOKENS:
        raise UserError("loki: there are too few tokens to choose settings; give more or longer windows of text")
    disable_loki(model)
    dense = predict(model, windows)
    trials: list[dict[str, Any]] = []
    chosen: dict[str, float] = {}
    for d_f, k_f in GRID:
        # A simulation runs no kernels, so do not compile them.
        config = LokiConfig(d_f=d_f, k_f=k_f, min_k=1, min_seq=0, prefill="simulate", kernels="torch")
        enable_loki(model, basis, config)
        try:
            sparse = predict(model, windows)
        finally:
            disable_loki(model)
        trials.append(_measured(config, basis.head_dim, dense, sparse))
        if trials[-1]["increase_bound"] <= tolerance:
            chosen = {"d_f": d_f, "k_f": k_f}
            break
    gate = {
        "windows": len(windows),
        "seq_length": max(map(len, windows)),
        "tolerance": tolerance,
        "trials": trials,
        "chosen": chosen,
    }
    return replace(basis, gate=gate)


def _largest_k(length: int) -> int:
    """Return the number of keys that a step attends to, with the settings in ``GRID`` that choose the most keys."""
    return LokiConfig(k_f=max(k_f for _, k_f in GRID), min_k=1).key_count(length)


def _measured(config: LokiConfig, head_dim: int, dense: Predictions, sparse: Predictions) -> dict[str, Any]:
    """Return the quality of settings as JSON values. Tokens that attend to all keys that they see are left out.

    ``bytes`` is a fraction of the bytes that dense attention reads. ``increase`` is the relative increase of the
    perplexity over dense attention, and ``increase_bound`` is an upper bound on it. With more text, the bound is closer
    to ``increase``.
    """
    # Token i sees i + 1 keys. The last token of a window has no loss, so a window has one token more than losses.
    counts = [config.key_count(len(losses) + 1) for losses in dense.losses]

    def counted(of_windows: list[Tensor]) -> Tensor:
        return torch.cat([each[k:] for each, k in zip(of_windows, counts, strict=True)])

    before, after = counted(dense.losses).double(), counted(sparse.losses).double()
    more = (after - before).mean().item()
    error = (after - before).std().item() / math.sqrt(len(after))
    return {
        "d_f": config.d_f,
        "k_f": config.k_f,
        "k": max(counts),
        "bytes": config.dim_count(head_dim) * BITS / (2 * head_dim * VALUE_BITS) + config.k_f,
        "perplexity": after.mean().exp().item(),
        "dense_perplexity": before.mean().exp().item(),
        "increase": math.expm1(more),
        "increase_bound": math.expm1(more + STANDARD_ERRORS * error),
        "same_token": (counted(dense.best) == counted(sparse.best)).double().mean().item(),
    }
