"""Published figures of large runs, and the constants that fourfold ships."""

from __future__ import annotations

import numpy as np

from fourfold.planning.calibration.fit import Calibration
from fourfold.planning.calibration.published import figures, weak_scaling
from fourfold.planning.machines.constants import NAMES, PRIORS
from validation_page.cells import table


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
