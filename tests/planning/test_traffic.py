"""The planner counts time for everything that a block moves through memory, not only for its matmuls and its
attention."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from tiny_runs import GEMMA, GPT, LLAMA, NEOX, tiny_run
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fourfold.config.model import ModelConfig
from fourfold.config.presets import PRESETS
from fourfold.config.run import RunConfig
from fourfold.data.loader import MicroBatch
from fourfold.parallel.grid.grid import Grid
from fourfold.parallel.tensor.norm import Norm
from fourfold.planning.cost.block_time import block_time, pointwise_traffic
from fourfold.planning.cost.step import step_parts
from fourfold.planning.cost.terms.pointwise import OWN_CHAINS, OWN_LAYER_CHAINS, OWN_NORMS
from fourfold.planning.machines.constants import prior_constants
from fourfold.planning.machines.machine import load_machine
from fourfold.planning.run_workload import workload_of, workload_of_model
from fourfold.planning.workload import Workload
from fourfold.training.job import Job
from fourfold.verification.trace import fake_processes, meta_stages

APART = (
    "mm",
    "addmm",
    "bmm",
    "_scaled_dot_product",
    "_foreach",
    "_fused_adam",
    "empty",
    "new_empty",
    "zeros",
    "detach",
)
"""Operations that ``Traffic`` ignores: matmuls, attention, the optimizer, and operations that move no bytes."""


class Traffic(TorchDispatchMode):
    """Count the bytes that operations read and write, separately for forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = func._overloadpacket.__name__
        if func.namespace == "aten" and not func.is_view and not name.startswith(APART) and name != "_unsafe_view":
            # The target of a copy is an input too, but ``out`` already counts it.
            read = args[1:] if name == "copy_" else args
            moved = [t.nbytes for t in tree_leaves((read, out)) if isinstance(t, Tensor)]
            self.bytes["backward" if torch._C._current_graph_task_id() != -1 else "forward"] += sum(moved)
        return out


def traffic(run: RunConfig) -> Counter[str]:
    with fake_processes(run.parallel.world_size):
        grid = Grid(run.parallel, "cpu")
        stages = meta_stages(run, grid)
        with FakeTensorMode(allow_non_fake_inputs=True):
            shape = (run.training.micro_batch_size, run.training.seq_length)
            job = Job(run, grid, torch.device("cpu"), stages)
            with Traffic() as counted:
                job.train_step([MicroBatch(*torch.zeros(2, *shape, dtype=torch.int64))], 0)
    return counted.bytes


def of_a_block(
    model: dict[str, Any], grid: dict[str, int], sequences: int, parts: int = 1
) -> tuple[Workload, float, float]:
    """Return the bytes that a block moves in its forward and in its backward. The result is half the difference between
    models with two and four layers. It includes casts of weights, which do not grow with the number of tokens."""
    training = {"precision": "bf16", "seq_length": 1 << 15, "micro_batch_size": sequences}
    sizes = {"hidden_size": 512, "intermediate_size": 1536, "num_attention_heads": 8, "head_dim": 64,
             "max_position_embeddings": 1 << 15, "num_key_value_heads": 4}  # fmt: skip
    if model is GPT or model is NEOX:
        sizes["num_key_value_heads"] = 8
    sections = {"training": training | {"global_batch_size": sequences}, "overlap": {"batch_parts": parts}}
    runs = [tiny_run(model | sizes | {"num_hidden_layers": n}, grid, **sections) for n in (2, 4)]
    few, many = (traffic(run) for run in runs)
    forward, backward = ((many[name] - few[name]) / 2 for name in ("forward", "backward"))
    return workload_of(runs[0]), forward, backward


