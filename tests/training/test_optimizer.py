"""Test optimizers on local shards, and the learning-rate schedule in edge cases."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from pool import Pool
from tiny_runs import GPT, HYBRID, LLAMA, MIXTURE, QWEN, QWEN_MOE, tiny_run

from fourfold.config.optimizer_rules import OptimizerConfig, is_matrix, rule_of
from fourfold.config.run import RunConfig, SchedulerConfig
from fourfold.errors import UserError
from fourfold.models.transformer import parameter_shapes
from fourfold.parallel.grid.grid import Grid
from fourfold.parallel.state import gather_full
from fourfold.training.job import Job
from fourfold.training.optimizer import check_groups, learning_rate
from fourfold.training.owned_matrices import Matrix, deal
from fourfold.verification.batches import random_micro_batches
from fourfold.verification.trace import trace

CPU = torch.device("cpu")


def rates(steps: int, **scheduler: Any) -> list[float]:
    return [learning_rate(step, steps, 2.0, SchedulerConfig(**scheduler)) for step in range(steps)]


def test_warm_up_is_linear_and_never_zero() -> None:
    for style in ("cosine", "linear", "wsd", "constant"):
        assert rates(20, warmup_steps=4, decay_style=style)[:5] == pytest.approx([0.5, 1.0, 1.5, 2.0, 2.0]), style
    assert rates(20, decay_style="cosine")[0] == 2.0


def test_cosine() -> None:
    values = rates(21, warmup_steps=0, decay_style="cosine", min_lr_ratio=0.1)
    assert values[0] == 2.0
    assert values[10] == pytest.approx(1.1)
    assert values[20] == pytest.approx(0.2)
    assert values[5] == pytest.approx(0.2 + 1.8 * 0.5 * (1 + math.cos(math.pi / 4)))
    assert values == sorted(values, reverse=True)


def test_linear() -> None:
    values = rates(11, warmup_steps=1, decay_style="linear", min_lr_ratio=0.0)
    assert values == pytest.approx([2.0] + [2 - 2 * i / 9 for i in range(10)])
    assert values[-1] == 0.0


def test_constant() -> None:
    assert rates(10, warmup_steps=3, decay_style="constant", min_lr_ratio=0.0)[3:] == [2.0] * 7


@pytest.mark.parametrize(
    ("steps", "warmup", "ratio", "falling"), [(100, 10, 0.2, 20), (100, 0, 1.0, 100), (8, 6, 0.5, 2)]
)
def test_wsd_falls_in_its_share_of_the_run(steps: int, warmup: int, ratio: float, falling: int) -> None:
    values = rates(steps, warmup_steps=warmup, decay_style="wsd", decay_ratio=ratio, min_lr_ratio=0.5)
    stable = values[warmup : steps - falling]
    assert stable == [2.0] * len(stable)
    assert values[steps - falling :] == pytest.approx([2 - (i + 1) / falling for i in range(falling)])
    assert values[-1] == 1.0


@pytest.mark.parametrize("style", ["cosine", "linear", "wsd", "constant"])
@pytest.mark.parametrize(("steps", "warmup"), [(1, 0), (1, 1), (2, 1), (3, 3), (3, 50), (5, 4)])
def test_short_runs(style: str, steps: int, warmup: int) -> None:
    """There is no division by zero, no rate is below the floor or above the peak, and steps past the end stay at the
    floor."""
    config = SchedulerConfig(warmup_steps=warmup, decay_style=style, min_lr_ratio=0.1)
    for step in range(steps + 3):
        assert 0 < learning_rate(step, steps, 2.0, config) <= 2.0
    if warmup < steps:
        expected = 2.0 if style == "constant" else 0.2
        assert learning_rate(steps + 2, steps, 2.0, config) == pytest.approx(expected)


def gradient_of(name: str, shape: tuple[int, ...], step: int) -> torch.Tensor:
    seed = sum(name.encode()) + 1000 * step
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def step_with_known_gradients(
    rank: int, world_size: int, run: RunConfig, steps: int, zero_gradients: bool
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]] | None:
    """Return the whole weights before and after."""
    job = Job(run, Grid(run.parallel, "cpu"), CPU)
    job.initialize(0)
    for shard in job.shards:
        # Biases start at zero, and a wrong weight decay would not change a zero.
        if len(shard.global_shape) == 1:
            shard.local.fill_(0.7)
    locals_before = [shard.local.clone() for shard in job.shards]
    before = gather_full(job.shards, locals_before)
    for step in range(steps):
        for shard in job.shards:
            gradient = gradient_of(shard.name, shard.global_shape, step)[shard.slices].contiguous()
            shard.parameter.grad = torch.zeros_like(shard.parameter)
            if not zero_gradients:
                shard.grad.copy_(gradient)
        job.optimizer.step(0.01)
        assert all(shard.parameter.grad is None for shard in job.shards)
    after = gather_full(job.shards, [shard.local for shard in job.shards])
    return None if before is None or after is None else (before, after)


def optimizer_section() -> dict[str, Any]:
    return {"betas": [0.8, 0.9], "eps": 1e-6, "weight_decay": 0.3}


@pytest.mark.parametrize(
    ("model", "parallel"),
    [
        (GPT, {}),
        (LLAMA, {"z": 3}),
        (GPT, {"x": 2, "y": 2}),
        (LLAMA, {"x": 2, "dp": 2, "zero": 1}),
        (HYBRID, {"x": 2, "z": 2}),
    ],
)
def test_adamw_is_torchs_on_every_grid(pool: Pool, model: dict[str, Any], parallel: dict[str, int]) -> None:
    run = tiny_run(model, parallel, optimizer=optimizer_section(), training={"global_batch_size": 12})
    before, after = pool.run(run.parallel.world_size, step_with_known_gradients, run, 3, False)[0]
    config = run.optimizer
    for name, start in before.items():
        parameter = torch.nn.Parameter(start.clone())
        decay = config.weight_decay if parameter.ndim > 1 else 0.0
        adamw = torch.optim.AdamW([parameter], lr=0.01, betas=config.betas, eps=config.eps, weight_decay=decay)
        for step in range(3):
            parameter.grad = gradient_of(name, tuple(parameter.shape), step)
            adamw.step()
        torch.testing.assert_close(after[name], parameter.data, rtol=1e-5, atol=1e-6)


def test_muon_leaves_the_convolutions_of_linear_attention_to_adamw() -> None:
    shapes = parameter_shapes(tiny_run(HYBRID).model)
    muon = {name for name, shape in shapes.items() if rule_of(name, len(shape), "muon") == "muon"}
    first = "layers.0.self_attn."
    assert {name for name in muon if name.startswith(first)} == {
        *(f"{first}inputs.{kind}_proj.weight" for kind in "qkvzba"),
        f"{first}o_proj.weight",
    }


def test_decays_biases_and_norms_of_linear_attention_do_not_decay() -> None:
    shapes = parameter_shapes(tiny_run(HYBRID).model)
    kept = {name for name, shape in shapes.items() if not is_matrix(name, len(shape))}
    core = "layers.0.self_attn.core."
    assert {f"{core}A_log", f"{core}dt_bias", f"{core}norm.weight"} <= kept
    assert not any(name.endswith(("_conv", "_proj.weight")) for name in kept)


def steps_of(optimizer: type[torch.optim.Optimizer], start: torch.Tensor, name: str, **settings: Any) -> torch.Tensor:
    """Return a weight after five steps of one of torch's optimizers."""
    parameter = torch.nn.Parameter(start.clone())
    stepping = optimizer([parameter], lr=0.01, **settings)
    for step in range(5):
        parameter.grad = gradient_of(name, tuple(parameter.shape), step)
        stepping.step()
    return parameter.detach()


