"""Measured rows are read as they were run, or skipped with a reason; scores follow their definitions."""

from __future__ import annotations

from pathlib import Path

import pytest
from planner_rows import COLUMNS, HEADER, row_text

from fourfold.errors import UserError
from fourfold.planning.calibration.fit import Calibration
from fourfold.planning.calibration.rows import Skipped, read_rows, row_of
from fourfold.planning.calibration.score import Scored, errors_of, memory_of, predict_rows, sweeps_of
from fourfold.planning.cost.activations import head_bytes, kept_by_block
from fourfold.planning.cost.memory import CACHED, CATEGORIES, stage_memory
from fourfold.planning.machines.machine import load_machine
from fourfold.planning.workload import Workload

A100 = load_machine("dgx-a100")


def row(**cells: object):
    return row_of(dict(zip(COLUMNS, row_text(**cells).split(","), strict=True)))


def held(work: Workload, *names: str) -> float:
    """Bytes of the first rank, of some categories."""
    return sum(float(bytes_) for name, bytes_ in stage_memory(work, A100, 0).items() if name in names)


def test_a_megatron_row() -> None:
    megatron = row(
        tp=2, pp=2, vpp=3, dp=2, zero_fsdp="distributed optimizer (ZeRO-1)", seq_parallel="yes", act_ckpt="none"
    )
    work = megatron.work
    layout, program = work.layout, work.program
    assert (layout.x, layout.pp, layout.interleave, layout.dp, layout.z, layout.zero) == (2, 2, 3, 2, 1, 1)
    assert program.split_residual and program.regather and program.overlap_dp
    assert program.weights_kept and program.half_weights
    assert work.layout.gpus == 8 and work.micro_batches == 16
    assert megatron.machine.name == "dgx-a100" and megatron.dense_half


def test_an_fsdp_row() -> None:
    work = row(n_gpus=64, zero_fsdp="FSDP2 full shard (group 8)", global_batch_seqs=128).work
    assert (work.layout.z, work.layout.dp, work.layout.zero) == (8, 8, 0)
    assert not work.program.half_weights
    work = row(zero_fsdp="ZeRO-3 (DeepSpeed)").work
    assert (work.layout.z, work.layout.dp, work.layout.zero) == (1, 8, 3)


def test_the_notes_of_a_torchtitan_row() -> None:
    """They name compilation, and the overlap of tensor-parallel collectives."""
    sharded = {"zero_fsdp": "FSDP2 full shard (group 1)", "tp": 8}
    vanilla, asynchronous, eager = (
        row(**sharded, notes=notes).work.program
        for notes in ("torch.compile; vanilla TP", "torch.compile; AsyncTP", "eager (no torch.compile)")
    )
    assert (vanilla.fused, vanilla.overlap_x, vanilla.overlap_forward) == (True, False, False)
    assert (asynchronous.fused, asynchronous.overlap_x, asynchronous.overlap_forward) == (True, True, True)
    assert not eager.fused


def test_what_deepspeed_keeps() -> None:
    """In bf16 it shards the optimizer's state whatever the stage, sums fp32 gradients in all-reduces and keeps them
    beside the others; a stage of a pipeline keeps what it has sent."""
    bf16 = row(zero_fsdp="ZeRO-0 (DeepSpeed)", precision="bf16", pp=2, dp=4).work
    assert (bf16.layout.zero, bf16.program.all_reduces_gradients, bf16.program.gradient_bytes) == (1, True, 6)
    fp16 = row(zero_fsdp="ZeRO-0 (DeepSpeed)", precision="fp16", pp=2, dp=4).work
    assert (fp16.layout.zero, fp16.step.reduce_bytes, fp16.program.gradient_copy) == (0, 2, True)
    for work in (bf16, fp16):
        kept, alone = (held(work.but(stage_keeps=more), "activations") for more in (work.program.stage_keeps, 0))
        assert kept - alone == 2 * 1.5 * (2 * 2 * 1024 * 1024)  # in flight, residuals, bytes of one


def test_the_optimizers_copy_of_gradients_is_made_when_activations_are_gone() -> None:
    work = row(zero_fsdp="ZeRO-0 (DeepSpeed)", precision="fp16").work
    assert held(work, *CATEGORIES) == held(work.but(gradient_copy=False), *CATEGORIES)
    few = work.but(micro_batch=1, seq=64, batch=8)
    few_alone = few.but(gradient_copy=False)
    entries = few.model.layers * few.model.block_weights + few.model.vocab * few.model.hidden
    assert held(few, "logits") == held(few_alone, "logits")
    assert held(few, *CATEGORIES) - held(few_alone, *CATEGORIES) == pytest.approx(
        (4 * entries - held(few_alone, "activations", "logits")) * (1 + CACHED)
    )


def test_what_nvidias_recipes_keep() -> None:
    """Gradients in bf16; a fused SwiGLU and loss; in FP8 the inputs of products in a byte."""
    how = {"source_ref": "NVIDIA/NeMo@1:docs", "zero_fsdp": "distributed optimizer (ZeRO-1)", "act_ckpt": "none"}
    cells = {**how, "mlp_type": "swiglu", "tp": 2, "dp": 4, "seq_parallel": ""}
    work = row(**cells).work
    assert work.step.reduce_bytes == 2 and not work.model.tied
    assert work.program.split_residual and not work.program.keeps_float8_inputs
    inner = 2 * work.tokens * work.model.inner / work.layout.x
    assert kept_by_block(work.but(fused_gate=False), False) - kept_by_block(work, False) == inner
    logits = work.tokens * work.model.vocab / work.layout.x
    assert head_bytes(work.but(fused_loss=False)) - head_bytes(work) == 4 * logits
    eight = row(**cells, precision="fp8").work
    gathered = 2 * work.tokens * work.model.hidden / 2
    assert kept_by_block(eight.but(keeps_float8_inputs=False), False) - kept_by_block(eight, False) == (
        2 * gathered / 2 - 2 * work.tokens * work.model.queries / work.layout.x / 2 + inner / 2
    )


