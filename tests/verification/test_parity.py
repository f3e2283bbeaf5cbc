"""The backbone: every layout computes what one process computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args
from unittest.mock import patch

import pytest
import torch
from pool import Pool
from tiny_runs import GEMMA, GPT, LLAMA, NEOX, QWEN, tiny_run

from fourfold.config.run import RunConfig, Schedule
from fourfold.parallel.communicate import Pending
from fourfold.verification.parity import ParityReport, parity, relative_differences, resharded

Case = tuple[dict[str, Any], dict[str, int], dict[str, Any]]

PACKED = {"data": {"source": "python-stdlib", "mask_documents": True}}
GOLDFISH = {"masks": {"goldfish": {"strategy": "hash"}}}
FULL = {"activation_checkpoint": {"mode": "full"}}
SELECTIVE = {"activation_checkpoint": {"mode": "selective", "modules": ["attention", "mlp", "norms", "gathers"]}}
OFFLOADED = {"activation_checkpoint": {"mode": "full", "every": 2, "offload": True}}
GROUPS = {
    "optimizer": {
        "groups": [
            {"parameters": ["layers.0.*", "embed_tokens.*"], "lr_ratio": 0.1},
            {"parameters": ["*norm.weight", "layers.*.mlp.*"], "lr_ratio": 3.0, "weight_decay": 0.5},
        ]
    }
}
DEEP_LLAMA, DEEP_GPT = LLAMA | {"num_hidden_layers": 4}, GPT | {"num_hidden_layers": 4}
SCHEDULES = get_args(Schedule)
FAST_SCHEDULES = ("1F1B", "Interleaved1F1B", "ZBVZeroBubble")
SIX_HEADS = {"preset": "llama-tiny", "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 8}
ONE_SEQUENCE = {"training": {"micro_batch_size": 1}}
UNEVEN = {"preset": "llama-tiny", "hidden_size": 56, "head_dim": 8, "intermediate_size": 72}

# Two to a line: the model, the grid, and what else is on. Global batch 8 in micro-batches of 2, so that most grids
# accumulate; labels are always masked unevenly.
CASES: dict[str, Case] = {
    "one process": (LLAMA, {}, {}),
    "x2": (LLAMA, {"x": 2}, {}),
    "z2": (LLAMA, {"z": 2}, {}),
    "x2 gpt": (GPT, {"x": 2}, {}),
    "dp2 zero 1 packed": (LLAMA, {"dp": 2, "zero": 1}, PACKED),
    "dp2 zero 3 qwen": (QWEN, {"dp": 2, "zero": 3}, {}),
    "x2 y2": (LLAMA, {"x": 2, "y": 2}, {}),
    "x2 y2, y shares the batch": (SIX_HEADS, {"x": 2, "y": 2}, {}),
    "y2 z2": (GPT, {"y": 2, "z": 2}, {}),
    "z2 dp2 zero 2": (QWEN, {"z": 2, "dp": 2, "zero": 2}, {}),
    "cp2 ulysses": (LLAMA, {"cp": 2, "cp_method": "ulysses"}, PACKED),
    "x2 cp2 packed": (LLAMA, {"x": 2, "cp": 2}, PACKED),
    "z2 cp2 zero 1 qwen": (QWEN, {"z": 2, "cp": 2, "zero": 1}, {}),
    **{f"pp2 {schedule}": (DEEP_GPT, {"pp": 2, "schedule": schedule}, ONE_SEQUENCE) for schedule in FAST_SCHEDULES},
    "pp4": (DEEP_LLAMA, {"pp": 4}, ONE_SEQUENCE),
    "pp4 two micro-batches": (
        DEEP_GPT,
        {"pp": 4, "layers_per_stage": [1, 1, 1, 1]},
        {"training": {"micro_batch_size": 4}},
    ),
    **{f"pp2 dp2 zero {zero}": (DEEP_LLAMA, {"pp": 2, "dp": 2, "zero": zero}, ONE_SEQUENCE) for zero in (0, 3)},
    "pp2 x2 packed": (DEEP_GPT, {"pp": 2, "x": 2}, ONE_SEQUENCE | PACKED),
    "pp2 cp2 interleaved": (DEEP_GPT, {"pp": 2, "cp": 2, "schedule": "Interleaved1F1B"}, ONE_SEQUENCE | PACKED),
    "y2 neox recomputed": (NEOX, {"y": 2}, FULL),
    "x2 z2 learning-rate groups": (GPT, {"x": 2, "z": 2}, GROUPS),
    "x2 y2 gemma": (GEMMA, {"x": 2, "y": 2}, SELECTIVE),
    "pp2 dp2 zero 2 gemma": (GEMMA | {"num_hidden_layers": 4}, {"pp": 2, "dp": 2, "zero": 2}, ONE_SEQUENCE),
    "x2 goldfish": (LLAMA, {"x": 2}, GOLDFISH),
    "z2 dp2 zero 3 goldfish packed": (GPT, {"z": 2, "dp": 2, "zero": 3}, GOLDFISH | PACKED),
}

SLOW_CASES: dict[str, Case] = {
    "no overlap": (LLAMA, {"x": 2, "z": 2}, {"overlap": {"input_gradients": False, "weight_prefetch": 0}}),
    "no overlap over y": (LLAMA, {"y": 2}, {"overlap": {"input_gradients": False, "gate_sum": False}}),
    "x2 y2 packed": (LLAMA, {"x": 2, "y": 2}, PACKED | SELECTIVE),
    "z4 uneven shards": (UNEVEN, {"z": 4}, {}),
    "cp4 ring": (LLAMA, {"cp": 4, "cp_method": "ring"}, PACKED | SELECTIVE),
    "x2 y2 neox recomputed": (NEOX, {"x": 2, "y": 2}, FULL),
    "deep prefetch": (LLAMA | {"num_hidden_layers": 4}, {"z": 2}, {"overlap": {"weight_prefetch": 3}}),
    "x2 dp2 zero 3": (LLAMA, {"x": 2, "dp": 2, "zero": 3}, ONE_SEQUENCE),
    "dp2 zero 2 gpt": (GPT, {"dp": 2, "zero": 2}, {}),
    "x2 y2 qwen recomputed": (QWEN, {"x": 2, "y": 2}, FULL),
    **{
        f"pp2 {schedule}": (DEEP_GPT, {"pp": 2, "schedule": schedule}, ONE_SEQUENCE)
        for schedule in SCHEDULES
        if schedule not in FAST_SCHEDULES
    },
    "pp2 dp2 zero 2": (DEEP_LLAMA, {"pp": 2, "dp": 2, "zero": 2}, ONE_SEQUENCE),
    "y2": (LLAMA, {"y": 2}, {}),
    "dp2": (LLAMA, {"dp": 2}, {}),
    "y2 gpt recomputed": (GPT, {"y": 2}, FULL),
    "z2 gpt recomputed": (GPT, {"z": 2}, SELECTIVE),
    "x4": (LLAMA, {"x": 4}, {}),
    "y4": (LLAMA, {"y": 4}, {}),
    "dp4": (LLAMA, {"dp": 4}, {}),
    "x2 y2 gpt": (GPT, {"x": 2, "y": 2}, {}),
    "x2 y2, y shares the queries": (SIX_HEADS | {"attention_bias": True}, {"x": 2, "y": 2}, ONE_SEQUENCE | PACKED),
    "x2 y2, one kv head": (LLAMA | {"num_key_value_heads": 1}, {"x": 2, "y": 2}, {}),
    "x2 z2": (QWEN, {"x": 2, "z": 2}, {}),
    "z2 dp2 zero 0": (GPT, {"z": 2, "dp": 2}, {}),
    "z2 dp2 zero 1": (LLAMA, {"z": 2, "dp": 2, "zero": 1}, ONE_SEQUENCE),
    "cp2 ring, gpt packed": (GPT, {"cp": 2}, PACKED),
    "dp2 cp2": (GPT, {"dp": 2, "cp": 2}, FULL),
    "pp2 dp2 zero 1 ZBV": (DEEP_GPT, {"pp": 2, "dp": 2, "zero": 1, "schedule": "ZBVZeroBubble"}, ONE_SEQUENCE),
    "pp2 z2, every second block from the CPU": (DEEP_GPT, {"pp": 2, "z": 2}, ONE_SEQUENCE | OFFLOADED),
    "x2 y2 z2": (QWEN, {"x": 2, "y": 2, "z": 2}, FULL | ONE_SEQUENCE),
    "z2 cp2 neox packed": (NEOX, {"z": 2, "cp": 2}, PACKED | SELECTIVE),
    "x2 cp2 goldfish": (QWEN, {"x": 2, "cp": 2}, GOLDFISH),
    "x2 y2 z2 gpt": (GPT, {"x": 2, "y": 2, "z": 2}, {}),
    **{
        f"pp4 {schedule}": (model | {"num_hidden_layers": 8}, {"pp": 4, "schedule": schedule}, ONE_SEQUENCE)
        for schedule in SCHEDULES
        for model in (LLAMA if schedule in ("GPipe", "LoopedBFS") else GPT,)
    },
    "pp2 x2 z2": (DEEP_LLAMA, {"pp": 2, "x": 2, "z": 2}, ONE_SEQUENCE),
    "pp2 cp2 y2": (DEEP_GPT, {"pp": 2, "cp": 2, "y": 2}, ONE_SEQUENCE | PACKED),
    "pp2 dp2 cp2 zero 1": (DEEP_LLAMA, {"pp": 2, "dp": 2, "cp": 2, "zero": 1}, ONE_SEQUENCE),
    "x2 y2 cp2 shared batch": (SIX_HEADS, {"x": 2, "y": 2, "cp": 2}, {}),
    "pp2 cp2 z2 x2, 16 ranks": (DEEP_LLAMA, {"pp": 2, "cp": 2, "z": 2, "x": 2}, ONE_SEQUENCE | FULL),
    "pp2 cp2 z2 y2, 16 ranks": (DEEP_GPT, {"pp": 2, "cp": 2, "z": 2, "y": 2}, ONE_SEQUENCE | PACKED),
    "x4 y2": (LLAMA, {"x": 4, "y": 2}, {}),
    "x2 y2 z2 gemma": (GEMMA, {"x": 2, "y": 2, "z": 2}, ONE_SEQUENCE | PACKED),
    "pp2 x2 z2 neox": (NEOX | {"num_hidden_layers": 4}, {"pp": 2, "x": 2, "z": 2}, ONE_SEQUENCE),
    "x2 y4 gpt, y shares the batch": (GPT, {"x": 2, "y": 4}, {"training": {"micro_batch_size": 4}}),
    "x2 y4, y shares the queries": (SIX_HEADS, {"x": 2, "y": 4}, PACKED | ONE_SEQUENCE),
    "x4 y2, kv not in x": (LLAMA | {"num_key_value_heads": 2}, {"x": 4, "y": 2}, SELECTIVE),
    "x4, heads repeat kv": (LLAMA | {"num_attention_heads": 12, "num_key_value_heads": 6, "head_dim": 8}, {"x": 4}, {}),
    "x8 one kv head": (QWEN | {"num_key_value_heads": 1}, {"x": 8}, {}),
    "y8": (GPT | {"num_attention_heads": 8}, {"y": 8}, {}),
    "z8 uneven": (UNEVEN, {"z": 8}, ONE_SEQUENCE),
    **{
        f"x2 {axis}2 dp2 zero {zero} {name}": (model, {"x": 2, axis: 2, "dp": 2, "zero": zero}, ONE_SEQUENCE)
        for axis in ("y", "z")
        for zero in (0, 1, 2, 3)
        for name, model in (("gpt", GPT), ("qwen", QWEN))
    },
    **{
        f"x2 y2 z2 dp2 zero {zero}": (LLAMA, {"x": 2, "y": 2, "z": 2, "dp": 2, "zero": zero}, ONE_SEQUENCE)
        for zero in (0, 3)
    },
    "x2 y2 z2 dp2 gpt": (GPT, {"x": 2, "y": 2, "z": 2, "dp": 2}, ONE_SEQUENCE | FULL),
}


def parity_body(rank: int, world_size: int, run: RunConfig) -> ParityReport | None:
    return parity(run, torch.device("cpu"))


def check(pool: Pool, case: Case, folder: Path) -> None:
    model, grid, sections = case
    run = tiny_run(model, grid, output_dir=str(folder), **sections)
    report = pool.run(run.parallel.world_size, parity_body, run)[0]
    assert report.ok, report
    # Not by luck of a loose limit: rounding leaves two digits of room.
    assert report.gradients < 5e-6, report.each_gradient


@pytest.mark.fast_cases(14)
@pytest.mark.parametrize("name", CASES)
def test_layout_computes_what_one_process_computes(pool: Pool, name: str, tmp_path: Path) -> None:
    check(pool, CASES[name], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW_CASES)
def test_larger_layout_computes_what_one_process_computes(pool: Pool, name: str, tmp_path: Path) -> None:
    check(pool, SLOW_CASES[name], tmp_path)


def unsummed_gradients_body(rank: int, world_size: int, run: RunConfig) -> ParityReport | None:
    """The classical defect: gradients of norm weights that no one sums over the tokens' ranks."""
    with patch("fourfold.training.job.sum_partial_gradients"):
        return parity(run, torch.device("cpu"), steps=1)


