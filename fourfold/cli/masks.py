"""fourfold masks"""

from __future__ import annotations

from typing import Annotated

import typer

from fourfold.cli.options import AsJson, Overrides, RunFile, show
from fourfold.data.progress import working


def masks(
    run_file: RunFile,
    samples: Annotated[int, typer.Option(min=0, max=1000, help="Number of training sequences to print.")] = 1,
    tokens: Annotated[int, typer.Option(min=1, max=10**9, help="Number of tokens for the statistics.")] = 1_000_000,
    as_json: AsJson = False,
    overrides: Overrides = [],  # noqa: B006 (typer only reads it)
) -> None:
    """Show which tokens of a run's data its masks drop from the loss, before you train.

    Prints training sequences with marks on the tokens that stay in the loss, and the fraction of such tokens. A gap is
    a token that the goldfish mask drops. The command also prints the longest passage without a gap, and the fraction of
    passages without a gap. The mask does not protect such passages from being memorized.
    """
    from fourfold.memorization.goldfish_laws import expected_extraction
    from fourfold.reports.terminal import masks_view
    from fourfold.run_file.load import load_run
    from fourfold.training.corpora import preview_masks

    run = load_run(run_file, overrides)
    with working("Reading the data"):
        preview, tokenizer = preview_masks(run, samples, tokens)
    record = {
        "trained_share": preview.trained_share,
        "goldfish": None if preview.statistics is None else preview.statistics.record(),
        "expected": expected_extraction(run.masks.goldfish),
        "warnings": [] if preview.statistics is None else preview.statistics.warnings(),
    }
    show(record, as_json, lambda record: masks_view(preview, tokenizer, record))
