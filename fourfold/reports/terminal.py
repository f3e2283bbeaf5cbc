"""Print the results of commands as tables in the terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from fourfold.reports.tables import in_unit, print_table
from fourfold.training.console import byte_unit, format_bytes

if TYPE_CHECKING:
    from fourfold.data.mask_preview import Preview
    from fourfold.data.tokenizer import Tokenizer
    from fourfold.verification.parity_report import ParityReport
    from fourfold.verification.trace import TraceReport


def parity_table(report: ParityReport) -> None:
    """Print a parity report. For each quantity, the table shows the tensor with the largest ratio. The ratio is the
    grid's error against float64, divided by the error of one process in float32."""
    rows = []
    shown = [(quantity, report.worst(quantity), report.limit) for quantity in report.deviations]
    shown += [("own types", each, report.own_types_limit) for each in report.own_types]
    for quantity, worst, limit in shown:
        numbers = [f"{worst.grid:.1e}", f"{worst.one_process:.1e}", f"{worst.ratio:.1f}"]
        rows.append([quantity, worst.tensor, *numbers, "ok" if worst.ratio <= limit else "FAILED"])
    title = f"Differences from float64, in the tensor with the largest ratio (limit {report.limit:g})"
    print_table(title, ("quantity", "tensor", "grid", "one process", "ratio", ""), rows, words=("tensor",))
    Console().print(
        f"resumed: trained by the trainer, resumed on {report.resumed_on}, one more step\n"
        f"replicas: {report.replicas:.1e} apart {_ok(report.replicas == 0)}\n"
        f"initial weights: within {report.initial:.1f} standard errors of their distributions "
        f"{_ok(report.initial <= report.initial_limit)}"
    )
    for key, reason in report.not_compared.items():
        Console(soft_wrap=True, highlight=False).print(f"not compared: {key} ({reason})", markup=False)


def _ok(good: bool) -> str:
    return "(ok)" if good else "(FAILED)"


def trace_tables(report: TraceReport) -> None:
    """Print the trace of a training step. The first table has the memory of one rank by category. With a pipeline, it
    has the memory of each pipeline rank. The next tables have the collectives of one rank: first by axis, operation,
    and purpose, and then by axis."""
    if report.pipeline:
        _pipeline_memory(report)
    else:
        name, unit = byte_unit(report.memory.total_peak)
        memory = [(kind.replace("_", " "), in_unit(size, unit)) for kind, size in asdict(report.memory).items()]
        print_table(f"Memory of one rank of {report.world_size}", ("kind", name), memory)
    rank = "the pipeline's first rank" if report.pipeline else "one rank"
    if not report.collectives:
        print(f"No collectives: {rank} computes the whole optimizer step")
        return
    title = f"Collectives of {rank} in one optimizer step"
    rows = [
        [c.axis, c.op, c.purpose, f"{c.count:,}", *_mebibytes(c.bytes, c.exposed_bytes),
         *_milliseconds(c.seconds, c.exposed_seconds)]
        for c in report.collectives
    ]  # fmt: skip
    timed = any(c.seconds is not None for c in report.collectives)
    header = ("axis", "operation", "purpose", "count", "MiB", "exposed", *(("ms", "exposed ms") if timed else ()))
    print_table(title, header, rows, words=("operation", "purpose"))
    _exposed_by_axis(report)


def _exposed_by_axis(report: TraceReport) -> None:
    """Print a table with one row per axis: the MiB of its collectives, and how many of them no matmul hides (exposed).
    If the trace has times, the table also has the total and the exposed milliseconds."""
    sent, exposed, timed = Counter[str](), Counter[str](), dict[str, tuple[float, float]]()
    for collective in report.collectives:
        for axis in (collective.axis, "all"):
            sent[axis] += collective.bytes
            exposed[axis] += collective.exposed_bytes
            if collective.seconds is not None and collective.exposed_seconds is not None:
                seconds, waited = timed.get(axis, (0.0, 0.0))
                timed[axis] = seconds + collective.seconds, waited + collective.exposed_seconds
    rows = [
        [axis, *_mebibytes(sent[axis], exposed[axis]), f"{exposed[axis] / sent[axis]:.0%}",
         *_milliseconds(*timed.get(axis, ()))]
        for axis in sorted(sent, key=lambda axis: (axis == "all", -sent[axis]))
    ]  # fmt: skip
    header = ("axis", "MiB", "exposed", "share", *(("ms", "exposed ms") if timed else ()))
    print_table("Exposed: no matmul runs between a collective and the wait for it", header, rows)


def _mebibytes(*sizes: int) -> list[str]:
    return [in_unit(size, 2**20) for size in sizes]


