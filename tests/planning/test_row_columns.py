"""Columns of measured rows that describe the model, the optimizer, and the framework change the workload as they
should."""

from __future__ import annotations

from pathlib import Path

import pytest
from planner_rows import COLUMNS, HEADER, row_text

from fourfold.planning.calibration.columns import parse_cells
from fourfold.planning.calibration.fit import Calibration
from fourfold.planning.calibration.rows import Row, read_rows, row_of
from fourfold.planning.calibration.score import predict_rows
from fourfold.planning.cost.head_memory import head_bytes
from fourfold.planning.cost.memory import stage_memory
from fourfold.planning.cost.out_of_memory import CACHED, FRAGMENTED, UNUSABLE, needed_bytes, runtime_bytes
from fourfold.planning.cost.tensor_sizes import tensor_bytes
from fourfold.planning.cost.weight_traffic import weight_traffic_seconds
from fourfold.planning.machines.constants import prior_constants
from fourfold.planning.machines.machine import load_machine
from fourfold.planning.workload import OPTIMIZERS, SCHEDULES, Workload

A100 = load_machine("dgx-a100")


def row(**cells: object) -> Row:
    text = {**COLUMNS, **{name: str(value) for name, value in cells.items()}}
    return row_of(parse_cells({name: cell for name, cell in text.items() if cell}))


def held(work: Workload, *names: str) -> float:
    """Return the bytes of some kinds of memory on the first rank."""
    return sum(float(bytes_) for name, bytes_ in stage_memory(work, A100, 0).items() if name in names)


def test_columns_of_the_model() -> None:
    gated, plain = (
        row(ep=8, architecture="moe", experts=16, experts_per_token=2, expert_ffn_hidden=768, gated_experts=gated)
        for gated in ("yes", "no")
    )
    assert plain.work.model.expert_weights == pytest.approx(gated.work.model.expert_weights * 2 / 3)
    assert row(mlp="swiglu", tie_word_embeddings="yes").work.model.tie_word_embeddings
    windows = row(sliding_window=128, sliding_layers=3).work.model
    assert (windows.sliding_window, windows.sliding) == (128, 3 / 12) and row().work.model.sliding == 0
    latent = row(head_dim=192, q_lora_rank=768, kv_lora_rank=512, qk_rope_head_dim=64, v_head_dim=128).work.model
    projections = 1024 * (768 + 512 + 64) + 768 * 16 * 192 + 512 * 16 * (128 + 128) + 16 * 128 * 1024
    assert latent.attention_weights == pytest.approx(projections)


def test_columns_of_the_step() -> None:
    plain, small = row(), row(master_weights="bf16", moments="int8", reduce_dtype="bf16")
    entries = plain.work.model.num_hidden_layers * plain.work.model.block_weights + plain.work.table_weights
    assert held(plain.work, "optimizer") - held(small.work, "optimizer") == pytest.approx((12 - 2) * entries, rel=0.01)
    assert (plain.work.step.reduce_bytes, small.work.step.reduce_bytes) == (4, 2)
    assert row(imbalance=2).work.step.imbalance == 2
    assert row(optimizer="lion").work.step.optimizer == OPTIMIZERS.index("lion")
    assert row(pp=2, schedule="GPipe").work.layout.schedule == SCHEDULES.index("GPipe")
    sharded = {"program": "torchtitan", "sharding": "fsdp"}
    alone, cast = row(**sharded).work, row(**sharded, autocast="yes").work
    assert held(cast, "weights") == 2 * held(alone, "weights")
    assert tensor_bytes(cast).residual == 2 * tensor_bytes(alone).residual


def test_what_selective_recompute_repeats() -> None:
    repeated = {"recompute": "selective", "program": "nemo", "mlp": "swiglu"}
    core, activations = (row(**repeated, recompute_what=what).work.program for what in ("attention", "activations"))
    assert (core.recomputes_attention, core.recomputes_mlp, core.recomputes_norms) == (True, False, False)
    assert (activations.recomputes_attention, activations.recomputes_mlp) == (False, True)


def test_the_loss_of_programs() -> None:
    """Megatron-LM overwrites its fp32 logits. Without a compiler, torchtitan keeps logits, softmax, and gradient."""
    megatron, eager, compiled = (
        row(program=name, compiled=compiled).work
        for name, compiled in (("megatron-lm", ""), ("torchtitan", ""), ("torchtitan", "yes"))
    )
    logits = megatron.tokens * megatron.model.padded_vocab_size
    assert head_bytes(megatron.but(in_place_loss=False)) - head_bytes(megatron) == 2 * logits
    assert head_bytes(eager) - head_bytes(eager.but(eager_loss=False)) == 6 * logits
    assert not compiled.program.eager_loss and not row(program="torchtitan", loss="fused").work.program.eager_loss


def test_an_allocator_without_expandable_segments_needs_more_memory() -> None:
    plain, expandable = row(), row(expandable_segments="yes")
    needed = [needed_bytes(10e9, each.work, each.machine) for each in (plain, expandable)]
    runtime = runtime_bytes(plain.work, plain.machine)
    assert needed[0] - needed[1] == pytest.approx((10e9 - runtime) / (1 + CACHED) * (FRAGMENTED - UNUSABLE))


def test_zero3_gathers_every_module() -> None:
    """DeepSpeed's ZeRO-3 gathers the weights of each module on their own, so the latency counts six times."""
    zero3 = row(program="deepspeed", sharding="zero3")
    constants, weights = prior_constants(), 1.0
    one, six = (
        weight_traffic_seconds(zero3.work.but(gathers_per_block=n), zero3.machine, constants, weights, 1)
        for n in (1, 6)
    )
    assert (zero3.work.program.gathers_per_block, six / one) == (6, pytest.approx(7 / 2, rel=0.01))


def test_a_row_of_the_errata_is_corrected(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("\n".join([HEADER, row_text(source="V1"), row_text(source="V2")]))
    assert [each.work.layout.recompute for each in read_rows([path])[0]] == [0, 2]


def test_memory_of_tensors_leaves_out_what_the_allocator_caches() -> None:
    tensors, reserved = (row(memory_gb=30, memory_kind=kind) for kind in ("tensors", "allocator"))
    scored = predict_rows([tensors, reserved], Calibration())
    assert scored[1].memory_gb == pytest.approx(scored[0].memory_gb * (1 + CACHED))
    assert scored[1].p_oom == pytest.approx(scored[0].p_oom)
