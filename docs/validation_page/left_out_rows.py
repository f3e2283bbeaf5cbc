"""Write the sections on rows whose source or machine was left out of the fit: errors, ranking, memory, and
intervals."""

from __future__ import annotations

import numpy as np

from fourfold.planning.calibration.fit import Calibration
from fourfold.planning.calibration.rows import Row
from fourfold.planning.calibration.score import (
    KEYS,
    MIN_RANKED,
    MIN_SWEEP,
    Scored,
    errors_of,
    left_out_fits,
    predict_left_out,
    predict_rows,
    summary,
)
from fourfold.planning.cost.out_of_memory import CACHED, SPREAD, UNUSABLE
from validation_page.cells import number, percent, table
from validation_page.error_intervals import (
    EXTRAPOLATIONS,
    KINDS,
    MIN_COMPARED,
    NEAR,
    coverage,
    interval_of,
    order_factor,
)
from validation_page.memory_rows import allocator_share, memory_coverage, memory_rows, misfits


def all_left_out(rows: list[Row]) -> dict[str, list[Scored]]:
    """Predict rows with a new source, a new machine, or both."""
    fits = left_out_fits(rows, "machine")
    return {
        "source": predict_left_out(rows, "source"),
        "machine": predict_left_out(rows, "machine", fits=fits),
        "both": predict_left_out(rows, "machine", False, fits),
    }


def dense(scored: list[Scored]) -> list[Scored]:
    return [s for s in scored if s.row.dense_half and s.error is not None]


def left_out_section(rows: list[Row], left_out: dict[str, list[Scored]]) -> list[str]:
    alone = predict_rows(rows, Calibration())
    by_source, by_machine = summary(left_out["source"]), summary(left_out["machine"])
    memory = by_source["memory"]
    return [
        "## A source that nothing was fitted to",
        "",
        "The planner's [constants](#constants) say how close a program gets to a machine's rates. They are fitted to",
        "measured rows, but not to your cluster or your program. So we test the planner as if each source were new to",
        "it: we predict the rows of a source with constants fitted to all other sources. In the second table, we",
        "predict the rows of a machine with constants fitted to all other machines. Median and mean are of the",
        "absolute errors. The bias is the mean of the signed errors:",
        "",
        *table(("source left out", "median", "mean", "bias"), error_rows(left_out["source"], "source")),
        "",
        *table(("machine left out", "median", "mean", "bias"), error_rows(left_out["machine"], "machine")),
        "",
        "Without fitted constants (machine files and priors only), the mean error is "
        f"{percent(errors_of(dense(alone))['mean_abs_error'])}, and the median error is "
        f"{percent(errors_of(dense(alone))['median_abs_error'])}.",
        "These errors are slightly too small, because we used them to choose two settings of the fit, each from a few",
        "candidates: the noise between sources (`NOISE_BETWEEN` in `calibration/fit.py`), and the weight of a source's",
        "rows.",
        "",
        *table(
            ("ranking", "source left out", "machine left out"),
            [
                (f"sweeps: {key.replace('_', ' ')}", number(value), number(by_machine["sweeps"][key]))
                for key, value in by_source["sweeps"].items()
            ],
        ),
        "",
        "This table shows how well the planner finds the fastest layout of a sweep. A *sweep* is a set of at least",
        f"{MIN_SWEEP} rows that differ only in layout. Its *regret* is the fraction by which the layout with the",
        "shortest predicted time is slower than the fastest layout. *Spearman* is the rank correlation of predicted",
        f"and measured times, for the sweeps with at least {MIN_RANKED} rows (*ranked* is their number).",
        "",
        "PyTorch's allocator holds more memory than a step uses. The planner counts this unused memory as a fraction",
        "of the step's allocations, the *allocator's share*. It is the only fitted constant of the memory prediction.",
        f"Its prior is {UNUSABLE}, and a fit to all rows gives {allocator_share(rows):.3f}. The planner uses {CACHED}",
        "(`CACHED` in `planning/cost/out_of_memory.py`).",
        "In this table, each source is predicted with a share fitted to the rows of all other sources:",
        "",
        *table(("source left out", "rows", "allocator's share", "mean", "bias"), memory_rows(rows)),
        "",
        f"For P(OOM), the planner assumes a standard deviation of {SPREAD:.0%}. The 90 % interval of this distribution",
        f"contains the measured memory of {percent(memory_coverage(rows))} of the rows.",
        "",
        f"Of the {memory['fitting_rows']} rows that fit into memory and name their recompute mode, "
        f"{percent(memory['fit_recall'])} are predicted to fit.",
        f"Of the {memory['out_of_memory_rows']} rows that ran out of memory, {percent(memory['oom_recall'])} are "
        "predicted not to fit. The prediction is wrong for S11, 206B, on GPUs of 80 GB. The same layout with one layer",
        "fewer per stage took 59 GB, and a layer with its activations takes 8 GB. So the layout should take 67 GB and",
        "fit. We do not know what else needed memory. The prediction is also wrong for GPT-2 XL with micro-batches of",
        "16 (G1), which the planner predicts to need as much memory as the GPU has.",
        "",
        *misfits(rows),
    ]


