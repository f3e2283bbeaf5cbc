"""How much Loki loses on a model: keys found, attention caught, and perplexity, beside the best and the worst choice.

The oracle chooses as many keys by their exact scores: what any ranking could reach at most. The control ranks by random
directions: what calibration must beat.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fourfold.errors import UserError
from fourfold.inference.loki.architecture import attentions_of
from fourfold.inference.loki.basis import LokiBasis
from fourfold.inference.loki.enable import disable_loki, enable_loki
from fourfold.inference.loki.settings import LokiConfig
from fourfold.inference.loki.simulate import Probe

CHUNK_LOGITS = 1 << 25

Windows = Sequence[Sequence[int]]
Progress = Callable[[Iterable[Any]], Iterable[Any]]


@torch.no_grad()
def evaluate(
    model: nn.Module, windows: Windows, basis: LokiBasis, config: LokiConfig, progress: Progress = iter
) -> dict[str, Any]:
    """Perplexity, recall and captured mass of Loki, the oracle and the control, as JSON values.

    Every row of a window chooses its keys, as in the paper's protocol (``prefill = "simulate"``). Layers that stay
    dense are left out of the means. Where the model had Loki already, it is switched off, and stays so. Raises
    ``UserError`` where ``enable_loki`` does, and when no row would have to choose.
    """
    length = max(map(len, windows))
    config = config.but(prefill="simulate", min_seq=0)
    k = config.keys_of(length)
    if k >= length:
        raise UserError(
            f"loki: k = {k} keys are all that windows of {length} tokens have, so nothing would be chosen; give longer "
            "windows (--seq-len), or fewer keys (--loki k=…, k_f=… or min_k=…)"
        )
    disable_loki(model)
    exact = config.but(d=basis.head_dim, d_f=None, variance=None)
    variants = {"loki": (basis, config), "oracle": (basis, exact), "random": (basis.random(), _as_wide(config, basis))}
    perplexity = {"dense": _perplexity(model, progress(windows))}
    found: dict[str, list[dict[str, Any] | None]] = {}
    widths: dict[str, list[int | None]] = {}
    for name, (ranked_by, chosen_by) in variants.items():
        with _probed(model, ranked_by, chosen_by) as (probes, dims):
            perplexity[name] = _perplexity(model, progress(windows))
        found[name] = [_summary(probe) for probe in probes]
        widths[name] = dims
    layers = [
        {"layer": number, "d": widths["loki"][number], **{name: found[name][number] for name in variants}}
        for number in range(basis.layers)
    ]
    return {
        "windows": len(windows),
        "seq_length": length,
        "k": k,
        "head_dim": basis.head_dim,
        "perplexity": perplexity,
        "layers": layers,
        "all": {name: _mean(found[name]) for name in variants},
    }


def _as_wide(config: LokiConfig, basis: LokiBasis) -> LokiConfig:
    """For a basis without variances: as many dims as the mean layer of the real one has."""
    if config.variance is None:
        return config.but(basis="best")
    dims = [basis.of_layer(layer, config)[1] for layer in range(basis.layers)]
    return config.but(variance=None, d=round(sum(dims) / len(dims)), basis="best")


@contextmanager
def _probed(model: nn.Module, basis: LokiBasis, config: LokiConfig) -> Iterator[tuple[list[Probe], list[int | None]]]:
    enable_loki(model, basis, config)
    states = [attention.loki for attention in attentions_of(model)]
    probes = []
    for state in states:
        state.probe = Probe()
        probes.append(state.probe)
    try:
        yield probes, [None if state.recipe.is_dense else state.recipe.d for state in states]
    finally:
        disable_loki(model)


def _perplexity(model: Any, windows: Iterable[Sequence[int]]) -> float:
    """exp of the mean loss of every token but the first of its window."""
    total, count = 0.0, 0
    for window in windows:
        tokens = torch.tensor(window, device=model.device)[None]
        logits_SV = model(input_ids=tokens, use_cache=False).logits[0, :-1]
        total += _loss(logits_SV, tokens[0, 1:])
        count += tokens.shape[1] - 1
    return math.exp(total / count)


def _loss(logits_SV: Tensor, targets_S: Tensor) -> float:
    rows = max(1, CHUNK_LOGITS // logits_SV.shape[1])
    return sum(
        float(nn.functional.cross_entropy(logits.float(), targets, reduction="sum"))
        for logits, targets in zip(logits_SV.split(rows), targets_S.split(rows), strict=True)
    )


def _summary(probe: Probe) -> dict[str, float] | None:
    """None for a layer that stayed dense."""
    if not probe.recall:
        return None
    recall, mass = torch.cat(probe.recall), torch.cat(probe.mass)
    return {
        "recall": float(recall.mean()),
        "recall_p5": _fifth_percentile(recall),
        "mass": float(mass.mean()),
        "mass_p5": _fifth_percentile(mass),
    }


def _fifth_percentile(values: Tensor) -> float:
    return float(values.kthvalue(max(1, math.ceil(0.05 * len(values)))).values)


def _mean(found: list[dict[str, float] | None]) -> dict[str, float]:
    there = [each for each in found if each is not None]
    return {name: sum(each[name] for each in there) / len(there) for name in there[0]}