def by_torchs_muon(config: OptimizerConfig, before: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Take five steps: with torch's Muon for matrices (each expert separately), and with torch's AdamW for all other
    parameters."""
    after = {}
    for name, start in before.items():
        decay = config.weight_decay if start.ndim > 1 else 0.0
        if rule_of(name, start.ndim, "muon") == "adamw":
            settings = {"betas": config.betas, "eps": config.eps, "weight_decay": decay}
            after[name] = steps_of(torch.optim.AdamW, start, name, **settings)
            continue
        parameters = [torch.nn.Parameter(m.clone()) for m in (start if start.ndim == 3 else start[None])]
        muon = torch.optim.Muon(
            parameters, lr=0.01, weight_decay=decay, momentum=config.momentum, adjust_lr_fn="match_rms_adamw"
        )
        for step in range(5):
            gradient = gradient_of(name, tuple(start.shape), step).reshape(-1, *start.shape[-2:])
            for parameter, own in zip(parameters, gradient, strict=True):
                parameter.grad = own.clone()
            muon.step()
        after[name] = torch.stack([p.detach() for p in parameters]).view_as(start)
    return after


@pytest.mark.parametrize(
    ("model", "parallel"),
    [
        (GPT, {}),
        (LLAMA, {"x": 2, "y": 2, "z": 2}),
        (MIXTURE, {"z": 2, "dp": 2, "ep": 2, "zero": 2}),
        pytest.param(GPT, {"z": 3, "dp": 2}, marks=pytest.mark.slow),
        pytest.param(QWEN_MOE, {"dp": 4, "ep": 2}, marks=pytest.mark.slow),
        pytest.param(MIXTURE, {"x": 2, "z": 4, "ep": 2}, marks=pytest.mark.slow),
        pytest.param(LLAMA, {"dp": 4, "zero": 3}, marks=pytest.mark.slow),
    ],
)
def test_muon_is_torchs_on_every_grid(
    pool: Pool, monkeypatch: pytest.MonkeyPatch, model: dict[str, Any], parallel: dict[str, int]
) -> None:
    """The run is in float32, because torch's Muon rounds to bf16 if it can."""
    optimizer = {**optimizer_section(), "name": "muon", "momentum": 0.9}
    run = tiny_run(model, parallel, optimizer=optimizer, training={"global_batch_size": 24})
    before, after = pool.run(run.parallel.world_size, step_with_known_gradients, run, 5, False)[0]
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.clone)
    expected = by_torchs_muon(run.optimizer, before)
    assert {rule_of(name, start.ndim, "muon") for name, start in before.items()} == {"adamw", "muon"}
    for name, weight in expected.items():
        torch.testing.assert_close(after[name], weight, rtol=1e-5, atol=1e-5)


