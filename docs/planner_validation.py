"""Score the planner on the measured rows that come with fourfold; write docs/planner_validation.md and the constants
that fourfold ships:

python docs/planner_validation.py

or, in seconds, what it says of mixtures of experts, to which nothing is fitted, and of the rows:

python docs/planner_validation.py mixtures
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from fourfold.planning.calibration.error_intervals import KINDS, MIN_COMPARED, NEAR, coverage, interval_of, order_factor
from fourfold.planning.calibration.fit import Calibration, to_toml
from fourfold.planning.calibration.machine_constants import shipped
from fourfold.planning.calibration.memory_cases import CAPACITIES, memory_cases
from fourfold.planning.calibration.published import figures, weak_scaling
from fourfold.planning.calibration.rows import Row, measured_table, read_rows, read_table
from fourfold.planning.calibration.score import (
    KEYS,
    Scored,
    errors_of,
    fit_rows,
    predict_left_out,
    predict_rows,
    summary,
)
from fourfold.planning.cases import stack
from fourfold.planning.cost.memory import CACHED, UNUSABLE, peak_memory, runtime_bytes
from fourfold.planning.machines.constants import NAMES, PRIORS
from fourfold.planning.machines.machine import stack_machines
from fourfold.planning.search.fastest import MAX_P_OUT_OF_MEMORY

HERE = Path(__file__).parent
SHIPPED = HERE.parent / "fourfold" / "planning" / "calibration" / "calibrated.toml"
SEEDS = range(8)
SHARE = 0.1
NEVER_FITTED = ("S3",)
"""Korthikanti et al.: all eight rows are held out."""
NOISE_OF_MEMORY = 0.12
"""Standard deviation of one measured memory row around its prediction."""
CACHED_SPREAD = 0.05
"""Standard deviation of ``CACHED`` around its prior, ``UNUSABLE``."""


def main() -> None:
    rows, skipped = read_rows([measured_table()])
    if sys.argv[1:] == ["mixtures"]:
        update_mixtures(rows, skipped)
        return
    calibration = fit_rows(rows)
    left_out = all_left_out(rows)
    SHIPPED.write_text(
        "# Factors on the priors of planning/machines/constants.py, by docs/planner_validation.py.\n"
        + to_toml(calibration)
        + "\n[intervals] # 5th and 95th percentile of measured over predicted seconds\n"
        + "".join(f'"{kind}" = [{low:.3f}, {high:.3f}]\n' for kind, (low, high) in intervals(left_out).items())
        + "\n[order] # sure (95 %) where two predicted times differ by this factor\n"
        + f"factor = {order_factor(dense(left_out['source'])):.3f}\n",
        encoding="utf-8",
    )
    (HERE / "planner_validation.md").write_text(page(rows, skipped, calibration, left_out), encoding="utf-8")
    for by, scored in left_out.items():
        print(f"{by} left out: mean {percent(errors_of(dense(scored))['mean_abs_error'])}")


def update_mixtures(rows: list[Row], skipped: dict[str, int]) -> None:
    """Replace the sections of the page that follow from the rows and the shipped constants."""
    path = HERE / "planner_validation.md"
    text = path.read_text(encoding="utf-8")
    left_out = mixtures_left_out(rows)
    for section in (introduction(rows), mixtures_section(rows, left_out), rows_section(skipped)):
        text = re.sub(
            rf"{re.escape(section[0])}\n.*?(?=\n## |\Z)", lambda _, new=section: "\n".join(new), text, flags=re.DOTALL
        )
    path.write_text(text, encoding="utf-8")


def mixtures_left_out(rows: list[Row]) -> list[Scored]:
    """Predictions of mixtures with constants fitted to the dense rows of all other sources."""
    left_out: list[Scored] = []
    for source in dict.fromkeys(row.source for row in rows if row.mixture):
        fitted = fit_rows([row for row in rows if row.source != source], known=False)
        left_out += predict_rows([row for row in rows if row.source == source and row.mixture], fitted)
    return left_out


def page(rows: list[Row], skipped: dict[str, int], calibration: Calibration, left_out: dict[str, list[Scored]]) -> str:
    dense_rows = [row for row in rows if not row.mixture]
    lines = [
        *introduction(rows),
        *left_out_section(dense_rows, left_out),
        *intervals_section(left_out),
        *within_section(dense_rows),
        *published_section(calibration),
        *constants_section(calibration),
        *mixtures_section(rows, left_out["source"]),
        *rows_section(skipped),
        *every_row_section(calibration, rows, left_out["source"]),
    ]
    return "\n".join(lines)


def introduction(rows: list[Row]) -> list[str]:
    mixtures = sum(row.mixture for row in rows)
    return [
        "# How well the planner predicts",
        "",
        "<!-- Written by docs/planner_validation.py. -->",
        "",
        f"The planner predicts {len(rows) - mixtures:,} published rows of dense models (step times or memory of runs)",
        f"and {mixtures} of [mixtures of experts](#mixtures-of-experts), which come with fourfold.",
        "Headline figures are for dense models in bf16 or fp16 with a complete configuration. FP8 and incomplete rows",
        "are listed as *others*, doubtful measurements apart.",
        "",
    ]


def mixtures_section(rows: list[Row], left_out: list[Scored]) -> list[str]:
    """Mixtures of experts, to which nothing is fitted: errors by source, by model and machine, and of every row."""
    mixtures = [row for row in rows if row.mixture]
    shipped_, alone = predict_rows(mixtures, shipped()), predict_rows(mixtures, Calibration())
    apart = {(s.row.source, s.row.row_id): s for s in left_out}
    every = [apart[row.source, row.row_id] for row in mixtures]
    groups: dict[str, list[tuple[Scored, ...]]] = {}
    for scores in zip(every, shipped_, alone, strict=True):
        row = scores[0].row
        kinds = [row.source, f"{row.source}: {row.sweep[1]}, {row.machine.name}"]
        for name in ["doubtful"] if row.doubt else ["all", *kinds]:
            groups.setdefault(name, []).append(scores)
    return [
        "## Mixtures of experts",
        "",
        *MIXTURES,
        "",
        *table(("rows", "median", "mean", "bias", "shipped constants: median", "mean", "bias", "fits"),
               [mixture_errors(name, groups[name]) for name in sorted(groups, key=lambda name: (name != "all", name))]),
        "",
        *table(("source", "row", "model", "s", "predicted", "error", "shipped", "machine files only", "GB predicted"),
               [(row.source, row.row_id, row.sweep[1], number(row.seconds), number(s.seconds),
                 *(f"{e.error:+.1%}" for e in (s, o, a) if e.error is not None), number(s.memory_gb))
                for row, s, o, a in zip(mixtures, every, shipped_, alone, strict=True)]),
        "",
    ]  # fmt: skip


def mixture_errors(name: str, scores: list[tuple[Scored, ...]]) -> tuple[str, ...]:
    apart, with_shipped = (errors_of([score[kind] for score in scores]) for kind in (0, 1))
    return (
        f"{name} ({len(scores)})",
        *(percent(e[key]) if key != "bias" else f"{e[key]:+.1%}"
          for e in (apart, with_shipped) for key in ("median_abs_error", "mean_abs_error", "bias")),
        f"{np.mean([score[0].p_oom <= 0.5 for score in scores]):.0%}",
    )  # fmt: skip


MIXTURES = """\
No constant is fitted to a mixture: these rows are predicted with what dense runs say of the machine and the program,
and with operations of experts that are counted. Every source is predicted with constants fitted to the *dense* rows
of all others, and beside it with the constants that fourfold ships, which know dense rows of S5 and S8. The rows are
not blind, though: which operations count was decided while looking at them, so the error on a program that nobody has
looked at will be larger.

