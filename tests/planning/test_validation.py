"""Check how the planner is validated: rows that are left out do not affect the fit, intervals have the coverage that
they claim, and the page is what the script writes."""

from __future__ import annotations

import itertools
import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from planner_rows import HEADER, row_text

from fourfold.errors import UserError
from fourfold.planning.calibration.fit import Calibration
from fourfold.planning.calibration.machine_constants import (
    kind_of_extrapolation,
    kind_of_step,
    shipped,
    shipped_interval,
    shipped_order_factor,
)
from fourfold.planning.calibration.rows import Row, measured_table, read_rows
from fourfold.planning.calibration.score import Scored, fit_rows, predict_left_out, predict_rows
from fourfold.planning.calibration.validation import validate
from fourfold.planning.machines.machine import load_machine
from fourfold.planning.machines.write import machine_toml
from fourfold.planning.search.fastest import MAX_P_OUT_OF_MEMORY

DOCS = Path(__file__).parents[2] / "docs"
sys.path.append(str(DOCS))

import planner_validation as page_maker  # noqa: E402 (found through the path added above)
from validation_page.error_intervals import KINDS, UNKNOWN, coverage, interval_of, order_factor  # noqa: E402
from validation_page.every_row import every_row_section  # noqa: E402
from validation_page.left_out_rows import all_left_out, intervals  # noqa: E402
from validation_page.memory_cases import memory_cases  # noqa: E402
from validation_page.mixture_rows import mixtures_left_out, mixtures_section  # noqa: E402
from validation_page.published_runs import figures, weak_scaling  # noqa: E402


def table_of(path: Path, sources: dict[str, float]) -> Path:
    """Write rows of several sources. ``sources`` gives the ratio of measured to predicted step time for each source."""
    texts, slower = [], []
    for source, factor in sources.items():
        for i in range(8):
            texts.append(row_text(row_id=str(i), source=source, tp=2 ** (i % 4), hidden=1024 * (1 + i % 3), heads=16,
                                  ffn_hidden=4096 * (1 + i % 3), step_seconds=1))  # fmt: skip
            slower.append(factor)
    path.write_text("\n".join([HEADER, *texts]), encoding="utf-8")
    rows, _ = read_rows([path])
    seconds = [s.seconds * f for s, f in zip(predict_rows(rows, Calibration()), slower, strict=True)]
    texts = [text.removesuffix(",1") + f",{value}" for text, value in zip(texts, seconds, strict=True)]
    path.write_text("\n".join([HEADER, *texts]), encoding="utf-8")
    return path


def test_rows_of_a_calibrated_machine_are_predicted_with_its_own_constants(tmp_path: Path) -> None:
    """The score without fitted constants (``machine_only``) does not use the machine's own constants."""
    found = {}
    for matmul in (0.2, 0.4):
        machine = replace(load_machine("dgx-a100"), efficiency=(("matmul", matmul),))
        (tmp_path / f"{matmul}.toml").write_text(machine_toml(machine, "own", machine), encoding="utf-8")
        row = row_text(machine=str(tmp_path / f"{matmul}.toml"), step_seconds=1)
        (tmp_path / "t.csv").write_text(f"{HEADER}\n{row}", encoding="utf-8")
        found[matmul] = validate(tmp_path / "t.csv", [])
    assert found[0.2].scored[0].seconds > 1.2 * found[0.4].scored[0].seconds
    assert found[0.2].machine_only[0].seconds == found[0.4].machine_only[0].seconds
    assert "[efficiency]" in found[0.2].constants


def errors(scored: list[Scored], source: str) -> np.ndarray:
    return np.array([s.error for s in scored if s.row.source == source])


def test_a_source_left_out_is_predicted_from_all_other_sources(tmp_path: Path) -> None:
    """The source's own rows do not affect the prediction, so the prediction is too fast by the source's factor. If its
    rows are in the fit, the error is small."""
    rows, _ = read_rows([table_of(tmp_path / "t.csv", {"a": 1.0, "b": 1.0, "slow": 1.5})])
    left_out = predict_left_out(rows, "source")
    assert len(left_out) == len(rows)
    assert errors(left_out, "slow").mean() < -0.25
    assert np.abs(errors(predict_rows(rows, fit_rows(rows)), "slow")).mean() < 0.05
    without = fit_rows([row for row in rows if row.source != "slow"], known=False)
    slow = predict_rows([row for row in rows if row.source == "slow"], without)
    assert errors(left_out, "slow").tolist() == errors(slow, "slow").tolist()


