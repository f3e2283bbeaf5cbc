"""Define, save, and load a model's Loki basis: the directions along which Loki compares queries and keys.

The directions are also called components. Each layer and KV head has its own components.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from fourfold.data.atomic_files import write_output
from fourfold.errors import UserError
from fourfold.inference.loki.codes import Encoder
from fourfold.inference.loki.fingerprint import Fingerprint
from fourfold.inference.loki.settings import LokiConfig
from fourfold.models.tensor_files import opened_tensors
from fourfold.parsing import parse_json

FORMAT = "3"
AGAIN = "make it again with: fourfold loki calibrate"
PARTS = {
    "pre": ("vectors", "variances"),
    "post": ("vectors", "variances"),
    "scores": ("vectors", "variances", "queries"),
}
"""The tensors that a basis file has for each kind of components."""
KINDS = tuple(PARTS)
"""Kinds of components. "pre" and "post" are principal components of the keys before and after their rotary embedding.
"scores" are components that approximate the products of queries and keys best."""


@dataclass(frozen=True)
class Components:
    """The components of one of the ``KINDS``, for every layer and KV head."""

    vectors_LKDD: Tensor
    """For each layer and KV head, a matrix that projects keys. Its columns are sorted by variance, largest first."""
    variances_LKD: Tensor
    """The variance along each column, in descending order."""
    queries_LKDD: Tensor | None = None
    """For each layer and KV head, a matrix that projects queries. None if ``vectors_LKDD`` projects queries too."""

    def ranks_at(self, share: float) -> Tensor:
        """Return, for each layer and KV head, the smallest number of components that together explain at least the
        fraction ``share`` of the variance, [L, K]. The Loki paper calls this number Rank@v (arXiv 2406.02542, eq. 2).
        """
        variances_LKD = self.variances_LKD.double().clamp(min=0)
        explained_LKD = variances_LKD.cumsum(-1) / variances_LKD.sum(-1, keepdim=True).clamp(min=1e-300)
        # Clamp the number, because rounding errors could give more components than exist.
        return ((explained_LKD < share - 1e-12).sum(-1) + 1).clamp(max=variances_LKD.shape[-1])

    def sides(self, layer: int, d: int) -> Tensor:
        """Return the leading d directions of one layer: first for queries, then for keys, [2, K, D, d]."""
        of_queries = self.vectors_LKDD if self.queries_LKDD is None else self.queries_LKDD
        return torch.stack([of_queries[layer, ..., :d], self.vectors_LKDD[layer, ..., :d]])


@dataclass(frozen=True)
class LokiBasis:
    """The result of calibrating Loki for one model: directions that rank its keys, and statistics of its keys."""

    components: dict[str, Components]
    """Components by kind (one of ``KINDS``). A random basis has only "post"."""
    best: tuple[str, ...]
    """For each layer, the kind that ranked held-out keys best."""
    mean_LKD: Tensor
    """Mean of the keys after their rotary embedding, for each layer and KV head."""
    covariance_LKDD: Tensor
    """Covariance of the keys after their rotary embedding, for each layer and KV head."""
    fingerprint: Fingerprint
    """Properties that identify the calibrated model."""
    seq_length: int
    """Number of tokens in the longest calibration window."""
    tokens: int
    """Number of tokens that the components were computed from."""
    recall: dict[str, list[float]] = field(default_factory=dict)
    """The recall of each layer, by kind of components: of the keys with the largest exact scores, the fraction that
    Loki chooses. It was measured on held-out windows, with Loki's default fractions of components and keys. Empty for a
    random basis."""
    gate: dict[str, Any] | None = None
    """The result of ``choose_settings`` as JSON values, or None if the quality was not measured. ``gate["chosen"]`` has
    the chosen ``d_f`` and ``k_f``, or nothing if no settings kept enough quality."""

    @property
    def head_dim(self) -> int:
        """Return the number of dims of an attention head."""
        return next(iter(self.components.values())).vectors_LKDD.shape[-1]

    def missing(self, config: LokiConfig) -> dict[str, float]:
        """Return the values of ``gate["chosen"]`` (``d_f`` and ``k_f``) that ``config`` does not set itself, by name.

        Args:
            config: Loki's settings.
        """
        return _not_given(config, (self.gate or {}).get("chosen", {}))

    def filled(self, config: LokiConfig) -> LokiConfig:
        """Return a copy of the settings that sets the number of components and the number of keys. A number that
        ``config`` does not set comes from ``gate["chosen"]``, or is Loki's default if there is none.

        Args:
            config: Loki's settings.
        """
        defaults = _not_given(config, {"d_f": config.d_f, "k_f": config.k_f})
        return config.model_copy(update=defaults | self.missing(config))

    def of_layer(self, layer: int, config: LokiConfig) -> Encoder:
        """Return the encoder of one layer. ``config`` selects the kind of components and their number d.

        Args:
            layer: Index of the layer.
            config: Loki's settings.

        Raises:
            UserError: The basis does not have this kind of components, or ``config.d`` exceeds the dims of a head.
        """
        kind = self.best[layer] if config.basis == "best" else config.basis
        if kind not in self.components:
            raise UserError(
                f"loki: the file has no {kind} components; set basis to best or {' or '.join(self.components)}"
            )
        queries_KDd, keys_KDd = self.components[kind].sides(layer, config.dim_count(self.head_dim))
        return Encoder.of(queries_KDd, keys_KDd, self.mean_LKD[layer], self.covariance_LKDD[layer])

    def random(self, seed: int = 0) -> LokiBasis:
        """Return a basis of random directions for the same model, as a control. A calibrated basis must rank keys
        better.

        Args:
            seed: Seed of the directions.
        """
        shape = self.covariance_LKDD.shape
        normal = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        components = Components(torch.linalg.qr(normal).Q.float(), torch.ones(shape[:-1]))
        best = ("post",) * len(self.best)
        return replace(self, components={"post": components}, best=best, recall={}, gate=None)

    def save(self, path: str | Path) -> None:
        """Write the basis to a safetensors file. The file is written completely or not at all.

        Args:
            path: Path of the file.

        Raises:
            UserError: The file cannot be written.
        """
        tensors = {"fingerprint": self.fingerprint.sample, "mean": self.mean_LKD, "covariance": self.covariance_LKDD}
        for kind, each in self.components.items():
            parts = zip(PARTS[kind], (each.vectors_LKDD, each.variances_LKD, each.queries_LKDD), strict=False)
            tensors |= {f"{kind}.{part}": tensor.contiguous() for part, tensor in parts if tensor is not None}
        about = {
            "format": FORMAT,
            "model": self.fingerprint.model,
            "rope": self.fingerprint.rope,
            "best": json.dumps(self.best),
            "recall": json.dumps(self.recall),
            "gate": json.dumps(self.gate),
            "seq_length": str(self.seq_length),
            "tokens": str(self.tokens),
        }
        write_output(Path(path), save(tensors, about))

    @classmethod
    def load(cls, path: str | Path) -> LokiBasis:
        """Return the basis in a file that ``save`` has written.

        Args:
            path: Path of the file.

        Raises:
            UserError: The file is missing, damaged, or not a basis.
        """
        if Path(path).is_dir():
            raise UserError(f"the basis {path} is a folder; give the file that fourfold loki calibrate wrote")
        with opened_tensors(Path(path)) as file:
            about = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        if about.get("format") != FORMAT or "fingerprint" not in tensors:
            raise UserError(f"{path} is not a basis of this version; {AGAIN}")
        kinds = [kind for kind in KINDS if f"{kind}.vectors" in tensors]
        try:
            basis = cls(
                {kind: Components(*(tensors[f"{kind}.{part}"].float() for part in PARTS[kind])) for kind in kinds},
                tuple(str(kind) for kind in parse_json(about["best"])),
                tensors["mean"].float(),
                tensors["covariance"].float(),
                Fingerprint(about["model"], about["rope"], tensors["fingerprint"]),
                int(about["seq_length"]),
                int(about["tokens"]),
                parse_json(about["recall"]),
                _parsed_gate(about.get("gate", "null")),
            )
        except (KeyError, ValueError, TypeError, UserError) as error:
            raise UserError(f"{path} is damaged ({error}); {AGAIN}") from None
        for kind, each in basis.components.items():
            _check(each, f"{path}: {kind}")
        if not kinds or not set(basis.best) <= set(kinds) or len(basis.best) != len(basis.mean_LKD):
            raise UserError(f"{path} is damaged: it has {kinds} components, not {set(basis.best)}; {AGAIN}")
        sizes, statistics = basis.components[kinds[0]].vectors_LKDD.shape, (basis.mean_LKD, basis.covariance_LKDD)
        are_finite = all(each.isfinite().all() for each in statistics)
        if [each.shape for each in statistics] != [sizes[:3], sizes] or not are_finite:
            raise UserError(f"{path}: the mean or the covariance of the keys is damaged; {AGAIN}")
        return basis

    def record(self) -> dict[str, Any]:
        """Return a summary of the basis as JSON values. It has Rank@90 of every layer and KV head (the number of
        components that explain 90 % of the variance), the recall of each kind, and the best kind of each layer."""
        ranks = {kind: each.ranks_at(0.9) for kind, each in self.components.items()}
        return {
            "seq_length": self.seq_length,
            "tokens": self.tokens,
            "head_dim": self.head_dim,
            "ranks": {kind: of_kind.tolist() for kind, of_kind in ranks.items()},
            "mean_rank": {kind: float(of_kind.double().mean()) for kind, of_kind in ranks.items()},
            "recall": self.recall,
            "best": list(self.best),
            "gate": self.gate,
        }


def _not_given(config: LokiConfig, values: dict[str, float]) -> dict[str, float]:
    """Return the entries of ``values`` that ``config`` does not set. A ``config`` with ``d`` counts as setting ``d_f``,
    and a ``config`` with ``k`` counts as setting ``k_f``."""
    given = config.model_fields_set
    return {name: value for name, value in values.items() if not given & {name, name.removesuffix("_f")}}


def _parsed_gate(text: str) -> dict[str, Any] | None:
    """Parse ``gate`` from a basis file. Raise an error if the settings in ``gate["chosen"]`` are impossible."""
    gate: dict[str, Any] | None = parse_json(text)
    if gate is not None:
        checked = LokiConfig(**gate["chosen"])
        gate["chosen"] = {name: getattr(checked, name) for name in gate["chosen"]}
    return gate


def _check(components: Components, where: str) -> None:
    """Raise ``UserError`` if the directions have a wrong shape or are not finite, or if they change the scores. In all
    directions together, the products of projected queries and keys must equal the exact scores.

    Without this check, Loki would choose arbitrary keys with a damaged basis, and report no error.
    """
    vectors_LKDD = components.vectors_LKDD.double()
    queries_LKDD = vectors_LKDD if components.queries_LKDD is None else components.queries_LKDD.double()
    shape = vectors_LKDD.shape
    if len(shape) != 4 or shape[-1] != shape[-2] or queries_LKDD.shape != shape:
        raise UserError(f"{where}: directions of shape {tuple(vectors_LKDD.shape)} are not a basis; {AGAIN}")
    if not all(each.isfinite().all() for each in (vectors_LKDD, queries_LKDD, components.variances_LKD)):
        raise UserError(f"{where}: the basis has NaN or infinite numbers; {AGAIN}")
    products = queries_LKDD.transpose(-1, -2) @ vectors_LKDD
    if (products - torch.eye(vectors_LKDD.shape[-1], dtype=torch.float64)).abs().max() > 1e-3:
        raise UserError(f"{where}: the scores in all directions differ from the exact scores; {AGAIN}")
