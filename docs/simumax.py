"""Write the table of docs/simumax.md: python docs/simumax.py"""

from __future__ import annotations

import csv
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fourfold.planning.calibration.fit import Calibration
from fourfold.planning.calibration.machine_constants import shipped
from fourfold.planning.calibration.rows import Row, read_rows
from fourfold.planning.calibration.score import predict_rows

DOCS = Path(__file__).parent
PAGE = DOCS / "simumax.md"
BEGIN, END = (f"<!-- {word} of docs/simumax.py -->" for word in ("Begin", "End"))


@dataclass(frozen=True)
class Errors:
    """Relative errors of every run, one array each."""

    fourfold: np.ndarray
    file_only: np.ndarray
    """Of step times that are predicted without fitted constants."""
    simumax: np.ndarray
    fourfold_memory: np.ndarray
    simumax_memory: np.ndarray


def runs() -> list[Row]:
    """Return SimuMax's measured runs. Their rows name the machine file relative to the repository."""
    before = Path.cwd()
    os.chdir(DOCS.parent)
    try:
        return read_rows([DOCS / "simumax_runs.csv"])[0]
    finally:
        os.chdir(before)


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


def table() -> list[str]:
    """Return the lines of the table."""
    rows = runs()
    found = errors(rows)
    lines = [f"| {' | '.join(HEADER)} |", f"|{'---|' * len(HEADER)}"]
    for name, belongs in GROUPS.items():
        chosen = np.array([belongs(row.row_id) for row in rows])
        cells = [
            _cell(each[chosen])
            for each in (
                found.fourfold, found.file_only, found.simumax, found.fourfold_memory, found.simumax_memory
            )
        ]  # fmt: skip
        lines.append(f"| {name} | {chosen.sum()} | {' | '.join(cells)} |")
    return lines


def _cell(found: np.ndarray) -> str:
    """Return the mean absolute error, and the error with the largest absolute value."""
    return f"{np.abs(found).mean():.1%} ({found[np.abs(found).argmax()]:+.1%})".replace("-", "−")


def main() -> None:
    before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    _, after = rest.split(END)
    PAGE.write_text("\n".join((before + BEGIN, *table(), END + after)), encoding="utf-8")


if __name__ == "__main__":
    main()
