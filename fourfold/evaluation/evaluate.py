"""Evaluate a model on texts and tasks, and return the results as one record."""

import math
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist

from fourfold.data.tokenizer import NoSuchToken, load_tokenizer
from fourfold.data.transformers_tokenizer import AnyTokenizer
from fourfold.environment import Place
from fourfold.errors import UserError
from fourfold.evaluation.perplexity import loss_of_text
from fourfold.huggingface.model_folder import TOKENIZER_FILE, source_of
from fourfold.inference.text import TEXT_FILE
from fourfold.launch.job_processes import choose_device
from fourfold.memorization.scored_model import (
    LONGEST_UNKNOWN,
    ScoredModel,
    ScoringRequest,
    context_length,
    find_tokenizer,
    open_scorer,
)
from fourfold.memorization.scorers import Scorer
from fourfold.untrusted_files import read_text_file


@dataclass(frozen=True, kw_only=True)
class EvaluationRequest(ScoringRequest):
    """A request to evaluate a model on texts and tasks."""

    texts: tuple[Path, ...] = ()
    """Text files whose perplexity is measured."""
    overlap: int = 1
    """A text is scored in windows. This is the number of tokens that each window repeats from the previous window."""
    context: int | None = None
    """Maximum number of input tokens per forward pass. The default is the model's context length, but at most
    ``LONGEST_UNKNOWN`` if fourfold did not train the model."""
    tasks: tuple[str, ...] = ()
    """Names of lm-eval tasks."""
    include_path: Path | None = None
    """A folder with the user's own lm-eval tasks. None if there are none."""
    num_fewshot: int | None = None
    """Number of solved examples in each prompt of a task. None uses each task's own number."""
    limit: int | None = None
    """Maximum number of documents per task. None uses all."""

    def check(self) -> None:
        """Raise ``UserError`` if the request has no text and no task, or if a text file is missing."""
        if not self.texts and not self.tasks:
            raise UserError("there is nothing to evaluate on; give --text FILE, or --tasks NAMES")
        for text in self.texts:
            if not text.is_file():
                raise UserError(f"--text {text} is not a file; {TEXT_FILE}")


def run_evaluation(place: Place, request: EvaluationRequest, subject: ScoredModel) -> dict[str, Any] | None:
    """Evaluate a model on texts and tasks. Every process of the model's grid must call this.

    Args:
        place: The rank of this process, and the number of processes.
        request: What to measure.
        subject: The model to evaluate.

    Returns:
        The record on rank 0, and None on all other ranks. If tasks have failed, the record's "failed" maps the names of
        these tasks to reasons.

    Raises:
        UserError: The tokenizer is unknown or does not fit the model, a text cannot be read or is empty, a task is
            unknown, or the context or the overlap is out of range.
    """
    device = choose_device(place, subject.run.training.device if subject.run is not None else "auto")
    tokenizer = find_tokenizer(request, subject, special_tokens=False)
    if tokenizer is None:
        raise UserError(f"the tokenizer of {request.model} is unknown; give --tokenizer")
    source = None if subject.checkpoint is None else source_of(subject.checkpoint)
    prefix = prefix_token(tokenizer, subject.name, source)
    model = open_scorer(subject, request, device)
    context = _context(model, subject, request)
    if not 1 <= request.overlap <= context:
        raise UserError(f"--overlap {request.overlap} must be at least 1 and at most {context}, the context")
    texts = {str(path): _measures(model, tokenizer, prefix, path, context, request.overlap) for path in request.texts}
    tasks: dict[str, dict[str, float]] = {}
    failed: dict[str, str] = {}
    if request.tasks:
        from fourfold.evaluation.harness import HarnessModel

        harness = HarnessModel(model, tokenizer, prefix, context)
        tasks, failed = harness.run_each(request.tasks, request.include_path, request.limit, request.num_fewshot)
    if dist.get_rank() != 0:
        return None
    record = {"model": str(subject.checkpoint or subject.name), "context": context, "texts": texts, "tasks": tasks}
    return {**record, "failed": failed} if failed else record


def prefix_token(tokenizer: AnyTokenizer, name: str, source: Path | None = None) -> int:
    """Return the id of the token that the first token of a text is predicted from.

    This is the beginning-of-text token if there is one, and otherwise the end-of-text token. fourfold stores a copy of
    the tokenizer next to a corpus. This copy has a beginning-of-text token only if the corpus's documents begin with
    it. If ``tokenizer`` has none, this function also looks for one in the tokenizer of the original Hugging Face model.

    Args:
        tokenizer: The tokenizer of the texts.
        name: The name of the model, for errors.
        source: The folder of the Hugging Face model that training started from, or None.

    Raises:
        UserError: The tokenizer has neither token.
    """
    begin = tokenizer.bos_id
    if begin is None and source is not None and (source / TOKENIZER_FILE).is_file():
        with suppress(NoSuchToken):
            original = load_tokenizer(source, tokenizer.eod_id)
            begin = original.bos_id if original.fingerprint == tokenizer.fingerprint else None
    token = tokenizer.eod_id if begin is None else begin
    if token is None:
        raise UserError(
            f"the tokenizer of {name} has no token that begins or ends a text, but the first token of a text is "
            "predicted from such a token; name an eos_token in its tokenizer_config.json"
        )
    return token


def _context(model: Scorer, subject: ScoredModel, request: EvaluationRequest) -> int:
    longest = context_length(model)
    if request.context is None:
        return longest if subject.run is not None else min(longest, LONGEST_UNKNOWN)
    if not 1 <= request.context <= longest:
        larger = "" if subject.run is None else "; --set training.seq_length=N allows a larger context"
        raise UserError(
            f"--context {request.context} must be at least 1 and at most {longest}, the model's context{larger}"
        )
    return request.context


def _measures(
    model: Scorer, tokenizer: AnyTokenizer, prefix: int, path: Path, context: int, overlap: int
) -> dict[str, float] | None:
    """Return the loss (nats per token), the perplexity, and the bits per byte of a text, as JSON values. Bits per byte
    are comparable between models with different tokenizers. Return None on all processes except the first."""
    text = read_text_file(path, "--text", TEXT_FILE)
    tokens = np.array(tokenizer.encode_batch([text])[0], dtype=np.int64)
    if len(tokens) == 0:
        raise UserError(f"--text {path} is empty; {TEXT_FILE}")
    if tokens.max() >= model.vocab_size:
        raise UserError(
            f"the tokenizer gives token {tokens.max()}, but the model knows {model.vocab_size} tokens; name "
            "the model's own tokenizer with --tokenizer"
        )
    nats = loss_of_text(model, tokens, prefix, context, overlap)
    if nats is None:
        return None
    loss, size = nats / len(tokens), len(text.encode())
    return {
        "tokens": len(tokens),
        "bytes": size,
        "loss": loss,
        "perplexity": math.exp(min(loss, 700.0)),
        "bits_per_byte": nats / math.log(2) / size,
    }
