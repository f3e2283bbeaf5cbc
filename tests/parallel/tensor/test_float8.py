"""Matmuls in float8 follow torchao's own arithmetic on every grid, and a device without float8 is refused.

torch can run these matmuls on a CPU, but slowly. Only fourfold's check of the device keeps users from running them.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from command_line import Cli
from pool import Pool
from tiny_corpus import run_file
from tiny_runs import LLAMA, tiny_run
from torchao.float8 import Float8LinearConfig
from torchao.float8.float8_linear import Float8Linear

from fourfold.config.layout import check_layout
from fourfold.config.run import RunConfig
from fourfold.errors import UserError
from fourfold.parallel.grid.grid import Grid
from fourfold.parallel.tensor import float8
from fourfold.parallel.tensor.float8 import Float8Matmuls, require_float8
from fourfold.parallel.tensor.linear import Linear4D
from fourfold.parallel.tensor.matmuls import Matmuls
from fourfold.training.job import Job
from fourfold.verification.batches import random_micro_batches
from fourfold.verification.trace import trace

CPU = torch.device("cpu")
RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
SIXTEENS = LLAMA | {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 8, "intermediate_size": 192}
"""Keys and values have 64 features. A rank has 32 of them with x = 2, and 16 of them with x·y = 4."""


def bf16_run(grid: dict[str, int], float8: str = "none", **sections: object) -> RunConfig:
    training = {"precision": "bf16", "float8": float8, "train_steps": 8}
    model = SIXTEENS | ({"num_hidden_layers": 4} if "pp" in grid else {})
    return tiny_run(model, grid, training=training, optimizer={"lr": 1e-2}, **sections)


def scales_rows() -> bool:
    """Return whether torch's CPU kernel takes a scale for each row."""
    ones = torch.ones(16, 16).to(torch.float8_e4m3fn)
    try:
        torch._scaled_mm(ones, ones.t(), torch.ones(16, 1), torch.ones(1, 16), out_dtype=torch.bfloat16)
    except RuntimeError:
        return False
    return True


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_three_matmuls_equal_torchaos(recipe: str) -> None:
    if recipe != "tensorwise" and not scales_rows():
        pytest.skip("the CPU kernel of torch 2.11 scales whole tensors only")
    torch.manual_seed(0)
    config = Float8LinearConfig.from_recipe_name(recipe)
    theirs = Float8Linear.from_float(torch.nn.Linear(64, 48, bias=False).bfloat16(), config)
    x = torch.randn(2, 32, 64).bfloat16().requires_grad_()
    y = theirs(x)
    grad = torch.randn_like(y)
    y.backward(grad)
    ours, weight = Float8Matmuls(config), theirs.weight.detach()
    assert torch.equal(ours.output(x.detach(), weight), y)
    assert torch.equal(ours.input_gradient(grad, weight), x.grad)
    assert torch.equal(ours.weight_gradient(grad, x.detach()), theirs.weight.grad)
    exact = Matmuls()
    error = (ours.output(x.detach(), weight) - exact.output(x.detach(), weight)).norm() / y.norm()
    assert 1e-3 < error < 0.06, "the products are rounded, and no more than that"


def losses_body(rank: int, world_size: int, run: RunConfig) -> tuple[list[float], set[str]]:
    """Train on the same batch again and again. Return its losses, and which layers multiply in float8."""
    job = Job(run, Grid(run.parallel, "cpu"), CPU)
    job.initialize(0)
    batch = random_micro_batches(run, 0, job.grid, CPU)
    losses = [job.train_step(batch, step).loss.item() for step in range(run.training.train_steps)]
    linears = {
        name
        for stage in job.stages.values()
        for name, module in stage.model.named_modules()
        if isinstance(getattr(module, "matmuls", None), Float8Matmuls) or isinstance(module, Float8Linear)
    }
    return losses, linears


def first_losses(pool: Pool, run: RunConfig) -> tuple[list[float], set[str]]:
    """Return the results of ``losses_body`` on rank 0. A single rank runs in this process, because a worker process
    would have to import torchao first."""
    ranks = run.parallel.world_size
    if ranks > 1:
        return pool.run(ranks, losses_body, run)[0]
    try:
        return losses_body(0, 1, run)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    "grid",
    [
        {},
        pytest.param({"x": 2, "y": 2}, marks=pytest.mark.slow),
        pytest.param({"pp": 2, "schedule": "ZBVZeroBubble"}, marks=pytest.mark.slow),
        pytest.param({"z": 2, "y": 2}, marks=pytest.mark.slow),
        pytest.param({"cp": 2, "dp": 2, "zero": 2}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_training_follows_bf16(pool: Pool, grid: dict[str, int]) -> None:
    sections = {"activation_checkpoint": {"mode": "full"}} if "z" in grid else {}
    exact_run, run = (bf16_run(grid, kind, **sections) for kind in ("none", "tensorwise"))
    (exact, _), (losses, linears) = (first_losses(pool, each) for each in (exact_run, run))
    assert losses != exact
    assert losses[0] == pytest.approx(exact[0], rel=5e-3)
    assert losses[-1] < 0.7 * losses[0]
    assert losses[-1] == pytest.approx(exact[-1], rel=0.15)
    for part in ("q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"):
        assert any(part in name for name in linears), part
    assert not any("head" in name for name in linears)


def test_layers_of_the_grid_share_one_interface() -> None:
    assert type(Linear4D.matmuls) is Matmuls


@pytest.mark.slow
@pytest.mark.parametrize("grid", [{}, {"x": 2, "z": 2}], ids=str)
def test_the_trace_keeps_what_bf16_keeps(grid: dict[str, int]) -> None:
    exact, rounded = (trace(bf16_run(grid, kind)) for kind in ("none", "tensorwise"))
    assert rounded.collectives == exact.collectives
    assert rounded.memory.activations_peak == pytest.approx(exact.memory.activations_peak, rel=0.02)


def test_unsupported_float8_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"needs a GPU, but this run is on the CPU; set training.float8 = 'none'"):
        require_float8(CPU)
    with pytest.raises(UserError, match=r"needs training.precision = 'bf16'"):
        tiny_run(SIXTEENS, training={"float8": "rowwise"})
    with pytest.raises(
        UserError, match=r"num_attention_heads × head_dim / x = 8 must be a multiple of 16 on every rank, such as 16"
    ):
        check_layout(bf16_run({"x": 8}, "rowwise"))
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    with pytest.raises(UserError, match=r"needs the torchao library: pip install 'fourfold\[float8\]'"):
        float8.use_float8(torch.nn.Module(), "rowwise")


def test_the_command_refuses_a_cpu(cli: Cli, prefix: str, tmp_path: Path) -> None:
    path = run_file(tmp_path, prefix, training__precision="bf16", training__float8="tensorwise")
    code, output, errors = cli("train", path)
    assert (code, output) == (2, "")
    assert "training.float8 needs a GPU" in errors