def test_many_rows_of_one_source_do_not_speak_for_all(tmp_path: Path) -> None:
    """Many copies of one source's rows change the fitted constants less than the same number of rows from other
    sources."""
    few, _ = read_rows([table_of(tmp_path / "few.csv", {"a": 1.0, "slow": 1.5})])
    one = fit_rows([*few, *[row for row in few if row.source == "slow"] * 3], known=False)
    many, _ = read_rows([table_of(tmp_path / "many.csv", {"a": 1.0, "b": 1.5, "c": 1.5, "d": 1.5, "e": 1.5})])
    several = fit_rows(many, known=False)
    fresh = [row for row in few if row.source == "a"]
    unknown = [Row(**{**vars(row), "source": "new"}) for row in fresh]
    slowness = [errors(predict_rows(unknown, fitted), "new").mean() for fitted in (one, several)]
    assert 0 < slowness[0] < slowness[1]


def test_leaving_out_needs_two(tmp_path: Path) -> None:
    table = table_of(tmp_path / "t.csv", {"a": 1.0, "b": 1.2})
    record = validate(table, [], "source").record()
    assert record["constants"] == "fitted to all other sources" and record["rows"] == 16
    with pytest.raises(UserError, match="needs rows of at least two machines"):
        validate(table, [], "machine")
    with pytest.raises(UserError, match="contradict each other"):
        validate(table, [table], "source")


def scored_rows(row: Row, source: str, ratios: list[float]) -> list[Scored]:
    rows = [Row(**{**vars(row), "source": source, "seconds": ratio}) for ratio in ratios]
    return [Scored(each, 1.0, 1.0, 0.0, "dense") for each in rows]


def test_intervals_weigh_rows_by_source_and_an_imagined_source(tmp_path: Path) -> None:
    """Many rows of a source hardly count more than a few rows. Without any rows, the interval comes from an imagined
    source, which stands for sources that nobody has published."""
    row = read_rows([table_of(tmp_path / "t.csv", {"a": 1.0})])[0][0]
    many, few = scored_rows(row, "a", [0.9] * 5000 + [1.1] * 5000), scored_rows(row, "b", [2.0] * 100)
    low, high = interval_of(many)
    assert low == pytest.approx(0.9) and high == pytest.approx(1.1)
    assert interval_of(many + few) == (low, pytest.approx(2.0))
    alone = interval_of([])
    assert alone == pytest.approx([np.exp(UNKNOWN.inv_cdf(share)) for share in (0.05, 0.95)], rel=0.03)
    assert interval_of(scored_rows(row, "b", [1.0, 1.0]))[1] > 1.3
    # The interval for the rows of b comes from a and the imagined source, without b. The interval for the rows of a
    # comes from b and the imagined source.
    assert coverage(many + few) == {"a": 1.0, "b": 0.0}


def test_the_factor_that_decides_an_order(tmp_path: Path) -> None:
    """An error that all rows of a sweep share does not affect their order. The factor is the 90th percentile of the
    remaining errors, for layouts close to the best layout."""
    row = read_rows([table_of(tmp_path / "t.csv", {"a": 1.0})])[0][0]

    def sweep(source: str, ratios: list[float]) -> list[Scored]:
        """Return rows with these ratios of measured to predicted time. The first row is predicted to be the fastest, by
        1 %."""
        scored = scored_rows(Row(**{**vars(row), "sweep": (source,)}), source, ratios)
        return [replace(s, row=replace(s.row, seconds=1.01 * ratio), seconds=1.01) if i else s
                for i, (s, ratio) in enumerate(zip(scored, ratios, strict=True))]  # fmt: skip

    alike, apart = sweep("a", [1.5] * 11), sweep("b", [1.0] * 6 + [1.2] * 2 + [0.5, 0.5, 0.5])
    assert order_factor(alike) == pytest.approx(1.0)
    assert order_factor(apart) == pytest.approx(2.0)
    # Every source has the same weight, however many rows it has. A source with too few rows does not count.
    others = [s for source in ("c", "d", "e") for s in sweep(source, [1.5] * 31)]
    assert 1.2 <= order_factor(others + apart) < 1.3
    assert order_factor(alike + sweep("f", [1.0, 3.0])) == pytest.approx(1.0)
    assert shipped_order_factor() > 1.02


def test_the_interval_of_a_machine() -> None:
    assert kind_of_extrapolation(load_machine("dgx-a100")) == "known machine"
    assert kind_of_extrapolation(load_machine("frontier")) == "new machine"
    row = read_rows([measured_table()])[0][0]
    for name, kind in itertools.product(("dgx-a100", "frontier"), KINDS):
        low, high = shipped_interval(load_machine(name), kind, row.work) or (0, 0)
        assert 0.5 < low < 1 < high < 3
        far_low, far_high = shipped_interval(load_machine(name), kind, row.work.but(seq_length=10**7)) or (1, 1)
        assert far_low <= low * 1.01 and far_high >= high and far_high / far_low > 3


