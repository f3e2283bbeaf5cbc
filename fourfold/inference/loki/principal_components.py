"""Calibrate Loki: compute the principal components of a model's keys from sums that are accumulated over a text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fourfold.errors import UserError
from fourfold.inference.loki.architecture import AttentionModule, attentions_of, key_shape, text_config
from fourfold.inference.loki.basis import KINDS, Components, LokiBasis
from fourfold.inference.loki.fingerprint import Fingerprint
from fourfold.inference.loki.key_hooks import KeyObserver, observe_keys
from fourfold.inference.loki.settings import LokiConfig
from fourfold.inference.loki.simulate import Probe, choices

if TYPE_CHECKING:
    from transformers import PreTrainedModel

HELD_OUT = 0.1
"""Fraction of windows that are held out to compare the kinds of components (``basis.KINDS``)."""

ROWS_COMPARED = 512
"""Number of tokens at the start of each held-out window that are used for this comparison."""

LEAST_EIGENVALUE = 1e-4
"""Lower bound on a matrix's eigenvalues, as a fraction of the largest eigenvalue. Before the matrix is inverted,
smaller eigenvalues are raised to this bound."""


@dataclass
class Moments:
    """Sums over the keys of one layer, in float64. No keys are stored."""

    count: int
    """Number of keys."""
    sum_KD: Tensor
    """Sum of the keys k."""
    products_KDD: Tensor
    """Sum of the products k·kᵀ."""
    of_queries_KDD: Tensor
    """Sum of the products q·qᵀ of the queries q, over all query heads of each KV head."""

    @classmethod
    def zero(cls, heads: int, head_dim: int) -> Moments:
        zeros = torch.zeros(heads, head_dim, head_dim, dtype=torch.float64)
        return cls(0, zeros[..., 0].clone(), zeros, zeros.clone())

    def add(self, key_BKSD: Tensor) -> None:
        keys_KTD = key_BKSD.float().transpose(0, 1).flatten(1, 2)
        self.count += keys_KTD.shape[1]
        self.sum_KD += keys_KTD.double().sum(1).cpu()
        self.products_KDD += (keys_KTD.transpose(1, 2) @ keys_KTD).double().cpu()

    def add_queries(self, query_BNSD: Tensor) -> None:
        queries_KTD = query_BNSD.float().unflatten(1, (len(self.sum_KD), -1)).transpose(0, 1).flatten(1, 3)
        self.of_queries_KDD += (queries_KTD.transpose(1, 2) @ queries_KTD).double().cpu()

    def covariance_KDD(self) -> Tensor:
        """Return the covariance of the keys around their mean.

        The mean of the keys adds the same value to all scores of a query, so it changes neither the softmax nor the
        order of the keys. A component along the mean would therefore not help to rank keys.
        """
        mean_KD = self.sum_KD / self.count
        return self.products_KDD / self.count - mean_KD[:, :, None] * mean_KD[:, None, :]

    def components(self) -> tuple[Tensor, Tensor]:
        """Return eigenvectors [K, D, D] as columns, and eigenvalues [K, D], in descending order of eigenvalues."""
        variances_KD, vectors_KDD = torch.linalg.eigh(self.covariance_KDD())
        return vectors_KDD.flip(-1).float().contiguous(), variances_KD.flip(-1).float().contiguous()

    def components_of_scores(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return three tensors: the matrix that projects keys, [K, D, D], the variances of the scores along its
        columns, [K, D], and the matrix that projects queries, [K, D, D].

        Project queries and keys with the first d columns. The products of the projections are then the best
        approximation of rank d to the scores q·k, in the mean square over independent queries and keys (KQ-SVD, arXiv
        2512.05916).
        """
        root_q_KDD, inverse_q_KDD = _square_root(self.of_queries_KDD / self.count)
        root_k_KDD, inverse_k_KDD = _square_root(self.covariance_KDD())
        left_KDD, values_KD, right_KDD = torch.linalg.svd(root_q_KDD.mT @ root_k_KDD)
        scale_K1D = values_KD.sqrt()[:, None]
        keys_KDD, queries_KDD = inverse_k_KDD @ right_KDD.mT * scale_K1D, inverse_q_KDD @ left_KDD * scale_K1D
        return keys_KDD.float(), (values_KD**2).float(), queries_KDD.float()


