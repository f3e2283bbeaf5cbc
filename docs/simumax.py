"""Write the table of docs/simumax.md: python docs/simumax.py"""

from __future__ import annotations

import csv
from collections.abc import Callable, Sequence
from contextlib import chdir
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from validation_page.cells import put_between, table

from fourfold.planning.calibration.fit import Calibration
from fourfold.planning.calibration.machine_constants import shipped
from fourfold.planning.calibration.rows import Row, read_rows
from fourfold.planning.calibration.score import predict_rows

DOCS = Path(__file__).parent
PAGE = DOCS / "simumax.md"


@dataclass(frozen=True)
class Errors:
    """Relative errors of every run, one array each."""

    fourfold: np.ndarray
    file_only: np.ndarray
    """Errors of the step times that fourfold predicts without fitted constants."""
    simumax: np.ndarray
    fourfold_memory: np.ndarray
    simumax_memory: np.ndarray


def runs() -> list[Row]:
    """Return SimuMax's measured runs. Their rows name the machine file relative to the repository."""
    with chdir(DOCS.parent):
        return read_rows([DOCS / "simumax_runs.csv"])[0]


def errors(rows: Sequence[Row]) -> Errors:
    """Compare both planners' predictions with the measurements."""
    with (DOCS / "simumax_predictions.csv").open(encoding="utf-8") as file:
        of_peer = {each["row_id"]: each for each in csv.DictReader(file)}
    peer = [of_peer[row.row_id] for row in rows]
    seconds, memory = np.array([row.seconds for row in rows]), np.array([row.memory_gb for row in rows])
    predicted, alone = predict_rows(rows, shipped()), predict_rows(rows, Calibration())
    return Errors(
        np.array([each.seconds for each in predicted]) / seconds - 1,
        np.array([each.seconds for each in alone]) / seconds - 1,
        np.array([float(each["step_seconds"]) for each in peer]) / seconds - 1,
        np.array([each.memory_gb for each in predicted]) / memory - 1,
        np.array([float(each["memory_gb"]) for each in peer]) / memory - 1,
    )


GROUPS: dict[str, Callable[[str], bool]] = {
    "Llama 3 70B, 12 blocks": lambda name: name.startswith("llama3_70b") and "seq" not in name,
    "Llama 3 405B, 4 blocks": lambda name: name.startswith("llama3_405b") and "seq" not in name,
    "Llama 3, 32,768 and 131,072 tokens": lambda name: "seq" in name,
    "DeepSeek-V2, 4 blocks": lambda name: name.startswith("deepseekv2"),
    "DeepSeek-V3, 4 blocks": lambda name: name.startswith("deepseekv3"),
    "all": lambda name: True,
}
"""The rows of the table, and which runs each row covers."""


HEADER = (
    "runs", "number", "time: fourfold", "time: machine file only", "time: SimuMax", "memory: fourfold",
    "memory: SimuMax",
)  # fmt: skip


def errors_table() -> list[str]:
    """Return the lines of the table."""
    rows = runs()
    found = errors(rows)
    columns = (found.fourfold, found.file_only, found.simumax, found.fourfold_memory, found.simumax_memory)
    cells = []
    for name, belongs in GROUPS.items():
        chosen = np.array([belongs(row.row_id) for row in rows])
        cells.append((name, f"{chosen.sum()}", *(_cell(each[chosen]) for each in columns)))
    return table(HEADER, cells)


def _cell(found: np.ndarray) -> str:
    """Return the mean absolute error, and the error with the largest absolute value."""
    return f"{np.abs(found).mean():.1%} ({found[np.abs(found).argmax()]:+.1%})".replace("-", "−")


def main() -> None:
    put_between(PAGE, "docs/simumax.py", errors_table())


if __name__ == "__main__":
    main()
