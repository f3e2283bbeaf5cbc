"""Adapt a model on any grid to lm-eval. Every process runs lm-eval's tasks. When a task needs the model, all processes
compute the forward pass together."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch.distributed as dist
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from numpy.typing import NDArray

from fourfold.data.transformers_tokenizer import AnyTokenizer
from fourfold.errors import UserError, first_line
from fourfold.evaluation.perplexity import loss_of_text
from fourfold.inference.lm_eval_tasks import find_tasks, run_tasks
from fourfold.memorization.scorers import Scorer
from fourfold.parallel.grid.shared_failure import raise_together

MAX_NEW_TOKENS = 256
"""Maximum number of tokens to generate for a request if the task does not set one."""

T = TypeVar("T")


class TaskFailed(UserError):
    """A task failed on at least one process, but not in the forward pass. All processes raise this error together, so
    the grid can run other tasks afterwards."""


class HarnessModel(TemplateLM):  # type: ignore[misc]  # lm-eval has no types
    """A model that lm-eval can use. When lm-eval sends requests, the ranks divide the requests among themselves, and
    score them together.

    Args:
        model: The model, which scores the requests on the grid.
        tokenizer: The tokenizer of the model.
        prefix: Id of the token that comes before every text.
        context: Maximum number of input tokens per forward pass.
    """

    def __init__(self, model: Scorer, tokenizer: AnyTokenizer, prefix: int, context: int) -> None:
        super().__init__()
        self._prefix = prefix
        self._model, self._tokenizer, self.max_length = model, tokenizer, context
        self._is_scoring = False

    def run_each(
        self, tasks: Sequence[str], folder: Path | None, limit: int | None, num_fewshot: int | None
    ) -> tuple[dict[str, dict[str, float]], dict[str, str]]:
        """Run tasks one after the other.

        If a task fails, the scores of all other tasks are kept.

        Args:
            tasks: Names of the tasks.
            folder: A folder with the user's own tasks, or None.
            limit: Maximum number of documents per task. None uses all.
            num_fewshot: Number of solved examples in each prompt. None uses each task's own number.

        Returns:
            First the metrics of each task, as in ``run_tasks``. Then the reason of the failure of each failed task.

        Raises:
            UserError: A task is unknown. In that case, no task has been run.
        """
        find_tasks(tasks, folder)
        scores: dict[str, dict[str, float]] = {}
        failed: dict[str, str] = {}
        for task in tasks:
            try:
                scores |= self.run_task(task, folder, limit, num_fewshot)
            except TaskFailed as failure:
                failed[task] = str(failure)
        return scores, failed

    def run_task(
        self, task: str, folder: Path | None = None, limit: int | None = None, num_fewshot: int | None = None
    ) -> dict[str, dict[str, float]]:
        """Run a task, or a group of tasks, on all processes, as ``run_tasks`` does. The arguments are the same as for
        ``run_each``.

        Raises:
            TaskFailed: The task failed on at least one process, but not during the model's forward pass. All processes
                raise this error.
        """
        failure = None
        try:
            results = run_tasks(self, [task], folder, limit, num_fewshot)
        except TaskFailed:
            # The task failed on another process. This process learned of the failure at the beginning of a pass.
            raise
        except Exception as error:  # Tasks are third-party code, templates, and data, and can raise anything.
            # If the model's forward pass failed, the processes may have stopped at different points of the pass. Then
            # they cannot continue together.
            if self._is_scoring:
                raise
            why = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {first_line(error)}"
            failure = TaskFailed(f"task {task}: lm-eval failed ({why})")
            failure.__cause__ = error
        raise_together(failure)
        return results

    @property
    def eot_token_id(self) -> int | None:
        return self._tokenizer.eod_id

    @property
    def prefix_token_id(self) -> int:
        return self._prefix

    @property
    def tokenizer_name(self) -> str:
        return self._tokenizer.fingerprint or ""

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        return self._tokenizer.encode_batch([string])[0]

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        longest = max((len(answer) for _, _, answer in requests), default=0)
        if longest > self.max_length:
            raise UserError(
                f"an answer of the task has {longest} tokens, but the model's context has only {self.max_length}, so "
                "the model cannot score the task"
            )
        documents = [np.array(context + answer)[-(self.max_length + 1) :] for _, context, answer in requests]
        answers: list[tuple[float, bool]] = []
        for document, (_, _, answer), fields in zip(documents, requests, self._score(documents), strict=True):
            places = slice(len(document) - 1 - len(answer), len(document) - 1)
            log_prob, predicted = fields[0, places].astype(np.float64), fields[1, places].astype(np.int64)
            answers.append((float(log_prob.sum()), bool((predicted == answer).all())))
        return answers

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        found: list[float] = []
        for request in requests:
            tokens = np.array(self.tok_encode(request.args[0]), dtype=np.int64)
            with self._scoring():
                nats = loss_of_text(self._model, tokens, self.prefix_token_id, self.max_length, overlap=1)
                found.append(-_broadcast(nats))
        return found

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Generate greedily. Each token takes one forward pass over the full context. There is no cache, so any grid
        works."""
        return [self._generate(*request.args) for request in requests]

    def _generate(self, prompt: str, options: dict[str, Any]) -> str:
        until = options.get("until") or []
        stops = [until] if isinstance(until, str) else list(until)
        tokens = self.tok_encode(prompt) or [self.prefix_token_id]
        made: list[int] = []
        for _ in range(int(options.get("max_gen_toks", MAX_NEW_TOKENS))):
            # A pass predicts each token of its input except the first. Append a 0, so that the pass also predicts the
            # token after the text.
            window = np.array([*[*tokens, *made][-self.max_length :], 0])
            (fields,) = self._score([window])
            token = int(fields[1, len(window) - 2])
            if token == self.eot_token_id:
                break
            made.append(token)
            text = self._tokenizer.decode(made)
            for stop in stops:
                if stop in text:
                    return text.partition(stop)[0]
        return self._tokenizer.decode(made)

    def _score(self, documents: list[NDArray[np.int64]]) -> list[NDArray[np.float32]]:
        with self._scoring():
            return _broadcast(self._model.score(documents))

    @contextmanager
    def _scoring(self) -> Iterator[None]:
        """Let all processes run the forward pass in the ``with`` block together. If the task has failed on any process,
        all processes raise ``TaskFailed`` and do not run the block."""
        raise_together(None)
        self._is_scoring = True
        yield
        self._is_scoring = False  # If the pass fails, the attribute stays True.


def _broadcast(value: T | None) -> T:
    """Return the value of the first process on every process. On all other processes, the argument is ignored."""
    values = [value]
    dist.broadcast_object_list(values, src=0)
    assert values[0] is not None
    return values[0]
