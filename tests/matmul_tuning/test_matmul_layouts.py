"""Matmul layouts give the same numbers, use the sizes of the real step, and are the same on all ranks."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from pool import Pool
from tiny_runs import GPT, LLAMA, QWEN, tiny_run
from torch import Tensor
from tuned_products import EVEN, LAYOUTS, forced_layouts

from fourfold.config.layout import MatmulSizes, matmul_sizes
from fourfold.config.run import RunConfig
from fourfold.errors import UserError
from fourfold.matmul_tuning.matmul_choice import agreed_layouts
from fourfold.matmul_tuning.matmul_table import MatmulTable, TunedLayer, key_of, machine_of, write_table
from fourfold.parallel.grid.grid import Grid
from fourfold.parallel.tensor.linear import Linear4D
from fourfold.parallel.tensor.matmul_layouts import PADDED_TO, Copy, LaidOutMatmuls, LayerLayout, copied
from fourfold.parallel.tensor.matmuls import Matmuls
from fourfold.training.job import Job
from fourfold.verification.batches import random_micro_batches

CPU = torch.device("cpu")
TUNED = {"tuned_products": "cached"}


@pytest.mark.parametrize("how", get_args(Copy))
@pytest.mark.parametrize("width", [1, 32, 64, 75])
def test_a_copy_is_the_same_matrix_in_another_order(how: Copy, width: int) -> None:
    matrix = torch.randn(96, width)
    for given in (matrix, matrix.T.contiguous().T):
        copy = copied(given, how)
        assert torch.equal(copy, matrix)
        assert (copy.data_ptr() == given.data_ptr()) == (how == "none")
        # A single column is stored by rows and by columns at once.
        if width == 1:
            continue
        assert (copy.stride(1) == 1) == ((given.stride(1) == 1) == ("turned" not in how))
        if "padded" in how:
            assert max(copy.stride()) * 4 // PADDED_TO % 2 == 1
            assert max(copy.stride()) * 4 % PADDED_TO == 0


@pytest.fixture
def new_memory_is_nan() -> Iterator[None]:
    """torch fills memory that nobody has initialized with NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("new_memory_is_nan")
