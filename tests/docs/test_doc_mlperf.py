"""The tables of docs/mlperf.md are what the planner predicts."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
sys.path.append(str(DOCS))

import mlperf  # noqa: E402 (found through the path added above)


@pytest.mark.parametrize(
    "gpus", [count if count == 256 else pytest.param(count, marks=pytest.mark.slow) for count in mlperf.COUNTS]
)
@pytest.mark.parametrize("benchmark", mlperf.BENCHMARKS, ids=lambda benchmark: benchmark.preset)
def test_the_page_has_the_planners_layout(benchmark: mlperf.Benchmark, gpus: int) -> None:
    text = mlperf.PAGE.read_text(encoding="utf-8")
    best = benchmark.plan(gpus)
    assert f"| {' | '.join(mlperf.row(benchmark, gpus, best))} |" in text, "run: python docs/mlperf.py"
    assert best.p_oom < 0.05


def test_the_planner_chooses_the_pipeline_of_the_reference() -> None:
    """MLPerf's reference trains DeepSeek-V3 on 256 GB300 with 4 pipeline stages and groups of 64 for the experts."""
    layout = mlperf.BENCHMARKS[0].plan(256).work.layout
    assert (int(layout.pp), int(layout.ep), int(layout.x)) == (4, 64, 1)
