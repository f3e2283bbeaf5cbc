"""Every layout of a mixture of experts computes what one process computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from pool import Pool
from test_parity import check
from tiny_runs import DEEPSEEK, MIXTURE, QWEN_MOE, tiny_run

from fourfold.config.run import ParallelConfig, RunConfig
from fourfold.errors import UserError
from fourfold.verification.low_precision import LIMIT, PrecisionError, precision_error
from fourfold.verification.parity import resharded

Case = tuple[dict[str, Any], dict[str, Any], dict[str, Any]]

LOSSES = {"moe": {"load_balancing_loss": 0.5, "z_loss": 0.01}}
BIAS = {"moe": {"bias_update_rate": 0.02}}
CAPACITY = {"moe": {"capacity_factor": 0.75, "load_balancing_loss": 0.5}}
PACKED = {"data": {"source": "python-stdlib", "mask_documents": True}}
GOLDFISH = {"masks": {"goldfish": {"strategy": "hash"}}}
FULL = {"activation_checkpoint": {"mode": "full"}}
SELECTIVE = {"activation_checkpoint": {"mode": "selective", "modules": ["attention", "mlp", "norms", "gathers"]}}
OFFLOADED = {"activation_checkpoint": {"mode": "full", "every": 2, "offload": True}}
ONE_SEQUENCE = {"training": {"micro_batch_size": 1}}
ADAPTERS = {"lora": {"rank": 4, "targets": ["q_proj", "o_proj"]}}
NODES_OF_2 = {"overlap": {"shards_per_node": 2}}
DEEP = MIXTURE | {"num_hidden_layers": 4}
TOP_1, TOP_8 = MIXTURE | {"num_experts_per_tok": 1}, QWEN_MOE | {"num_experts_per_tok": 8}
MANY = MIXTURE | {"num_experts": 64, "num_experts_per_tok": 1, "moe_intermediate_size": 16}
"""More experts than the tokens of a small micro-batch reach: some get none."""

CASES: dict[str, Case] = {
    "one process": (QWEN_MOE, {}, LOSSES),
    "dp2, experts whole": (MIXTURE, {"dp": 2}, LOSSES),
    "ep2 dp2": (QWEN_MOE, {"dp": 2, "ep": 2}, LOSSES),
    "ep2 z2": (DEEPSEEK, {"z": 2, "ep": 2}, BIAS),
    "ep2 cp2 with capacity": (MIXTURE, {"cp": 2, "ep": 2}, CAPACITY),
    "x2 ep2 dp2": (MIXTURE, {"x": 2, "dp": 2, "ep": 2}, LOSSES),
    "y2 ep2 z2": (QWEN_MOE, {"y": 2, "z": 2, "ep": 2}, LOSSES | FULL),
    "ep2 dp4 zero 3": (MIXTURE, {"dp": 4, "ep": 2, "zero": 3}, ONE_SEQUENCE | LOSSES),
    "pp2 ep2 dp2": (DEEPSEEK, {"pp": 2, "dp": 2, "ep": 2}, ONE_SEQUENCE | BIAS),
}

SLOW_CASES: dict[str, Case] = {
    "x2": (QWEN_MOE, {"x": 2}, LOSSES),
    "y2": (QWEN_MOE, {"y": 2}, LOSSES),
    "x2 y2 with capacity": (QWEN_MOE, {"x": 2, "y": 2}, CAPACITY),
    "ep4 dp4": (MIXTURE, {"dp": 4, "ep": 4}, LOSSES),
    "ep4 z4": (MIXTURE, {"z": 4, "ep": 4}, LOSSES | SELECTIVE),
    "ep2 z4": (DEEPSEEK, {"z": 4, "ep": 2}, BIAS),
    "ep4 z2 dp2": (DEEPSEEK, {"z": 2, "dp": 2, "ep": 4}, BIAS),
    "ep2 z2 dp2": (DEEPSEEK, {"z": 2, "dp": 2, "ep": 2}, BIAS | FULL),
    **{
        f"ep2 dp4 zero {zero}": (MIXTURE, {"dp": 4, "ep": 2, "zero": zero}, ONE_SEQUENCE | LOSSES) for zero in (0, 1, 2)
    },
    **{f"ep4 dp4 zero {zero}": (QWEN_MOE, {"dp": 4, "ep": 4, "zero": zero}, LOSSES) for zero in (1, 2, 3)},
    **{
        f"ep{ep} z2 dp2 zero {zero}": (MIXTURE, {"z": 2, "dp": 2, "ep": ep, "zero": zero}, ONE_SEQUENCE | LOSSES)
        for ep in (2, 4)
        for zero in (1, 2, 3)
    },
    "ep2 z4 zero 2": (MIXTURE, {"z": 4, "ep": 2, "zero": 2}, LOSSES),
    "ep2 z4 dp2 zero 2 deep": (DEEP, {"z": 4, "dp": 2, "ep": 2, "zero": 2}, ONE_SEQUENCE | LOSSES | FULL),
    **{
        f"ep{ep} dp2 z3 zero 3": (
            MIXTURE | {"num_experts": 6},
            {"dp": 2, "z": 3, "ep": ep, "zero": 3},
            {"training": {"micro_batch_size": 1, "global_batch_size": 12}},
        )
        for ep in (2, 6)
    },
    "ep2 z4 in nodes of 2": (DEEPSEEK, {"z": 4, "ep": 2}, BIAS | NODES_OF_2),
    "ep2 z2 prefetched deeply": (DEEP, {"z": 2, "ep": 2}, {"overlap": {"weight_prefetch": 3}}),
    "ep2 z2 not prefetched": (DEEP, {"z": 2, "ep": 2}, {"overlap": {"weight_prefetch": 0}}),
    "ep4 cp4 with capacity": (MIXTURE, {"cp": 4, "ep": 4}, CAPACITY | PACKED),
    "ep4 cp2 dp2 ring": (MIXTURE, {"cp": 2, "dp": 2, "ep": 4, "cp_method": "ring"}, LOSSES | PACKED),
    "x2 ep2 cp2 with capacity": (QWEN_MOE, {"x": 2, "cp": 2, "ep": 2}, CAPACITY | PACKED),
    "x4 ep2 dp2": (MIXTURE, {"x": 4, "dp": 2, "ep": 2}, LOSSES | ONE_SEQUENCE),
    "x2 y2 ep2 z2": (QWEN_MOE, {"x": 2, "y": 2, "z": 2, "ep": 2}, LOSSES | ONE_SEQUENCE),
    "x2 y2 ep2 dp2 zero 3 recomputed": (DEEPSEEK, {"x": 2, "y": 2, "dp": 2, "ep": 2, "zero": 3}, BIAS | SELECTIVE),
    "x2 ep4 dp2 z2": (MIXTURE, {"x": 2, "dp": 2, "z": 2, "ep": 4}, CAPACITY | FULL),
    **{
        f"pp2 ep2 dp2 {schedule}": (DEEP, {"pp": 2, "dp": 2, "ep": 2, "schedule": schedule}, ONE_SEQUENCE | LOSSES)
        for schedule in ("GPipe", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
    },
    "pp2 ep2 z2 offloaded": (DEEP, {"pp": 2, "z": 2, "ep": 2}, ONE_SEQUENCE | LOSSES | OFFLOADED),
    "pp2 ep2 dp2 zero 1 ZBV": (
        DEEPSEEK,
        {"pp": 2, "dp": 2, "ep": 2, "zero": 1, "schedule": "ZBVZeroBubble"},
        ONE_SEQUENCE | BIAS,
    ),
    "pp2 x2 ep2 cp2": (DEEP, {"pp": 2, "x": 2, "cp": 2, "ep": 2}, ONE_SEQUENCE | CAPACITY),
    "ep2 dp2 top 1": (TOP_1, {"dp": 2, "ep": 2}, LOSSES),
    "ep2 dp2 top 8, all experts": (TOP_8, {"dp": 2, "ep": 2}, LOSSES),
    "ep4 dp4 experts without a token": (MANY, {"dp": 4, "ep": 4}, LOSSES | ONE_SEQUENCE),
    "x2 ep2 z2 experts without a token": (MANY, {"x": 2, "z": 2, "ep": 2}, CAPACITY),
    "ep2 dp2 goldfish packed": (MIXTURE, {"dp": 2, "ep": 2}, LOSSES | GOLDFISH | PACKED),
    "ep2 dp2 adapters": (MIXTURE, {"dp": 2, "ep": 2}, ADAPTERS | LOSSES),
    "x2 ep2 z2 adapters": (QWEN_MOE, {"x": 2, "z": 2, "ep": 2}, {"lora": {"rank": 4}}),
    "ep2 dp2 all tokens on one expert": (
        MIXTURE | {"num_experts": 2, "num_experts_per_tok": 1, "router_bias": True},  # the bias makes them take turns
        {"dp": 2, "ep": 2},
        {"moe": {"bias_update_rate": 100.0}},
    ),
    "geglu": (MIXTURE | {"mlp": "geglu"}, {"dp": 2, "ep": 2}, {}),
    "neox's parallel residual": (MIXTURE | {"parallel_residual": True}, {"x": 2, "dp": 2, "ep": 2}, FULL),
}


@pytest.mark.fast_cases(4)
@pytest.mark.parametrize("name", CASES)
def test_layout_computes_what_one_process_computes(pool: Pool, name: str, tmp_path: Path) -> None:
    check(pool, CASES[name], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW_CASES)
def test_larger_layout_computes_what_one_process_computes(pool: Pool, name: str, tmp_path: Path) -> None:
    check(pool, SLOW_CASES[name], tmp_path)


def test_it_resumes_with_other_experts_on_a_rank() -> None:
    for grid in ({"dp": 4, "ep": 2}, {"x": 2, "z": 2, "ep": 2}, {"dp": 2}):
        run = tiny_run(MIXTURE, grid)
        assert resharded(run).parallel.ep != run.parallel.ep


@pytest.mark.parametrize(
    ("model", "grid", "sections", "message"),
    [
        (MIXTURE, {"dp": 2, "ep": 4}, {}, "parallel.ep = 4 must divide dp·cp·z = 2"),
        (MIXTURE | {"num_experts": 6}, {"dp": 4, "ep": 4}, {}, "model.num_experts = 6 cannot be split over ep = 4"),
        (
            {"preset": "llama-tiny"},
            {"dp": 2, "ep": 2},
            {},
            "parallel.ep = 2 splits experts, and model.num_experts is 0",
        ),
        (
            MIXTURE | {"moe_intermediate_size": 50},
            {"x": 4},
            {},
            "model.moe_intermediate_size = 50 cannot be split over x",
        ),
        (
            MIXTURE | {"num_experts": 6},
            {"dp": 3, "z": 2, "ep": 3},
            {"training": {"global_batch_size": 12}},
            "ep = 3 and z = 2 must divide each other",
        ),
        (MIXTURE, {"x": 2}, {"overlap": {"batch_parts": 2}}, "overlap.batch_parts = 2 is for dense models"),
        (
            MIXTURE,
            {},
            {"training": {"precision": "bf16", "float8": "rowwise"}},
            "float8 = 'rowwise' is for dense models",
        ),
        (MIXTURE, {}, {"training": {"compile": True}}, "training.compile is for dense models"),
        (MIXTURE, {}, BIAS, "set model.router_bias = true"),
        ({"preset": "llama-tiny"}, {}, LOSSES, "moe.load_balancing_loss is of a mixture of experts"),
        (DEEPSEEK, {}, BIAS | {"lora": {"rank": 2}}, "lora freezes the biases of routers"),
    ],
)
def test_what_is_not_supported_is_refused(
    model: dict[str, Any], grid: dict[str, Any], sections: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        tiny_run(model, grid, **sections)


def precision_body(rank: int, world_size: int, run: RunConfig) -> PrecisionError | None:
    return precision_error(run, torch.device("cpu"), steps=8)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("grid", [{"dp": 2, "ep": 2}, {"x": 2, "z": 2, "ep": 2}, {"y": 2, "dp": 2, "ep": 2}], ids=str)
def test_lower_precision_only_rounds(pool: Pool, grid: dict[str, int], precision: str, tmp_path: Path) -> None:
    run = tiny_run(MIXTURE, grid, training={"precision": precision}, output_dir=str(tmp_path), **LOSSES)
    alone = run.model_copy(update={"parallel": ParallelConfig()})
    found, one = (pool.run(r.parallel.world_size, precision_body, r)[0] for r in (run, alone))
    assert found.gradients < LIMIT * one.gradients
    assert found.weights < LIMIT * one.weights
