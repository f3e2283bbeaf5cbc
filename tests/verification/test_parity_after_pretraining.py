"""Pairs of answers and averaged weights: every layout computes what one process computes."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest
from layouts import ADAPTERS, DEEP_GPT, DEEP_LLAMA, FULL, SIX_HEADS, TWO_PARTS, Case
from pool import Pool
from tiny_runs import DEEPSEEK, GPT, LLAMA, MIXTURE, QWEN, tiny_run
from tuned_products import parity_on_cpu

from fourfold.config.run import PipelineSchedule, RunConfig
from fourfold.verification.parity_report import ParityReport
from fourfold.verification.trace import trace

PAIRS = {"dpo": {"beta": 0.2}, "data": {"format": "preferences", "train": [{"path": "nowhere"}]}}
AVERAGE = {"ema": {"decay": 0.8}}

CASES: dict[str, Case] = {
    "x2 y2 pairs": (LLAMA, {"x": 2, "y": 2}, PAIRS),
    "cp2 z2 pairs": (QWEN, {"cp": 2, "z": 2}, PAIRS),
    "pp2 pairs, average": (DEEP_GPT, {"pp": 2}, PAIRS | AVERAGE),
    "x2 z2 average": (LLAMA, {"x": 2, "z": 2}, AVERAGE),
}
SLOW_CASES: dict[str, Case] = {
    **{
        f"pp2 dp2 {schedule} pairs": (
            DEEP_GPT,
            {"pp": 2, "dp": 2, "schedule": schedule},
            PAIRS | {"training": {"global_batch_size": 16}},
        )
        for schedule in get_args(PipelineSchedule)
    },
    "x2 y2 dp2 zero 3 pairs, recomputed": (GPT, {"x": 2, "y": 2, "dp": 2, "zero": 3}, PAIRS | FULL),
    "pp2 cp2 pairs": (DEEP_LLAMA, {"pp": 2, "cp": 2}, PAIRS),
    "y2 z2 pairs, adapters": (LLAMA, {"y": 2, "z": 2}, PAIRS | ADAPTERS),
    "x2 y2 pairs, y shares the batch, in parts": (SIX_HEADS, {"x": 2, "y": 2}, PAIRS | TWO_PARTS),
    "dp2 ep2 average, biases of routers": (DEEPSEEK, {"dp": 2, "ep": 2}, AVERAGE),
    "dp2 pairs of long answers": (
        LLAMA | {"vocab_size": 1000},
        {"dp": 2},
        PAIRS | {"dpo": {"beta": 0.5}, "training": {"seq_length": 256, "global_batch_size": 4}},
    ),
    "z2 ep2 pairs": (MIXTURE, {"z": 2, "ep": 2}, PAIRS),
    "pp2 y2 ZBV average, tied": (DEEP_GPT, {"pp": 2, "y": 2, "schedule": "ZBVZeroBubble"}, AVERAGE),
    "dp2 cp2 zero 3 average of adapters": (LLAMA, {"dp": 2, "cp": 2, "zero": 3}, AVERAGE | ADAPTERS),
}


def parity_body(rank: int, world_size: int, run: RunConfig) -> ParityReport | None:
    return parity_on_cpu(run)


def check(pool: Pool, case: Case, folder: Path) -> None:
    model, grid, sections = case
    run = tiny_run(model, grid, output_dir=str(folder), **sections)
    report = pool.run(run.parallel.world_size, parity_body, run)[0]
    assert report.ok, report.record()
    assert ("averages" in report.deviations) == bool(run.ema.decay)


def test_the_trace_counts_averages_and_the_second_pass_of_pairs() -> None:
    training = {"device": "cpu", "global_batch_size": 4}
    plain, averaged, pairs = (
        trace(tiny_run(LLAMA, {"x": 2, "y": 2}, training=training, **sections)) for sections in ({}, AVERAGE, PAIRS)
    )
    assert averaged.memory.optimizer == plain.memory.optimizer * 3 // 2
    assert averaged.collectives == plain.collectives, "averages need no communication"
    (once,), (twice,) = (
        [c for c in found.collectives if c.purpose == "lm_head: logits" and c.op == "reduce_scatter"]
        for found in (plain, pairs)
    )
    assert twice.bytes == 2 * once.bytes


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("name", CASES)
def test_layout_computes_what_one_process_computes(pool: Pool, name: str, tmp_path: Path) -> None:
    check(pool, CASES[name], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW_CASES)
def test_more_layouts(pool: Pool, name: str, tmp_path: Path) -> None:
    check(pool, SLOW_CASES[name], tmp_path)
