"""The section on rows whose source or machine was left out of the fit: errors, ranking, memory, and intervals."""

from __future__ import annotations

import numpy as np

from fourfold.planning.calibration.fit import Calibration
from fourfold.planning.calibration.rows import Row
from fourfold.planning.calibration.score import KEYS, Scored, errors_of, predict_left_out, predict_rows, summary
from fourfold.planning.cost.memory import CACHED, UNUSABLE
from validation_page.cells import number, percent, table
from validation_page.error_intervals import KINDS, MIN_COMPARED, NEAR, coverage, interval_of, order_factor
from validation_page.memory_rows import allocator_share, memory_rows, misfits


def all_left_out(rows: list[Row]) -> dict[str, list[Scored]]:
    """Predictions of rows with a new source, a new machine, or both."""
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


def intervals(left_out: dict[str, list[Scored]]) -> dict[str, tuple[float, float]]:
    return {kind: interval_of(scored) for kind, scored in by_kind(left_out).items()}


def by_kind(left_out: dict[str, list[Scored]]) -> dict[str, list[Scored]]:
    """Return the predictions of each kind of extrapolation, for all rows that are not doubtful."""
    timed = ([s for s in left_out[by] if s.error is not None and not s.row.doubt and not s.row.mixture]
             for by in ("source", "both"))  # fmt: skip
    return dict(zip(KINDS, timed, strict=True))
