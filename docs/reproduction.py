"""Write docs/reproduction.md from reproduction_page.md.in: python docs/reproduction.py

The template has marks in double braces. The script replaces each mark with a text:

- {{page.md; cells; column}}: a cell of a table in another page or in planner_figures.json. ``cells`` are the first
  cells of its row. {{share; …}} shows the cell as a percentage. {{rate; …}} is the cell's number in bold, and {{before
  colon; …}} is the part of the cell before a colon.
- {{plan; name}}: a prediction that this script computes with the planner.
- {{gaps; mask; key}}: a number in figures/mask_gaps.json.
- {{law; k; S}}: the share of passages of S tokens that have no dropped token, by the drop law.
- {{said; page.md; pattern}}: a number in the text of a page.
- {{runs}}: the table of slingshot_runs.csv.
"""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

from validation_page.published_runs import AXONN_BLOCKS, MEGATRON, base_of

from fourfold.memorization.goldfish_laws import exact_match_law
from fourfold.planning.calibration.machine_constants import constants_for, shipped
from fourfold.planning.calibration.rows import read_rows
from fourfold.planning.calibration.score import predict_rows
from fourfold.planning.machines.machine import load_machine
from fourfold.planning.search.plan import Prediction, predict

HERE = Path(__file__).parent
PAGE, TEMPLATE = HERE / "reproduction.md", HERE / "reproduction_page.md.in"
STUDY = {"x": 4, "zero": 1, "recompute": 2, "micro_batch_size": 1}
"""Settings that the 175B and 1T models share in the scripts of the Frontier study. x is the study's tensor-parallel
size."""
STAGES = {"frontier-175b": 16, "frontier-1t": 128}
TENSOR_SIZES = (1, 2, 4, 8, 16, 32)
YEAR = 365.25 * 24 * 3600


def main() -> None:
    PAGE.write_text(page(), encoding="utf-8")


def page() -> str:
    template = TEMPLATE.read_text(encoding="utf-8")
    return re.sub(r"\{\{(.+?)\}\}", lambda mark: value_of([part.strip() for part in mark[1].split(";")]), template)


def value_of(mark: list[str]) -> str:
    """Return the text that replaces a mark."""
    if mark[0] == "plan":
        return planned()[mark[1]]
    if mark[0] == "gaps":
        return gaps(*mark[1:])
    if mark[0] == "runs":
        return runs()
    if mark[0] == "law":
        return share(exact_match_law(int(mark[1]), int(mark[2])))
    if mark[0] == "said":
        return said(HERE / mark[1], mark[2])
    if mark[0] == "share":
        return share(float(value_of(mark[1:])))
    if mark[0] == "rate":
        return value_of(mark[1:]).split("**")[1]
    if mark[0] == "before colon":
        return value_of(mark[1:]).partition(": ")[0]
    return cell(HERE / mark[0], mark[1:-1], mark[-1])


def cell(path: Path, beginning: list[str], column: str) -> str:
    """Return a cell of a table in a file: the cell in this column, in the row that begins with ``beginning``. Exactly
    one table must have such a cell."""
    text, found = path.read_text(encoding="utf-8"), []
    if path.suffix == ".json":
        tables = [[table["columns"], *table["rows"]] for table in json.loads(text)]
    else:
        tables = [
            [[each.strip() for each in line.strip("|").split("|")] for line in table.splitlines()]
            for table in re.findall(r"(?:^\|.*\|\n)+", text, re.MULTILINE)
        ]
    for header, *rows in tables:
        if column in header:
            found += [row[header.index(column)] for row in rows if row[: len(beginning)] == beginning]
    assert len(found) == 1, f"{path.name}: {len(found)} cells for {beginning} in column {column}"
    return found[0]


