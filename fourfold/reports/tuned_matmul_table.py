"""Print the table of tuned matmuls of ``fourfold machine tune-matmul``."""

from collections.abc import Mapping, Sequence
from typing import Any

from fourfold.reports.tables import print_table

HEADER = ("layers", "tokens × out × in", "matmul", "layout", "GFLOP/s", "gain", "other order")


def print_matmuls(record: Mapping[str, Any]) -> None:
    """Print a table with one row per matmul. The row shows the rate with the default memory layout, and how many times
    as fast the chosen memory layout is.

    A weight can be stored as it is or transposed, and tuning chooses one of these two orders. The column "other order"
    shows the gain of the layer's three matmuls together over the default layout, if the weight had the other order.
    """
    print_table(f"Matmuls in {record['precision']}", HEADER, matmul_rows(record["layers"]), words=HEADER[:4])
    print(f"{record['machine']}\n{record['file']}")


def matmul_rows(layers: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Return the rows of the table of matmuls. Each layer has one row per matmul."""
    rows = []
    for layer in layers:
        sizes = [layer[key] for key in ("tokens", "outputs", "inputs")]
        for number, (matmul, own) in enumerate(layer["products"].items()):
            rate = 2 * sizes[0] * sizes[1] * sizes[2] / own["seconds"] / 1e9
            is_first = number == 0
            first = [", ".join(layer["layers"]), " × ".join(map(str, sizes))] if is_first else ["", ""]
            other = f"{layer['other_order']:.2f}" if is_first else ""
            words = [*(["weight transposed"] if layer["turned"] else []), *([own["copies"]] if own["copies"] else [])]
            gain = f"{own['gain']:.2f} ({own['low']:.2f} to {own['high']:.2f})" if words else ""
            name = matmul.replace("_", " ")
            rows.append([*first, name, "; ".join(words) or "as stored", f"{rate:,.0f}", gain, other])
    return rows
