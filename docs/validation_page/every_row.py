"""The sections on single rows: their sources, doubts, and errors."""

from __future__ import annotations

import tomllib
from collections import Counter

from fourfold.planning.calibration.fit import Calibration
from fourfold.planning.calibration.programs import PROGRAMS
from fourfold.planning.calibration.rows import Row, measured_table, read_table
from fourfold.planning.calibration.score import Scored, predict_rows
from validation_page.cells import number, table


def rows_section(skipped: dict[str, int]) -> list[str]:
    """Return a section that says where the rows come from, which are not predicted, and which are doubtful."""
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
        f"`fourfold/planning/calibration/measured.csv` has {len(measured):,} rows, and `sources.toml` beside it the "
        "bibliography.",
        "[measured-rows.md](measured-rows.md) lists the columns. The rows were collected from repositories and papers,",
        "and converted once from a table of free text: every text was mapped to values by hand. What a",
        "source does not print is named in the column `derived`; a step time that is not printed follows from",
        "tokens/s or FLOP/s (`time_from`). Earlier, words were looked for in that text, which misread rows: 28 of S5",
        "that can be predicted were taken for FSDP (they say `FSDP=0`), 9 of S5 with FSDP did not have the fused",
        "operations of NeMo, and one of S9 that recomputes every second layer was taken for selective recompute.",
        "Rows of S11 and S12 name Jean Zay instead of a DGX A100 with a slower network. Two sources stay out, tables",
        "of the NeMo Framework Launcher (29 rows, of which 18 in FP8 could be predicted): the licence found in that",
        "repository, an evaluation agreement, counts benchmark results as confidential.",
        "",
        f"Not predicted: {', '.join(f'{count} ({reason})' for reason, count in skipped.items())}.",
        "",
        *table(
            ("source", "rows", "title", "where", "licence", "read"),
            [(name, f"{counts[name]}", entry["title"], entry["where"], entry["licence"], entry["read"])
             for name, entry in bibliography.items()],
        ),
        "",
        "Doubtful rows, which are never fitted and are scored apart:",
        "",
        *table(("source", "rows", "why"), [(s, ", ".join(ids), why) for (s, why), ids in doubts.items()]),
        "",
        "A row says which program ran. Each program's flags (`planning/calibration/programs.py`) were set from what is",
        "known of it, and were not read again in its source code for this page; where to check them:",
        "",
        *table(("program", "where to check its flags"), program_rows()),
        "",
    ]  # fmt: skip


def program_rows() -> list[tuple[str, str]]:
    return [(name, traits.source) for name, traits in PROGRAMS.items()]


def every_row_section(calibration: Calibration, rows: list[Row], left_out: list[Scored]) -> list[str]:
    """Return the errors of rows of dense models. ``mixtures_section`` has the rows of mixtures."""
    rows = [row for row in rows if not row.mixture]
    apart = {(s.row.source, s.row.row_id): s for s in left_out}
    scored, alone = predict_rows(rows, calibration), predict_rows(rows, Calibration())
    return [
        "## Every row",
        "",
        "Seconds and GB, measured and predicted with constants fitted to all other sources; then the errors with the",
        "shipped constants, and without any.",
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