def test_muon_rounds_to_bf16_as_torchs_does(pool: Pool) -> None:
    optimizer = {**optimizer_section(), "name": "muon"}
    run = tiny_run(LLAMA, {"x": 2}, optimizer=optimizer, training={"precision": "bf16"})
    before, after = pool.run(2, step_with_known_gradients, run, 5, False)[0]
    for name, weight in by_torchs_muon(run.optimizer, before).items():
        moved = float((weight - before[name]).abs().max())
        torch.testing.assert_close(after[name], weight, rtol=0, atol=0.02 * moved)


@pytest.mark.parametrize("parallel", [{}, {"x": 2, "z": 2}])
def test_lion_is_the_published_one(pool: Pool, parallel: dict[str, int]) -> None:
    """The reference is Algorithm 2 of arXiv 2302.06675."""
    optimizer = {**optimizer_section(), "name": "lion"}
    run = tiny_run(GPT, parallel, optimizer=optimizer, training={"global_batch_size": 12})
    before, after = pool.run(run.parallel.world_size, step_with_known_gradients, run, 3, False)[0]
    (beta1, beta2), decay = run.optimizer.betas, run.optimizer.weight_decay
    for name, weight in before.items():
        mean = torch.zeros_like(weight)
        for step in range(3):
            gradient = gradient_of(name, tuple(weight.shape), step)
            update = (beta1 * mean + (1 - beta1) * gradient).sign()
            mean = beta2 * mean + (1 - beta2) * gradient
            weight = weight - 0.01 * (update + (decay if weight.ndim > 1 else 0.0) * weight)
        moved = after[name] - weight
        assert (moved.abs() > 1e-6).float().mean() < 1e-4, "but for elements where the update is rounding noise"


def test_matrices_are_dealt_evenly() -> None:
    many = {(8, 16): [Matrix(i) for i in range(9)], (4, 4): [Matrix(9, e) for e in range(50)]}
    for ranks in (1, 3, 4, 64):
        rounds = deal(many, ranks)
        dealt = [matrix for units in rounds for unit in units for matrix in unit]
        assert sorted(map(str, dealt)) == sorted(map(str, [*many[8, 16], *many[4, 4]]))
        assert all(len(units) <= ranks for units in rounds)
        assert all(len(units) == ranks for units in rounds[:-1])
        entries = [16 * len(unit) if unit[0].expert is not None else 128 for units in rounds for unit in units]
        assert entries == sorted(entries, reverse=True)
        assert max(entries) == 128


@pytest.mark.parametrize("parallel", [{}, {"z": 3}, {"x": 2, "z": 2}])
def test_only_matrices_decay(pool: Pool, parallel: dict[str, int]) -> None:
    """On every grid and with every shape of the local shard, only matrices have weight decay."""
    run = tiny_run(GPT, parallel, optimizer=optimizer_section(), training={"global_batch_size": 12})
    before, after = pool.run(run.parallel.world_size, step_with_known_gradients, run, 1, True)[0]
    kinds = {1: 0, 2: 0}
    for name, start in before.items():
        kept = 1 - 0.01 * 0.3 if start.ndim > 1 else 1.0
        torch.testing.assert_close(after[name], start * kept, rtol=1e-6, atol=0)
        kinds[start.ndim] += 1
    assert min(kinds.values()) > 5


