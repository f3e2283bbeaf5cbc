"""No run file of any legal settings is computed wrongly, and none is called wrong that is right."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from pool import Pool
from random_runs import Table, random_table, run_of, shrink

from fourfold.config.run import RunConfig
from fourfold.run_file.dump import to_toml
from fourfold.verification.comparison import ParityReport
from fourfold.verification.parity import parity

RUNS = 200


def parity_body(rank: int, world_size: int, run: RunConfig) -> ParityReport | None:
    return parity(run, torch.device("cpu"), steps=2)


def check(pool: Pool, table: Table, folder: Path) -> ParityReport:
    run = run_of(table, folder)
    return pool.run(run.parallel.world_size, parity_body, run)[0]


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("seed", range(RUNS))
def test_random_run_computes_what_one_process_computes(seed: int, pool: Pool, tmp_path: Path) -> None:
    table = random_table(seed)
    report = check(pool, table, tmp_path)
    if not report.ok:
        smallest = shrink(table, lambda smaller: not check(pool, smaller, tmp_path).ok)
        pytest.fail(f"{report.record()}\nthe smallest run file that fails:\n{to_toml(run_of(smallest, tmp_path))}")