@torch.no_grad()
def calibrate(model: PreTrainedModel, windows: Sequence[Sequence[int]]) -> LokiBasis:
    """Compute a model's basis from windows of token ids. The model reads one window at a time.

    There are three kinds of components: principal components of the keys before ("pre") and after ("post") their rotary
    embedding, and components that approximate the attention scores best ("scores"). Each layer gets the kind that ranks
    the keys of held-out windows best. A tenth of the windows is held out, but at least one window.

    Args:
        model: A transformers model.
        windows: Lists of token ids.

    Returns:
        The basis: components of every kind, for every layer and KV head.

    Raises:
        UserError: The model is not supported, its keys are not finite, or there is too little text.
    """
    attentions = attentions_of(model)
    heads, head_dim = key_shape(attentions[0])
    count_held = max(1, round(HELD_OUT * len(windows)))
    if len(windows) < 2:
        raise UserError(
            "there are too few windows of text to calibrate; give more text or --tokens, or a smaller --seq-len"
        )
    summed, held = windows[: len(windows) - count_held], windows[len(windows) - count_held :]
    moments = {kind: [Moments.zero(heads, head_dim) for _ in attentions] for kind in ("pre", "post")}

    def add(number: int, query: Tensor, keys: dict[str, Tensor], scaling: float) -> None:
        for kind in moments:
            moments[kind][number].add(keys[kind])
        moments["post"][number].add_queries(query)

    _observe(model, attentions, summed, add)
    tokens = sum(map(len, summed))
    if tokens <= head_dim:
        raise UserError(f"calibration on {tokens} tokens cannot tell {head_dim} directions apart; give more text")
    components = {kind: _joined(of_layers, Moments.components) for kind, of_layers in moments.items()}
    components["scores"] = _joined(moments["post"], Moments.components_of_scores)
    basis = LokiBasis(
        components,
        ("scores",) * len(attentions),
        torch.stack([each.sum_KD / each.count for each in moments["post"]]).float(),
        torch.stack([each.covariance_KDD() for each in moments["post"]]).float(),
        Fingerprint.of(text_config(model), attentions),
        max(map(len, windows)),
        tokens,
    )
    recall = _compare(model, attentions, basis, held)
    best = tuple(max(KINDS, key=lambda kind: recall[kind][n]) for n in range(len(attentions)))
    return replace(basis, best=best, recall=recall)


def _square_root(square_KDD: Tensor) -> tuple[Tensor, Tensor]:
    """Return R with R·Rᵀ equal to the matrix, and then the inverse of Rᵀ. Before that, raise all eigenvalues of the
    matrix to at least ``LEAST_EIGENVALUE`` times the largest eigenvalue."""
    values_KD, vectors_KDD = torch.linalg.eigh(square_KDD)
    root_KD = values_KD.maximum(LEAST_EIGENVALUE * values_KD[:, -1:]).clamp(min=1e-12).sqrt()
    return vectors_KDD * root_KD[:, None], vectors_KDD / root_KD[:, None]


def _joined(of_layers: list[Moments], components: Callable[[Moments], tuple[Tensor, ...]]) -> Components:
    for number, moments in enumerate(of_layers):
        if not (moments.products_KDD.isfinite().all() and moments.of_queries_KDD.isfinite().all()):
            raise UserError(f"layer {number} has NaN or infinite keys; load the model in bf16 or fp32")
    return Components(*map(torch.stack, zip(*map(components, of_layers), strict=True)))


def _compare(
    model: PreTrainedModel,
    attentions: list[AttentionModule],
    basis: LokiBasis,
    held: Sequence[Sequence[int]],
) -> dict[str, list[float]]:
    """Return the recall of each layer on held-out windows, for each kind of components. Loki uses its default fractions
    of components and keys. It chooses all keys by their scores, also the first and the last keys."""
    configs = {kind: LokiConfig(min_k=1, min_seq=0, sink=0, recent=0, basis=kind) for kind in KINDS}
    encoders = {kind: [basis.of_layer(layer, configs[kind]) for layer in range(len(attentions))] for kind in KINDS}
    probes = {kind: [Probe() for _ in attentions] for kind in KINDS}

    def rank(number: int, query: Tensor, keys: dict[str, Tensor], scaling: float) -> None:
        key = keys["post"][:, :, :ROWS_COMPARED]
        for kind, config in configs.items():
            encoder = encoders[kind][number].to(key.device)
            for _ in choices(query[:, :, :ROWS_COMPARED], key, encoder, config, scaling, None, probes[kind][number]):
                pass  # The probe records the choices.

    _observe(model, attentions, held, rank)
    return {kind: [float(torch.cat(probe.recall).mean()) for probe in each] for kind, each in probes.items()}


def _observe(
    model: PreTrainedModel, attentions: list[AttentionModule], windows: Iterable[Sequence[int]], observer: KeyObserver
) -> None:
    """Run the model's decoder on each window, while an observer receives its keys."""
    with observe_keys(model, attentions, observer):
        for window in windows:
            model.get_decoder()(input_ids=torch.tensor(window, device=model.device)[None], use_cache=False)
