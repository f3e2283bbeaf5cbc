"""The evaluation of a model from its name to one record."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist

from fourfold.data.tokenizer import Tokenizer
from fourfold.errors import UserError
from fourfold.evaluation.perplexity import perplexity
from fourfold.inference.tasks import import_lm_eval, run_tasks
from fourfold.memorization.forward import AuditedModel, HuggingFaceTokenizer
from fourfold.memorization.subject import ScoringRequest, Subject, context_of, open_model, tokenizer_of
from fourfold.training.environment import Place
from fourfold.training.launch import device_of


@dataclass(frozen=True, kw_only=True)
class EvaluationRequest(ScoringRequest):
    """What to evaluate.

    texts: files; overlap: tokens that a window sees of the one before; tasks: of lm-eval, looked for in
    ``include_path`` too; num_fewshot, limit: examples in the prompt, and documents of a task.
    """

    texts: tuple[Path, ...] = ()
    overlap: int = 1
    tasks: tuple[str, ...] = ()
    include_path: Path | None = None
    num_fewshot: int | None = None
    limit: int | None = None

    def check(self) -> None:
        """Raise UserError for nothing to do, and for what is not there."""
        if not self.texts and not self.tasks:
            raise UserError("there is nothing to evaluate on; give --text FILE, or --tasks NAMES")
        for text in self.texts:
            if not text.is_file():
                raise UserError(f"--text {text} does not exist")
        if self.tasks:
            import_lm_eval()


def evaluate_of_place(place: Place, request: EvaluationRequest, subject: Subject) -> dict[str, Any] | None:
    """Evaluate on every process of the grid of ``subject``; the record on rank 0, None elsewhere."""
    device = device_of(place, subject.run.training.device if subject.run is not None else "auto")
    tokenizer = tokenizer_of(request, subject)
    if tokenizer is None:
        raise UserError(f"nobody says which tokenizer {request.model} has; give --tokenizer")
    model = open_model(subject, request, device)
    context = context_of(model, subject.run)
    if not 1 <= request.overlap <= context:
        raise UserError(f"--overlap {request.overlap} must be at least 1 and at most {context}, the model's context")
    texts = {str(path): _perplexity(model, tokenizer, path, context, request.overlap) for path in request.texts}
    tasks = _tasks(model, tokenizer, context, request) if request.tasks else {}
    if dist.is_initialized() and dist.get_rank() != 0:
        return None
    return {"model": str(subject.checkpoint or subject.name), "context": context, "texts": texts, "tasks": tasks}


def _perplexity(
    model: AuditedModel, tokenizer: Tokenizer | HuggingFaceTokenizer, path: Path, context: int, overlap: int
) -> dict[str, float] | None:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--text {path} cannot be read: {error}") from error
    tokens = np.array(tokenizer.encode_batch([text])[0], dtype=np.int64)
    if len(tokens) == 0:
        raise UserError(f"--text {path} has no text")
    if tokens.max() >= model.vocab_size:
        raise UserError(
            f"the tokenizer gives token {tokens.max()}, and the model's vocabulary has {model.vocab_size}; it is "
            "another model's"
        )
    found = perplexity(model, tokens, len(text.encode()), tokenizer.eod_id, context, overlap)
    return None if found is None else found.record()


def _tasks(
    model: AuditedModel, tokenizer: Tokenizer | HuggingFaceTokenizer, context: int, request: EvaluationRequest
) -> dict[str, dict[str, float]]:
    from fourfold.evaluation.harness import HarnessModel

    harness = HarnessModel(model, tokenizer, context)
    return run_tasks(harness, request.tasks, request.include_path, request.limit, request.num_fewshot)
