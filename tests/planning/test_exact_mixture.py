"""The planner's closed formulas equal the trace of mixtures of experts too."""

from __future__ import annotations

from typing import Any

import pytest
from exact_collectives import Line, collective_lines
from exact_parameters import stored_bytes
from tiny_runs import MIXTURE, QWEN_MOE, tiny_run

from fourfold.config.run import RunConfig
from fourfold.planning.cost.activations import peak_bytes
from fourfold.planning.run_workload import workload_of
from fourfold.verification.trace import Collective, Memory, trace

OF_WEIGHTS = ("weights", "gradients")
CASES: list[tuple[dict[str, Any], dict[str, int], str]] = [
    (MIXTURE, {"x": 2, "y": 2, "dp": 2, "ep": 2}, "full"),
    (QWEN_MOE, {"z": 4, "dp": 2, "ep": 2}, "none"),
    (MIXTURE, {"z": 2, "dp": 2, "ep": 2, "zero": 2}, "none"),
]
MORE: list[tuple[dict[str, Any], dict[str, int], str]] = [
    (MIXTURE, {}, "none"),
    (QWEN_MOE, {"dp": 4, "ep": 2}, "full"),
    (MIXTURE, {"z": 2, "dp": 4, "ep": 4}, "none"),
    (QWEN_MOE, {"z": 4, "dp": 2, "ep": 2, "zero": 2}, "none"),
    (MIXTURE, {"dp": 4, "ep": 2, "zero": 3}, "selective"),
    (QWEN_MOE, {"dp": 4, "ep": 2, "zero": 1}, "none"),
    (QWEN_MOE, {"x": 2, "z": 2, "ep": 2}, "selective"),
    (QWEN_MOE, {"y": 2, "dp": 2}, "none"),
    (MIXTURE, {"cp": 2, "ep": 2}, "none"),
]


def totals(lines: list[Line] | list[Collective]) -> dict[tuple[str, str, str], tuple[int, int]]:
    """Count and bytes by axis, operation and purpose. Groups of the ranks with the same experts may be those of an axis
    too, and bear its name: all that is sent of weights counts as one."""
    found: dict[tuple[str, str, str], tuple[int, int]] = {}
    for line in lines:
        key = ("data" if line.purpose in OF_WEIGHTS else line.axis, line.op, line.purpose)
        count, size = found.get(key, (0, 0))
        found[key] = (count + line.count, size + line.bytes)
    return found


@pytest.mark.parametrize(
    ("model", "grid", "mode"), [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in MORE)], ids=str
)
def test_formulas_equal_the_trace(model: dict[str, Any], grid: dict[str, int], mode: str) -> None:
    """With an even load: all that is sent and stored, and the activations' peak within a tenth."""
    run = run_of(model, grid, mode)
    memory, work = assert_equal_to_the_trace(run), workload_of(run)
    assert peak_bytes(work, work.model.layers, 1) == pytest.approx(memory.activations_peak, rel=0.1)


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(("model", "grid", "mode"), [*CASES, *MORE], ids=str)
def test_formulas_equal_the_trace_with_muon(model: dict[str, Any], grid: dict[str, int], mode: str) -> None:
    assert_equal_to_the_trace(run_of(model, grid, mode, optimizer={"name": "muon"}))


def run_of(model: dict[str, Any], grid: dict[str, int], mode: str, **sections: Any) -> RunConfig:
    ranks = grid.get("z", 1) * grid.get("dp", 1)
    return tiny_run(
        model | {"num_hidden_layers": 3},
        grid,
        training={"precision": "bf16", "global_batch_size": 4 * ranks, "seq_length": 128},
        activation_checkpoint={"mode": mode},
        **sections,
    )


def assert_equal_to_the_trace(run: RunConfig) -> Memory:
    traced = trace(run, whole=True)
    assert totals(collective_lines(run)) == totals(traced.collectives)
    memory = traced.memory
    assert stored_bytes(run) == (memory.parameters, memory.gradients, memory.optimizer)
    return memory