def test_parity_sees_a_gradient_that_is_not_summed(pool: Pool, tmp_path: Path) -> None:
    report = pool.run(2, unsummed_gradients_body, tiny_run(LLAMA, {"x": 2}, output_dir=str(tmp_path)))[0]
    assert not report.ok
    wrong = {name for name, error in report.each_gradient.items() if error > 1e-3}
    assert wrong == {name for name in report.each_gradient if "norm" in name}
    assert report.loss < 1e-6, "the loss of the first step looks right, which is why gradients are compared"


def lost_rows_body(rank: int, world_size: int, run: RunConfig) -> ParityReport | None:
    """A sum over y that one layer forgets."""
    with patch("fourfold.parallel.linear.start_all_reduce", lambda partial, axis, why: Pending(partial)):
        return parity(run, torch.device("cpu"), steps=1)


def test_parity_sees_a_sum_that_is_missing(pool: Pool, tmp_path: Path) -> None:
    report = pool.run(2, lost_rows_body, tiny_run(LLAMA, {"y": 2}, output_dir=str(tmp_path)))[0]
    assert not report.ok
    assert report.loss > 1e-5


def test_nan_is_never_equal() -> None:
    expected = {"w": torch.ones(3)}
    assert relative_differences({"w": torch.tensor([1.0, float("nan"), 1.0])}, expected, 1e-4)["w"] == float("inf")