Sizes are those of the models' published configurations. The tables do not say how tokens are exchanged, nor what runs
as a CUDA graph: both are from the recipes (S5: `scripts/performance/configs` of Megatron-Bridge; S8: the run files of
the recipes), matched to each table by its container. S5 forces an even load; Grok-1 in S8 drops tokens.

- Rows move through memory: gathered, exchanged, sorted, padded and rounded for products in 8 bits, and back. From
  container 26.06 on, exchanges put rows in their place, and products make the activation and round (`fused_experts`).
- Before that, each product of an expert is launched on its own, and the host first waits for the counts of rows, so
  it hides these launches behind nothing else. With a capacity it knows the counts.
- DeepEP and HybridEP send a token once to a GPU, and over the network once to a node.

What remains: GPT-OSS (up to -35 %), whose experts have biases and a clamped activation, and whose attention has sinks
and windows, none of which is predicted; its rows on B200 with ep 8 recompute the experts' activation, which no column
says, and are predicted not to fit. Runs of the oldest containers on H100 and B300 (-40 %), which newer ones run
almost twice as fast. Multi-head latent attention (DeepSeek, Kimi) is not predicted.

No source of these rows gives memory. Against `fourfold trace`, states and all that is sent are equal, and the peak of
the activations is within a tenth (`tests/planning/test_exact_mixture.py`). All rows ran: *fits* is the share that is
predicted to.
""".splitlines()


def left_out_section(rows: list[Row], left_out: dict[str, list[Scored]]) -> list[str]:
    alone = predict_rows(rows, Calibration())
    by_source, by_machine = summary(left_out["source"]), summary(left_out["machine"])
    memory = by_source["memory"]
    return [
        "## A source that nothing was fitted to",
        "",
        "Your own cluster and program are like a publication that the constants have never seen. Every source is",
        "predicted with constants that are fitted to the rows of all others, and beside it every machine:",
        "",
        *table(("source left out", "median", "mean", "bias"), error_rows(left_out["source"], "source")),
        "",
        *table(("machine left out", "median", "mean", "bias"), error_rows(left_out["machine"], "machine")),
        "",
        "Without fitted constants (machine files and priors only): mean "
        f"{percent(errors_of(dense(alone))['mean_abs_error'])}, median "
        f"{percent(errors_of(dense(alone))['median_abs_error'])}.",
        "The noise between sources (`NOISE_BETWEEN` in `calibration/fit.py`) and the weight of a source's rows were",
        "chosen among a few values by these same errors.",
        "",
        *table(
            ("ranking and memory", "source left out", "machine left out"),
            [
                (f"sweeps: {key.replace('_', ' ')}", number(value), number(by_machine["sweeps"][key]))
                for key, value in by_source["sweeps"].items()
            ],
        ),
        "",
        "A sweep is a set of rows that differ only in layout; its regret is how much slower the predicted best is than",
        "the measured best.",
        "",
        "Memory: what the allocator holds unused, as a share of what a step allocates, is the only fitted constant",
        f"(`CACHED` in `planning/cost/memory.py`: {CACHED}; fitted to all rows {allocator_share(rows):.3f}; prior "
        f"{UNUSABLE}). Here it is fitted to the",
        "rows of other sources:",
        "",
        *table(("source left out", "rows", "allocator's share", "mean", "bias"), memory_rows(rows)),
        "",
        f"Of the {memory['fitting_rows']} rows that ran and name their recompute {percent(memory['fit_recall'])} are "
        f"predicted to fit, and of {memory['out_of_memory_rows']} that ran",
        f"out of memory {percent(memory['oom_recall'])} not to. One is missed (S11, 206B): the same layout with one "
        "layer per stage less was measured at 59 GB, and",
        "a layer with its activations takes 8 GB. What ran out there was not the memory of a step.",
        "",
        *misfits(rows),
    ]


def misfits(rows: list[Row]) -> list[str]:
    """Judge probabilities of fitting on devices that measured runs would, and would not, fit."""
    cases = memory_cases(rows)
    found = [
        (f"{low:.0%} to {high:.0%}", f"{count}", percent(share)) for low, high, count, share in cases.reliability()
    ]
    (precision, recall), (careful, careful_recall) = cases.refused(0.5), cases.refused(MAX_P_OUT_OF_MEMORY)
    return [
        f"So few rows ran out of memory that misfits are constructed: the {sum(r.memory_gb is not None for r in rows)} "
        "runs with a measured memory, on devices with",
        f"{CAPACITIES[0]:.0%} to {CAPACITIES[-1]:.0%} of what they need ({len(CAPACITIES)} each). Of the cases that "
        f"are more likely than not to run out of memory {percent(precision)}",
        f"do, and they are {percent(recall)} of those that do. A plan is more careful, and refuses a layout from "
        f"{MAX_P_OUT_OF_MEMORY:.0%} on: {percent(careful_recall)} of those",
        f"that do not fit, and {percent(1 - careful)} of its refusals would have fitted.",
        "",
        *table(("predicted to fit", "cases", "fit"), found),
        "",
    ]


def all_left_out(rows: list[Row]) -> dict[str, list[Scored]]:
    """Predictions of rows whose source, machine, or machine and source are new."""
    return {**{by: predict_left_out(rows, by) for by in KEYS}, "both": predict_left_out(rows, "machine", False)}


def by_kind(left_out: dict[str, list[Scored]]) -> dict[str, list[Scored]]:
    """The predictions of each kind of extrapolation, of all rows that are not doubtful."""
    timed = ([s for s in left_out[by] if s.error is not None and not s.row.doubt and not s.row.mixture]
             for by in ("source", "both"))  # fmt: skip
    return dict(zip(KINDS, timed, strict=True))


def intervals(left_out: dict[str, list[Scored]]) -> dict[str, tuple[float, float]]:
    return {kind: interval_of(scored) for kind, scored in by_kind(left_out).items()}


def intervals_section(left_out: dict[str, list[Scored]]) -> list[str]:
    found = []
    for kind, scored in by_kind(left_out).items():
        low, high = interval_of(scored)
        shares = coverage(scored)
        inside = sum(share * sum(s.row.source == source for s in scored) for source, share in shares.items())
        worst = min(shares, key=lambda source: shares[source])
        found.append(
            (
                kind,
                f"× {low:.2f} to × {high:.2f}",
                percent(np.mean(list(shares.values()))),
                percent(inside / len(scored)),
                f"{worst}: {shares[worst]:.0%}",
            )
        )
    return [
        "## Intervals",
        "",
        "`fourfold plan` says between which times a step lies with a probability of 90 %: factors on the predicted",
        "seconds, the 5th and 95th percentile of measured over predicted on what was left out above, with equal weight",
        "for every source, and FP8 and incomplete rows among them. Where the machine is new, the program is too.",
        "Coverage is the share of a source's rows inside the interval that all other sources give:",
        "",
        *table(("extrapolation", "5 % to 95 %", "coverage, mean of sources", "of rows", "least"), found),
        "",
        "What two layouts have in common, such as the program, does not change their order. Of the rows of a sweep,",
        "with their source left out, those that are predicted up to "
        f"{NEAR - 1:.0%} slower than the predicted best are so by a factor",
        f"that is right within {order_factor(dense(left_out['source'])):.2f} in 90 % of cases (sources of at least "
        f"{MIN_COMPARED} such rows, which weigh the same). Layouts",
        "that are predicted closer to the best can be told apart from it only by measurement, and `fourfold plan`",
        "says so.",
        "",
    ]  # fmt: skip


def within_section(rows: list[Row]) -> list[str]:
    """Hold out rows of sources of which a tenth is fitted."""
    scores = []
    for seed in SEEDS:
        fitted, held_out = split(rows, seed)
        scores.append(summary(predict_rows(held_out, fit_rows(fitted))))
    found = []
    names = ["all", *sorted({s for score in scores for s in score["by_source"]}), "others"]
    for name in names:
        apart = [s if name == "all" else s[name] if name in s else s["by_source"].get(name) for s in scores]
        each = [e for e in apart if e and e["mean_abs_error"] is not None]
        means = [e["mean_abs_error"] for e in each]
        label = f"{name} ({round(np.mean([e['count'] for e in each]))})"
        medians = np.mean([e["median_abs_error"] for e in each])
        found.append((label, percent(medians), percent(np.mean(means)), percent(max(means))))
    regret = [score["sweeps"]["regret_mean"] for score in scores]
    return [
        "## Other rows of a known source",
        "",
        "Where some runs of a program on a machine are known, the others are predicted better. The constants are",
        "fitted to a random tenth of the rows (one draw a row of `numpy.random.default_rng(seed)` below 0.1) and the",
        f"rest are held out, for {len(SEEDS)} seeds. S3 (Korthikanti et al. 2022) is never fitted here.",
        "",
        *table(("held out", "median", "mean", "worst seed's mean"), found),
        "",
        f"Mean regret within sweeps: {percent(float(np.mean(regret)))}.",
        "",
    ]


def split(rows: list[Row], seed: int) -> tuple[list[Row], list[Row]]:
    """Split off a random tenth to fit; the rest are held out."""
    chosen = np.random.default_rng(seed).random(len(rows)) < SHARE
    may = [row.seconds is not None and row.source not in NEVER_FITTED for row in rows]
    fit = [m and bool(c) for m, c in zip(may, chosen, strict=True)]
    return [r for r, f in zip(rows, fit, strict=True) if f], [r for r, f in zip(rows, fit, strict=True) if not f]


def published_section(calibration: Calibration) -> list[str]:
    header = ("model", "machine", "GPUs", "published", "as run", "error", "layout", "best")
    return [
        "## Published figures",
        "",
        "PFLOP/s of the whole job, counting recompute and the full attention square, with the constants that fourfold",
        "ships. *As run*: the published layout, or, where it is not published, the fastest one that the program",
        "supports (AxoNN: x, y, z, dp, full recompute; on Frontier and Perlmutter the fastest of the 20 that its own",
        "model of communication puts first, as its authors chose, `calibration/axonn_layouts.py`). *Best*: the",
        "fastest of all layouts, in the same convention. None of these rows was fitted.",
        "",
        *table(header, published_rows(calibration)),
        "",
        "The fitted rows include no run on an MI250X and none on a Slingshot network. What is known of these machines",
        "besides data sheets: a step of RCCL's ring over whole nodes takes 8 µs and its chunk at 78 GB/s a node, but",
        "at least 30 µs; an all-gather reaches 71 GB/s a node, a reduce-scatter 78, an all-reduce of 1 to 4 GB 57",
        "(axonn-ai/sc2025-pccl-reproducer, up to 4,096 GCDs); NCCL's all-gather on Perlmutter 59 to 63 GB/s, and 9 µs",
        "for each GPU (the same). In training, collectives of these machines have been slower: AxoNN's, in its",
        "published logs of a 20B model on 512 GCDs without `NCCL_NET_GDR_LEVEL`, reach 26 to 29 GB/s a node, and",
        "DeepSpeed's on LUMI, also without, 39 (hpcgroup/perf-variability-ipdps26, spyysalo/lumi-llm-scaling). The",
        "planner assumes that it is set, as in the scripts of AxoNN's large runs. All kernels but communication take",
        "6.6 s a step in that log on Frontier and are predicted at 7.3 s (on Perlmutter 3.5 s, and 1.6 published,",
        "more than an A100's peak: half a step's); LUMI's steps of a 175B model on 128 to 1,024 GCDs are predicted 8",
        "to 10 % too fast, and 16 % on 2,048. So the rate of products explains no error of 28 %. Nobody has published",
        "collectives of 32,768 GCDs, nor how long their ranks wait for each other. Your own runs on these machines",
        "correct the constants (`fourfold calibrate --from`).",
        "",
        "AxoNN's weak scaling on Frontier, efficiency against 512 GCDs:",
        "",
        *table(("GPUs", "model", "published", "predicted", "layout"), weak_rows(calibration)),
        "",
    ]


def constants_section(calibration: Calibration) -> list[str]:
    levels = [key for key in calibration.offsets if key.startswith(("all", "machine"))]
    return [
        "## Constants",
        "",
        "The constants that fourfold ships are fitted to all rows that are not doubtful: the prior, and the factors on",
        "it for all machines, and for each machine with rows. How they are fitted is in `calibration/fit.py`.",
        "",
        *table(
            ("constant", "prior", "spread", *levels, "source of the prior"),
            [
                (name, f"{PRIORS[name].median:g}", f"{PRIORS[name].spread:g}",
                 *(f"{np.exp(calibration.offsets[level][i]):.2f}" for level in levels), PRIORS[name].source)
                for i, name in enumerate(NAMES)
            ],
        ),
        "",
    ]  # fmt: skip


def rows_section(skipped: dict[str, int]) -> list[str]:
    """Say where the rows are from, which are not predicted, and which are doubtful."""
    measured = read_table(measured_table())
    counts = Counter(row.source for row in measured)
    bibliography = tomllib.loads(measured_table().with_name("sources.toml").read_text(encoding="utf-8"))
    doubts: dict[tuple[str, str], list[str]] = {}
    for row in measured:
        if row.doubt:
            doubts.setdefault((row.source, row.doubt), []).append(row.row_id)
    return [
        "## The rows",
        "",
        f"`fourfold/planning/calibration/measured.csv` has {len(measured):,} rows, and `sources.toml` beside it the "
        "bibliography.",
        "[planner.md](planner.md) lists the columns. The rows were collected from repositories and papers, and",
        "converted once from a table whose columns were free text: every text was mapped to values by hand. What a",
        "source does not print is named in the column `derived`; a step time that is not printed follows from",
        "tokens/s or FLOP/s (`time_from`). Earlier, words were looked for in that text, which misread rows: 28 of S5",
        "that can be predicted were taken for FSDP (they say `FSDP=0`), 9 of S5 with FSDP did not have the fused",
        "operations of NeMo, and one of S9 that recomputes every second layer was taken for selective recompute.",
        "Rows of S11 and S12 name Jean Zay instead of a DGX A100 with a slower network. Two sources stay out, tables",
        "of the NeMo Framework Launcher (29 rows, of which 18 in FP8 could be predicted): the licence found in that",
        "repository, an evaluation agreement, counts benchmark results as confidential.",
        "",
        f"Not predicted: {', '.join(f'{count} ({reason})' for reason, count in skipped.items())}.",
        "",
        *table(
            ("source", "rows", "title", "where", "licence", "read"),
            [(name, f"{counts[name]}", entry["title"], entry["where"], entry["licence"], entry["read"])
             for name, entry in bibliography.items()],
        ),
        "",
        "Doubtful rows, which are never fitted and are scored apart:",
        "",
        *table(("source", "rows", "why"), [(s, ", ".join(ids), why) for (s, why), ids in doubts.items()]),
        "",
        "A row says which program ran. Each program's flags (`planning/calibration/programs.py`) were set from what is",
        "known of it, and were not read again in its source code for this page; where to check them:",
        "",
        *table(("program", "where to check its flags"), program_rows()),
        "",
    ]  # fmt: skip


def every_row_section(calibration: Calibration, rows: list[Row], left_out: list[Scored]) -> list[str]:
    """Rows of dense models; those of mixtures are in ``mixtures_section``."""
    rows = [row for row in rows if not row.mixture]
    apart = {(s.row.source, s.row.row_id): s for s in left_out}
    scored, alone = predict_rows(rows, calibration), predict_rows(rows, Calibration())
    return [
        "## Every row",
        "",
        "Seconds and GB, measured and predicted with constants fitted to all other sources; then the errors with the",
        "shipped constants, and without any.",
        "",
        *table(
            ("source", "row", "s", "predicted", "error", "shipped", "machine files only", "GB", "predicted"),
            [every_row(apart[s.row.source, s.row.row_id], s, a) for s, a in zip(scored, alone, strict=True)],
        ),
        "",
        "Regenerate this page, and the shipped constants, with:",
        "",
        "```sh",
        "# not run by the tests: it takes minutes and writes into the repository",
        "python docs/planner_validation.py",
        "```",
        "",
    ]


def every_row(apart: Scored, shipped: Scored, alone: Scored) -> tuple[str, ...]:
    row = apart.row
    errors = ("" if s.error is None else f"{s.error:+.1%}" for s in (apart, shipped, alone))
    return (
        row.source, row.row_id, number(row.seconds), number(apart.seconds), *errors,
        "OOM" if row.out_of_memory else number(row.memory_gb), number(apart.memory_gb),
    )  # fmt: skip


def error_rows(scored: list[Scored], by: str) -> list[tuple[str, ...]]:
    """Errors of all rows, of each source or machine, of the doubtful ones and of the others."""
    result = summary(scored)
    groups = {"all": dense(scored)}
    for s in dense(scored):
        groups.setdefault(KEYS[by](s.row), []).append(s)
    found = {name: errors_of(group) for name, group in groups.items()}
    found |= {"doubtful": result["doubtful"], "others": result["others"]}
    return [
        (f"{name} ({e['count']})", percent(e["median_abs_error"]), percent(e["mean_abs_error"]), f"{e['bias']:+.1%}")
        for name, e in found.items()
    ]


def memory_rows(rows: list[Row]) -> list[tuple[str, ...]]:
    """Predict the memory of each source with the allocator's share that fits all others."""
    found, everything = [], []
    for source in dict.fromkeys(row.source for row in rows if row.memory_gb is not None):
        own = [row for row in rows if row.source == source and row.memory_gb is not None]
        share = allocator_share([row for row in rows if row.source != source])
        runtime, allocated, measured = memory_parts(own)
        errors = (runtime + allocated * (1 + share)) / measured - 1
        everything += errors.tolist()
        found.append((source, f"{len(own)}", f"{share:.3f}", percent(np.abs(errors).mean()), f"{errors.mean():+.1%}"))
    return [
        ("all", f"{len(everything)}", "", percent(np.abs(everything).mean()), f"{np.mean(everything):+.1%}"),
        *found,
    ]


