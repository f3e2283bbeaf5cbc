"""`fourfold evaluate`: measure how well a model predicts texts and solves tasks."""

from pathlib import Path
from typing import Annotated

from typer import Option

from fourfold.cli.options import TASK_LIST, AsJson, Overrides, TaskFolder, TaskLimit, show
from fourfold.data.progress import working
from fourfold.errors import UserError


def evaluate(
    model: Annotated[str, Option(metavar="CHECKPOINT|RUN|HF", help="The model to evaluate.", show_default=False)],
    text: Annotated[list[Path], Option(metavar="FILE", help="A text to predict. Repeatable.")] = [],  # noqa: B006
    tasks: Annotated[str, Option(metavar="NAMES", help=f"Tasks of lm-eval, separated by commas; {TASK_LIST}")] = "",
    include_path: TaskFolder = None,
    num_fewshot: Annotated[
        int | None, Option(min=0, help="Number of examples in a task's prompt. Default: the task decides.")
    ] = None,
    limit: TaskLimit = None,
    overlap: Annotated[int, Option(min=1, help="Tokens that each window repeats from the previous window.")] = 1,
    context: Annotated[
        int | None,
        Option(
            min=1,
            help="Length of a window in tokens. Default: the model's context, and for a Hugging Face model at "
            "most 2048.",
        ),
    ] = None,
    tokenizer: Annotated[str | None, Option(metavar="PATH|bytes", help="Default: the model's own.")] = None,
    micro_batch_size: Annotated[int, Option(min=1, help="Sequences that one rank scores at a time.")] = 8,
    as_json: AsJson = False,
    overrides: Overrides = [],  # noqa: B006 (typer only reads it)
) -> None:
    """Measure how well a model predicts a text, and its scores on lm-eval tasks.

    For a text, the command prints the loss in nats per token, the perplexity, and bits per byte. Compare models with
    different tokenizers by bits per byte. The text is cut into windows. For a model that fourfold trained, windows are
    as long as training.seq_length. For a Hugging Face model, windows are as long as the model's context, but at most
    2048 tokens unless --context is larger. Any grid of processes works: --set parallel.z=2 scores on two processes.
    """
    from fourfold.evaluation.evaluate import EvaluationRequest
    from fourfold.inference.lm_eval_tasks import task_names
    from fourfold.memorization.scored_model import run_on_model_grid
    from fourfold.reports.terminal import evaluation_tables

    request = EvaluationRequest(
        model=model,
        tokenizer=tokenizer,
        micro_batch_size=micro_batch_size,
        overrides=tuple(overrides),
        texts=tuple(text),
        overlap=overlap,
        context=context,
        tasks=task_names(tasks),
        include_path=include_path,
        num_fewshot=num_fewshot,
        limit=limit,
    )
    request.check()
    with working("Evaluating"):
        record = run_on_model_grid("fourfold.evaluation.evaluate:run_evaluation", request)
    show(record, as_json, evaluation_tables)
    if failed := record.get("failed"):
        raise UserError("; ".join(failed.values()))
