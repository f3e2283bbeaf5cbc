"""Tasks of the lm-eval library with full attention and with Loki; those that generate exercise decoding."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn

from fourfold.errors import UserError
from fourfold.huggingface.transformers_models import HuggingFaceText, TextTokenizer
from fourfold.inference.lm_eval_tasks import import_lm_eval, run_tasks
from fourfold.inference.loki.basis import LokiBasis
from fourfold.inference.loki.enable import disable_loki, enable_loki
from fourfold.inference.loki.settings import LokiConfig


def evaluate_tasks(
    model: nn.Module,
    tokenizer: TextTokenizer,
    basis: LokiBasis,
    config: LokiConfig,
    tasks: Sequence[str],
    limit: int | None = None,
    folder: Path | None = None,
) -> dict[str, Any]:
    """Metrics of each task, full attention's and Loki's side by side, as JSON values.

    limit: documents of each task. folder: of tasks of your own. Likelihoods are one prefill each, which Loki leaves
    dense unless ``config.prefill`` is "simulate". Where the model had Loki already, it is switched off, and stays so.
    """
    import_lm_eval()
    from lm_eval.models.huggingface import HFLM

    check_tokenizer(tokenizer)
    disable_loki(model)
    found: dict[str, Any] = {task: {} for task in tasks}
    for name in ("full", "loki"):
        if name == "loki":
            enable_loki(model, basis, config)
        try:
            wrapped = HFLM(pretrained=model, tokenizer=tokenizer.tokenizer, batch_size=1)
            results = run_tasks(wrapped, tasks, folder, limit)
        finally:
            disable_loki(model)
        for task, metrics in results.items():
            found.setdefault(task, {})[name] = {key.removesuffix(",none"): value for key, value in metrics.items()}
    return found


def check_tokenizer(tokenizer: TextTokenizer) -> None:
    """Raise ``UserError`` for one that lm-eval cannot use."""
    if not isinstance(tokenizer, HuggingFaceText):
        raise UserError("tasks need a tokenizer of transformers, and this model has bytes")
