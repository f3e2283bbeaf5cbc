"""Test what parity does not cover in the 4D layers: overlap, precision, initial weights, and torch functions that would
compute wrong results."""

from __future__ import annotations

import ast
import gc
import itertools
import weakref
from pathlib import Path

import pytest
import torch
from pool import Pool
from tiny_jobs import job_of
from tiny_runs import GPT, LLAMA, QWEN, tiny_run
from torch.utils._python_dispatch import TorchDispatchMode

import fourfold
from fourfold.config.run import ParallelConfig, RunConfig
from fourfold.models.initialize import initialize
from fourfold.models.norms import RMSNorm
from fourfold.models.transformer import Transformer
from fourfold.parallel.grid.communicate import ON_WAIT, PURPOSE
from fourfold.parallel.grid.grid import Grid
from fourfold.parallel.state import gather_full
from fourfold.parallel.tensor.norm import Norm
from fourfold.parallel.tensor.sharding import Tile
from fourfold.training.job import Job
from fourfold.verification.batches import random_micro_batches
from fourfold.verification.trace import fake_processes


def losses_body(rank: int, world_size: int, run: RunConfig, steps: int) -> tuple[list[float], set[torch.dtype]]:
    job = job_of(run)
    losses = [
        job.train_step(random_micro_batches(run, 0, job.grid, job.device), step).loss.item() for step in range(steps)
    ]
    return losses, {shard.local.dtype for shard in job.shards}


@pytest.mark.parametrize("master", ["fp32", "bf16"])
@pytest.mark.parametrize(
    "grid",
    [{}, *(pytest.param(grid, marks=pytest.mark.slow) for grid in ({"z": 2, "dp": 2, "zero": 2}, {"x": 2, "y": 2}))],
    ids=str,
)
def test_bf16_follows_fp32(pool: Pool, grid: dict[str, int], master: str) -> None:
    sections = {"optimizer": {"lr": 3e-3}}
    exact = tiny_run(LLAMA, grid, **sections)
    mixed = tiny_run(LLAMA, grid, training={"precision": "bf16", "master_weights": master}, **sections)
    ranks = exact.parallel.world_size
    expected, _ = pool.run(ranks, losses_body, exact, 6)[0]
    losses, dtypes = pool.run(ranks, losses_body, mixed, 6)[0]
    assert dtypes == {torch.float32 if master == "fp32" else torch.bfloat16}
    assert expected[-1] < expected[0] - 0.1, "one batch, seen six times, is learned"
    for got, want in zip(losses, expected, strict=True):
        assert got == pytest.approx(want, rel=0.01)


class _Order(TorchDispatchMode):
    """Record the matmuls and collectives in the order of their issue."""

    def __init__(self) -> None:
        super().__init__()
        self.issued: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._overloadpacket.__name__
        if name == "mm":
            self.issued.append(f"mm {tuple(args[0].shape)} {tuple(args[1].shape)}")
        elif func.namespace == "c10d" and PURPOSE.get() is not None:
            self.issued.append(PURPOSE.get().why)
        return func(*args, **(kwargs or {}))


def order_body(rank: int, world_size: int, run: RunConfig) -> list[str]:
    job = job_of(run)
    micro_batches = random_micro_batches(run, 0, job.grid, job.device)[:1]
    kept = job.count_kept(micro_batches)
    with _Order() as order:
        token = ON_WAIT.set(lambda result: order.issued.append("wait"))
        job.forward_backward(micro_batches, kept)
        ON_WAIT.reset(token)
    return order.issued


def after(issued: list[str], collective: str, layers: int) -> list[str]:
    """For each time that a collective is issued, return the operations between it and the first wait."""
    places = [at for at, line in enumerate(issued) if line == collective]
    assert len(places) == layers, "the collective has another name"
    return [",".join(issued[at + 1 : issued.index("wait", at)]) for at in places]


