"""Write the section on new rows from known sources: the constants are fitted to a tenth of all rows, and predict the
remaining rows."""

from __future__ import annotations

import numpy as np

from fourfold.planning.calibration.rows import Row
from fourfold.planning.calibration.score import fit_rows, predict_rows, summary
from validation_page.cells import percent, table

SEEDS = range(8)
SHARE = 0.1
NEVER_FITTED = ("S3",)
"""Sources whose rows are always held out. S3 is Korthikanti et al., with eight rows."""


def within_section(rows: list[Row]) -> list[str]:
    """Return a section with the errors of predictions for nine tenths of the rows, if the constants are fitted to one
    tenth."""
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
        "If some runs of a program on a machine are in the fit, the planner predicts further runs better. To measure",
        "how much better, we fit the constants to a random tenth of all rows, and predict the remaining nine tenths.",
        f"*Median* and *mean* are averages over {len(SEEDS)} seeds. The fits never include S3 (Korthikanti et al.",
        "2022):",
        "",
        *table(("held out", "median", "mean", "worst seed's mean"), found),
        "",
        f"Mean regret within sweeps: {percent(float(np.mean(regret)))}.",
        "",
    ]


def split(rows: list[Row], seed: int) -> tuple[list[Row], list[Row]]:
    """Return a random tenth of the rows, for the fit, and all other rows, which are held out."""
    chosen = np.random.default_rng(seed).random(len(rows)) < SHARE
    may = [row.seconds is not None and row.source not in NEVER_FITTED for row in rows]
    fit = [m and bool(c) for m, c in zip(may, chosen, strict=True)]
    return [r for r, f in zip(rows, fit, strict=True) if f], [r for r, f in zip(rows, fit, strict=True) if not f]
