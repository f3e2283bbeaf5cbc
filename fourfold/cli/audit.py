"""fourfold audit"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fourfold.cli.options import AsJson, Overrides, TopK, TopP, show
from fourfold.data.progress import working
from fourfold.errors import UserError

ABOVE_LIMIT = 4


def audit(
    model: Annotated[str, typer.Option(metavar="CHECKPOINT|RUN|HF", help="The model to audit.", show_default=False)],
    documents: Annotated[
        Path, typer.Option(metavar="FILE.jsonl", help='Documents to audit: "text" or "tokens" in each line.')
    ],
    control: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.jsonl",
            help="More control documents, which the model was not trained on. Documents with a count of 0 are "
            "always controls.",
        ),
    ] = None,
    suffix: Annotated[
        int, typer.Option(help="Number of tokens at the end of a document that the model must repeat.")
    ] = 50,
    prefix: Annotated[int, typer.Option(help="Minimum number of tokens before the suffix.")] = 50,
    offset: Annotated[
        int, typer.Option(help="Number of tokens of unrelated documents before each document, as in a packed sequence.")
    ] = 0,
    reference: Annotated[
        str | None,
        typer.Option(
            metavar="CHECKPOINT|RUN|HF", help="A model that was not trained on these documents, to compare with."
        ),
    ] = None,
    run: Annotated[
        Path | None, typer.Option(metavar="RUN.toml", help="Replay this run's goldfish mask. Default: the model's run.")
    ] = None,
    tokenizer: Annotated[str | None, typer.Option(metavar="PATH|bytes", help="Default: the model's own.")] = None,
    text_key: Annotated[str, typer.Option(help="The key that holds the text.")] = "text",
    temperature: Annotated[float, typer.Option(help="Temperature of an attacker that draws tokens at random.")] = 1.0,
    top_k: TopK = None,
    top_p: TopP = None,
    generate: Annotated[int, typer.Option(help="Continue this many trained documents, and as many controls.")] = 0,
    beams: Annotated[
        int, typer.Option(help="Also search for near-verbatim continuations, with this many beams. Needs --generate.")
    ] = 0,
    micro_batch_size: Annotated[int, typer.Option(help="Number of documents that one rank scores in a pass.")] = 8,
    out: Annotated[Path | None, typer.Option(metavar="FOLDER", help="Write audit.json and audit.html there.")] = None,
    max_exact_match: Annotated[
        float | None, typer.Option(help="Exit with code 4 if more than this share of documents is repeated exactly.")
    ] = None,
    as_json: AsJson = False,
    overrides: Overrides = [],  # noqa: B006 (typer only reads it)
) -> None:
    """Measure how much of its training data a model repeats.

    One forward pass over a document shows what greedy decoding would produce after each of the document's prefixes. The
    audit runs on any grid of processes: --set parallel.z=2 scores on two processes. Exit code 4: the model repeats more
    than --max-exact-match allows.
    """
    if max_exact_match is not None and not 0 <= max_exact_match <= 1:
        raise UserError(f"--max-exact-match {max_exact_match} must be a share from 0 to 1, such as 0.01")
    from fourfold import jobs
    from fourfold.memorization.audit import AuditRequest
    from fourfold.memorization.scores import AttackSampling
    from fourfold.reports.audit_report import audit_tables, write_audit_report

    request = AuditRequest(
        model=model, documents=documents, control=control, reference=reference, run=run, tokenizer=tokenizer,
        suffix=suffix, prefix=prefix, offset=offset, sampling=AttackSampling(temperature, top_k, top_p),
        generate=generate, beams=beams, micro_batch_size=micro_batch_size, text_key=text_key,
        overrides=tuple(overrides),
    )  # fmt: skip
    with working("Scoring the documents"):
        record = jobs.audit(request)
    show(record, as_json, audit_tables)
    if record is None:
        return
    # Write the report only after showing the results, so that they are not lost if writing fails.
    if out is not None:
        page = write_audit_report(record, out)
        if not as_json:
            print(f"Report: {page}")
    if max_exact_match is not None and record["exact_match"] > max_exact_match:
        raise typer.Exit(ABOVE_LIMIT)