@pytest.mark.parametrize("overlap", [True, False])
def test_input_gradients_are_reduced_while_weight_gradients_are_computed(pool: Pool, overlap: bool) -> None:
    """Matmuls that hide the reduction come between its start and the wait for it. Without overlap, nothing comes
    between them."""
    run = tiny_run(LLAMA, {"x": 2, "y": 2}, overlap={"input_gradients": overlap})
    model, tokens = run.model, run.training.micro_batch_size * run.training.seq_length
    weight_gradient = f"mm {(model.intermediate_size // 2, tokens)} {(tokens, model.hidden_size // 2)}"
    hidden_by = after(pool.run(4, order_body, run)[0], "up: input gradient", model.num_hidden_layers)
    assert [text.startswith(weight_gradient) for text in hidden_by] == [overlap] * model.num_hidden_layers, hidden_by
    assert overlap or not any(hidden_by)


@pytest.mark.parametrize("overlap", [True, False])
def test_gate_is_summed_while_up_is_computed(pool: Pool, overlap: bool) -> None:
    run = tiny_run(LLAMA, {"y": 2}, overlap={"gate_sum": overlap})
    model, tokens = run.model, run.training.micro_batch_size * run.training.seq_length
    matmul = f"mm {(tokens, model.hidden_size // 2)} {(model.hidden_size // 2, model.intermediate_size)}"
    hidden_by = after(pool.run(2, order_body, run)[0], "up: outputs", 2 * model.num_hidden_layers)
    assert [text.startswith(matmul) for text in hidden_by] == [overlap, False] * model.num_hidden_layers, hidden_by


def evaluation_body(rank: int, world_size: int, run: RunConfig) -> list[str]:
    job = job_of(run)
    with _Order() as order:
        job.evaluate(random_micro_batches(run, 0, job.grid, job.device)[:1])
    return order.issued


def test_evaluation_computes_no_gradient(pool: Pool) -> None:
    issued = pool.run(2, evaluation_body, tiny_run(LLAMA, {"y": 2}))[0]
    assert "lm_head: logits" in issued
    assert not any("gradient" in line for line in issued)
    trained = pool.run(2, order_body, tiny_run(LLAMA, {"y": 2}))[0]
    assert any("gradient" in line for line in trained), "the name that is looked for above"
    matmuls_after_logits = [
        sum(line.startswith("mm") for line in lines[lines.index("lm_head: logits") :]) for lines in (issued, trained)
    ]
    assert matmuls_after_logits[0] == 0 < matmuls_after_logits[1]


def stray_body(rank: int, world_size: int, run: RunConfig) -> bool:
    whole = Transformer(run.model)
    initialize(whole, run.model, seed=5)
    job = Job(run, Grid(run.parallel, "cpu"), torch.device("cpu"))
    job.initialize(seed=5)
    gathered = gather_full(job.shards, [shard.local for shard in job.shards])
    return gathered is None or all(torch.equal(gathered[n], p) for n, p in whole.named_parameters())


@pytest.mark.fast_cases(4)
@pytest.mark.parametrize("model", [LLAMA, GPT, QWEN], ids=["llama", "gpt", "qwen"])
@pytest.mark.parametrize("grid", [{"x": 2, "y": 2}, {"z": 4}, {"y": 2, "dp": 2, "zero": 3}], ids=str)
def test_initial_weights_are_bit_equal_on_every_grid(pool: Pool, model: dict, grid: dict[str, int]) -> None:
    assert all(pool.run(4, stray_body, tiny_run(model, grid)))


class _Axis:
    def __init__(self, size: int, rank: int) -> None:
        self.size, self.rank = size, rank
        self.name = "axis"


class _Plane:
    def __init__(self, x: int, y: int, x_rank: int, y_rank: int) -> None:
        self.x, self.y, self.ep = _Axis(x, x_rank), _Axis(y, y_rank), _Axis(1, 0)


@pytest.mark.parametrize("tile", [Tile(), Tile(x=0, y=1), Tile(x=1, y=0), Tile(x=0, y=0), Tile(y=0)], ids=str)
def test_tiles_cover_a_parameter(tile: Tile) -> None:
    covered = torch.zeros(12, 8)
    for x_rank, y_rank in itertools.product(range(2), range(2)):
        plane = _Plane(2, 2, x_rank, y_rank)
        slices = tile.slices((12, 8), plane)
        assert covered[slices].shape == tile.local_shape((12, 8), plane)
        assert tile.global_shape(tile.local_shape((12, 8), plane), plane) == (12, 8)
        covered[slices] += 1
    replicas = (2 if tile.x is None else 1) * (2 if tile.y is None else 1)
    assert (covered == replicas).all()


