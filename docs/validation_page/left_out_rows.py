"""Write the sections on errors, ranking, memory, and intervals of rows whose source or machine is left out of the
fit."""

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
    """Predict each row with constants that are not fitted to its source, to its machine, or to both."""
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
        "The planner's [constants](#constants) describe how close a program gets to a machine's rates. The constants",
        "are fitted to the rows, not to your cluster or your program. To estimate the error for your program, we",
        "predict the rows of each source with constants that are fitted to all other sources. In the second table, we",
        "predict the rows of each machine with constants that are fitted to all other machines. *Median* and *mean*",
        "are the median and the mean of the absolute errors. *Bias* is the mean of the signed errors:",
        "",
        *table(("source left out", "median", "mean", "bias"), error_rows(left_out["source"], "source")),
        "",
        *table(("machine left out", "median", "mean", "bias"), error_rows(left_out["machine"], "machine")),
        "",
        "Without fitted constants (machine files and priors only), the mean error is "
        f"{percent(errors_of(dense(alone))['mean_abs_error'])}, and the median error is "
        f"{percent(errors_of(dense(alone))['median_abs_error'])}.",
        "All errors on this page are slightly too small, because we used them to choose two settings of the fit: the",
        "noise between sources (`NOISE_BETWEEN` in `calibration/fit.py`), and the weight of a source's rows.",
        "",
        *table(
            ("ranking", "source left out", "machine left out"),
            [
                (f"sweeps: {key.replace('_', ' ')}", number(value), number(by_machine["sweeps"][key]))
                for key, value in by_source["sweeps"].items()
            ],
        ),
        "",
        "The table above shows how well the planner finds the fastest layout of a *sweep*: a set of at least",
        f"{MIN_SWEEP} rows that differ only in layout. *Regret* is the fraction by which the layout with the shortest",
        "predicted time is slower than the fastest layout. *Spearman* is the rank correlation of predicted and",
        f"measured times. It covers the sweeps with at least {MIN_RANKED} rows (*ranked* is their number).",
        "",
        "PyTorch's allocator holds more memory than a step uses. The planner assumes that this unused memory is a",
        "fixed fraction of the step's allocations, the *allocator's share*. No other constant of the memory prediction",
        f"is fitted. The share's prior is {UNUSABLE}, and a fit to all rows gives {allocator_share(rows):.3f}. The",
        f"planner uses {CACHED} (`CACHED` in `planning/cost/out_of_memory.py`).",
        "In the next table, we predict each source with a share that is fitted to all other sources:",
        "",
        *table(("source left out", "rows", "allocator's share", "mean", "bias"), memory_rows(rows)),
        "",
        "To compute the probability of running out of memory, the planner assumes that its memory prediction has a",
        f"standard deviation of {SPREAD:.0%}. The resulting 90 % interval contains the measured memory of",
        f"{percent(memory_coverage(rows))} of the rows.",
        "",
        f"Of the {memory['fitting_rows']} rows that fit into memory and name their recompute mode, the planner",
        f"predicts that {percent(memory['fit_recall'])} fit.",
        f"Of the {memory['out_of_memory_rows']} rows that ran out of memory, it predicts that "
        f"{percent(memory['oom_recall'])} do not fit.",
        "The planner is wrong for two of these rows. The first is the 206B model of S11, on GPUs of 80 GB. The same",
        "layout with one layer fewer per stage took 59 GB, and a layer with its activations takes 8 GB. So the layout",
        "should fit with 67 GB, and we do not know what else needed memory. The second row is GPT-2 XL with",
        "micro-batches of 16 (G1). The planner predicts that this run needs as much memory as the GPU has.",
        "",
        *misfits(rows),
    ]


def error_rows(scored: list[Scored], by: str) -> list[tuple[str, ...]]:
    """Return the lines of a table of errors: for all dense measurements (``dense``), for each source or machine, for
    doubtful measurements, and for the measurements of dense models that belong to none of these groups."""
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
        "`fourfold plan` prints an interval that contains a step's time with a probability of 90 %. To get its ends,",
        "the planner multiplies the predicted seconds by two factors: the 5th and the 95th percentile of measured /",
        "predicted seconds over the rows (including FP8 rows and rows with incomplete configurations). For a *known",
        "machine*, each row is predicted without its source. For a *new machine*, each row is predicted without its",
        "source and without any row from its machine. In the percentiles, a source with n rows counts as √n rows. We",
        "also add a hypothetical source with 4 rows, to represent programs that nobody has published. Its errors have",
        "a standard deviation of 35 %. With this standard deviation and 4 rows, the coverage is close to 90 %.",
        "",
        "Each kind of step has its own factors. In a *small batch*, the device waits for the host for more than 5 % of",
        "the step. A *long context* has at least 32,768 tokens per sequence. A *mixture* is any MoE model. *Dense* is",
        "every other step. Some runs are far outside the rows: their GPU count, hidden size, sequence length, or",
        "tokens per micro-batch is more than twice the rows' largest value, or less than half the smallest. For these",
        "runs, the planner uses only the hypothetical source.",
        "",
        "To test the intervals, we compute the factors without one source. The *coverage* is the share of this",
        "source's rows that are inside their intervals:",
        "",
        *table(
            ("extrapolation", "factors", "coverage, mean of sources", "coverage of all rows", "lowest coverage"), found,
        ),
        "",
        "The order of layouts is more certain than their times, because an error that two layouts share does not",
        "change their order. To measure how certain the order is, we predict each sweep without its source. Then we",
        "compare the predicted best layout with every layout that is predicted to be at most "
        f"{NEAR - 1:.0%} slower. In 90 % of",
        "these pairs, the predicted ratio of the two times is within a factor of "
        f"{order_factor(dense(left_out['source'])):.2f} of the measured ratio.",
        f"(Each source with at least {MIN_COMPARED} pairs has the same weight.) If two predictions differ by less than",
        "this factor, `fourfold plan` says that it cannot tell which layout is faster.",
        "",
    ]  # fmt: skip


def intervals(left_out: dict[str, list[Scored]]) -> dict[str, dict[str, tuple[float, float]]]:
    return {
        extrapolation: {kind: interval_of(scored) for kind, scored in kinds.items()}
        for extrapolation, kinds in by_kind(left_out).items()
    }


def by_kind(left_out: dict[str, list[Scored]]) -> dict[str, dict[str, list[Scored]]]:
    """Group the predictions by known or new machine, and by the kind of step. Leave doubtful rows out."""
    timed = ([s for s in left_out[by] if s.error is not None and not s.row.doubt] for by in ("source", "both"))
    return {
        extrapolation: {kind: [s for s in scored if s.kind == kind] for kind in KINDS}
        for extrapolation, scored in zip(EXTRAPOLATIONS, timed, strict=True)
    }