@pytest.mark.parametrize("how", get_args(Copy))
def test_the_padding_of_a_copy_holds_numbers(how: Copy) -> None:
    """The padding must not be NaN: if the number of columns is odd, oneDNN's AMX kernels multiply it by zero."""
    assert torch.empty(1).isnan()
    copy = copied(torch.randn(32, 33), how)
    assert not copy.as_strided((copy.untyped_storage().nbytes() // 4,), (1,)).isnan().any()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_change_no_matmul(layout: LayerLayout) -> None:
    x, grad = torch.randn(2, 8, 24, dtype=torch.float64), torch.randn(2, 8, 40, dtype=torch.float64)
    weight = torch.randn(40, 24, dtype=torch.float64)
    stored = weight.T.contiguous().T if layout.turned else weight
    ours, plain = LaidOutMatmuls(layout), Matmuls()
    total = torch.randn(2, 8, 24, dtype=torch.float64)
    torch.testing.assert_close(ours.output(x, stored), plain.output(x, weight))
    torch.testing.assert_close(ours.input_gradient(grad, stored), plain.input_gradient(grad, weight))
    torch.testing.assert_close(
        ours.input_gradient(grad, stored, total.clone()), plain.input_gradient(grad, weight, total.clone())
    )
    gradient = ours.weight_gradient(grad, x)
    torch.testing.assert_close(gradient, plain.weight_gradient(grad, x))
    assert gradient.stride() == stored.stride(), "else autograd would copy it"


def sizes_body(rank: int, world_size: int, run: RunConfig) -> None:
    """Compare the sizes of all matmuls of a step with the tuned sizes."""
    seen: set[tuple[str, MatmulSizes]] = set()

    class Noting(Matmuls):
        def __init__(self, name: str) -> None:
            self.name = name

        def output(self, x: Tensor, weight: Tensor) -> Tensor:
            seen.add((self.name, MatmulSizes(x.shape[:-1].numel(), *weight.shape)))
            return super().output(x, weight)

    with forced_layouts(run):
        job = Job(run, Grid(run.parallel, "cpu"), CPU)
    job.initialize(0)
    linears = {name: m for s in job.stages.values() for name, m in s.model.named_modules() if isinstance(m, Linear4D)}
    assert all(isinstance(linear.matmuls, LaidOutMatmuls) for linear in linears.values())
    assert any(linear.tiles["weight"].turned for linear in linears.values())
    for name, linear in linears.items():
        linear.matmuls = Noting(name.rpartition(".")[2])
    job.train_step(random_micro_batches(run, 0, job.grid, CPU), 0)
    assert seen == set(matmul_sizes(run).items())


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(
    ("model", "grid", "sections"),
    [
        (LLAMA, {}, {}),
        (QWEN, {"x": 2}, {"overlap": {"batch_parts": 2}}),
        (GPT, {"y": 2, "cp": 2}, {}),
    ],
)
def test_tuned_sizes_are_the_sizes_of_the_step(
    pool: Pool, tmp_path: Path, model: dict[str, Any], grid: dict[str, int], sections: dict[str, Any]
) -> None:
    run = tiny_run(model, grid, training=TUNED, output_dir=str(tmp_path), **sections)
    pool.run(run.parallel.world_size, sizes_body, run)


def layouts_body(rank: int, world_size: int, run: RunConfig, folder: str) -> Any:
    """Return the layouts of a run on a rank whose own table has different layouts."""
    os.environ["XDG_CACHE_HOME"] = f"{folder}/{rank}"
    layers = {
        key_of(sizes, torch.float32): TunedLayer(layout=LAYOUTS[rank], gains=EVEN, other_order=1.0)
        for sizes in matmul_sizes(run).values()
    }
    write_table(MatmulTable(machine=machine_of(CPU), layers=layers))
    try:
        return agreed_layouts(run, CPU)
    finally:
        del os.environ["XDG_CACHE_HOME"]


def test_all_ranks_take_the_layouts_of_the_first(pool: Pool, tmp_path: Path) -> None:
    run = tiny_run(LLAMA, {"z": 2}, training=TUNED)
    first, second = pool.run(2, layouts_body, run, str(tmp_path))
    assert first == second
    assert set(first.values()) == {LAYOUTS[0]}


def rounded_body(rank: int, world_size: int, runs: list[RunConfig]) -> list[dict[str, Tensor]]:
    """For each run, return the weights after a step with stochastic rounding."""
    found = []
    for run in runs:
        with forced_layouts(run):
            job = Job(run, Grid(run.parallel, "cpu"), CPU)
        job.initialize(0)
        job.train_step(random_micro_batches(run, 0, job.grid, CPU), 0)
        found.append({shard.name: shard.local.clone() for shard in job.shards if shard.name.endswith("_proj.weight")})
    return found


def test_stochastic_rounding_steps_turned_weights_alike(pool: Pool, tmp_path: Path) -> None:
    """The noise follows the memory order. So a transposed weight may be rounded to its other neighbor, but no
    further."""
    training = {"precision": "bf16", "master_weights": "bf16"}
    runs = [
        tiny_run(
            LLAMA,
            training=training | {"tuned_products": tuned},
            optimizer={"stochastic_rounding": True, "lr": 1e-3},
            output_dir=str(tmp_path),
        )
        for tuned in ("off", "cached")
    ]
    plain, turned = pool.run(1, rounded_body, runs)[0]
    for name, weight in plain.items():
        apart = (weight.float() - turned[name].float()).abs()
        assert (apart <= 2.0**-7 * weight.float().abs() + 3e-4).all(), name
        assert apart.mean() < 2.0**-8 * weight.float().abs().mean() + 3e-5, name


def test_features_that_choose_matmul_layouts_are_refused() -> None:
    with pytest.raises(UserError, match="tuned_products = 'off', or compile = false"):
        tiny_run(LLAMA, training=TUNED | {"compile": True})
    tiny_run(LLAMA, {"x": 2}, training=TUNED | {"compile": True})
    with pytest.raises(UserError, match=r"training\.float8 = 'tensorwise' chooses the layouts of its matmuls itself"):
        sixteens = LLAMA | {"num_key_value_heads": 8, "intermediate_size": 192}
        tiny_run(sixteens, training=TUNED | {"float8": "tensorwise", "precision": "bf16"})
