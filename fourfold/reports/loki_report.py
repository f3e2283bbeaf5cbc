"""Build the rows of the terminal's tables about the calibration and evaluation of Loki."""

from collections.abc import Mapping
from typing import Any

Record = Mapping[str, Any]
Rows = list[list[str]]

KINDS = {"pre": "before rotary embedding", "post": "after rotary embedding"}
VARIANTS = {"loki": "Loki", "oracle": "exact top-k", "random": "random basis"}


def rank_header(record: Record) -> list[str]:
    """Return the headers of the columns in ``rank_rows``."""
    header = ["layer", *(f"{kind}-rotary: mean (most)" for kind in record["ranks"])]
    return [*header, *(f"recall, {kind}" for kind in record["recall"]), "ranked by"]


def rank_rows(record: Record) -> Rows:
    """Return one row per layer: for each kind of keys, the mean and the largest Rank@90 over the heads, then the recall
    for each kind, and the kind that Loki ranks by."""
    rows = []
    for layer in range(len(record["best"])):
        row = [str(layer)]
        for ranks in record["ranks"].values():
            heads = ranks[layer]
            row.append(f"{sum(heads) / len(heads):.1f} ({max(heads)})")
        row += [f"{recall[layer]:.1%}" for recall in record["recall"].values()]
        rows.append([*row, record["best"][layer]])
    return rows


PERPLEXITY_HEADER = ("attention", "keys of a row", "dims that rank", "perplexity", "recall", "captured mass")


def perplexity_rows(record: Record) -> Rows:
    """Return one row each for dense attention, Loki, exact top-k attention, and a random basis (the control)."""
    dims = [layer["d"] for layer in record["layers"] if layer["d"] is not None]
    ranking = f"{min(dims)}" if min(dims) == max(dims) else f"{min(dims)} to {max(dims)}"
    widths = {"loki": ranking, "oracle": str(record["head_dim"]), "random": ranking}
    rows = [["dense", str(record["seq_length"]), "", f"{record['perplexity']['dense']:.4f}", "", ""]]
    for name, title in VARIANTS.items():
        found = record["all"][name]
        rows.append(
            [
                title,
                str(record["k"]),
                widths[name],
                f"{record['perplexity'][name]:.4f}",
                f"{found['recall']:.1%}",
                f"{found['mass']:.1%}",
            ]
        )
    return rows


LAYER_HEADER = ("layer", "d", "recall", "worst 5 %", "random", "mass", "worst 5 %", "exact top-k", "random")


def layer_rows(record: Record) -> Rows:
    """Return one row per layer: recall and captured mass with Loki, with exact top-k attention, and with a random
    basis. The row of a layer without Loki says "dense"."""
    rows = []
    for layer in record["layers"]:
        if layer["loki"] is None:
            rows.append([str(layer["layer"]), "dense", *[""] * (len(LAYER_HEADER) - 2)])
            continue
        loki, oracle, random = (layer[name] for name in VARIANTS)
        shares = (
            loki["recall"],
            loki["recall_p5"],
            random["recall"],
            loki["mass"],
            loki["mass_p5"],
            oracle["mass"],
            random["mass"],
        )
        rows.append([str(layer["layer"]), str(layer["d"]), *(f"{share:.1%}" for share in shares)])
    return rows


TASK_HEADER = ("task", "metric", "full attention", "Loki")


def task_rows(tasks: Record) -> Rows:
    """Return one row per task and metric, with the values for full attention and for Loki."""
    return [
        [task, metric, f"{value:.4f}", f"{found['loki'][metric]:.4f}" if metric in found.get("loki", {}) else ""]
        for task, found in tasks.items()
        for metric, value in found.get("full", {}).items()
    ]
