"""Measure what a model loses with Loki: recall, captured attention, perplexity, and task scores.

On a text, Loki is compared with an oracle and with a control. The oracle chooses the same number of keys by their exact
scores, which Loki approximates. So no ranking has a higher recall than the oracle. By chance, a ranking can still have
a lower perplexity. The control is Loki with random directions. A calibrated basis must be better than the control.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from fourfold.data.transformers_tokenizer import TransformersTokenizer
from fourfold.errors import UserError
from fourfold.inference.lm_eval_tasks import run_tasks, wrap_model
from fourfold.inference.loki.architecture import attentions_of
from fourfold.inference.loki.basis import LokiBasis
from fourfold.inference.loki.enable import disable_loki, enable_loki
from fourfold.inference.loki.loki_attention import state_of
from fourfold.inference.loki.settings import LokiConfig
from fourfold.inference.loki.simulate import Probe, only_by_score

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CHUNK_LOGITS = 1 << 25
"""Number of float32 logits in memory at a time."""

TokenLists = Sequence[Sequence[int]]


@dataclass(frozen=True)
class Predictions:
    """The predictions of a model in windows of text. Each list has one tensor per window, [S - 1], where S is the
    number of tokens in the window."""

    losses: list[Tensor]
    """The loss of each token except the first token of the window."""
    best: list[Tensor]
    """The most likely next token after each token except the last token of the window."""


@torch.no_grad()
def measure_quality(
    model: PreTrainedModel, windows: TokenLists, basis: LokiBasis, config: LokiConfig
) -> dict[str, Any]:
    """Measure Loki, the oracle, and the control on windows of text.

    Every token of a window chooses its keys, as in the Loki paper (``prefill = "simulate"``). Means over layers leave
    out the layers that stay dense. Loki is disabled afterwards, even if it was enabled before.

    Args:
        model: A transformers model.
        windows: Lists of token ids.
        basis: The result of ``calibrate`` for this model.
        config: Loki's settings.

    Returns:
        Perplexity, recall, and captured mass of Loki, the oracle, and the control, as JSON values. The captured mass is
        the fraction of the exact softmax that is on the chosen keys.

    Raises:
        UserError: ``enable_loki`` refuses the model, or the settings choose all keys of the longest window.
    """
    length = max(map(len, windows))
    config = basis.filled(config).model_copy(update={"prefill": "simulate", "min_seq": 0})
    k = config.key_count(length)
    if k >= length:
        raise UserError(
            f"loki: windows of {length} tokens have no more than k = {k} keys, so nothing would be chosen; give longer "
            "windows (--seq-len), or fewer keys (--loki k=…, k_f=… or min_k=…)"
        )
    disable_loki(model)
    variants = {
        "loki": (basis, config),
        "oracle": (basis, only_by_score(config)),
        "random": (basis.random(), config.model_copy(update={"basis": "best"})),
    }
    perplexity = {"dense": _perplexity(model, windows)}
    found: dict[str, list[dict[str, float] | None]] = {}
    for name, (ranked_by, chosen_by) in variants.items():
        with _probed(model, ranked_by, chosen_by, is_exact=name == "oracle") as probes:
            perplexity[name] = _perplexity(model, windows)
        found[name] = [_summary(probe) for probe in probes]
    layers: list[dict[str, Any]] = []
    for number, of_loki in enumerate(found["loki"]):
        d = None if of_loki is None else config.dim_count(basis.head_dim)
        layers.append({"layer": number, "d": d, **{name: found[name][number] for name in variants}})
    return {
        "windows": len(windows),
        "seq_length": length,
        "k": k,
        "head_dim": basis.head_dim,
        "perplexity": perplexity,
        "layers": layers,
        "all": {name: _mean(found[name]) for name in variants},
    }


def compare_tasks(
    model: PreTrainedModel,
    tokenizer: TransformersTokenizer,
    basis: LokiBasis,
    config: LokiConfig,
    tasks: Sequence[str],
    limit: int | None = None,
    folder: Path | None = None,
) -> dict[str, dict[str, dict[str, float]]]:
    """Return the metrics of each lm-eval task with dense attention ("full") and with Loki ("loki").

    Only tasks that generate text run Loki's decoding. Computing a likelihood is a single prefill, which stays dense
    unless ``config.prefill`` is "simulate". Loki is disabled afterwards, even if it was enabled before.

    Args:
        model: A transformers model.
        tokenizer: The model's tokenizer.
        basis: The result of ``calibrate``.
        config: Loki's settings.
        tasks: Names of tasks.
        limit: Largest number of documents per task. None means all documents.
        folder: A folder with your own tasks.

    Raises:
        UserError: ``enable_loki`` refuses the model, lm-eval is not installed, or a task is unknown.
    """
    found: dict[str, dict[str, dict[str, float]]] = {task: {} for task in tasks}
    disable_loki(model)
    for name in ("full", "loki"):
        if name == "loki":
            enable_loki(model, basis, basis.filled(config))
        try:
            results = run_tasks(wrap_model(model, tokenizer), tasks, folder, limit)
        finally:
            disable_loki(model)
        for task, metrics in results.items():
            found.setdefault(task, {})[name] = {key.removesuffix(",none"): value for key, value in metrics.items()}
    return found


@contextmanager
def _probed(model: PreTrainedModel, basis: LokiBasis, config: LokiConfig, *, is_exact: bool) -> Iterator[list[Probe]]:
    """Enable Loki inside the ``with`` statement, or the oracle if ``is_exact``. Yield each layer's probe."""
    enable_loki(model, basis, config)
    probes: list[Probe] = []
    for attention in attentions_of(model):
        state = state_of(attention)
        assert state is not None
        state.probe, state.is_exact = Probe(), is_exact
        probes.append(state.probe)
    try:
        yield probes
    finally:
        disable_loki(model)


def predict(model: PreTrainedModel, windows: TokenLists) -> Predictions:
    """Return the model's predictions in windows of text, with its current attention."""
    losses, best = [], []
    for window in windows:
        tokens = torch.tensor(window, device=model.device)[None]
        logits_SV = model(input_ids=tokens, use_cache=False).logits[0, :-1]
        rows = max(1, CHUNK_LOGITS // logits_SV.shape[1])
        pairs = zip(logits_SV.split(rows), tokens[0, 1:].split(rows), strict=True)
        losses.append(torch.cat([cross_entropy(logits.float(), each, reduction="none") for logits, each in pairs]))
        best.append(logits_SV.argmax(-1))
    return Predictions(losses, best)


def _perplexity(model: PreTrainedModel, windows: TokenLists) -> float:
    """Return exp of the mean loss over all tokens except the first token of each window."""
    return torch.cat(predict(model, windows).losses).double().mean().exp().item()


def _summary(probe: Probe) -> dict[str, float] | None:
    """Return the mean recall and the mean captured mass of a layer. Return None for a layer that stayed dense."""
    if not probe.recall:
        return None
    return {"recall": float(torch.cat(probe.recall).mean()), "mass": float(torch.cat(probe.mass).mean())}


def _mean(summaries: Sequence[dict[str, float] | None]) -> dict[str, float]:
    sparse = [each for each in summaries if each is not None]
    return {name: sum(each[name] for each in sparse) / len(sparse) for name in sparse[0]}