def error_rows(scored: list[Scored], by: str) -> list[tuple[str, ...]]:
    """Return rows of a table with the errors of all rows, of each source or machine, of doubtful rows, and of rows
    without a group."""
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


def intervals_section(left_out: dict[str, list[Scored]]) -> list[str]:
    found = []
    for extrapolation, kinds in by_kind(left_out).items():
        covered = {kind: coverage(scored) for kind, scored in kinds.items()}
        for kind, scored in kinds.items():
            low, high = interval_of(scored)
            shares = covered[kind]
            worst = min(shares, key=lambda source: shares[source])
            found.append(
                (
                    f"{extrapolation}, {kind} ({len(scored)})",
                    f"× {low:.2f} to × {high:.2f}",
                    percent(np.mean(list(shares.values()))),
                    percent(np.mean([shares[s.row.source] for s in scored])),
                    f"{worst}: {shares[worst]:.0%}",
                )
            )
    return [
        "## Intervals",
        "",
        "`fourfold plan` prints an interval that contains a step's time with a probability of 90 %. To get it, the",
        "planner multiplies the predicted seconds by two factors. To find them, we divide the measured seconds of each",
        "row by the seconds predicted without its source, also for FP8 and incomplete rows. The factors are the 5th",
        "and the 95th percentile of these ratios. A source with n rows has the weight of √n rows. An imagined source",
        "stands for sources that nobody has published: its ratios have a standard deviation of 35 %, and it weighs as",
        "much as a source with 4 rows. We chose its spread and its weight so that the coverage is close to 90 %. For",
        "a *new machine*, we use predictions that know neither the rows of the row's machine nor the rows of its",
        "source on other machines.",
        "",
        "Each kind of step has its own factors. In a *small batch*, the device waits for the host for more than 5 % of",
        "the step. A *long context* has at least 32,768 tokens per sequence. A *mixture* is any MoE model, and *dense*",
        "are all other steps. If a run is more than twice as large as all measured rows (GPUs, hidden size, sequence",
        "length, or tokens per micro-batch), or less than half as large, the planner uses the interval of the imagined",
        "source alone.",
        "",
        "To test the interval, we compute it from all sources except one. The *coverage* of this source is the",
        "fraction of its rows that fall into the interval:",
        "",
        *table(
            ("extrapolation", "factors", "coverage, mean of sources", "coverage of all rows", "lowest coverage"), found,
        ),
        "",
        "The order of layouts is more certain than their times, because an error that two layouts share does not",
        "change their order. To measure how certain it is, we predict each sweep without its source, and take the",
        "layout with the shortest predicted time as the best. We compare it with each row whose predicted time is up",
        f"to {NEAR - 1:.0%} longer: we divide the row's time by the best layout's time, once as predicted and once as",
        "measured. For 90 % of the rows, these two ratios agree within a factor of "
        f"{order_factor(dense(left_out['source'])):.2f}.",
        f"Only sources with at least {MIN_COMPARED} of these rows count, with equal weight.",
        "If two predictions are closer than this factor, `fourfold plan` says that the layouts cannot be told apart.",
        "",
    ]  # fmt: skip


def intervals(left_out: dict[str, list[Scored]]) -> dict[str, dict[str, tuple[float, float]]]:
    return {
        extrapolation: {kind: interval_of(scored) for kind, scored in kinds.items()}
        for extrapolation, kinds in by_kind(left_out).items()
    }


def by_kind(left_out: dict[str, list[Scored]]) -> dict[str, dict[str, list[Scored]]]:
    """Return the predictions for each interval. Doubtful rows are left out."""
    timed = ([s for s in left_out[by] if s.error is not None and not s.row.doubt] for by in ("source", "both"))
    return {
        extrapolation: {kind: [s for s in scored if s.kind == kind] for kind in KINDS}
        for extrapolation, scored in zip(EXTRAPOLATIONS, timed, strict=True)
    }
