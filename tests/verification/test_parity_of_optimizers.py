"""Muon and Lion step on every layout as they do on one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny_runs
import torch
from layouts import GROUPS, NODES_OF_2, OFFLOADED, ONE_SEQUENCE, PACKED, TUNED, UNEVEN, Case
from pool import Pool
from test_parity import check
from tiny_runs import DEEPSEEK, GPT, LLAMA, MIXTURE, QWEN, QWEN_MOE, tiny_run

from fourfold.checkpoints.checkpoint import Checkpointer, load_checkpoint
from fourfold.config.optimizer_rules import rule_of
from fourfold.config.run import CheckpointConfig, RunConfig
from fourfold.errors import UserError
from fourfold.models.transformer import Transformer
from fourfold.parallel.grid.grid import Grid
from fourfold.training.job import Job
from fourfold.verification.reference_optimizer import is_for_muon

LION, MUON = ({"optimizer": {"name": name, **GROUPS["optimizer"]}} for name in ("lion", "muon"))
ADAPTERS = {"optimizer": {"name": "muon"}, "lora": {"rank": 4, "targets": ["up_proj", "q_proj", "o_proj"]}}
DEEP_LLAMA, DEEP_GPT = LLAMA | {"num_hidden_layers": 4}, GPT | {"num_hidden_layers": 4}
MODELS = {
    name: model
    for name, model in vars(tiny_runs).items()
    if isinstance(model, dict) and "preset" in model and not name.startswith("_")
}
LOSSES = {"moe": {"load_balancing_loss": 0.5, "z_loss": 0.01}}

CASES: dict[str, Case] = {
    "x2 y2 z2 muon": (LLAMA, {"x": 2, "y": 2, "z": 2}, MUON | ONE_SEQUENCE),
    "x2 z2 lion": (LLAMA, {"x": 2, "z": 2}, LION),
    "z2 dp2 zero 1 muon": (GPT, {"z": 2, "dp": 2, "zero": 1}, MUON | ONE_SEQUENCE),
    "pp2 dp2 muon": (DEEP_LLAMA, {"pp": 2, "dp": 2}, MUON | ONE_SEQUENCE),
    "dp2 experts over 2, muon": (MIXTURE, {"dp": 2, "ep": 2}, MUON | LOSSES),
    "x2 muon for adapters": (LLAMA, {"x": 2}, ADAPTERS),
}

SLOW_CASES: dict[str, Case] = {
    **{
        f"x2 {axis}2 dp2 zero {zero} {name}": (QWEN, {"x": 2, axis: 2, "dp": 2, "zero": zero}, sections | ONE_SEQUENCE)
        for axis in ("y", "z")
        for zero in (0, 1, 2, 3)
        # Use the two optimizers in turn.
        for name, sections in [(("muon", MUON), ("lion", LION))[(zero + (axis == "z")) % 2]]
    },
    **{
        f"z4 dp2 ep{ep} zero {zero} muon": (QWEN_MOE, {"z": 4, "dp": 2, "ep": ep, "zero": zero}, MUON | ONE_SEQUENCE)
        for ep in (1, 2, 8)
        for zero in (0, 1, 2, 3)
        if ep < 8 or zero == 3
    },
    "x2 y2 z2 experts, muon": (DEEPSEEK, {"x": 2, "y": 2, "z": 2}, MUON | ONE_SEQUENCE),
    "dp2 experts, lion": (MIXTURE, {"dp": 2, "ep": 2}, LION | LOSSES),
    "z4 in nodes of 2, muon": (UNEVEN, {"z": 4}, MUON | NODES_OF_2 | ONE_SEQUENCE),
    "z8 uneven, muon": (UNEVEN, {"z": 8}, MUON | ONE_SEQUENCE),
    "cp2 z2 muon": (LLAMA, {"cp": 2, "z": 2}, MUON | PACKED),
    "x2 z2 tuned products, muon": (GPT, {"x": 2, "z": 2}, TUNED | MUON),
    "pp2 x2 z2 interleaved, muon": (
        DEEP_GPT,
        {"pp": 2, "x": 2, "z": 2, "schedule": "Interleaved1F1B"},
        MUON | ONE_SEQUENCE | OFFLOADED,
    ),
    "pp2 dp2 ZBV muon": (DEEP_LLAMA, {"pp": 2, "dp": 2, "schedule": "ZBVZeroBubble"}, MUON | ONE_SEQUENCE),
    "z2 dp2 muon for adapters": (GPT, {"z": 2, "dp": 2, "zero": 1}, ADAPTERS),
}


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_parity_steps_the_same_parameters_with_muon(model: dict[str, object]) -> None:
    with torch.device("meta"):
        parameters = dict(Transformer(tiny_run(model).model).named_parameters())
    by_muon = {name for name, p in parameters.items() if rule_of(name, p.ndim, "muon") == "muon"}
    assert by_muon == {name for name, p in parameters.items() if is_for_muon(name, p)} != set()


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("name", CASES)
def test_layout_steps_as_one_process_does(pool: Pool, name: str, tmp_path: Path) -> None:
    check(pool, CASES[name], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW_CASES)
def test_larger_layout_steps_as_one_process_does(pool: Pool, name: str, tmp_path: Path) -> None:
    check(pool, SLOW_CASES[name], tmp_path)


def resume_with_another(rank: int, world_size: int, run: RunConfig, other: str, folder: str) -> str:
    device = torch.device("cpu")
    job = Job(run, Grid(run.parallel, "cpu"), device)
    job.initialize(0)
    Checkpointer(Path(folder), job, CheckpointConfig()).save(1)
    optimizer = run.optimizer.model_copy(update={"name": other})
    with pytest.raises(UserError) as error:
        load_checkpoint(Path(folder) / "step_1", Job(run.model_copy(update={"optimizer": optimizer}), job.grid, device))
    return str(error.value)


@pytest.mark.parametrize(("saved", "resumed"), [("adamw", "muon"), ("lion", "adamw")])
def test_states_of_another_optimizer_are_refused(pool: Pool, tmp_path: Path, saved: str, resumed: str) -> None:
    run = tiny_run(LLAMA, {}, optimizer={"name": saved})
    said = pool.run(1, resume_with_another, run, resumed, str(tmp_path))[0]
    assert (
        f"has the states of optimizer.name = '{saved}', but the run file has '{resumed}'; restore the old value" in said
    )
