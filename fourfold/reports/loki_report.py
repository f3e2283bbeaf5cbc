"""Print the results of calibrating and evaluating Loki as tables in the terminal."""

from collections.abc import Mapping
from statistics import fmean
from typing import Any

from rich.console import Console

from fourfold.reports.tables import print_table

Record = Mapping[str, Any]

TITLES = {"pre": "pre-rotary", "post": "post-rotary", "scores": "scores"}
VARIANTS = {"loki": "Loki", "oracle": "exact top-k", "random": "random basis"}
PERPLEXITY_HEADER = ("attention", "attended keys", "ranking dims", "perplexity", "recall", "captured mass")
TRIAL_HEADER = ("d_f", "k_f", "keys", "bytes", "dense perplexity", "perplexity", "change", "at most", "same token")
LAYER_COLUMNS = (
    ("recall", "loki", "recall"), ("random", "random", "recall"),
    ("mass", "loki", "mass"), ("exact top-k", "oracle", "mass"), ("random", "random", "mass"),
)  # fmt: skip
"""Columns of the table of layers. Each column has three texts: the header, the name of a variant of attention (see
``VARIANTS``), and the key of the column's values in the variant's record."""


def rank_table(record: Record) -> None:
    """Print the result of a calibration, one row per layer.

    ``calibrate`` computes several kinds of components for each layer. A row first has one cell per kind, with
    the mean and the maximum of Rank@90 over the heads. Rank@90 is the number of components that explain 90 % of the
    variance. Then the row has the recall of each kind: how many of the keys with the largest scores Loki chooses. The
    last cell names the kind that the layer uses to rank keys.
    """
    header = [*(f"{TITLES[kind]}: mean (max)" for kind in record["ranks"]), *(f"recall, {k}" for k in record["recall"])]
    rows = []
    for layer, best in enumerate(record["best"]):
        ranks = [heads[layer] for heads in record["ranks"].values()]
        recalls = [f"{recall[layer]:.1%}" for recall in record["recall"].values()]
        rows.append([str(layer), *(f"{fmean(heads):.1f} ({max(heads)})" for heads in ranks), *recalls, best])
    title = f"Dims, out of {record['head_dim']}, that explain 90 % of the variance"
    print_table(title, ["layer", *header, "ranked by"], rows)
    console = Console()
    for kind, mean in record["mean_rank"].items():
        console.print(f"mean of all heads, {TITLES[kind]}: {mean:.1f}")
    console.print(f"{record['tokens']:,} tokens in windows of {record['seq_length']:,}. Written: {record['basis']}")


def calibration_tables(record: Record) -> None:
    """Print three results of a calibration: the table of ``rank_table``, the quality of the settings that were tried,
    and which settings to use."""
    rank_table(record)
    gate = record["gate"]
    title = f"Quality on {gate['windows']} held-out windows of {gate['seq_length']:,} tokens"
    print_table(title, TRIAL_HEADER, [_trial_row(trial) for trial in gate["trials"]])
    Console().print(verdict(gate))


def verdict(gate: Record) -> str:
    """Return sentences that say which settings to use, and how much quality these settings lose.

    Args:
        gate: The record of the settings that were tried (``LokiBasis.gate``).
    """
    last = gate["trials"][-1]
    if not gate["chosen"]:
        return (
            f"No settings pass: with all of them, the perplexity may be more than {100 * gate['tolerance']:g}% above "
            "dense attention. Use dense attention, give more text, or set --loki d_f=… and --loki k_f=… yourself."
        )
    return (
        f"Use d_f = {last['d_f']:g} and k_f = {last['k_f']:g}: {last['bytes']:.1%} of the bytes of dense attention. "
        f"The perplexity changes by {last['increase']:+z.1%} (at most {last['increase_bound']:+z.1%}). `fourfold "
        f"generate --basis` uses these settings by default. Contexts longer than {gate['seq_length']:,} tokens were "
        "not measured."
    )


def _trial_row(trial: Record) -> list[str]:
    """Return the table row of one trial of settings. The last cell says how often Loki and dense attention have the
    same most likely token."""
    settings = [f"{trial['d_f']:g}", f"{trial['k_f']:g}", str(trial["k"]), f"{trial['bytes']:.1%}"]
    perplexities = [f"{trial[name]:.4f}" for name in ("dense_perplexity", "perplexity")]
    changes = [f"{trial[name]:+z.1%}" for name in ("increase", "increase_bound")]
    return [*settings, *perplexities, *changes, f"{trial['same_token']:.1%}"]


def loki_tables(record: Record) -> None:
    """Print how much quality a model loses with Loki, on texts and in tasks."""
    if "perplexity" in record:
        title = f"{record['windows']} windows of {record['seq_length']:,} tokens"
        print_table(title, PERPLEXITY_HEADER, _perplexity_rows(record))
        header = ("layer", "d", *(name for name, _, _ in LAYER_COLUMNS))
        print_table("Layers: recall of the best keys, and captured mass", header, _layer_rows(record))
    if "tasks" in record:
        print_table("Tasks", ("task", "metric", "dense attention", "Loki"), _task_rows(record["tasks"]))


def _perplexity_rows(record: Record) -> list[list[str]]:
    """Return four table rows: for dense attention, Loki, exact top-k attention, and a random basis (the control)."""
    ranking = next(str(layer["d"]) for layer in record["layers"] if layer["d"] is not None)
    widths = {"loki": ranking, "oracle": str(record["head_dim"]), "random": ranking}
    rows = [["dense", str(record["seq_length"]), "", f"{record['perplexity']['dense']:.4f}", "", ""]]
    for name, title in VARIANTS.items():
        shares = [f"{record['all'][name][key]:.1%}" for key in ("recall", "mass")]
        rows.append([title, str(record["k"]), widths[name], f"{record['perplexity'][name]:.4f}", *shares])
    return rows


def _layer_rows(record: Record) -> list[list[str]]:
    """Return one table row per layer, with the columns of ``LAYER_COLUMNS``. The row of a layer that does not use Loki
    says "dense"."""
    rows = []
    for layer in record["layers"]:
        is_dense = layer["loki"] is None
        cells = ["" if is_dense else f"{layer[variant][key]:.1%}" for _, variant, key in LAYER_COLUMNS]
        rows.append([str(layer["layer"]), "dense" if is_dense else str(layer["d"]), *cells])
    return rows


def _task_rows(tasks: Record) -> list[list[str]]:
    """Return one table row per task and metric, with the value for dense attention and then the value for Loki."""
    return [
        [task, metric, f"{value:.4f}", f"{found['loki'][metric]:.4f}" if metric in found.get("loki", {}) else ""]
        for task, found in tasks.items()
        for metric, value in found.get("full", {}).items()
    ]
