"""In every recompute mode, all compiled blocks share the code that was compiled for the first block."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tiny_runs import GPT, LLAMA, QWEN, tiny_run
from torch._dynamo.utils import counters
from torch.testing._internal.distributed.fake_pg import FakeStore

from fourfold.parallel.grid.grid import Grid
from fourfold.training.job import Job
from fourfold.verification.batches import random_micro_batches

CPU = torch.device("cpu")
SELECTIVE = {"mode": "selective", "modules": ["attention", "mlp", "norms", "gathers"]}


@pytest.fixture
def fresh_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Remove the code that earlier tests compiled. In this test, torch.compile captures graphs, but does not compile
    them to kernels."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def graphs(
    model: dict[str, Any], layers: int, grid: dict[str, int], mode: dict[str, Any], steps: int = 2, **sections: Any
) -> int:
    """Return the number of graphs that the first steps compile, on one of the processes of a grid."""
    torch._dynamo.reset()
    counters.clear()
    sections |= {"training": {"compile": True}, "activation_checkpoint": mode}
    run = tiny_run(model | {"num_hidden_layers": layers}, grid, **sections)
    dist.init_process_group("fake", rank=0, world_size=run.parallel.world_size, store=FakeStore())
    try:
        job = Job(run, Grid(run.parallel, "cpu"), CPU)
        job.initialize(0)
        for step in range(steps):
            job.train_step(random_micro_batches(run, step, job.grid, CPU), step)
    finally:
        dist.destroy_process_group()
    assert not counters["graph_break"]
    return int(counters["stats"]["unique_graphs"])


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("model", [LLAMA, GPT], ids=["llama", "gpt"])
@pytest.mark.parametrize("grid", [{}, {"x": 2}, {"z": 2}, {"cp": 2}, {"x": 2, "y": 2}], ids=str)
@pytest.mark.parametrize(
    "mode",
    [SELECTIVE, {"mode": "full", "offload": True}, {"mode": "full"}, {"mode": "none"}],
    ids=["selective", "offload", "full", "none"],
)
def test_more_blocks_compile_nothing_more(model: dict[str, Any], grid: dict[str, int], mode: dict[str, Any]) -> None:
    assert graphs(model, 10, grid, mode) == graphs(model, 2, grid, mode) > 0


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("mode", [SELECTIVE, {"mode": "none"}], ids=lambda mode: mode["mode"])
def test_documents_compile_nothing_more(mode: dict[str, Any]) -> None:
    """With packed documents, later blocks compile nothing, and neither do steps with more or fewer documents. Only the
    first block that has another number of documents may compile."""
    packed = {"source": "python-stdlib", "mask_documents": True}
    first = graphs(LLAMA, 2, {}, mode, steps=2, data=packed)
    assert graphs(LLAMA, 10, {}, mode, steps=2, data=packed) == first
    assert graphs(LLAMA, 2, {}, mode, steps=8, data=packed) == first


@pytest.mark.usefixtures("fresh_compiler")
def test_key_value_heads_that_are_gathered_break_no_graph() -> None:
    assert graphs(QWEN, 2, {"y": 4}, {"mode": "none"}) > 0
