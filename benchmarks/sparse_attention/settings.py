"""Make each sparse-attention method for a budget. A budget is a share of the bytes that dense attention reads. It also
covers the bytes that a method reads to score the keys."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from benchmarks.sparse_attention.rivals.eviction import H2O, SnapKV, StreamingLLM
from benchmarks.sparse_attention.rivals.exact import Dense, ExactTopK, RandomKeys
from benchmarks.sparse_attention.rivals.interface import ACCUMULATOR_ELEMENTS, Rival
from benchmarks.sparse_attention.rivals.loki import ELEMENT_BYTES, SUM_ELEMENTS, Loki, LokiSharedBudget, PaperLoki
from benchmarks.sparse_attention.rivals.quest import Quest
from benchmarks.sparse_attention.rivals.sparq import MEAN_ELEMENTS, SparQ
from benchmarks.sparse_attention.rivals.tidal import TidalDecode
from benchmarks.sparse_attention.rivals.top_p import TopP
from fourfold.inference.loki import LokiBasis, LokiConfig
from fourfold.inference.loki.codes import PER_BYTE

SINKS = 4
SNAPKV_WINDOW = 32
SPARQ_RECENT = 4
"""SparQ always chooses the last k / 4 of the cached keys."""

BOUNDS = ("exact top-k", "exact top-p")
"""Methods whose bytes do not include the keys that they read for the scores. So their results are upper bounds for the
other methods."""


@dataclass(frozen=True)
class LokiSettings:
    """The settings of a variant of Loki that are the same for all budgets."""

    keeps_ends: bool = True
    """Whether the first and the last keys are always chosen, as they are by default."""
    is_shared: bool = False
    """Whether the KV heads of a layer share one budget of keys."""
    is_top_p: bool = False
    is_coded: bool = True
    """Whether codes of the components rank the keys. If not, the components themselves rank them, as in the paper."""
    kind: str = "best"
    """Kind of the basis, as in ``LokiConfig.basis``."""


LOKI, PAPER, DEFAULTS = "Loki", "Loki, as in the paper", "Loki, defaults"
SPARQ_MEAN = "SparQ, with mean"
VARIANTS = {
    LOKI: LokiSettings(),
    PAPER: LokiSettings(keeps_ends=False, is_coded=False, kind="post"),
    "Loki, shared budget": LokiSettings(is_shared=True),
    "Loki, top-p": LokiSettings(keeps_ends=False, is_top_p=True),
}
METHODS = (
    *VARIANTS,
    "Quest",
    "SparQ",
    SPARQ_MEAN,
    "TidalDecode",
    "SnapKV",
    "H2O",
    "StreamingLLM",
    "random",
    *BOUNDS,
)


@dataclass(frozen=True)
class Setup:
    """A model's Loki basis and rotary embedding, and the settings of all methods for this model."""

    basis: LokiBasis
    inverse_frequencies: Tensor
    dims: Mapping[tuple[str, float], int] = field(default_factory=dict)
    """By method and budget: Loki's number of dims, SparQ's number of channels, or Quest's number of tokens per page.
    These numbers are chosen on contexts that the comparison does not use."""
    thresholds: Mapping[tuple[str, float, int], float] = field(default_factory=dict)
    """The p of methods with top-p, by method, budget, and length."""


def keys_within(budget: float, length: int, head_dim: int, scoring: float) -> int:
    """Return how many keys a method may attend to, after it has used a part of the budget for scores. The result is at
    most ``length``.

    Args:
        budget: Share of the bytes that dense attention reads.
        length: Number of cached keys.
        head_dim: Size of a head.
        scoring: Number of elements of the cache that the method reads for its scores, for each KV head.
    """
    return min(length, int((budget * 2 * head_dim * length - scoring) / (2 * head_dim)))