def test_kinds_of_steps() -> None:
    work = read_rows([measured_table()])[0][0].work
    assert (kind_of_step(work, 0.01), kind_of_step(work, 0.5)) == ("dense", "small batch")
    assert kind_of_step(work.but(seq_length=65536), 0.5) == "long context"
    assert kind_of_step(work.but(seq_length=65536, num_experts=8), 0.5) == "mixture"


def same_text(found: list[str], expected: list[str]) -> None:
    """Check that texts are equal, except for the last digits of numbers, which differ between processors."""
    number = re.compile(r"-?\d+\.\d+")
    assert [number.sub("#", line) for line in found] == [number.sub("#", line) for line in expected]
    values = [[float(n) for line in text for n in number.findall(line)] for text in (found, expected)]
    assert values[0] == pytest.approx(values[1], rel=0.02, abs=0.11)


def test_the_page_has_every_row() -> None:
    rows, _ = read_rows([measured_table()])
    scored = predict_rows(rows, shipped())
    lines = every_row_section(shipped(), rows, scored)
    cells = [line.split(" | ") for line in lines if line.startswith("| ")][1:]
    assert len(cells) == sum(not row.mixture for row in rows)
    lines = mixtures_section(rows, mixtures_left_out(rows))
    assert any(row.mixture for row in rows) and any(line.startswith("| ") for line in lines)


@pytest.mark.slow
def test_published_figures_are_predicted_within_reason() -> None:
    found = figures(shipped())
    assert len(found) == 6
    for figure in found:
        run = figure.as_run
        assert run.utilization(run.work.model_flops()) < run.utilization(run.work.hardware_flops()) < 0.7
        assert 0.6 < figure.as_run_pflops / figure.published < 1.5, figure.model
    curve = weak_scaling(shipped())
    assert curve[0]["efficiency"] == 1
    # Each number of GPUs trains a different model. With more GPUs, the model is larger.
    efficiencies = [r["efficiency"] for r in curve]
    assert all(later < before + 0.001 for before, later in itertools.pairwise(efficiencies)), efficiencies


def test_the_planner_pages_quote_the_figures() -> None:
    page = (DOCS / "planner.md").read_text(encoding="utf-8")
    tables = json.loads(page_maker.FIGURES.read_text(encoding="utf-8"))
    for left_out, table in zip(("source", "machine"), tables[:2], strict=True):
        assert table["columns"][0] == f"{left_out} left out"
        (everything,) = (row for row in table["rows"] if row[0].startswith("all "))
        rows = everything[0].removeprefix("all ").strip("()")
        assert f"| the row's {left_out} ({rows} rows) | {' | '.join(everything[1:])} |" in page
    (spans,) = (table for table in tables if table["columns"][0] == "extrapolation")
    model = (DOCS / "planner-model.md").read_text(encoding="utf-8")
    for *cells, lowest in spans["rows"]:
        source, _, coverage = lowest.partition(": ")
        assert f"| {' | '.join(cells)} | {coverage} (source {source}) |" in model
    covered = [float(cells[3].rstrip("%")) for cells in spans["rows"]]
    assert f"the measured time of {min(covered):.0f} to {max(covered):.0f} % of the rows" in page
    assert f"ratio of the two times differ by at most a factor of {shipped_order_factor():.2f}." in " ".join(
        page.split()
    )


@pytest.mark.slow
def test_the_figures_are_what_the_script_makes() -> None:
    rows, skipped = read_rows([measured_table()])
    left_out = all_left_out(rows)
    made = page_maker.tables_in(page_maker.page(rows, skipped, fit_rows(rows), left_out))
    stored = json.loads(page_maker.FIGURES.read_text(encoding="utf-8"))
    lines = ["\n".join(map(str, (table["columns"], *table["rows"]))).splitlines() for tables in (made, stored)
             for table in tables]  # fmt: skip
    for found, expected in zip(lines[: len(made)], lines[len(made) :], strict=True):
        same_text(found, expected)
    for extrapolation, kinds in intervals(left_out).items():
        machine = load_machine("dgx-a100" if extrapolation == "known machine" else "frontier")
        for kind, interval in kinds.items():
            assert shipped_interval(machine, kind, rows[0].work) == pytest.approx(interval, abs=0.01)


def test_misfits_are_recognized_and_probabilities_of_fitting_are_reliable() -> None:
    """Each case combines a measured run with a device. In some cases the run fits into the device's memory, and in some
    cases it does not fit."""
    cases = memory_cases(read_rows([measured_table()])[0])
    precision, recall = cases.refused(0.5)
    assert len(cases.fits) > 700 and precision > 0.9 and recall > 0.9
    careful, careful_recall = cases.refused(MAX_P_OUT_OF_MEMORY)
    assert careful < precision and careful_recall > 0.97
    for low, high, count, share in cases.reliability():
        assert count > 50 and low - 0.05 <= share <= high + 0.05
