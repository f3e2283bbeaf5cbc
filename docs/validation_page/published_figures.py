"""Published figures of large runs, and the constants that fourfold ships."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fourfold.planning.calibration.fit import Calibration
from fourfold.planning.calibration.published import figures, weak_scaling
from fourfold.planning.calibration.rows import read_rows
from fourfold.planning.calibration.score import predict_rows
from fourfold.planning.machines.constants import NAMES, PRIORS
from validation_page.cells import table


def published_section(calibration: Calibration) -> list[str]:
    header = ("model", "machine", "GPUs", "published", "as run", "error", "layout", "best")
    return [
        "## Published figures",
        "",
        "Megatron PFLOP/s of the whole job (full recompute and the whole attention square count), with the constants",
        "that fourfold ships. *As run*: the published layout, or, if it is not published, the fastest one that the",
        "program supports (AxoNN: x, y, z, dp, full recompute; on Frontier and Perlmutter the fastest of the 20 that",
        "its own model of communication puts first, as its authors chose, `calibration/axonn_layouts.py`). *Best*: the",
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
        "6.6 s a step in that log on Frontier and are predicted at 7.1 s on a mean GCD (on Perlmutter 3.4 s, and 1.6",
        "published, more than an A100's peak: half a step's). Steps of a 175B model on LUMI are predicted too fast:",
        f"{steps_on_lumi(calibration)}. So the rate of products",
        "does not explain the error of the 320B model. The times of a job's GCDs for the same product have a standard",
        "deviation of 1.6 %, and products on Perlmutter, repeats among them, of 1.1 % (the same logs). All devices",
        "wait for the slowest, which the planner counts (`spread` in the machine files). Nobody has published",
        "collectives of 32,768 GCDs, nor how long their ranks wait for each other's network. Your own runs on these",
        "machines correct the constants (`fourfold machine calibrate --from`).",
        "",
        "AxoNN's code differs from what is predicted here in three ways (axonn-ai/axonn, `intra_layer` and",
        "`communication.py`). The larger sums, of q, k, v and up, are over its inner ranks, which are neighbors;",
        "attention is computed by each of these anew, as heads are split over the others; and the backward of a",
        "product gathers its weight a third time and waits for it, unless the weights are cached (`run_axonn_amd.sh`",
        "of axonn-ai/Megatron-AxoNN caches all 24 layers of its 5B model). Figures in this paragraph are without the",
        "spread of devices, which takes 2 to 3 % of a step. With the first two alone the 320B model on Frontier would",
        "be predicted 41 % too fast, and efficiency at 32,768 GCDs at 65 %. With all three, and nothing cached, the",
        "errors would be +18 %, -6 % (Perlmutter) and -14 % (Alps), but efficiency at 8,192 and 16,384 GCDs would be",
        "81 and 63 %. Whether the weights were cached in these runs is not published: the predictions above have none",
        "of the three.",
        "",
        "AxoNN's weak scaling on Frontier, efficiency against 512 GCDs:",
        "",
        *table(("GPUs", "model", "published", "predicted", "layout"), weak_rows(calibration)),
        "",
    ]


def published_rows(calibration: Calibration) -> list[tuple[str, ...]]:
    return [
        (f.model, f.machine, f"{f.gpus:,}", f"{f.published:,.1f}", f"{f.as_run_pflops:,.1f}",
         f"{f.as_run_pflops / f.published - 1:+.0%}", f.as_run.describe(), f"{f.best_pflops:,.1f}: {f.best.describe()}")
        for f in figures(calibration)
    ]  # fmt: skip


def steps_on_lumi(calibration: Calibration) -> str:
    """Return by how much, for each number of GCDs (docs/slingshot_runs.csv)."""
    rows, _ = read_rows([Path(__file__).parents[1] / "slingshot_runs.csv"])
    errors = [
        (int(found.row.work.layout.gpus), -found.error)
        for found in predict_rows([row for row in rows if row.source == "LUMI"], calibration)
        if found.error is not None
    ]
    *shares, last_share = (f"{100 * error:.0f}" for _, error in errors)
    *sizes, last_size = (f"{gpus:,}" for gpus, _ in errors)
    return f"by {', '.join(shares)} and {last_share} % on {', '.join(sizes)} and {last_size} GCDs"


def weak_rows(calibration: Calibration) -> list[tuple[str, ...]]:
    return [
        (f"{r['gpus']:,}", r["model"], "" if r["published"] is None else f"{r['published']:.1%}",
         f"{r['efficiency']:.1%}", r["layout"])
        for r in weak_scaling(calibration)
    ]  # fmt: skip


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