CASES = [
    *((model, grid) for model in (LLAMA, GPT) for grid in ({}, {"x": 2}, {"y": 2}, {"x": 2, "y": 2}, {"y": 4})),
    (NEOX, {"x": 2}),
    (GEMMA, {"y": 2}),
]


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("sequences", [1, 2])
@pytest.mark.parametrize(("model", "grid"), CASES, ids=str)
def test_a_block_moves_what_the_planner_says(model: dict[str, Any], grid: dict[str, int], sequences: int) -> None:
    work, forward, backward = of_a_block(model, grid, sequences)
    told_forward, told_backward = pointwise_traffic(work)
    # The planner assumes norm kernels for these layouts. A CPU has no norm kernel, and runs chains of operations.
    if not (work.layout.y > 1 or work.model.zero_centered_norm):
        residual = work.step.item_bytes * work.tokens * work.model.hidden_size / work.layout.x
        chains = OWN_LAYER_CHAINS if work.model.layer_norm else OWN_CHAINS
        told_forward += (chains[0] - OWN_NORMS[0]) * residual
        told_backward += (chains[1] - OWN_NORMS[1]) * residual
    assert forward == pytest.approx(told_forward, rel=0.07)
    assert backward == pytest.approx(told_backward, rel=0.07)


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("grid", [{"y": 2}, {"x": 2}, {"x": 2, "y": 2}], ids=str)
@pytest.mark.parametrize(("sequences", "parts"), [(4, 4), (4, 2), (1, 2)])
def test_parts_of_a_micro_batch_move_little_more(grid: dict[str, int], sequences: int, parts: int) -> None:
    work, forward, backward = of_a_block(GPT, grid, sequences, parts)
    expected = pointwise_traffic(work)
    if work.layout.y == 1:
        residual = work.step.item_bytes * work.tokens * work.model.hidden_size / work.layout.x
        expected = [size + (OWN_LAYER_CHAINS[i] - OWN_NORMS[i]) * residual for i, size in enumerate(expected)]
    assert forward == pytest.approx(expected[0], rel=0.07)
    assert backward == pytest.approx(expected[1], rel=0.07)


def test_a_norm_of_one_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """A LayerNorm is one kernel, also on a CPU. The CPU's backward reads the input and the output's gradient once. The
    GPU's backward reads them again for the gradient of the weights."""
    monkeypatch.setattr(Norm, "forward", Norm.fused)
    work, forward, backward = of_a_block(GPT, {}, 1)
    told_forward, told_backward = pointwise_traffic(work)
    residual = work.step.item_bytes * work.tokens * work.model.hidden_size
    assert forward == pytest.approx(told_forward, rel=0.02)
    assert backward == pytest.approx(told_backward - 2 * 2 * residual, rel=0.1)


def test_the_sum_of_gate_is_hidden() -> None:
    """The sum of gate costs only the fraction ``exposed`` of its time, like all overlapped communication."""
    machine, constants = load_machine("dgx-h100"), prior_constants()
    work = workload_of_model(ModelConfig(**PRESETS["llama3-8b"])).but(seq_length=8192, global_batch_size=1, y=4)
    block = block_time(work, machine, constants)
    waited, hidden = (step_parts(work.but(gate_first=first), machine, constants)["y"] for first in (False, True))
    assert waited - hidden == pytest.approx(
        work.model.num_hidden_layers * (1 - constants.exposed) * min(block.gate_sum, block.up_matmul)
    )


def test_copies_of_offloaded_inputs_are_hidden_as_far_as_a_block_is_long() -> None:
    machine, constants = load_machine("dgx-h100"), prior_constants()
    work = workload_of_model(ModelConfig(**PRESETS["llama3-8b"])).but(seq_length=8192, global_batch_size=1, recompute=2)
    block = block_time(work, machine, constants)
    copy = work.step.item_bytes * work.tokens * work.model.hidden_size / machine.host
    for slower, beside in [(1, (copy, copy)), (1000, (block.forward, block.forward + block.backward))]:
        slow = replace(machine, host=machine.host / slower)
        kept, moved = (step_parts(work.but(offload=it), slow, constants)["recompute"] for it in (False, True))
        exposed = 2 * copy * slower - (1 - constants.exposed) * sum(beside)
        assert moved - kept == pytest.approx(work.model.num_hidden_layers * exposed)
