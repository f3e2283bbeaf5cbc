"""Score the planner on measured rows; write docs/planner_validation.md and the constants that fourfold ships:

python docs/planner_validation.py FOLDER_OF_CSV_FILES
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np

from fourfold.planning.calibration.fit import Calibration, to_toml
from fourfold.planning.calibration.published import figures, weak_scaling
from fourfold.planning.calibration.rows import Row, read_rows
from fourfold.planning.calibration.score import errors_of, fit_rows, predict_rows, summary, sweeps_of
from fourfold.planning.cases import stack
from fourfold.planning.cost.memory import CACHED, UNUSABLE, peak_memory, runtime_bytes
from fourfold.planning.machines.constants import NAMES, PRIORS
from fourfold.planning.machines.machine import stack_machines

HERE = Path(__file__).parent
SHIPPED = HERE.parent / "fourfold" / "planning" / "calibration" / "calibrated.toml"
SEEDS = range(8)
SHIPPED_SEED = 0
SHARE = 0.1
NOISE_OF_MEMORY = 0.12
"""Standard deviation of one measured memory row around its prediction."""
CACHED_SPREAD = 0.05
"""Standard deviation of ``CACHED`` around its prior, ``UNUSABLE``."""
NEVER_FITTED = ("S3",)
"""Korthikanti et al.: all eight rows are held out."""


def main() -> None:
    rows, skipped = read_rows(sorted(Path(sys.argv[1]).glob("*.csv")))
    splits = {seed: split(rows, seed) for seed in SEEDS}
    scores = {seed: summary(predict_rows(held_out, fit_rows(fitted))) for seed, (fitted, held_out) in splits.items()}
    fitted, _ = splits[SHIPPED_SEED]
    calibration = fit_rows(fitted)
    SHIPPED.write_text(
        "# Factors on the priors of planning/machines/constants.py, by docs/planner_validation.py.\n"
        + to_toml(calibration),
        encoding="utf-8",
    )
    (HERE / "planner_validation.md").write_text(page(rows, skipped, fitted, scores, calibration), encoding="utf-8")
    means = [score["mean_abs_error"] for score in scores.values()]
    print(f"mean {np.mean(means):.4f} ({min(means):.4f} to {max(means):.4f}) over seeds; {len(fitted)} rows fitted")


def split(rows: list[Row], seed: int) -> tuple[list[Row], list[Row]]:
    """Split off a random tenth to fit; the rest are held out."""
    chosen = np.random.default_rng(seed).random(len(rows)) < SHARE
    may = [row.seconds is not None and row.source not in NEVER_FITTED for row in rows]
    fit = [m and bool(c) for m, c in zip(may, chosen, strict=True)]
    return [r for r, f in zip(rows, fit, strict=True) if f], [r for r, f in zip(rows, fit, strict=True) if not f]


def page(
    rows: list[Row],
    skipped: dict[str, int],
    fitted: list[Row],
    scores: dict[int, dict[str, Any]],
    calibration: Calibration,
) -> str:
    scored, alone = predict_rows(rows, calibration), predict_rows(rows, Calibration())
    in_fit = {(row.source, row.row_id) for row in fitted}
    dense = [s for s in alone if s.row.dense_half and s.error is not None]
    whole = sweeps_of([s for s in scored if s.row.dense_half and s.error is not None])
    lines = [
        "# How well the planner predicts",
        "",
        "<!-- Written by docs/planner_validation.py. -->",
        "",
        f"The planner predicts {len(rows)} published rows (step times or memory of training runs). Skipped: "
        + ", ".join(f"{count} ({reason})" for reason, count in skipped.items())
        + ".",
        "",
        "The constants of `planning/machines/constants.py` are fitted to a random tenth of the rows (one draw a row of",
        "`numpy.random.default_rng(seed)` below 0.1), and the others are held out. S3 (Korthikanti et al. 2022) is",
        f"never fitted. The constants that fourfold ships are those of seed {SHIPPED_SEED}, {len(fitted)} rows.",
        "Headline figures are for dense models in bf16 or fp16 with a complete configuration; FP8 and incomplete rows",
        "are listed as *others*.",
        "",
        "## Held-out error of the step time",
        "",
        *table(("rows", "median", "mean", "worst seed's mean"), held_out_rows(scores)),
        "",
        "Without fitted constants (machine files and priors only): mean "
        f"{percent(errors_of(dense)['mean_abs_error'])}, median {percent(errors_of(dense)['median_abs_error'])} over "
        f"{len(dense)} rows.",
        "",
        "## Ranking within sweeps, and memory",
        "",
        *table(("what", "mean over seeds"), other_scores(scores)),
        "",
        "A sweep is a set of rows that differ only in layout; its regret is how much slower the predicted best is than",
        "the measured best. A sweep with fitted rows removed may have fewer than the eight points that a rank",
        "correlation needs. Over all rows, with the shipped constants, the rank correlation is",
        f"{whole['spearman_median']:.2f} in the median of {whole['ranked']} sweeps ({whole['spearman_min']:.2f} in the "
        f"worst), and the mean regret of {whole['count']} sweeps is {percent(whole['regret_mean'])}.",
        "",
        "`oom recall` is the recall on rows that ran out of memory, `fit recall` on rows that fitted. Of the three",
        "rows that ran out of memory one is missed (S11, 206B): the same layout with one layer per stage less was",
        "measured at 59 GB, and a layer with its activations takes 8 GB. What ran out there was not the memory of a",
        "step.",
        "",
        "Fitting rows are those that ran, whether or not their memory was measured, and that name their recompute.",
        "Rows are read by the source code of their programs: DeepSpeed shards the state of a",
        "bf16 optimizer at any stage and all-reduces fp32 gradients (`deepspeed/runtime/bf16_optimizer.py`),",
        "and its pipeline keeps what it has sent (`runtime/pipe/engine.py`); NVIDIA's recipes have bf16 gradients, a",
        "fused loss and SwiGLU, and Transformer Engine stores the inputs of FP8 matmuls in one byte (NeMo,",
        "`scripts/performance/helpers.py`); llm-foundry has a fused loss (`models/mpt/modeling_mpt.py`).",
        "",
        "## Published figures",
        "",
        "PFLOP/s of the whole job, counting recompute and the full attention square, with the constants that fourfold",
        "ships. *As run*: the published layout, or, where it is not published, the fastest one that the program",
        "supports (AxoNN: x, y, z, dp, full recompute). *Best*: the fastest of all layouts, in the same convention.",
        "None of these rows was fitted.",
        "",
        *table(
            ("model", "machine", "GPUs", "published", "as run", "error", "layout", "best"), published_rows(calibration)
        ),
        "",
        "Why errors exceed 15 %: the fitted rows include no run on an MI250X and none on a Slingshot network, so",
        "Frontier and Perlmutter are predicted from their machine files and the constants that all programs share.",
        "AxoNN's own curve gives 79 TFLOP/s per GCD at 512 GCDs, where communication is small; 0.9 of the",
        "matmul rate that it measured is 112, so most of the difference is the matmul rate in training.",
        "Its layouts are not published: the fastest of thousands is compared, which errs on the fast side. Your own",
        "runs on these machines correct the constants (`fourfold calibrate --from`).",
        "",
        "AxoNN's weak scaling on Frontier, efficiency against 512 GCDs:",
        "",
        *table(("GPUs", "model", "published", "predicted", "layout"), weak_rows(calibration)),
        "",
        "## Constants",
        "",
        "The prior, and the factors on it: for all machines, and for each machine with fitted rows.",
        "",
        *table(
            ("constant", "prior", "spread", *constant_levels(calibration), "source of the prior"),
            constants(calibration),
        ),
        "",
        f"Allocator and workspaces (`CACHED` in `planning/cost/memory.py`): {fitted_overhead(fitted):.3f} from the "
        f"{sum(row.memory_gb is not None for row in fitted)} fitted rows with memory, prior {UNUSABLE}.",
        "",
        "## Every row",
        "",
        "Seconds and GB, measured and predicted with the shipped constants; *fit* marks the rows of the fit.",
        "",
        *table(
            ("source", "row", "s", "predicted", "error", "machine files only", "GB", "predicted", "fit"),
            (
                (
                    s.row.source, s.row.row_id, number(s.row.seconds), number(s.seconds),
                    "" if s.error is None else f"{s.error:+.1%}", "" if a.error is None else f"{a.error:+.1%}",
                    "OOM" if s.row.out_of_memory else number(s.row.memory_gb), number(s.memory_gb),
                    "fit" if (s.row.source, s.row.row_id) in in_fit else "",
                )
                for s, a in zip(scored, alone, strict=True)
            ),
        ),
        "",
        "Regenerate this page with:",
        "",
        "```sh",
        "# not run by the tests: it needs the tables of measured rows",
        "python docs/planner_validation.py FOLDER_OF_CSV_FILES",
        "```",
        "",
    ]  # fmt: skip
    return "\n".join(lines)


def held_out_rows(scores: dict[int, dict[str, Any]]) -> list[tuple[str, ...]]:
    """Average over the seeds: all rows, then each source, then the others."""
    found = []
    names = ["all", *sorted({s for score in scores.values() for s in score["by_source"]}), "others"]
    for name in names:
        apart = [s if name == "all" else s[name] if name in s else s["by_source"].get(name) for s in scores.values()]
        each = [e for e in apart if e and e["mean_abs_error"] is not None]
        means = [e["mean_abs_error"] for e in each]
        medians = [e["median_abs_error"] for e in each]
        label = f"{name} ({round(np.mean([e['count'] for e in each]))})"
        found.append((label, percent(np.mean(medians)), percent(np.mean(means)), percent(max(means))))
    return found


def other_scores(scores: dict[int, dict[str, Any]]) -> list[tuple[str, str]]:
    found = []
    for part in ("sweeps", "memory"):
        for key in next(iter(scores.values()))[part]:
            values = [score[part][key] for score in scores.values() if score[part][key] is not None]
            if values:
                found.append((f"{part}: {key.replace('_', ' ')}", f"{np.mean(values):.3g}"))
    return found


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


def constant_levels(calibration: Calibration) -> list[str]:
    return [key for key in calibration.offsets if not key.startswith("program")]


def constants(calibration: Calibration) -> list[tuple[str, ...]]:
    levels = constant_levels(calibration)
    return [
        (name, f"{prior.median:g}", f"{prior.spread:g}",
         *(f"{np.exp(calibration.offsets[level][i]):.2f}" for level in levels), prior.source)
        for i, (name, prior) in enumerate((name, PRIORS[name]) for name in NAMES)
    ]  # fmt: skip


def fitted_overhead(fitted: list[Row]) -> float:
    """Estimate the allocator's overhead as a share of the allocated bytes, from fitted rows with memory and a prior."""
    rows = [row for row in fitted if row.memory_gb is not None]
    work, machine = stack([row.work for row in rows]), stack_machines([row.machine for row in rows])
    runtime = np.where(work.program.count_runtime, runtime_bytes(work, machine), 0)
    allocated = (peak_memory(work, machine) - runtime) / (1 + CACHED)
    shares = np.clip((np.array([row.memory_gb * 1e9 for row in rows]) - runtime) / allocated - 1, -0.1, 0.4)
    return float(
        (UNUSABLE / CACHED_SPREAD**2 + shares.sum() / NOISE_OF_MEMORY**2)
        / (CACHED_SPREAD**-2 + len(rows) / NOISE_OF_MEMORY**2)
    )


def table(header: tuple[str, ...], rows: Any) -> list[str]:
    return [f"| {' | '.join(header)} |", f"|{'---|' * len(header)}", *(f"| {' | '.join(row)} |" for row in rows)]


def percent(value: float) -> str:
    return f"{value:.1%}"


def number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


if __name__ == "__main__":
    main()
