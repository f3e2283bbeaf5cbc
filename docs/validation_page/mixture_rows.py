"""Write the section on mixtures of experts. The planner's constants are not fitted to rows of mixtures."""

from __future__ import annotations

import numpy as np

from fourfold.planning.calibration.fit import Calibration
from fourfold.planning.calibration.machine_constants import shipped
from fourfold.planning.calibration.rows import Row
from fourfold.planning.calibration.score import Scored, errors_of, fit_rows, predict_rows
from validation_page.cells import number, percent, table

MIXTURES = """\
No constant is fitted to a mixture of experts. The planner uses the constants of dense models, and adds the operations
of the experts. The tables show three errors of each row:

- *error*: with constants fitted to the dense rows of all other sources.
- *shipped*: with the constants that fourfold comes with. They are also fitted to the dense rows of the sources.
- *machine files only*: without fitted constants.

We knew these rows when we decided which operations the planner counts. So expect larger errors for a program without
published rows.

The sizes of the models are from their published configurations. The tables of S5 and S8 do not say how tokens are
exchanged between experts, or what runs as a CUDA graph. We take this from the recipes with the same container version
(S5: `scripts/performance/configs` of Megatron-Bridge, S8: the run files of the recipes). In S5, every expert gets
equally many tokens. Grok-1 in S8 drops tokens above an expert's capacity.

The planner counts these operations:

- Tokens move through memory. They are gathered, exchanged, sorted, padded, rounded for 8-bit matmuls, and moved back.
  In containers from 26.06 on, the exchange delivers tokens sorted by expert, and the matmul kernels also compute the
  activation and round it to 8 bits (`fused_experts`).
- In earlier containers, the host launches the matmuls of each expert separately. Before this, it must wait for the
  number of tokens per expert, so no other work hides the launches. With an expert capacity, the host does not wait.
- DeepEP and HybridEP send a token once to each GPU that needs it, and over the network once to each node.

With the shipped constants, two groups of rows have large errors:

- For GPT-OSS, the predicted time is up to 35 % too short. We do not know why. GPT-OSS's rows on B200 with ep 8
  recompute the experts' activation. No column says this, so the planner predicts that they do not fit.
- For the oldest containers on H100 and B300, the predicted time is up to 40 % too short. Newer containers run the same
  models almost twice as fast.

All rows of the tables are runs that did not run out of memory. *Fits* is the share of rows that the planner predicts to
fit.
""".splitlines()


def mixtures_left_out(rows: list[Row]) -> list[Scored]:
    """Predict the rows of mixture-of-experts models, with constants that are fitted to the dense rows of all other
    sources."""
    left_out: list[Scored] = []
    for source in dict.fromkeys(row.source for row in rows if row.mixture):
        fitted = fit_rows([row for row in rows if row.source != source], known=False)
        left_out += predict_rows([row for row in rows if row.source == source and row.mixture], fitted)
    return left_out


def mixtures_section(rows: list[Row], left_out: list[Scored]) -> list[str]:
    """Return the section: a table of errors by source and by model and machine, and a table with the error of every
    row."""
    mixtures = [row for row in rows if row.mixture and row.seconds is not None]
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