def runs() -> str:
    """Return a table of measured runs on machines with Slingshot networks, with the planner's predictions."""
    rows, _ = read_rows([HERE / "slingshot_runs.csv"])
    lines = ["| run | GPUs | measured s per step | predicted s per step | error |", "|---|---|---|---|---|"]
    for found in predict_rows(rows, shipped()):
        row = found.row
        assert row.seconds is not None and found.seconds is not None and found.error is not None
        cells = (
            row.source,
            f"{int(row.work.layout.gpus):,}",
            f"{row.seconds:.4g}",
            f"{found.seconds:.4g}",
            f"{found.error:+.0%}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def said(path: Path, pattern: str) -> str:
    """Return the text in a page that the group of a regular expression matches. The expression must match exactly
    once."""
    (found,) = re.findall(pattern, " ".join(path.read_text(encoding="utf-8").split()))
    return str(found)


def gaps(mask: str, key: str, passage: str = "") -> str:
    """Return a number from figures/mask_gaps.json, as the page shows it."""
    row = stored_gaps(mask)
    return share(row[key][passage] if passage else row[key]) if key != "longest_span" else f"{row[key]:,}"


def stored_gaps(mask: str) -> dict[str, Any]:
    table: dict[str, dict[str, Any]] = json.loads((HERE / "figures" / "mask_gaps.json").read_text(encoding="utf-8"))
    return table[mask]


def share(value: float) -> str:
    return f"{value:.1%}" if value >= 0.001 else f"{value:.1e}" if value else "none"


def on_frontier(model: str, batch: int, **layout: int) -> Prediction:
    """Predict a run of the Frontier study on Frontier, with the study's training program and settings."""
    machine = load_machine("frontier")
    return predict(base_of(model, 2048, batch).but(**{**STUDY, **layout}, **MEGATRON), machine, constants_for(machine))


@cache
def planned() -> dict[str, str]:
    """Return the text of each prediction. The keys are the names in the template's marks."""
    of_175b = {dp: on_frontier("frontier-175b", 320 * dp, pp=16, dp=dp) for dp in (2, 16)}
    of_1t = {dp: on_frontier("frontier-1t", 512 * dp, pp=128, dp=dp) for dp in (2, 6)}
    strong_175b = on_frontier("frontier-175b", 320 * 16, pp=16, dp=2)
    strong_1t = on_frontier("frontier-1t", 512 * 6, pp=128, dp=2)
    tensor = {x: on_frontier("frontier-22b", 640, x=x, pp=8, dp=32 // x) for x in TENSOR_SIZES}
    stages = [sum(stage.values()) - stage["reserve"] for stage in of_175b[2].stages]
    steps = 20e12 / (3072 * 2048)
    as_run, best = (
        float(cell(HERE / "planner_figures.json", ["frontier-1t", "frontier"], column).split(":")[0])
        for column in ("as run", "best")
    )
    overlapped, exposed = axonn_with_overlap(True), axonn_with_overlap(False)
    return {
        "weak 175b": f"{of_175b[2].seconds / of_175b[16].seconds:.1%}",
        "weak 1t": f"{of_1t[2].seconds / of_1t[6].seconds:.1%}",
        "strong 175b": f"{strong_175b.seconds / of_175b[16].seconds / 8:.0%}",
        "strong 1t": f"{strong_1t.seconds / of_1t[6].seconds / 3:.0%}",
        "tensor sizes": ", ".join(f"{tensor[x].seconds:.1f} s with {x}" for x in TENSOR_SIZES),
        "memory 175b": f"{min(stages) / 1e9:.1f} to {max(stages) / 1e9:.1f} GB",
        "years as run": f"{steps * of_1t[6].seconds / YEAR:.0f}",
        "years best": f"{steps * of_1t[6].seconds * as_run / best / YEAR:.0f}",
        "one passage in": f"{1 / exact_match_law(50, 500):,.0f}",
        "overlap 80b": f"{1 - overlapped.seconds / exposed.seconds:.0%}",
    }


def axonn_with_overlap(overlap: bool) -> Prediction:
    """Predict a run of AxoNN, GPT-80B on 8,192 GCDs of Frontier, with or without overlap. The layout is the one in
    planner_figures.json."""
    machine = load_machine("frontier")
    switches = {} if overlap else {"overlap_x": False, "overlap_z": False, "prefetch": 0}
    layout = {"x": 2, "z": 256, "dp": 16, "recompute": 2, "micro_batch_size": 2}
    work = base_of("gpt-80b", 2048, 8192).but(**{**AXONN_BLOCKS, **switches}, **layout)
    return predict(work, machine, constants_for(machine))


if __name__ == "__main__":
    main()
