"""Run lm-eval tasks with any model that lm-eval supports."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from fourfold.data.transformers_tokenizer import AnyTokenizer, TransformersTokenizer
from fourfold.errors import UserError, first_line
from fourfold.extras import import_extra

if TYPE_CHECKING:
    from lm_eval.api.model import LM
    from lm_eval.tasks import TaskManager
    from transformers import PreTrainedModel


def import_lm_eval(purpose: str = "--tasks needs") -> ModuleType:
    """Import lm-eval. If it is not installed, raise a ``UserError`` whose message begins with ``purpose``."""
    return import_extra("lm_eval", "evaluate", purpose)


def task_names(names: str) -> tuple[str, ...]:
    """Split task names at commas. Raise ``UserError`` if there is a name and lm-eval is not installed."""
    tasks = tuple(name.strip() for name in names.split(",") if name.strip())
    if tasks:
        import_lm_eval()
    return tasks


def checked_tokenizer(tokenizer: AnyTokenizer) -> TransformersTokenizer:
    """Return the tokenizer, after checking that lm-eval can use it. Raise ``UserError`` if it cannot."""
    if not isinstance(tokenizer, TransformersTokenizer):
        raise UserError("tasks need a tokenizer of transformers, but this model reads bytes")
    return tokenizer


def wrap_model(model: PreTrainedModel, tokenizer: TransformersTokenizer) -> LM:
    """Return a transformers model and its tokenizer, wrapped as a model of lm-eval."""
    import_lm_eval()
    from lm_eval.models.huggingface import HFLM

    return HFLM(pretrained=model, tokenizer=tokenizer.tokenizer, batch_size=1)


def find_tasks(tasks: Sequence[str], folder: Path | None = None) -> TaskManager:
    """Return a manager of lm-eval's tasks and the tasks in ``folder``. Raise ``UserError`` if one of ``tasks`` is
    unknown."""
    manager = _tasks_in(folder)
    unknown = [task for task in tasks if not manager.match_tasks([task])]
    if unknown:
        raise UserError(
            f"task {unknown[0]}: lm-eval has no such task; for your own tasks, give their folder with --include-path, "
            "or with evaluation.include_path in a run file"
        )
    return manager


@cache
def _tasks_in(folder: Path | None) -> TaskManager:
    """Return a manager of lm-eval's tasks and the tasks in a folder. This takes seconds, because lm-eval has thousands
    of task files."""
    from lm_eval.tasks import TaskManager

    return TaskManager(include_path=None if folder is None else str(folder))


def rehearse(tasks: Sequence[str], folder: Path | None = None, num_fewshot: int | None = None) -> None:
    """Run each lm-eval task on two documents, with random answers and no model. This finds errors in datasets and
    templates early.

    Raises:
        UserError: lm-eval is not installed, or a task is unknown or fails.
    """
    lm_eval = import_lm_eval()
    manager = find_tasks(tasks, folder)
    for task in tasks:
        try:
            lm_eval.simple_evaluate(
                "dummy", tasks=[task], num_fewshot=num_fewshot, limit=2, task_manager=manager, bootstrap_iters=0
            )
        except Exception as error:  # Tasks are third-party code, templates, and data, and can raise anything.
            raise UserError(
                f"task {task}: lm-eval cannot run it ({type(error).__name__}: {first_line(error)})"
            ) from error


def run_tasks(
    model: LM,
    tasks: Sequence[str],
    folder: Path | None = None,
    limit: int | None = None,
    num_fewshot: int | None = None,
) -> dict[str, dict[str, float]]:
    """Run lm-eval tasks with a model, and return the metrics.

    Args:
        model: The result of ``wrap_model``, or another model of lm-eval.
        tasks: Names of tasks.
        folder: A folder with your own tasks. None if you have none.
        limit: Largest number of documents per task. None means all documents.
        num_fewshot: Number of examples in the prompt. None means each task's default.

    Returns:
        The metrics of each task. Their names are lm-eval's names, such as ``acc,none`` (the metric and a filter of the
        answers). The result is empty on every process except the first.

    Raises:
        UserError: lm-eval is not installed, or a task is unknown.
    """
    lm_eval = import_lm_eval()
    results = lm_eval.simple_evaluate(
        model,
        tasks=list(tasks),
        num_fewshot=num_fewshot,
        limit=limit,
        task_manager=find_tasks(tasks, folder),
        bootstrap_iters=0,
        log_samples=False,
    )
    return {
        task: {key: value for key, value in numbers.items() if "," in key and isinstance(value, (int, float))}
        for task, numbers in (results or {"results": {}})["results"].items()
    }
