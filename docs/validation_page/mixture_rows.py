"""The section on mixtures of experts. Nothing is fitted to them."""

from __future__ import annotations

import numpy as np

from fourfold.planning.calibration.fit import Calibration
from fourfold.planning.calibration.machine_constants import shipped
from fourfold.planning.calibration.rows import Row
from fourfold.planning.calibration.score import Scored, errors_of, fit_rows, predict_rows
from validation_page.cells import number, percent, table

MIXTURES = """\
No constant is fitted to a mixture: these rows are predicted with what dense runs say of the machine and the program,
and with operations of experts that are counted. Every source is predicted with constants fitted to the *dense* rows
of all others, and beside it with the constants that fourfold ships, which know dense rows of S5 and S8. The rows are
not blind, though: which operations count was decided with them in view, so the error on an unseen program will be
larger.

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


def mixtures_left_out(rows: list[Row]) -> list[Scored]:
    """Predictions of mixtures, with constants fitted to the dense rows of all other sources."""
    left_out: list[Scored] = []
    for source in dict.fromkeys(row.source for row in rows if row.mixture):
        fitted = fit_rows([row for row in rows if row.source != source], known=False)
        left_out += predict_rows([row for row in rows if row.source == source and row.mixture], fitted)
    return left_out


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
