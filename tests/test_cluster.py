"""Run the benchmarks of the emulated cluster in their tiny form, with and without the emulated network."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from patience import PATIENCE
from pool import Pool

from benchmarks.accelerators import accelerators

ROOT = Path(__file__).parents[1]


def tiny(rank: int, world_size: int, name: str, out: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [name, "--tiny", "--rounds", "1", "--json", out])
        assert not importlib.import_module(f"benchmarks.{name}").main()


def record_of(pool: Pool, folder: Path, name: str) -> dict[str, Any]:
    pool.run(4, tiny, name, str(folder / "record.json"))
    record: dict[str, Any] = json.loads((folder / "record.json").read_text())
    return record


def test_overlap(pool: Pool, tmp_path: Path) -> None:
    rows = record_of(pool, tmp_path, "cluster_overlap")["rows"]
    assert {"none", "all", "computation", "communication", "only batch_parts"} <= set(rows)
    assert "only gate_sum" not in rows  # with y = 1, gate_sum does nothing
    assert all(row["seconds"] > 0 for row in rows.values())
    assert rows["none"]["faster"] == 1 and rows["computation"]["exposed"] == 0


def test_accelerators_take_their_time_and_change_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock moves only when an accelerator sleeps."""
    now = 0.0

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    monkeypatch.setattr("benchmarks.accelerators.time", SimpleNamespace(perf_counter=lambda: now, sleep=sleep))
    left, right = torch.randn(64, 128), torch.randn(128, 32, requires_grad=True)
    plain = left @ right
    with accelerators(0.01):
        emulated = left @ right
        emulated.sum().backward()
        torch.zeros(64, 32).addmm_(left, right.detach())
    products = 3 * (2 * 64 * 128 * 32)  # three matmuls: the output, the gradient of ``right``, and addmm_
    assert torch.equal(plain, emulated)
    assert now == pytest.approx(products / 0.01e9)


@pytest.mark.slow
def test_order(pool: Pool, tmp_path: Path) -> None:
    record = record_of(pool, tmp_path, "cluster_order")
    seconds = [row["measured"] for row in record["grids"].values()]
    assert seconds == sorted(seconds) and len(seconds) == 10
    assert record["first_choice"] >= 1 and -1 <= record["spearman"] <= 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("nodes", "per_node", "grid", "switch"), [(4, 1, "x=2,z=2", "batch_parts"), (2, 2, "z=4", "shards_per_node")]
)
def test_on_the_cluster(nodes: int, per_node: int, grid: str, switch: str) -> None:
    command = ["bash", "benchmarks/cluster.sh", "overlap", "--tiny", "--rounds", "1", "--grid", grid]
    environment = {**os.environ, "PYTHON": sys.executable, "PYTHONPATH": str(ROOT)}
    environment |= {"NODES": str(nodes), "PER_NODE": str(per_node)}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=pipe, stderr=pipe, text=True) as cluster:
        try:
            out, err = cluster.communicate(timeout=PATIENCE)
        finally:
            # End the cluster even after a timeout, so that it removes its network links.
            cluster.terminate()
    assert cluster.returncode == 0, err
    if out.startswith("skipped"):
        pytest.skip(out.strip())
    assert "4 processes, 400mbit a link" in out and f"only {switch}" in out
    listed = subprocess.run(["ip", "-br", "link"], capture_output=True, text=True, check=True).stdout
    # Other clusters may run, so look only for this cluster's links.
    assert not re.search(rf"^ff{cluster.pid}\b", listed, re.MULTILINE)
