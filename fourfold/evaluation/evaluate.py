"""The evaluation of a model from its name to one record."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist

from fourfold.data.tokenizer import Tokenizer, load_tokenizer
from fourfold.environment import Place
from fourfold.errors import UserError
from fourfold.evaluation.perplexity import perplexity
from fourfold.huggingface.convert import TOKENIZER_FILE, source_of
from fourfold.inference.lm_eval_tasks import import_lm_eval, run_tasks
from fourfold.launch.job_processes import device_of
from fourfold.memorization.forward import AuditedModel, HuggingFaceTokenizer
from fourfold.memorization.scored_model import (
    LONGEST_UNKNOWN,
    ScoringRequest,
    Subject,
    context_of,
    open_model,
    tokenizer_of,
)


@dataclass(frozen=True, kw_only=True)
class EvaluationRequest(ScoringRequest):
    """What to evaluate.

    texts: files; overlap: tokens that a window sees of the one before; context: tokens of the longest input, by default
    the model's context, and at most ``LONGEST_UNKNOWN`` where it was not trained here; tasks: of lm-eval, looked for in
    ``include_path`` too; num_fewshot, limit: examples in the prompt, and documents of a task.
    """

    texts: tuple[Path, ...] = ()
    overlap: int = 1
    context: int | None = None
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
    tokenizer = tokenizer_of(request, subject, special_tokens=False)
    if tokenizer is None:
        raise UserError(f"nobody says which tokenizer {request.model} has; give --tokenizer")
    prefix = prefix_token(tokenizer, subject)
    model = open_model(subject, request, device)
    context = _context(model, subject, request)
    if not 1 <= request.overlap <= context:
        raise UserError(f"--overlap {request.overlap} must be at least 1 and at most {context}, the context")
    texts = {str(path): _perplexity(model, tokenizer, prefix, path, context, request.overlap) for path in request.texts}
    tasks = _tasks(model, tokenizer, prefix, context, request) if request.tasks else {}
    if dist.is_initialized() and dist.get_rank() != 0:
        return None
    return {"model": str(subject.checkpoint or subject.name), "context": context, "texts": texts, "tasks": tasks}


def prefix_token(tokenizer: Tokenizer | HuggingFaceTokenizer, subject: Subject) -> int:
    """What the first token of a text is predicted from: the token that begins texts, else the one that ends them.

    The tokenizer of a corpus does not know the former; the model that training began with does.
    """
    begin = tokenizer.bos_id
    source = None if subject.checkpoint is None else source_of(subject.checkpoint)
    if begin is None and source is not None and (source / TOKENIZER_FILE).is_file():
        original = load_tokenizer(source)
        begin = original.bos_id if original.fingerprint == tokenizer.fingerprint else None
    token = tokenizer.eod_id if begin is None else begin
    if token is None:
        raise UserError(
            f"the tokenizer of {subject.name} has no token that begins a text and none that ends one, from which the "
            "first could be predicted; name an eos_token in its tokenizer_config.json"
        )
    return token


def _context(model: AuditedModel, subject: Subject, request: EvaluationRequest) -> int:
    longest = context_of(model, subject.run)
    if request.context is None:
        return longest if subject.run is not None else min(longest, LONGEST_UNKNOWN)
    if not 1 <= request.context <= longest:
        larger = "" if subject.run is None else "; --set training.seq_length=N lets it have more"
        raise UserError(
            f"--context {request.context} must be at least 1 and at most {longest}, the model's context{larger}"
        )
    return request.context


def _perplexity(
    model: AuditedModel,
    tokenizer: Tokenizer | HuggingFaceTokenizer,
    prefix: int,
    path: Path,
    context: int,
    overlap: int,
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
    found = perplexity(model, tokens, len(text.encode()), prefix, context, overlap)
    return None if found is None else found.record()


def _tasks(
    model: AuditedModel,
    tokenizer: Tokenizer | HuggingFaceTokenizer,
    prefix: int,
    context: int,
    request: EvaluationRequest,
) -> dict[str, dict[str, float]]:
    from fourfold.evaluation.harness import HarnessModel

    harness = HarnessModel(model, tokenizer, prefix, context)
    return run_tasks(harness, request.tasks, request.include_path, request.limit, request.num_fewshot)