def rival(name: str, budget: float, length: int, setup: Setup) -> Rival | None:
    """Return a method that stays within a budget, or None if it could not attend to any key.

    Args:
        name: Name of the method.
        budget: Share of the bytes that dense attention reads.
        length: Number of cached keys at the first step.
        setup: The model's basis and the settings of the methods.
    """
    d = setup.basis.head_dim
    plain = keys_within(budget, length, d, 0)
    if name in VARIANTS:
        return loki(name, VARIANTS[name], budget, length, setup)
    if name == "Quest":
        return quest(budget, length, setup)
    if name in ("SparQ", SPARQ_MEAN):
        r, adds_mean = setup.dims["SparQ", budget], name == SPARQ_MEAN
        k = keys_within(budget, length, d, r * length + adds_mean * MEAN_ELEMENTS * d)
        return SparQ(k, r, max(1, k // SPARQ_RECENT), adds_mean) if k >= 1 else None
    if name == "TidalDecode":
        # The first layer attends to all keys, and chooses the keys for all other layers. Divide the budget that is left
        # among the other layers.
        layers = len(setup.basis.best)
        k = int((budget * layers - 1) * length / (layers - 1))
        return TidalDecode(k, 0) if k >= 1 else None
    if name == "H2O":
        k = int(plain * d / (d + ACCUMULATOR_ELEMENTS / 2))
        return H2O(k, max(1, k // 2))
    made: dict[str, Rival] = {
        "dense": Dense(),
        "exact top-k": ExactTopK(plain),
        "exact top-p": TopP(ExactTopK(plain), setup.thresholds.get(("exact top-p", budget, length), 1.0)),
        "random": RandomKeys(plain),
        "StreamingLLM": StreamingLLM(plain, SINKS, setup.inverse_frequencies),
        "SnapKV": SnapKV(plain, min(SNAPKV_WINDOW, plain // 2)),
    }
    return made[name]


def quest(budget: float, length: int, setup: Setup) -> Quest | None:
    """Return Quest with the page size in ``setup``, or None if not even one page fits into the budget."""
    size, d = setup.dims["Quest", budget], setup.basis.head_dim
    pages = keys_within(budget, length, d, 2 * d * -(-length // size)) // size
    return Quest(pages, size) if pages >= 1 else None


def loki_with_defaults(setup: Setup) -> Loki:
    """Return Loki with its default settings, whatever it reads. Only ``min_seq`` differs, so that no context is too
    short for Loki."""
    config = LokiConfig(min_seq=0)
    return Loki([setup.basis.of_layer(layer, config) for layer in range(len(setup.basis.best))], config)


def loki_scoring(name: str, budget: float, setup: Setup) -> float:
    """Return how many elements of the cache a variant of Loki reads per key for its scores."""
    dims = setup.dims[name, budget]
    return math.ceil(dims / PER_BYTE) / ELEMENT_BYTES if VARIANTS[name].is_coded else dims


def loki(name: str, settings: LokiSettings, budget: float, length: int, setup: Setup) -> Rival | None:
    """Return a variant of Loki. Return None if no key fits into the budget, or if the chosen number of components is
    larger than ``head_dim``."""
    dims = setup.dims[name, budget]
    of_sum = SUM_ELEMENTS * setup.basis.head_dim if settings.is_coded else 0
    k = keys_within(budget, length, setup.basis.head_dim, loki_scoring(name, budget, setup) * length + of_sum)
    if k < 1 or dims > setup.basis.head_dim:
        return None
    ends = None if settings.keeps_ends else 0
    config = LokiConfig(d=dims, k=k, sink=ends, recent=ends, min_seq=0, basis=settings.kind)
    layers = range(len(setup.basis.best))
    if settings.is_coded:
        encoders = [setup.basis.of_layer(layer, config) for layer in layers]
        made = (LokiSharedBudget if settings.is_shared else Loki)(encoders, config)
    else:
        made = PaperLoki([setup.basis.components[settings.kind].sides(layer, dims) for layer in layers], config)
    return TopP(made, setup.thresholds.get((name, budget, length), 1.0), 4 * k) if settings.is_top_p else made