@pytest.mark.parametrize(
    "grid",
    [
        {"x": 2, "y": 2},
        {"x": 2, "y": 2, "z": 2, "dp": 2},
        {"x": 2, "y": 2, "z": 2, "dp": 2, "zero": 3},
        {"z": 2},
        {"dp": 8},
    ],
    ids=str,
)
def test_resume_is_tried_on_another_grid(grid: dict[str, int]) -> None:
    run = tiny_run(LLAMA, grid, training={"global_batch_size": 16, "micro_batch_size": 1})
    assert resharded(run).parallel != run.parallel
    assert resharded(run).parallel.world_size == run.parallel.world_size


def idle_optimizer_body(rank: int, world_size: int, run: RunConfig) -> ParityReport | None:
    with patch("fourfold.training.optimizer.ShardedAdamW.step"):
        return parity(run, torch.device("cpu"), steps=1)


def test_parity_sees_an_optimizer_that_does_nothing(pool: Pool, tmp_path: Path) -> None:
    """Also of a run whose long warm-up hardly moves the weights at first."""
    run = tiny_run(LLAMA, {"z": 2}, output_dir=str(tmp_path), lr_scheduler={"warmup_steps": 2000})
    assert pool.run(2, idle_optimizer_body, run)[0].weights > 1e-4