def _milliseconds(*seconds: float | None) -> list[str]:
    return [f"{1e3 * value:,.3g}" for value in seconds if value is not None]


def _pipeline_memory(report: TraceReport) -> None:
    """Print a table of memory by category, with one row for each pipeline rank."""
    name, unit = byte_unit(max(rank.memory.total_peak for rank in report.pipeline))
    rows: list[list[str]] = []
    for rank in report.pipeline:
        memory, layers = rank.memory, ", ".join(f"{first}–{end - 1}" for first, end in rank.layers)
        states = memory.parameters + memory.gradients + memory.optimizer
        sizes = (states, memory.activations_peak, memory.gathered_weights_peak, memory.total_peak)
        rows.append([str(rank.pp_rank), layers, *(in_unit(size, unit) for size in sizes)])
    title = f"Memory of one rank of {report.world_size}, by pipeline rank, in {name}"
    print_table(title, ("pp", "layers", "states", "activations", "gathered", "total peak"), rows)


def masks_view(preview: Preview, tokenizer: Tokenizer | None, record: Mapping[str, Any]) -> None:
    """Print training sequences in color, and then statistics of the masks. Tokens in the loss are green. Tokens that
    the goldfish mask drops are red and in brackets. All other tokens are dim."""
    console = Console()
    for sample in preview.samples:
        text = Text()
        for piece, trained, dropped in zip(sample.pieces(tokenizer), sample.trained, sample.dropped, strict=True):
            style = "bold red" if dropped else "green" if trained else "dim"
            text.append(f"[{piece}]" if dropped else piece, style)
        console.print(text, end="\n\n")
    facts = {"trained": f"{record['trained_share']:.1%} of the tokens"}
    if (goldfish := record["goldfish"]) is not None:
        chance = f"chance: about {goldfish['expected_longest_span']:.0f}"
        facts["left out by the goldfish mask"] = f"{goldfish['drop_rate']:.2%} of the tokens that the other masks keep"
        facts["longest passage without a gap"] = f"{goldfish['longest_undropped_span']} tokens ({chance})"
    if (expected := record["expected"]) is not None:
        for suffix, share in expected["exact_match"].items():
            facts[f"passages of {suffix} tokens without a gap"] = f"{share:.2g}"
        for noise, share in expected["near_duplicates_train"].items():
            facts[f"near-duplicates, {float(noise):.0%} replaced"] = f"{share:.1%} train a dropped token"
    print_table("Masks", ("", ""), [[*fact] for fact in facts.items()])
    for warning in record["warnings"]:
        console.print(Text.assemble(("Warning: ", "bold"), warning))


def evaluation_tables(record: Mapping[str, Any]) -> None:
    """Print the result of ``fourfold evaluate``: the loss on each text, and the metrics of each lm-eval task."""
    rows = [
        [Path(name).name, f"{t['tokens']:,}", f"{t['loss']:.4f}", f"{t['perplexity']:.3f}", f"{t['bits_per_byte']:.4f}"]
        for name, t in record["texts"].items()
    ]
    if rows:
        header = ("text", "tokens", "nats per token", "perplexity", "bits per byte")
        print_table(f"{record['model']}, context {record['context']}", header, rows)
    rows = [[task, key, f"{value:.4f}"] for task, numbers in record["tasks"].items() for key, value in numbers.items()]
    if rows:
        print_table(f"{record['model']}: lm-eval", ("task", "metric", "value"), rows)


def print_transferred(record: Mapping[str, Any]) -> None:
    """Print a line about the files that were written when a Hugging Face model was imported or exported."""
    what = f"{record['model_type']}, {record['parameters']:,} parameters, {record['bytes']:,} bytes"
    print(f"{record['folder']}: {what} in {record['files']} file{'s' * (record['files'] != 1)}")


def generation_line(record: Mapping[str, Any]) -> str:
    """Return a line about generated text: the numbers of tokens, the sampling settings, the speed, and the size of the
    KV cache."""
    speed = record["tokens_per_second"]
    rate = "" if speed is None else f", then {speed:.1f} tokens/s"
    cache = "" if record["cache_bytes"] is None else f"; cache {format_bytes(record['cache_bytes'])}"
    settings = dict(record["settings"])
    words = [] if settings.pop("do_sample") else ["always the most likely token"]
    chosen = ", ".join(words + [f"{key} {value}" for key, value in settings.items()])
    return (
        f"{record['prompt_tokens']:,} + {record['new_tokens']:,} tokens ({chosen}): the first after "
        f"{record['prompt_seconds']:.2f} s{rate}{cache}"
    )
