"""Score the planner on the measured rows that come with fourfold; write docs/planner_validation.md and the constants
that fourfold ships:

python docs/planner_validation.py

or, in seconds, what it says of mixtures of experts, to which nothing is fitted, and of the rows:

python docs/planner_validation.py mixtures
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from validation_page.cells import percent
from validation_page.every_row import every_row_section, rows_section
from validation_page.known_sources import within_section
from validation_page.left_out_rows import all_left_out, dense, intervals, intervals_section, left_out_section
from validation_page.mixture_rows import mixtures_left_out, mixtures_section
from validation_page.published_figures import constants_section, published_section

from fourfold.planning.calibration.error_intervals import order_factor
from fourfold.planning.calibration.fit import Calibration, to_toml
from fourfold.planning.calibration.rows import Row, measured_table, read_rows
from fourfold.planning.calibration.score import Scored, errors_of, fit_rows

HERE = Path(__file__).parent
SHIPPED = HERE.parent / "fourfold" / "planning" / "calibration" / "calibrated.toml"


def main() -> None:
    rows, skipped = read_rows([measured_table()])
    if sys.argv[1:] == ["mixtures"]:
        update_mixtures(rows, skipped)
        return
    calibration = fit_rows(rows)
    left_out = all_left_out(rows)
    SHIPPED.write_text(
        "# Factors on the priors of planning/machines/constants.py, by docs/planner_validation.py.\n"
        + to_toml(calibration)
        + "\n[intervals] # 5th and 95th percentile of measured over predicted seconds\n"
        + "".join(f'"{kind}" = [{low:.3f}, {high:.3f}]\n' for kind, (low, high) in intervals(left_out).items())
        + "\n[order] # sure (95 %) where two predicted times differ by this factor\n"
        + f"factor = {order_factor(dense(left_out['source'])):.3f}\n",
        encoding="utf-8",
    )
    (HERE / "planner_validation.md").write_text(page(rows, skipped, calibration, left_out), encoding="utf-8")
    for by, scored in left_out.items():
        print(f"{by} left out: mean {percent(errors_of(dense(scored))['mean_abs_error'])}")


def update_mixtures(rows: list[Row], skipped: dict[str, int]) -> None:
    """Replace the sections of the page that follow from the rows and the shipped constants."""
    path = HERE / "planner_validation.md"
    text = path.read_text(encoding="utf-8")
    left_out = mixtures_left_out(rows)
    for section in (introduction(rows), mixtures_section(rows, left_out), rows_section(skipped)):
        text = re.sub(
            rf"{re.escape(section[0])}\n.*?(?=\n## |\Z)", lambda _, new=section: "\n".join(new), text, flags=re.DOTALL
        )
    path.write_text(text, encoding="utf-8")


def page(rows: list[Row], skipped: dict[str, int], calibration: Calibration, left_out: dict[str, list[Scored]]) -> str:
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
        f"The planner predicts {len(rows) - mixtures:,} published rows of dense models (step times or memory of runs)",
        f"and {mixtures} of [mixtures of experts](#mixtures-of-experts), which come with fourfold.",
        "Headline figures are for dense models in bf16 or fp16 with a complete configuration. FP8 and incomplete rows",
        "are listed as *others*, doubtful measurements apart.",
        "",
    ]


if __name__ == "__main__":
    main()