def test_groups_of_parameters_have_rates_and_decays_of_their_own(pool: Pool) -> None:
    groups = [
        {"parameters": ["embed_*.weight", "layers.0.*"], "lr_ratio": 0},
        {"parameters": ["layers.*.mlp.*"], "lr_ratio": 2.0, "weight_decay": 0.1},
        {"parameters": ["*"], "lr_ratio": 0.5},
    ]
    run = tiny_run(GPT, {"x": 2, "z": 2}, optimizer=optimizer_section() | {"groups": groups})
    before, after = pool.run(4, step_with_known_gradients, run, 1, False)[0]
    for name, start in before.items():
        parameter = torch.nn.Parameter(start.clone())
        parameter.grad = gradient_of(name, tuple(parameter.shape), 0)
        frozen, mlp = name.startswith(("embed_", "layers.0.")), ".mlp." in name
        lr, decay = (0.02, 0.1) if mlp else (0.005, 0.3 if parameter.ndim > 1 else 0.0)
        torch.optim.AdamW([parameter], lr=lr, betas=(0.8, 0.9), eps=1e-6, weight_decay=decay).step()
        if frozen:
            assert torch.equal(after[name], start), name
        else:
            torch.testing.assert_close(after[name], parameter.data, rtol=1e-5, atol=1e-6)


def test_a_run_with_groups_is_traced() -> None:
    groups = {"groups": [{"parameters": ["layers.0.*"], "lr_ratio": 0.5}]}
    assert trace(tiny_run(GPT, {"x": 2}, optimizer=groups)).memory == trace(tiny_run(GPT, {"x": 2})).memory
    with pytest.raises(UserError, match="sets neither lr_ratio nor weight_decay"):
        tiny_run(GPT, optimizer={"groups": [{"parameters": ["*"]}]})


def embedding_copies_body(rank: int, world_size: int, run: RunConfig) -> torch.Tensor:
    job = Job(run, Grid(run.parallel, "cpu"), CPU)
    job.initialize(0)
    for step in range(2):
        job.train_step(random_micro_batches(run, step, job.grid, CPU), step)
    (end,) = [shard.local for shard in job.shards if shard.name == "embed_tokens.weight"]
    return end.clone()


def test_both_ends_of_a_tied_weight_are_rounded_alike(pool: Pool) -> None:
    run = tiny_run(
        QWEN,
        {"pp": 2},
        training={"precision": "bf16", "master_weights": "bf16"},
        optimizer={"stochastic_rounding": True},
    )
    first, last = pool.run(2, embedding_copies_body, run)
    assert torch.equal(first, last)


def test_a_group_without_parameters_is_refused(pool: Pool) -> None:
    run = tiny_run(GPT, optimizer={"groups": [{"parameters": ["layers.*.mlp.gate_proj.*"], "lr_ratio": 0.5}]})
    with pytest.raises(Exception, match=r"'layers\.\*\.mlp\.gate_proj\.\*' names no trained parameter; layers"):
        pool.run(1, step_with_known_gradients, run, 1, True)


def test_a_group_behind_one_that_has_all_is_refused() -> None:
    groups = [{"parameters": ["*"], "lr_ratio": 0.5}, {"parameters": ["layers.0.*"], "lr_ratio": 0.1}]
    config = tiny_run(GPT, optimizer={"groups": groups}).optimizer
    with pytest.raises(UserError, match=r"every parameter of layers\.0\.\* is in an earlier group"):
        check_groups(config, ["layers.0.mlp.weight", "norm.weight"])
    check_groups(config.model_copy(update={"groups": config.groups[::-1]}), ["layers.0.mlp.weight", "norm.weight"])


def test_defaults_equal_the_run_files_defaults() -> None:
    config = OptimizerConfig()
    assert (config.lr, config.betas, config.eps, config.weight_decay) == (3e-4, (0.9, 0.95), 1e-8, 0.1)


def refuse_moved_memory(rank: int, world_size: int, run: RunConfig) -> str:
    """FSDP2 can move a parameter to new memory. An optimizer that still updates the old memory would silently train
    nothing, so it must refuse."""
    job = Job(run, Grid(run.parallel, "cpu"), CPU)
    job.initialize(0)
    shard = job.optimizer.parameters[0]
    shard.data = shard.data.clone()
    with pytest.raises(AssertionError) as error:
        job.optimizer.step(0.01)
    return str(error.value)


def test_an_optimizer_that_steps_other_memory_is_noticed(pool: Pool) -> None:
    assert "embed_tokens.weight has moved" in pool.run(1, refuse_moved_memory, tiny_run())[0]
