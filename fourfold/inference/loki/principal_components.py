"""Calibration: principal components of a model's keys, from sums that are streamed over a text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fourfold.errors import UserError
from fourfold.inference.loki.architecture import attentions_of, key_shape, text_config
from fourfold.inference.loki.basis import KINDS, Components, LokiBasis
from fourfold.inference.loki.fingerprint import Fingerprint
from fourfold.inference.loki.key_hooks import watched
from fourfold.inference.loki.settings import LokiConfig
from fourfold.inference.loki.simulate import Probe, simulate

HELD_OUT = 0.1
"""Share of the windows that no sum sees, on which the kinds of components are compared."""

ROWS_COMPARED = 512


@dataclass
class Moments:
    """Sums over keys of one layer, in float64: no key is kept.

    count: keys; sum_KD: of k; products_KDD: of k·kᵀ.
    """

    count: int
    sum_KD: Tensor
    products_KDD: Tensor

    @classmethod
    def none(cls, heads: int, head_dim: int) -> Moments:
        zeros = torch.zeros(heads, head_dim, head_dim, dtype=torch.float64)
        return cls(0, zeros[..., 0].clone(), zeros)

    def add(self, key_BKSD: Tensor) -> None:
        keys_KTD = key_BKSD.float().transpose(0, 1).flatten(1, 2)
        self.count += keys_KTD.shape[1]
        self.sum_KD += keys_KTD.double().sum(1).cpu()
        self.products_KDD += (keys_KTD.transpose(1, 2) @ keys_KTD).double().cpu()

    def covariance_KDD(self) -> Tensor:
        """Centred: a direction spent on the mean would rank nothing, because softmax does not see it."""
        mean_KD = self.sum_KD / self.count
        return self.products_KDD / self.count - mean_KD[:, :, None] * mean_KD[:, None, :]

    def components(self) -> tuple[Tensor, Tensor]:
        """Eigenvectors [K, D, D] as columns and eigenvalues [K, D], the largest first."""
        variances_KD, vectors_KDD = torch.linalg.eigh(self.covariance_KDD())
        return vectors_KDD.flip(-1).float().contiguous(), variances_KD.flip(-1).float().contiguous()


@torch.no_grad()
def calibrate(
    model: nn.Module,
    windows: Sequence[Sequence[int]],
    kinds: Sequence[str] = KINDS,
    progress: Callable[[Iterable[Sequence[int]]], Iterable[Sequence[int]]] = iter,
) -> LokiBasis:
    """The basis of a model from windows of token ids, one at a time through the model.

    kinds: "pre", "post" or both, of which the better is then chosen for each layer on windows that were held out (a
    tenth, at least one, where there are two or more). progress: shows how far it is. Raises ``UserError`` for a model
    that Loki does not know, and for too little text.
    """
    attentions = attentions_of(model)
    heads, head_dim = key_shape(attentions[0])
    count_held = min(len(windows) - 1, max(1, round(HELD_OUT * len(windows)))) if len(kinds) > 1 else 0
    if len(windows) < 1 + (len(kinds) > 1):
        raise UserError(
            "calibration needs at least two windows of text; give more text or --tokens, or a smaller --seq-len"
        )
    summed, held = windows[: len(windows) - count_held], windows[len(windows) - count_held :]
    moments = {kind: [Moments.none(heads, head_dim) for _ in attentions] for kind in kinds}

    def add(number: int, query: Tensor, keys: dict[str, Tensor], scaling: float) -> None:
        for kind in kinds:
            moments[kind][number].add(keys[kind])

    with watched(model, attentions, add):
        for window in progress(summed):
            _run(model, window)
    tokens = sum(map(len, summed))
    if tokens <= head_dim:
        raise UserError(f"calibration on {tokens} tokens cannot tell {head_dim} directions apart; give more text")
    components = {kind: _joined(of_layers) for kind, of_layers in moments.items()}
    recall = _compare(model, attentions, components, held) if len(kinds) > 1 else {}
    best = tuple(max(kinds, key=lambda kind: recall[kind][n] if recall else 0) for n in range(len(attentions)))
    fingerprint = Fingerprint.of(text_config(model), attentions)
    return LokiBasis(components, best, fingerprint, max(map(len, windows)), tokens, recall)


def _joined(of_layers: list[Moments]) -> Components:
    for number, moments in enumerate(of_layers):
        if not moments.products_KDD.isfinite().all():
            raise UserError(f"layer {number} has keys that are NaN or infinite; load the model in bf16 or fp32")
    vectors, variances = zip(*(moments.components() for moments in of_layers), strict=True)
    return Components(torch.stack(vectors), torch.stack(variances))


def _compare(
    model: nn.Module, attentions: list[nn.Module], components: dict[str, Components], held: Sequence[Sequence[int]]
) -> dict[str, list[float]]:
    """Recall of each kind of components in each layer, at a quarter of the keys and of the dims."""
    config = LokiConfig(min_k=1, min_seq=0)
    probes = {kind: [Probe() for _ in attentions] for kind in components}

    def rank(number: int, query: Tensor, keys: dict[str, Tensor], scaling: float) -> None:
        key = keys["post"][:, :, :ROWS_COMPARED]
        for kind, each in components.items():
            basis_KDd = each.vectors_LKDD[number, ..., : config.dims_of(key.shape[-1])].to(key.device)
            simulate(query[:, :, :ROWS_COMPARED], key, key, basis_KDd, 0, config, scaling, None, probes[kind][number])

    with watched(model, attentions, rank):
        for window in held:
            _run(model, window)
    return {kind: [float(torch.cat(probe.recall).mean()) for probe in each] for kind, each in probes.items()}


def _run(model: nn.Module, window: Sequence[int]) -> None:
    tokens = torch.tensor(window, device=model.device)[None]
    model.get_decoder()(input_ids=tokens, use_cache=False)