FORBIDDEN = {
    "clip_grad_norm_": "knows only (dp, z): use parallel.state.clip_gradients",
    "get_total_norm": "knows only (dp, z): use parallel.state.clip_gradients",
    "state_dict": "knows only (dp, z): use checkpoints.global_tensors",
    "get_model_state_dict": "knows only (dp, z): use checkpoints.global_tensors",
}


def test_nobody_calls_stock_functions_that_are_silently_wrong() -> None:
    allowed = {
        # The references use torch's own functions on purpose, on one process.
        Path("verification", "one_process.py"): set(FORBIDDEN),
        Path("verification", "stochastic_rounding.py"): {"clip_grad_norm_"},
        Path("data", "hub.py"): {"state_dict"},  # the state of a dataset
    }
    root = Path(fourfold.__file__).parent
    for path in root.rglob("*.py"):
        forbidden = FORBIDDEN.keys() - allowed.get(path.relative_to(root), set())
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                name = getattr(node.func, "attr", getattr(node.func, "id", ""))
                assert name not in forbidden, f"{path}:{node.lineno}: {name} {FORBIDDEN[name]}"


def compiled_body(rank: int, world_size: int, run: RunConfig) -> list[float]:
    return losses_body(rank, world_size, run, 3)[0]


@pytest.mark.slow
@pytest.mark.parametrize("grid", [{}, {"x": 2}], ids=str)
def test_compiled_blocks_compute_the_same(pool: Pool, grid: dict[str, int]) -> None:
    plain, compiled = (
        pool.run(max(1, grid.get("x", 1)), compiled_body, tiny_run(LLAMA, grid, training={"compile": c}))[0]
        for c in (False, True)
    )
    assert compiled == pytest.approx(plain, rel=1e-4)


def dropped_body(rank: int, world_size: int, run: RunConfig) -> bool:
    """Return whether a job gives back its memory and its groups when nothing refers to it any more."""
    job = job_of(run)
    job.train_step(random_micro_batches(run, 0, job.grid, job.device), 0)
    kept = [weakref.ref(part) for part in (job.grid, *job.stages.values())]
    del job
    gc.collect()
    return all(ref() is None for ref in kept)


@pytest.mark.parametrize("grid", [{"dp": 2}, {"z": 2}, {"x": 2}], ids=str)
def test_a_dropped_job_is_freed(pool: Pool, grid: dict[str, int]) -> None:
    run = tiny_run(LLAMA, grid, training={"precision": "bf16"})
    assert pool.run(2, dropped_body, run) == [True, True]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "norm",
    [RMSNorm(64, 1e-5), RMSNorm(64, 1e-5, rounds_last=True), torch.nn.LayerNorm(64)],
    ids=["RMSNorm", "RMSNorm rounded last", "LayerNorm"],
)
def test_a_norm_by_one_kernel_is_the_norm_of_a_split_stream(norm: torch.nn.Module, dtype: torch.dtype) -> None:
    """A GPU runs this kernel if every rank has all channels."""
    with fake_processes(1):
        layer = Norm(norm, Grid(ParallelConfig(), "cpu"), "norm").to_empty(device="cpu").to(dtype)
        for parameter in layer.parameters():
            torch.nn.init.normal_(parameter, 1.0, 0.1)
        torch.manual_seed(0)
        x, grad = torch.randn(2, 3, 5, 64, dtype=dtype)
        told = []
        for forward in (layer.fused, layer.forward):
            leaf = x.clone().requires_grad_()
            out = forward(leaf)
            told.append([out, *torch.autograd.grad(out, [leaf, *layer.parameters()], grad)])
    for one, other in zip(*told, strict=True):
        assert (one - other).float().norm() < torch.finfo(dtype).eps * 2 * other.float().norm()
