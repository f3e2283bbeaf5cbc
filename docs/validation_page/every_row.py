"""Write two sections: where the measured rows come from, and the error of every row."""

from __future__ import annotations

import tomllib
from collections import Counter

from fourfold.planning.calibration.fit import Calibration
from fourfold.planning.calibration.programs import PROGRAMS
from fourfold.planning.calibration.rows import Row, measured_table, read_table
from fourfold.planning.calibration.score import Scored, predict_rows
from validation_page.cells import number, table


def rows_section(skipped: dict[str, list[str]]) -> list[str]:
    """Return a section that says where the rows come from, which rows are not predicted, and which rows are
    doubtful."""
    measured = read_table(measured_table())
    counts = Counter(row.source for row in measured)
    bibliography = tomllib.loads(measured_table().with_name("sources.toml").read_text(encoding="utf-8"))
    doubts: dict[tuple[str, str], list[str]] = {}
    for row in measured:
        if row.doubt:
            doubts.setdefault((row.source, row.doubt), []).append(row.row_id)
    return [
        "## The rows",
        "",
        f"`fourfold/planning/calibration/measured.csv` has {len(measured):,} rows, and `sources.toml` next to it lists "
        "their sources.",
        "[Measured rows](measured-rows.md) describes the columns. We collected the rows by hand from repositories and",
        "papers. We computed some values from other values of the source. The column `derived` names these values, and",
        "`time_from` says how we computed a step time.",
        "",
        "We left out two tables of the NeMo Framework Launcher with 29 rows, because the license of its repository",
        "treats benchmark results as confidential.",
        "",
        f"The planner does not predict {', '.join(f'{len(ids)} rows ({reason})' for reason, ids in skipped.items())}.",
        "",
        *table(
            ("source", "rows", "title", "where", "license", "how it was read"),
            [(name, f"{counts[name]}", entry["title"], entry["where"], entry["license"], entry["read"])
             for name, entry in bibliography.items()],
        ),
        "",
        "We do not trust the rows in the next table. No constant is fitted to them, and their errors are listed",
        "separately, as *doubtful*:",
        "",
        *table(("source", "rows", "why"), [(s, ", ".join(ids), why) for (s, why), ids in doubts.items()]),
        "",
        "Each row names its program. The flags of a program say how it runs a step, for example which operations it",
        "fuses (`planning/calibration/programs.toml`). We set the flags from what we know about the program, without",
        "checking its source code. The table says where you can check them:",
        "",
        *table(("program", "where to check its flags"), program_rows()),
        "",
    ]  # fmt: skip


def program_rows() -> list[tuple[str, str]]:
    return [(name, traits.source) for name, traits in PROGRAMS.items()]


def every_row_section(calibration: Calibration, rows: list[Row], left_out: list[Scored]) -> list[str]:
    """Return a section with the error of every row of a dense model. ``mixtures_section`` has the other rows."""
    rows = [row for row in rows if not row.mixture]
    apart = {(s.row.source, s.row.row_id): s for s in left_out}
    scored, alone = predict_rows(rows, calibration), predict_rows(rows, Calibration())
    return [
        "## Every row",
        "",
        "The table shows the measured seconds (*s*) and memory (*GB*) of every row. *Predicted* is the prediction with",
        "constants that are fitted to all other sources, and *error* is the error of the predicted seconds. *Shipped*",
        "is the error with the constants that fourfold ships. *Machine files only* is the error without any fitted",
        "constants.",
        "",
        *table(
            ("source", "row", "s", "predicted", "error", "shipped", "machine files only", "GB", "predicted"),
            [every_row(apart[s.row.source, s.row.row_id], s, a) for s, a in zip(scored, alone, strict=True)],
        ),
        "",
        "Regenerate this page, and the shipped constants, with:",
        "",
        "```sh",
        "# not run by the tests: it takes minutes and writes into the repository",
        "python docs/planner_validation.py",
        "```",
        "",
    ]


def every_row(apart: Scored, shipped: Scored, alone: Scored) -> tuple[str, ...]:
    row = apart.row
    errors = ("" if s.error is None else f"{s.error:+.1%}" for s in (apart, shipped, alone))
    return (
        row.source, row.row_id, number(row.seconds), number(apart.seconds), *errors,
        "OOM" if row.out_of_memory else number(row.memory_gb), number(apart.memory_gb),
    )  # fmt: skip
