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
LAYER_COLUMNS = (
    ("recall", "loki", "recall"), ("random", "random", "recall"),
    ("mass", "loki", "mass"), ("exact top-k", "oracle", "mass"), ("random", "random", "mass"),
)  # fmt: skip
"""Columns of the table of layers. Each has a header, the name of a variant, and the key of the column's values in the
variant's record."""


def rank_table(record: Record) -> None:
    """Print the result of a calibration, one row per layer.

    For each kind of components, a row has the recall, and the mean and the maximum of Rank@90 over the heads. Rank@90
    is the number of dimensions that explain 90 % of the variance. The last cell names the kind that ranks the keys.
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
    """Return one row each for dense attention, Loki, exact top-k attention, and a random basis (the control)."""
    ranking = next(str(layer["d"]) for layer in record["layers"] if layer["d"] is not None)
    widths = {"loki": ranking, "oracle": str(record["head_dim"]), "random": ranking}
    rows = [["dense", str(record["seq_length"]), "", f"{record['perplexity']['dense']:.4f}", "", ""]]
    for name, title in VARIANTS.items():
        shares = [f"{record['all'][name][key]:.1%}" for key in ("recall", "mass")]
        rows.append([title, str(record["k"]), widths[name], f"{record['perplexity'][name]:.4f}", *shares])
    return rows


def _layer_rows(record: Record) -> list[list[str]]:
    """Return one row per layer: recall and captured mass with Loki, with exact top-k attention, and with a random
    basis. The row of a layer without Loki says "dense"."""
    rows = []
    for layer in record["layers"]:
        is_dense = layer["loki"] is None
        cells = ["" if is_dense else f"{layer[variant][key]:.1%}" for _, variant, key in LAYER_COLUMNS]
        rows.append([str(layer["layer"]), "dense" if is_dense else str(layer["d"]), *cells])
    return rows


def _task_rows(tasks: Record) -> list[list[str]]:
    """Return one row per task and metric, with the values for dense attention and for Loki."""
    return [
        [task, metric, f"{value:.4f}", f"{found['loki'][metric]:.4f}" if metric in found.get("loki", {}) else ""]
        for task, found in tasks.items()
        for metric, value in found.get("full", {}).items()
    ]
