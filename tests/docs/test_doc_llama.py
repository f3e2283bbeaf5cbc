"""The numbers on the page about Llama 3.1 405B equal the trace."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from markdown import REPOSITORY, tables_of

from fourfold.planning.calibration.machine_constants import constants_for
from fourfold.planning.machines.machine import load_machine
from fourfold.planning.request import request_from_options
from fourfold.planning.run_workload import workload_of
from fourfold.planning.search.plan import make_plan, predict
from fourfold.run_file.load import load_run

PAGE = REPOSITORY / "docs" / "llama-405b.md"
GRIDS = "machine | grid | options after `--set`"
MEMORY = (
    "machine | parameters | gradients | optimizer | gathered weights | activations"
    " | peak by trace | peak by planner | device memory"
)
SECONDS = (
    "machine | seconds with the grid above | model FLOPs utilization | seconds with the fastest layout, and the layout"
)
MACHINES = {"16 × 8 H100": "dgx-h100", "Frontier": "frontier", "Perlmutter": "perlmutter", "Alps": "alps"}


def overrides_of(cell: str) -> list[str]:
    return [part.strip("` ") for part in cell.split(",") if "=" in part]


def test_every_grid_is_legal_and_has_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)
    tables = tables_of(PAGE)
    for machine, grid, cell in tables[GRIDS]:
        run = load_run("examples/llama-3.1-405b.toml", overrides_of(cell))
        axes = {axis: getattr(run.parallel, axis) for axis in ("x", "z", "pp")}
        assert grid == " × ".join(f"{axis} {size}" for axis, size in axes.items() if size > 1), machine
    assert len(tables[MEMORY]) == len(tables[GRIDS])
    for *_, peak, planned, available in tables[MEMORY]:
        assert float(peak) < float(available)
        assert planned == "–" or float(peak) <= 1.02 * float(planned) < float(available)


def test_seconds_and_planned_memory_are_the_planners(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)
    tables = tables_of(PAGE)
    assert [row[0] for row in tables[SECONDS]] == list(MACHINES)
    for (_, _, cell), memory, seconds in zip(tables[GRIDS], tables[MEMORY], tables[SECONDS], strict=False):
        work = workload_of(load_run("examples/llama-3.1-405b.toml", overrides_of(cell)))
        machine = load_machine(MACHINES[seconds[0]])
        predicted = predict(work, machine, constants_for(machine))
        allocated = predicted.memory_bytes - predicted.stages[0]["reserve"]
        assert seconds[1:3] == [f"{predicted.seconds:.0f}", f"{predicted.utilization(work.model_flops()):.1%}"]
        assert memory[7] == f"{allocated / 1e9:.2f}"


@pytest.mark.parametrize(
    "place",
    [
        pytest.param(place, id=name, marks=() if name == "Alps" else pytest.mark.slow)
        for place, name in enumerate(MACHINES)
    ],
)
def test_the_fastest_layout_is_the_planners(place: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)
    tables = tables_of(PAGE)
    (*_, overrides), (name, predicted, _, fastest) = tables[GRIDS][place], tables[SECONDS][place]
    request = request_from_options(None, Path("examples/llama-3.1-405b.toml"), overrides_of(overrides))
    machine = load_machine(MACHINES[name])
    best = make_plan(request.base, machine, constants_for(machine), request.gpus, top=1).best
    assert fastest == f"{best.seconds:.0f}: {best.describe()}"
    assert best.seconds < float(predicted)


@pytest.mark.slow
def test_the_memory_is_what_the_trace_counts() -> None:
    command = "from fourfold.cli.app import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", command, "trace", "examples/llama-3.1-405b.toml", "--json"],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        check=True,
    )
    memory = json.loads(done.stdout)["memory"]
    shown = tables_of(PAGE)[MEMORY][0][1:7]
    keys = ("parameters", "gradients", "optimizer", "gathered_weights_peak", "activations_peak", "total_peak")
    assert shown == [f"{memory[key] / 1e9:.2f}" for key in keys]
