"""Compare published figures of large runs with the planner: python docs/planner_claims.py"""

from __future__ import annotations

from validation_page.published_figures import published_rows, weak_rows

from fourfold.planning.calibration.machine_constants import shipped
from fourfold.reports.tables import print_table


def main() -> None:
    calibration = shipped()
    header = ("model", "machine", "GPUs", "published", "as run", "error", "layout", "best")
    weak_header = ("GPUs", "model", "published", "predicted", "layout")
    words = ("machine", "layout", "best")
    print_table("Published figures (Megatron PFLOP/s)", header, published_rows(calibration), words=words)
    print_table("Efficiency of AxoNN's weak scaling", weak_header, weak_rows(calibration), words=("model", "layout"))


if __name__ == "__main__":
    main()
