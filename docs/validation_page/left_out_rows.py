"""The section on rows whose source or machine was left out of the fit: errors, ranking, memory, and intervals."""

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
    predict_left_out,
    predict_rows,
    summary,
)
from fourfold.planning.cost.memory import CACHED, UNUSABLE
from validation_page.cells import number, percent, table
from validation_page.error_intervals import KINDS, MIN_COMPARED, NEAR, coverage, interval_of, order_factor
from validation_page.memory_rows import allocator_share, memory_rows, misfits


def all_left_out(rows: list[Row]) -> dict[str, list[Scored]]:
    """Predict rows with a new source, a new machine, or both."""
    return {**{by: predict_left_out(rows, by) for by in KEYS}, "both": predict_left_out(rows, "machine", False)}


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
        "measured rows, but not to your cluster or program. So we predict each source with constants fitted to the",
        "rows of all other sources. In the second table, we predict each machine with constants fitted to the rows of",
        "all other machines. Median and mean are of the absolute errors, and the bias is the mean of the signed",
        "errors:",
        "",
        *table(("source left out", "median", "mean", "bias"), error_rows(left_out["source"], "source")),
        "",
        *table(("machine left out", "median", "mean", "bias"), error_rows(left_out["machine"], "machine")),
        "",
        "Without fitted constants (machine files and priors only), the mean error is "
        f"{percent(errors_of(dense(alone))['mean_abs_error'])}, and the median error is "
        f"{percent(errors_of(dense(alone))['median_abs_error'])}.",
        "We also used these errors to choose the values of two settings, each from a few candidates: the noise",
        "between sources",
        "(`NOISE_BETWEEN` in `calibration/fit.py`), and the weight of a source's rows.",
        "",
        *table(
            ("ranking", "source left out", "machine left out"),
            [
                (f"sweeps: {key.replace('_', ' ')}", number(value), number(by_machine["sweeps"][key]))
                for key, value in by_source["sweeps"].items()
            ],
        ),
        "",
        f"A *sweep* is a set of at least {MIN_SWEEP} rows that differ only in layout. Its *regret* is the fraction by",
        "which the predicted best is slower than the measured best. *Spearman* is the rank correlation of predicted",
        f"and measured times, for the sweeps with at least {MIN_RANKED} rows (*ranked* is their number).",
        "",
        "For memory, only one constant is fitted, the *allocator's share*: the unused memory that the allocator holds,",
        f"as a fraction of a step's allocations. It is set to {CACHED} (`CACHED` in `planning/cost/memory.py`). A fit",
        f"to all rows gives {allocator_share(rows):.3f}, and the prior is {UNUSABLE}.",
        "In this table, each source is predicted with a share fitted to the rows of all other sources:",
        "",
        *table(("source left out", "rows", "allocator's share", "mean", "bias"), memory_rows(rows)),
        "",
        f"{memory['fitting_rows']} rows ran and name their recompute mode, and {percent(memory['fit_recall'])} of them "
        "are predicted to fit.",
        f"{memory['out_of_memory_rows']} rows ran out of memory, and {percent(memory['oom_recall'])} of them are "
        "predicted not to fit. One is missed (S11, 206B, on GPUs of 80 GB).",
        "With one layer fewer per stage, the same layout took 59 GB, and a layer with its activations takes 8 GB. So",
        "this layout should take 67 of the 80 GB, and something other than the memory of a step must have run out.",
        "",
        *misfits(rows),
    ]


def error_rows(scored: list[Scored], by: str) -> list[tuple[str, ...]]:
    """Return the errors of all rows, of each source or machine, of doubtful rows, and of rows without a group."""
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
        "`fourfold plan` prints an interval that contains a step's time with a probability of 90 %. Each of its two",
        "bounds is the predicted seconds times a factor. To find the factors, we divide the measured seconds of the",
        "left-out rows above by their predicted seconds, also for FP8 and incomplete rows. The factors are the 5th and",
        "the 95th percentile of these ratios, with equal weight for every source. For a *new machine*, all rows of the",
        "row's machine are left out of the fit. The factors that the fit finds for the row's source on other machines",
        "are not used either. *Coverage* is the fraction of rows that fall into the interval computed from all other",
        "sources:",
        "",
        *table(
            ("extrapolation", "factors", "coverage, mean of sources", "coverage of all rows", "lowest coverage"), found
        ),
        "",
        "An error that two layouts share does not change their order. In each sweep, with its",
        f"source left out, we compare the predicted best with rows that are predicted up to {NEAR - 1:.0%} slower. For",
        "90 % of these rows, the predicted ratio of the row's time to the best's time is within a factor of "
        f"{order_factor(dense(left_out['source'])):.2f}",
        f"of the measured ratio. Only sources with at least {MIN_COMPARED} of these rows count, with equal weight.",
        "If two predictions are closer than this factor, `fourfold plan` says that the layouts cannot be told apart.",
        "",
    ]  # fmt: skip


def intervals(left_out: dict[str, list[Scored]]) -> dict[str, tuple[float, float]]:
    return {kind: interval_of(scored) for kind, scored in by_kind(left_out).items()}


def by_kind(left_out: dict[str, list[Scored]]) -> dict[str, list[Scored]]:
    """Return the predictions of each kind of extrapolation, for all rows that are not doubtful."""
    timed = ([s for s in left_out[by] if s.error is not None and not s.row.doubt and not s.row.mixture]
             for by in ("source", "both"))  # fmt: skip
    return dict(zip(KINDS, timed, strict=True))