def memory_parts(rows: list[Row]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Bytes of the runtime, allocated by the step, and measured, of rows with memory."""
    work, machine = stack([row.work for row in rows]), stack_machines([row.machine for row in rows])
    runtime = np.where(work.program.count_runtime, runtime_bytes(work, machine), 0)
    measured = np.array([row.memory_gb * 1e9 for row in rows if row.memory_gb is not None])
    return runtime, (peak_memory(work, machine) - runtime) / (1 + CACHED), measured


def allocator_share(rows: list[Row]) -> float:
    """Estimate what the allocator holds unused as a share of the allocated bytes, with a prior."""
    runtime, allocated, measured = memory_parts([row for row in rows if row.memory_gb is not None])
    shares = np.clip((measured - runtime) / allocated - 1, -0.1, 0.4)
    return float(
        (UNUSABLE / CACHED_SPREAD**2 + shares.sum() / NOISE_OF_MEMORY**2)
        / (CACHED_SPREAD**-2 + len(shares) / NOISE_OF_MEMORY**2)
    )


def program_rows() -> list[tuple[str, str]]:
    from fourfold.planning.calibration.programs import PROGRAMS

    return [(name, traits.source) for name, traits in PROGRAMS.items()]


def published_rows(calibration: Calibration) -> list[tuple[str, ...]]:
    return [
        (f.model, f.machine, f"{f.gpus:,}", f"{f.published:,.1f}", f"{f.as_run_pflops:,.1f}",
         f"{f.as_run_pflops / f.published - 1:+.0%}", f.as_run.describe(), f"{f.best_pflops:,.1f}: {f.best.describe()}")
        for f in figures(calibration)
    ]  # fmt: skip


def weak_rows(calibration: Calibration) -> list[tuple[str, ...]]:
    return [
        (f"{r['gpus']:,}", r["model"], "" if r["published"] is None else f"{r['published']:.1%}",
         f"{r['efficiency']:.1%}", r["layout"])
        for r in weak_scaling(calibration)
    ]  # fmt: skip


def dense(scored: list[Scored]) -> list[Scored]:
    return [s for s in scored if s.row.dense_half and s.error is not None]


def table(header: tuple[str, ...], rows: Any) -> list[str]:
    return [f"| {' | '.join(header)} |", f"|{'---|' * len(header)}", *(f"| {' | '.join(row)} |" for row in rows)]


def percent(value: Any) -> str:
    return f"{value:.1%}"


def number(value: Any) -> str:
    return "" if value is None else f"{value:.4g}"


if __name__ == "__main__":
    main()