def test_other_programs_are_not_nvidias() -> None:
    work = row(zero_fsdp="distributed optimizer (ZeRO-1)", mlp_type="swiglu", tp=2, dp=4, seq_parallel="").work
    program = work.program
    assert work.step.reduce_bytes == 4 and not (program.split_residual or program.fused_gate or program.fused_loss)
    assert row(source_ref="mosaicml/llm-foundry@1:README.md", zero_fsdp="FSDP FULL_SHARD").work.program.fused_loss


@pytest.mark.parametrize(
    ("text", "node"),
    [
        ("NVLink3; 4x Omni-Path 100 Gb/s per node", 50e9),
        ("NVLink; 8x HDR InfiniBand 200 Gb/s per node", 200e9),
        ("800 Gb/s per node (README)", 100e9),
        ("NVLink in host; 400 Gb/s RDMA per GPU", 400e9),
        ("", 200e9),
    ],
)
def test_the_network_of_a_row(text: str, node: float) -> None:
    assert row(interconnect=text).machine.node == node


@pytest.mark.parametrize(
    ("cells", "reason"),
    [
        ({"ep": 8}, "mixture of experts"),
        ({"gpu_type": "TPU v4"}, "unknown GPU"),
        ({"layers": ""}, "no layers"),
        ({"micro_batch": ""}, "no micro_batch"),
        ({"tp": 3}, "does not divide"),
        ({"step_time_s": ""}, "nothing measured"),
        ({"hidden": "wide"}, "hidden is not a number"),
        ({"precision": "NVFP4"}, "below 8 bits"),
        ({"micro_batch": 16}, "more than the global batch"),
        ({"heads": 0}, "heads is not between 0"),
        ({"hidden": -1024}, "hidden is not between 0"),
        ({"seq_len": "nan"}, "seq_len is not between 0"),
        ({"step_time_s": "inf"}, "step_time_s is not between 0"),
        ({"layers": 1.5}, "layers is not a whole number"),
        ({"vpp": 99, "pp": 2, "dp": 4}, "more than the layers"),
        ({"zero_fsdp": "FSDP2 (group 0)"}, "a group of no GPUs"),
    ],
)
def test_a_row_that_cannot_be_predicted_has_a_reason(cells: dict[str, object], reason: str) -> None:
    with pytest.raises(Skipped, match=reason):
        row(**cells)


def test_a_file_that_is_no_table_is_a_sentence(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_bytes(HEADER.encode() + b"\n\xe9\n")
    with pytest.raises(UserError, match="is not a CSV file in UTF-8"):
        read_rows([path])
    path.write_text(HEADER.replace(",", ";"))
    with pytest.raises(UserError, match="must be separated by commas"):
        read_rows([path])


def test_a_file_is_read_and_its_skipped_rows_counted(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("\n".join([HEADER, row_text(), row_text(ep=8), row_text(ep=4), row_text(precision="fp8")]))
    rows, skipped = read_rows([path])
    assert len(rows) == 2 and skipped == {"mixture of experts": 2}
    assert [r.dense_half for r in rows] == [True, False]
    path.write_text("a,b\n1,2\n")
    with pytest.raises(UserError, match="has no column gpu_type"):
        read_rows([path])
    with pytest.raises(UserError, match="cannot be read"):
        read_rows([tmp_path / "none.csv"])


def test_out_of_memory_rows() -> None:
    assert row(mem_gb_per_gpu="OOM", step_time_s="").out_of_memory
    scored = predict_rows([row(mem_gb_per_gpu="OOM", step_time_s="", hidden=20480, heads=128), row(mem_gb_per_gpu=30)],
                   Calibration())  # fmt: skip
    memory = memory_of(scored)
    assert memory["oom_recall"] == 1 and memory["fit_recall"] == 1 and memory["rows"] == 1


def test_whatever_ran_fitted() -> None:
    """A row with only a time counts among those that fitted if it names its recompute."""
    scored = predict_rows([row(), row(act_ckpt=""), row(hidden=20480, heads=128)], Calibration())
    memory = memory_of(scored)
    assert memory["fitting_rows"] == 2 and memory["fit_recall"] == 0.5


def scored_row(measured: float, predicted: float) -> Scored:
    return Scored(row(step_time_s=measured), predicted, 1.0, 0.0)


def test_errors_and_sweeps() -> None:
    errors = errors_of([scored_row(1.0, 1.1), scored_row(2.0, 1.6), scored_row(1.0, 1.0)])
    assert errors["mean_abs_error"] == pytest.approx(0.1)
    assert errors["median_abs_error"] == pytest.approx(0.1)
    assert errors["bias"] == pytest.approx(-0.1 / 3)
    right = sweeps_of([scored_row(float(i), float(i) ** 2) for i in range(1, 10)])
    assert right["regret_mean"] == 0 and right["spearman_median"] == pytest.approx(1)
    wrong = sweeps_of([scored_row(float(i), 1 / i) for i in range(1, 10)])
    assert wrong["regret_mean"] == pytest.approx(8) and wrong["spearman_median"] == pytest.approx(-1)
    assert sweeps_of([scored_row(1.0, 1.0)])["regret_mean"] is None
