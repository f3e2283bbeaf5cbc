"""Tasks of the lm-eval library, for any model that it can drive."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fourfold.errors import UserError


def import_lm_eval() -> Any:
    """The lm-eval library, or a sentence that says how to get it."""
    try:
        import lm_eval
    except ImportError as error:
        raise UserError("tasks need the lm-eval library: pip install 'fourfold[evaluate]'") from error
    return lm_eval


def run_tasks(
    model: Any,
    tasks: Sequence[str],
    folder: Path | None = None,
    limit: int | None = None,
    num_fewshot: int | None = None,
) -> dict[str, dict[str, float]]:
    """Every task's numbers by metric, as lm-eval names them; empty on all processes of a launcher's but the first.

    model: an ``lm_eval.api.model.LM``. folder: of tasks of your own. limit: documents of each task. Raises
    ``UserError`` for a task that there is not.
    """
    lm_eval = import_lm_eval()
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=None if folder is None else str(folder))
    unknown = [task for task in tasks if not manager.match_tasks([task])]
    if unknown:
        raise UserError(f"--tasks {unknown[0]}: lm-eval has no such task; --include-path names a folder of your own")
    results = lm_eval.simple_evaluate(
        model,
        tasks=list(tasks),
        num_fewshot=num_fewshot,
        limit=limit,
        task_manager=manager,
        bootstrap_iters=0,
        log_samples=False,
    )
    return {
        task: {key: value for key, value in numbers.items() if isinstance(value, (int, float))}
        for task, numbers in (results or {"results": {}})["results"].items()
    }
