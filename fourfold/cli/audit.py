"""`fourfold audit`: measure what a model memorized, and preview loss masks."""

from pathlib import Path
from typing import Annotated

from typer import Exit, Option, Typer

from fourfold.cli.options import AsJson, Overrides, RunFile, TopK, TopP, show
from fourfold.cli.usage import FirstUnlessNamed
from fourfold.data.progress import working
from fourfold.errors import UserError

ABOVE_LIMIT = 4


class WithOptionsOfDocuments(FirstUnlessNamed):
    """A group of commands that shows the help text of its first command, `fourfold audit documents`, for `fourfold
    audit --help`."""

    own_options = ()


audit = Typer(
    cls=WithOptionsOfDocuments, no_args_is_help=True, help="Measure how much of its training data a model repeats."
)


@audit.command()
def documents(
    model: Annotated[str, Option(metavar="CHECKPOINT|RUN|HF", help="The model to audit.", show_default=False)],
    file: Annotated[
        Path,
        Option("--documents", metavar="FILE.jsonl", help='Documents to audit. Each line has "text" or "tokens".'),
    ],
    control: Annotated[
        Path | None,
        Option(
            metavar="FILE.jsonl",
            help="More control documents, which the model was not trained on. Documents with a count of 0 are "
            "always controls.",
        ),
    ] = None,
    suffix: Annotated[int, Option(help="Number of tokens at the end of a document that the model must repeat.")] = 50,
    prefix: Annotated[int, Option(help="Minimum number of tokens before the suffix.")] = 50,
    offset: Annotated[
        int, Option(help="Number of tokens of unrelated documents before each document, as in a packed sequence.")
    ] = 0,
    reference: Annotated[
        str | None,
        Option(metavar="CHECKPOINT|RUN|HF", help="A model that was not trained on these documents, to compare with."),
    ] = None,
    run: Annotated[
        Path | None, Option(metavar="RUN.toml", help="Replay this run's goldfish mask. Default: the model's run.")
    ] = None,
    tokenizer: Annotated[str | None, Option(metavar="PATH|bytes", help="Default: the model's own.")] = None,
    text_key: Annotated[str, Option(help="The key that holds the text.")] = "text",
    temperature: Annotated[float, Option(help="Temperature of an attacker that draws tokens at random.")] = 1.0,
    top_k: TopK = None,
    top_p: TopP = None,
    generate: Annotated[int, Option(help="Continue this many trained documents, and as many controls.")] = 0,
    beams: Annotated[
        int, Option(help="Also search for near-verbatim continuations, with this many beams. Needs --generate.")
    ] = 0,
    micro_batch_size: Annotated[int, Option(help="Number of documents that one rank scores in a pass.")] = 8,
    out: Annotated[
        Path | None, Option(metavar="FOLDER", help="Write audit.json and audit.html into this folder.")
    ] = None,
    max_exact_match: Annotated[
        float | None, Option(help="Exit with code 4 if more than this share of documents is repeated exactly.")
    ] = None,
    as_json: AsJson = False,
    overrides: Overrides = [],  # noqa: B006 (typer only reads it)
) -> None:
    """Measure how much of its training data a model repeats.

    One forward pass over a document shows what greedy decoding would produce after each of the document's prefixes. The
    audit runs on any grid of processes: --set parallel.z=2 scores on two processes. Exit code 4: the model repeats more
    than --max-exact-match allows.

    Before you train, `fourfold audit masks RUN.toml` shows which tokens the masks of a run drop from the loss.
    """
    if max_exact_match is not None and not 0 <= max_exact_match <= 1:
        raise UserError(f"--max-exact-match {max_exact_match} must be a share from 0 to 1, such as 0.01")
    from fourfold import jobs
    from fourfold.memorization.audit_request import AuditRequest
    from fourfold.memorization.scores import AttackSampling
    from fourfold.reports.audit_report import audit_tables, write_audit_report

    request = AuditRequest(
        model=model, documents=file, control=control, reference=reference, run=run, tokenizer=tokenizer,
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
        raise Exit(ABOVE_LIMIT)


@audit.command()
def masks(
    run_file: RunFile,
    samples: Annotated[int, Option(min=0, max=1000, help="Number of training sequences to print.")] = 1,
    tokens: Annotated[int, Option(min=1, max=10**9, help="Number of tokens for the statistics.")] = 1_000_000,
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
