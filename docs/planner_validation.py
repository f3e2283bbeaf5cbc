"""Compare the planner's predictions with the measured rows that come with fourfold: python docs/planner_validation.py

The script takes ten minutes. It writes three things:

- the page planner_validation.md, which git ignores
- the file planner_figures.json, with the tables that other pages quote
- the constants that come with fourfold
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
from validation_page.cells import percent
from validation_page.error_intervals import HIGH, LOW, UNKNOWN, order_factor
from validation_page.every_row import every_row_section, rows_section
from validation_page.known_sources import within_section
from validation_page.left_out_rows import all_left_out, dense, intervals, intervals_section, left_out_section
from validation_page.mixture_rows import mixtures_section
from validation_page.published_figures import constants_section, published_section

from fourfold.planning.calibration.fit import Calibration, to_toml
from fourfold.planning.calibration.machine_constants import range_features
from fourfold.planning.calibration.rows import Row, measured_table, read_rows
from fourfold.planning.calibration.score import Scored, errors_of, fit_rows

HERE = Path(__file__).parent
FIGURES = HERE / "planner_figures.json"
QUOTED = ("A source that nothing was fitted to", "Intervals", "Published figures")
"""Sections of the page with tables that other pages quote."""
SHIPPED = HERE.parent / "fourfold" / "planning" / "calibration" / "calibrated.toml"


def main() -> None:
    rows, skipped = read_rows([measured_table()])
    calibration = fit_rows(rows)
    left_out = all_left_out(rows)
    SHIPPED.write_text(
        "# Factors on the priors of planning/machines/constants.py, by docs/planner_validation.py.\n"
        + to_toml(calibration)
        + "\n[range] # smallest and largest value among the rows\n"
        + "".join(f'"{name}" = [{low:.0f}, {high:.0f}]\n' for name, (low, high) in ranges(rows).items())
        + "\n[intervals] # 5th and 95th percentile of measured over predicted seconds\n"
        + "unknown = [{:.3f}, {:.3f}]\n".format(*(np.exp(UNKNOWN.inv_cdf(share)) for share in (LOW, HIGH)))
        + "".join(
            f'"{extrapolation}"."{kind}" = [{low:.3f}, {high:.3f}]\n'
            for extrapolation, kinds in intervals(left_out).items()
            for kind, (low, high) in kinds.items()
        )
        + "\n[order] # if two predicted times differ by this factor, their order is 95 % sure\n"
        + f"factor = {order_factor(dense(left_out['source'])):.3f}\n",
        encoding="utf-8",
    )
    text = page(rows, skipped, calibration, left_out)
    (HERE / "planner_validation.md").write_text(text, encoding="utf-8")
    FIGURES.write_text(json.dumps(tables_in(text), indent=1) + "\n", encoding="utf-8")
    for by, scored in left_out.items():
        print(f"{by} left out: mean {percent(errors_of(dense(scored))['mean_abs_error'])}")


def ranges(rows: list[Row]) -> dict[str, tuple[float, float]]:
    """Return for each feature of a run (such as its number of GPUs) the smallest and the largest value among the rows
    with a step time."""
    features = [range_features(row.work) for row in rows if row.seconds is not None]
    return {name: (min(f[name] for f in features), max(f[name] for f in features)) for name in features[0]}


def tables_in(text: str) -> list[dict[str, list[str] | list[list[str]]]]:
    """Return the tables in the page's ``QUOTED`` sections, each with its columns and rows."""
    found = []
    for section in re.split(r"^## ", text, flags=re.MULTILINE):
        if section.partition("\n")[0] in QUOTED:
            for table in re.findall(r"(?:^\|.*\|\n)+", section, re.MULTILINE):
                columns, _, *rows = (
                    [each.strip() for each in line.strip("|").split("|")] for line in table.splitlines()
                )
                found.append({"columns": columns, "rows": rows})
    return found


def page(
    rows: list[Row], skipped: dict[str, list[str]], calibration: Calibration, left_out: dict[str, list[Scored]]
) -> str:
    dense_rows = [row for row in rows if not row.mixture]
    lines = [
        *introduction(rows),
        *left_out_section(dense_rows, left_out),
        *intervals_section(left_out),
        *within_section(dense_rows),
        *published_section(calibration),
        *constants_section(calibration),
        *mixtures_section(rows, left_out["source"]),
        *rows_section(skipped),
        *every_row_section(calibration, rows, left_out["source"]),
    ]
    return "\n".join(lines)


def introduction(rows: list[Row]) -> list[str]:
    mixtures = sum(row.mixture for row in rows)
    return [
        "# How well the planner predicts",
        "",
        "<!-- Written by docs/planner_validation.py. -->",
        "",
        "This page shows how close the planner's predictions are to published step times and memory. A *row*",
        "is one published run. Its *source* (S1, V1, …) is a publication in [this list](#the-rows). fourfold comes",
        f"with {len(rows) - mixtures:,} rows of dense models and {mixtures} rows of [mixtures of",
        "experts](#mixtures-of-experts).",
        "",
        "In the tables, the lines of a source or a machine include only dense models in bf16 or fp16 whose source",
        "describes the full configuration. The line *others* has dense models in other precisions or with incomplete",
        "configurations. The line *doubtful* has measurements that we do not trust. The number of rows is in",
        "parentheses.",
        "",
    ]


if __name__ == "__main__":
    main()
