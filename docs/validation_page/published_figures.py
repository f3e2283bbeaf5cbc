"""Published figures of large runs, and the constants that fourfold ships."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fourfold.planning.calibration.fit import Calibration
from fourfold.planning.calibration.rows import read_rows
from fourfold.planning.calibration.score import predict_rows
from fourfold.planning.machines.constants import NAMES, PRIORS
from validation_page.cells import table
from validation_page.published_runs import figures, weak_scaling


def published_section(calibration: Calibration) -> list[str]:
    header = ("model", "machine", "GPUs", "published", "as run", "error", "layout", "best")
    return [
        "## Published figures",
        "",
        "This section shows predictions for the largest published runs. The planner's constants are not fitted to any",
        "of these runs. All speeds are Megatron PFLOP/s of the full job, which always count full recompute and the",
        "full attention matrix. The columns have these meanings:",
        "",
        "- *as run*: the predicted speed of the published program in the published layout. If the layout is not",
        "  published, we predict the fastest layout that the program supports. For AxoNN's runs on Frontier and",
        "  Perlmutter, we predict the fastest of the 20 layouts that its authors tried",
        "  (`docs/validation_page/axonn_layouts.py`).",
        "- *error*: the difference between *as run* and the published speed, relative to the published speed.",
        "- *best*: the predicted speed of fourfold, in its fastest layout.",
        "",
        *table(header, published_rows(calibration)),
        "",
        "The predictions for Frontier, Perlmutter, and Alps are less certain, because no constant is fitted to a run",
        "on an MI250X or on a Slingshot network. For these machines, we have data sheets and these measurements:",
        "",
        "- On Frontier, each step of RCCL's ring over full nodes takes 8 µs plus the time to send its chunk at 78 GB/s",
        "  per node, but at least 30 µs. An all-gather reaches 71 GB/s per node, a reduce-scatter 78 GB/s, and an",
        "  all-reduce of 1 to 4 GB reaches 57 GB/s (axonn-ai/sc2025-pccl-reproducer, up to 4,096 GCDs).",
        "- On Perlmutter, NCCL's all-gather reaches 59 to 63 GB/s per node (the same source). Its latency is 9 µs for",
        "  each GPU of the ring (arXiv 2504.18658).",
        "- In training, collectives were slower. AxoNN's collectives reached 26 to 29 GB/s per node in its published",
        "  logs of a 20B model on 512 GCDs, and DeepSpeed's collectives reached 39 GB/s on LUMI",
        "  (hpcgroup/perf-variability-ipdps26, spyysalo/lumi-llm-scaling). These runs did not set the variable",
        "  `NCCL_NET_GDR_LEVEL`, which allows direct transfers between a GPU and the network adapter. AxoNN's scripts",
        "  for large runs set it, and the planner assumes that it is set.",
        "- In AxoNN's log on Frontier, all kernels except communication take 6.6 s per step. The prediction for a GCD",
        "  of average speed is 7.1 s. In AxoNN's log on Perlmutter, these kernels take 1.6 s, and the prediction is",
        "  3.4 s. The 1.6 s are probably only half a step, because an A100 cannot compute a full step in this time.",
        "- LUMI has the same GCDs as Frontier. For a 175B model on LUMI, the predicted steps are too fast,",
        f"  {steps_on_lumi(calibration)}. A wrong",
        "  matmul rate could explain this error, but not the larger error of the 320B model on Frontier.",
        "- In AxoNN's logs, the times of a job's GCDs for the same matmul have a standard deviation of 1.6 %, and on",
        "  Perlmutter of at most 1.1 %. All devices wait for the slowest one (`spread` in the machine files).",
        "",
        "If you run on these machines, you can correct the constants with your runs (`fourfold machine calibrate",
        "--from`).",
        "",
        "The predictions are for the algorithm in AxoNN's paper. AxoNN's code differs from the paper in three ways",
        "(axonn-ai/axonn, `intra_layer` and `communication.py`):",
        "",
        "1. AxoNN's code sums the partial outputs of q, k, v, and up (the larger sums) over its inner tensor axis,",
        "   whose ranks are neighbors. We predict sums over y, whose ranks are x apart.",
        "2. Each rank of the inner axis repeats the attention, because heads are split only over the outer tensor",
        "   axis.",
        "3. In the backward pass, each matmul gathers its weight a third time and waits for it, unless the weights are",
        "   cached (`run_axonn_amd.sh` of axonn-ai/Megatron-AxoNN caches all 24 layers of its 5B model).",
        "",
        "The predictions do not include these differences, because we do not know whether the runs cached their",
        "weights. With the first two differences, the planner would predict the 320B model on Frontier 41 % too fast,",
        "with an efficiency of 65 % in the next table. With all three differences and no cached weights, the errors",
        "would be +18 % (Frontier), -6 % (Perlmutter), and -14 % (Alps). But the efficiencies at 8,192 and 16,384 GCDs",
        "would be far too low, 81 and 63 %. (These numbers do not include the spread of devices, 2 to 3 % of a step.)",
        "",
        "The next table shows AxoNN's weak scaling on Frontier, as efficiency relative to 512 GCDs:",
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
    """Return a phrase that says for each number of GCDs how much faster the predicted steps on LUMI are than the
    measured steps (docs/slingshot_runs.csv)."""
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
        "The constants that fourfold ships are fitted to all rows of dense models that are not doubtful",
        "(`calibration/fit.py`). A machine's constant is its *prior*, times the factor for all machines (*all*), times",
        "the machine's own factor if the table has a column for it. *Spread* is the standard deviation of the prior's",
        "logarithm.",
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
