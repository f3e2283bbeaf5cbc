"""The planner reads measured rows as the source describes them. A mistake in the file is an error. If a row cannot be
predicted, the planner gives the reason."""

from __future__ import annotations

import csv
import tomllib
from pathlib import Path
from typing import get_args

import pytest
from planner_rows import COLUMNS, HEADER, row_text

from fourfold.errors import UserError
from fourfold.planning.calibration.columns import NEEDED, MeasuredRow, parse_cells
from fourfold.planning.calibration.fit import Calibration
from fourfold.planning.calibration.programs import PROGRAMS
from fourfold.planning.calibration.rows import Skipped, measured_table, read_rows, read_table, row_of
from fourfold.planning.calibration.score import Scored, errors_of, memory_of, predict_rows, summary, sweeps_of
from fourfold.planning.cost.block_memory import kept_by_block
from fourfold.planning.cost.head_memory import head_bytes
from fourfold.planning.cost.memory import CATEGORIES, stage_memory
from fourfold.planning.cost.out_of_memory import CACHED
from fourfold.planning.machines.constants import prior_constants
from fourfold.planning.machines.machine import load_machine
from fourfold.planning.program_flags import Program
from fourfold.planning.workload import Workload

A100 = load_machine("dgx-a100")


def row(**cells: object):
    text = {**COLUMNS, **{name: str(value) for name, value in cells.items()}}
    return row_of(parse_cells({name: cell for name, cell in text.items() if cell}))


def held(work: Workload, *names: str) -> float:
    """Return the bytes of some kinds of memory on the first rank."""
    return sum(float(bytes_) for name, bytes_ in stage_memory(work, A100, 0).items() if name in names)


def test_a_megatron_row() -> None:
    megatron = row(tp=2, pp=2, vpp=3, sharding="zero1", seq_parallel="yes", recompute="none")
    work = megatron.work
    layout, program = work.layout, work.program
    assert (layout.x, layout.pp, layout.stages_per_rank, layout.dp, layout.z, layout.zero) == (2, 2, 3, 2, 1, 1)
    assert program.split_residual and program.regather and program.overlap_dp
    assert program.weights_kept and program.half_weights
    assert work.layout.gpus == 8 and work.micro_batches == 16
    assert megatron.machine.name == "dgx-a100" and megatron.dense_half


def test_what_ranks_shard() -> None:
    work = row(gpus=64, program="torchtitan", sharding="fsdp", shard_group=8, global_batch=128).work
    assert (work.layout.z, work.layout.dp, work.layout.zero) == (8, 8, 0)
    assert not work.program.half_weights
    work = row(gpus=64, program="fms-fsdp", sharding="hsdp", global_batch=128).work
    assert (work.layout.z, work.layout.dp) == (8, 8)
    work = row(program="deepspeed", sharding="zero3").work
    assert (work.layout.z, work.layout.dp, work.layout.zero) == (1, 8, 3)


def test_no_text_changes_a_prediction() -> None:
    """Free text once changed predictions: FSDP=0 in a note was read as FSDP, and made a step five times slower."""
    told = "FSDP=0; torch.compile; DeepSpeed; AsyncTP; CUDA_LAUNCH_BLOCKING=1; MoE; OOM; NVIDIA/NeMo"
    plain, worded = row(tp=2), row(tp=2, notes=told)
    assert plain.work == worded.work and plain.machine == worded.machine and plain.sweep == worded.sweep


def test_compilation_and_overlap_of_tensor_parallelism() -> None:
    sharded = {"program": "torchtitan", "sharding": "fsdp", "shard_group": 1, "tp": 8}
    vanilla, asynchronous, eager = (
        row(**sharded, compiled=compiled, tp_overlap=overlap).work.program
        for compiled, overlap in (("yes", "none"), ("yes", "pieces"), ("no", ""))
    )
    assert (vanilla.fused, vanilla.overlap_x, vanilla.overlap_forward) == (True, False, False)
    assert (asynchronous.fused, asynchronous.overlap_x, asynchronous.overlap_forward) == (True, True, True)
    assert (eager.fused, eager.overlap_x, eager.overlap_forward) == (False, True, False)


def test_recompute() -> None:
    layout = row(recompute="full", recompute_every=2).work.layout
    assert (layout.recompute, layout.recompute_every) == (2, 2)
    work = row(recompute="selective", recompute_what="ops").work
    assert work.layout.recompute == 1 and work.program.recomputes_per_op
    assert row(recompute="").work.layout.recompute == 0 and not row(recompute="").ran


def test_what_deepspeed_keeps() -> None:
    """In bf16, DeepSpeed shards the optimizer's state in every ZeRO stage. It sums fp32 gradients in all-reduces, and
    keeps them in addition to 16-bit gradients. A pipeline stage keeps the activations that it has sent."""
    bf16 = row(program="deepspeed", pp=2).work
    assert (bf16.layout.zero, bf16.program.all_reduces_gradients, bf16.program.gradient_bytes) == (1, True, 6)
    fp16 = row(program="deepspeed", precision="fp16", pp=2).work
    assert (fp16.layout.zero, fp16.step.reduce_bytes, fp16.program.gradient_copy) == (0, 2, True)
    for work in (bf16, fp16):
        kept, alone = (held(work.but(stage_keeps=more), "activations") for more in (work.program.stage_keeps, 0))
        # Micro-batches in flight × tensors kept for each × bytes of a tensor.
        assert kept - alone == 2 * 1.5 * (2 * 2 * 1024 * 1024)


def test_the_optimizers_copy_of_gradients_is_made_when_activations_are_gone() -> None:
    work = row(program="megatron-deepspeed", precision="fp16", attention="unfused").work
    assert held(work, *CATEGORIES) == held(work.but(gradient_copy=False), *CATEGORIES)
    few = work.but(micro_batch_size=1, seq_length=64, global_batch_size=8)
    few_alone = few.but(gradient_copy=False)
    entries = (
        few.model.num_hidden_layers * few.model.block_weights + few.model.padded_vocab_size * few.model.hidden_size
    )
    assert held(few, "logits") == held(few_alone, "logits")
    assert held(few, *CATEGORIES) - held(few_alone, *CATEGORIES) == pytest.approx(
        (4 * entries - held(few_alone, "activations", "logits")) * (1 + CACHED)
    )


def test_what_nvidias_recipes_keep() -> None:
    """NVIDIA's recipes have bf16 gradients, a fused SwiGLU, and a fused loss. In FP8, they store the inputs of matmuls
    in one byte per entry."""
    cells = {"program": "nemo", "sharding": "zero1", "recompute": "none", "mlp": "swiglu", "tp": 2, "seq_parallel": ""}
    work = row(**cells).work
    assert work.step.reduce_bytes == 2 and not work.model.tie_word_embeddings
    assert work.program.split_residual and not work.program.keeps_float8_inputs
    inner = 2 * work.tokens * work.model.intermediate_size / work.layout.x
    assert kept_by_block(work.but(fused_gate=False), False) - kept_by_block(work, False) == inner
    logits = work.tokens * work.model.padded_vocab_size / work.layout.x
    assert head_bytes(work.but(fused_loss=False)) - head_bytes(work) == 4 * logits
    eight = row(**cells, precision="fp8").work
    gathered = 2 * work.tokens * work.model.hidden_size / 2
    assert kept_by_block(eight.but(keeps_float8_inputs=False), False) - kept_by_block(eight, False) == (
        2 * gathered / 2 - 2 * work.tokens * work.model.queries / work.layout.x / 2 + inner / 2
    )


def test_parts_of_the_memory_of_long_sequences() -> None:
    """Processing tokens in chunks (``tiled``) and offload each remove exactly the memory that they should remove."""
    cells = {"program": "deepspeed", "sharding": "zero3", "cp": 8, "cp_method": "ulysses", "seq_len": 131072,
             "global_batch": 1, "micro_batch": 1, "mlp": "swiglu", "vocab": 128256}  # fmt: skip

    def parts(**more: object) -> dict[str, float]:
        work = row(**cells, **more).work
        return {name: float(size) for name, size in stage_memory(work, A100, 0).items()}

    plain, tiles, tiled = parts(), parts(tiled="loss"), parts(tiled="both")
    assert tiles["logits"] < plain["logits"] / 5
    assert {**tiles, "logits": 0, "reserve": 0} == {**plain, "logits": 0, "reserve": 0}
    tokens, hidden, inner = 131072 // 8, 1024, 4096
    # Without tiles, the backward pass of the MLP holds six tensors for all tokens: gate, up, silu(gate), their product,
    # and two gradients. With tiles, it holds them only for as many tokens as the hidden size. The peak is then in
    # attention's backward pass, so the saving can be smaller by up to one of the six tensors.
    assert 5 < (plain["activations"] - tiled["activations"]) / (2 * (tokens - hidden) * inner) <= 6
    inputs, optimizer = parts(offload="inputs"), parts(offload="optimizer")
    # With offload, only two of the twelve inputs stay in memory: the input of the recomputed block, and the next one.
    assert plain["activations"] - inputs["activations"] == pytest.approx((12 - 2) * 2 * tokens * hidden, rel=1e-6)
    assert plain["optimizer"] > 0 == optimizer["optimizer"] == optimizer["gradients"]
    assert optimizer["activations"] == plain["activations"] and optimizer["parameters"] == plain["parameters"]
    assert row(**cells, offload="both").work.layout.offload
    with pytest.raises(Skipped, match="how fast the host"):
        row(machine="laptop", gpus_per_node="", offload="both")


def test_a_row_can_name_its_kernels() -> None:
    usual, older = row(program="torchtitan"), row(program="megatron-lm", attention="flash2")
    assert usual.work.program.flash2 and older.work.program.flash2
    for named in ("flash3", "cudnn"):
        program = row(program="torchtitan", attention=named).work.program
        assert program.flash and not program.flash2
    entries = usual.work.tokens * usual.work.model.padded_vocab_size
    compiled, eager, fused = (
        head_bytes(row(program="torchtitan", loss=loss).work) / entries for loss in ("compiled", "eager", "fused")
    )
    # "compiled" holds logits and their gradient in 16 bits, and logits in 32 bits. "eager" frees the 16-bit logits, but
    # holds the softmax and its gradient too.
    assert compiled - fused == pytest.approx(4) and eager - compiled == pytest.approx(6)


def test_separate_operations_add_the_biases_of_experts() -> None:
    """In Megatron-LM, adding biases takes 14 passes over the rows, and one pass over the gradients of gate and up.
    Fused kernels add biases without extra passes."""
    sizes = {"layers": 4, "experts": 8, "experts_per_token": 2, "expert_ffn_hidden": 512, "recompute": "none"}
    run = {"architecture": "moe", "program": "nemo", "gpus": 1, "tp": 1, "pp": 1, "cuda_graph": "step", **sizes}

    def added(**cells: object) -> float:
        rows = [row(**run, **cells, expert_bias=bias) for bias in ("no", "yes")]
        assert not rows[0].work.program.adds_expert_bias
        plain, biased = (float(each.seconds) for each in predict_rows(rows, Calibration()))
        return (biased - plain) * prior_constants().memory * A100.memory_bandwidth

    work = row(**run).work
    bytes_of_rows = 2 * 2 * work.tokens * (14 * work.model.hidden_size + 2 * 512)
    assert added() == pytest.approx(float(bytes_of_rows * 4 * work.micro_batches), rel=1e-3)
    assert added(fused_experts="yes") == 0


def test_the_host_bounds_small_blocks() -> None:
    """GPT-2 blocks 1,536 to 3,072 wide took 4.6 to 5.2 ms in Megatron-LM at 1 to 8 tensor-parallel ranks of H100s."""
    small = {"layers": 40, "hidden": 1536, "ffn_hidden": 6144, "recompute": "none", "global_batch": 8, "micro_batch": 8}
    on = {"machine": "dgx-h100", "program": "megatron-lm"}
    scored = predict_rows([row(**small, **on, gpus=tp, tp=tp, step_seconds=0.2) for tp in (2, 4, 8)], Calibration())
    assert all(0.0037 < float(each.seconds) / 40 < 0.0056 for each in scored)


def test_megatron_adds_gradients_directly_to_their_sums() -> None:
    """Megatron-LM stores no fp32 gradient of the head apart from the sum. Transformer Engine stores one unused 16-bit
    gradient for each shape of a block's weights."""
    work = row(sharding="zero1", mlp="swiglu", tp=2, seq_parallel="yes").work
    head = work.model.padded_vocab_size * work.model.hidden_size / work.layout.x
    assert head_bytes(work.but(fuses_accumulation=False)) - head_bytes(work) == 4 * head
    unused = 2 * work.model.block_weights / work.layout.x
    work = work.but(count_cached=False, count_runtime=False)
    without = work.but(unused_gradients=False)
    assert held(work, *CATEGORIES) - held(without, *CATEGORIES) == pytest.approx(unused)


def test_zero3_keeps_the_host_busy() -> None:
    """A block of Qwen-1.8B took 11 ms in DeepSpeed's ZeRO-3 with full recompute, however few tokens it had."""
    model = {"layers": 24, "hidden": 2048, "ffn_hidden": 5504, "mlp": "swiglu", "program": "deepspeed", "gpus": 1}
    sharded = [row(**model, sharding="zero3", seq_len=seq, global_batch=8, micro_batch=1) for seq in (256, 512)]
    assert all(0.008 < float(each.seconds) / 24 / 8 < 0.012 for each in predict_rows(sharded, Calibration()))


def test_other_programs_are_not_nvidias() -> None:
    work = row(sharding="zero1", mlp="swiglu", tp=2, seq_parallel="").work
    program = work.program
    assert work.step.reduce_bytes == 4 and not (program.split_residual or program.fused_loss)
    assert program.fused_gate
    assert not row(program="megatron-deepspeed", mlp="swiglu").work.program.fused_gate
    assert row(program="llm-foundry", sharding="fsdp").work.program.fused_loss
    assert row(program="fourfold", sharding="zero1", compiled="yes").work.program == Program(fused=True)


@pytest.mark.parametrize(("gbits", "node"), [(400, 50e9), (1600, 200e9), ("", A100.node)])
def test_the_network_of_a_row(gbits: object, node: float) -> None:
    assert row(node_gbits=gbits).machine.node == node


@pytest.mark.parametrize(
    ("cells", "reason"),
    [
        ({"ep": 8}, "MoE model"),
        ({"architecture": "moe"}, "MoE model"),
        ({"architecture": "hybrid"}, "hybrid model"),
        ({"machine": ""}, "no machine"),
        ({"layers": ""}, "no layers"),
        ({"micro_batch": ""}, "no micro_batch"),
        ({"tp": 3}, "does not divide"),
        ({"step_seconds": ""}, "nothing measured"),
        ({"precision": "nvfp4"}, "below 8 bits"),
        ({"micro_batch": 16}, "more than the global batch"),
        ({"vpp": 99, "pp": 2}, "more than the layers"),
        ({"ep": 3, "experts": 6, "experts_per_token": 2, "expert_ffn_hidden": 64}, "ep does not divide"),
    ],
)
def test_a_row_that_cannot_be_predicted_has_a_reason(cells: dict[str, object], reason: str) -> None:
    with pytest.raises(Skipped, match=reason):
        row(**cells)


@pytest.mark.parametrize(
    ("cells", "sentence"),
    [
        ({"hidden": "wide"}, "hidden = 'wide'"),
        ({"heads": 0}, "heads = '0': must be a number ≥ 1 and < 1e.12, such as 1"),
        ({"hidden": -1024}, "hidden = '-1024'"),
        ({"seq_len": "nan"}, "seq_len = 'nan'"),
        ({"step_seconds": "inf"}, "step_seconds = 'inf'"),
        ({"layers": 1.5}, "layers = '1.5': give a whole number"),
        ({"shard_group": 0}, "shard_group = '0'"),
        ({"sharding": "FSDP=0"}, "sharding = 'FSDP=0': must be 'none', 'zero1'.* or 'hsdp'"),
        ({"seq_parallel": "maybe"}, "seq_parallel = 'maybe': give yes or no"),
        ({"program": "megatron"}, "program = 'megatron': choose from megatron-lm, nemo, .*other"),
        ({"program": ""}, "program is empty"),
        ({"precision": ""}, "precision is empty; give fp32, fp16, bf16"),
        ({"hidden": 1000}, "hidden = 1000 is not a multiple of heads = 16"),
        ({"kv_heads": 3}, "heads = 16 is not a multiple of kv_heads = 3"),
        ({"sharding": "hsdp", "shard_group": 3}, "gpus = 8 is not a multiple of shard_group = 3"),
        ({"tp": 16}, "tp = 16 is larger than the number of GPUs, 8"),
        ({"vpp": 2}, "vpp = 2 needs pp, but pp is 1"),
        ({"machine": "A100-80GB"}, "machine = A100-80GB is unknown; did you mean"),
    ],
)
def test_a_mistaken_cell_names_its_row_and_column(tmp_path: Path, cells: dict[str, object], sentence: str) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("\n".join([HEADER, row_text(), row_text(row_id="b7", **cells)]))
    with pytest.raises(UserError, match=rf"rows\.csv, line 3 \(b7\): {sentence}"):
        read_rows([path])


@pytest.mark.parametrize(
    ("header", "sentence"),
    [
        (HEADER.replace("program,", ""), "has no column program; docs/measured-rows.md lists the columns$"),
        (HEADER.replace(",recompute,", ",act_ckpt,"), "has no column recompute"),
        (HEADER.replace(",", ";"), "must be separated by commas"),
        (HEADER + ",step_second", "has an unknown column 'step_second'; did you mean step_seconds"),
        (HEADER + ",quux", "has an unknown column 'quux'; remove it, or keep its text in notes"),
        (HEADER + ",tp", "has two columns tp"),
        ("a,b", "has no column gpus, precision, program, machine"),
    ],
)
def test_a_mistaken_header_names_the_column(tmp_path: Path, header: str, sentence: str) -> None:
    path = tmp_path / "rows.csv"
    path.write_text(header + "\n" + row_text())
    with pytest.raises(UserError, match=sentence):
        read_rows([path])


def test_a_file_that_is_not_a_table_gets_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_bytes(HEADER.encode() + b"\n\xe9\n")
    with pytest.raises(UserError, match="is not a CSV file in UTF-8"):
        read_rows([path])
    path.write_text(f"{HEADER}\n{row_text()},more")
    with pytest.raises(UserError, match="line 2 has more cells than columns"):
        read_rows([path])
    with pytest.raises(UserError, match="cannot be read"):
        read_rows([tmp_path / "none.csv"])


def test_a_file_is_read_and_its_skipped_rows_are_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    others = row_text(row_id="2", ep=8), row_text(row_id="3", ep=4), row_text(row_id="4", lora="yes")
    path.write_text("\n".join([HEADER, row_text(), *others, row_text(precision="fp8")]))
    rows, skipped = read_rows([path])
    assert len(rows) == 2 and skipped == {"MoE model of unknown sizes": ["2", "3"], "LoRA": ["4"]}
    assert [r.dense_half for r in rows] == [True, False]


def test_doubtful_rows_are_scored_apart() -> None:
    scored = predict_rows([row(), row(doubt="two iterations only", step_seconds=50)], Calibration())
    result = summary(scored)
    assert result["rows"] == 1 and result["doubtful"]["count"] == 1 and result["others"]["count"] == 0


def test_the_table_that_comes_with_fourfold() -> None:
    """Every source is in the bibliography, row names are unique, and every flag of a program has its source."""
    table = read_table(measured_table())
    assert len({(r.source, r.row_id) for r in table}) == len(table) > 1000
    sources = tomllib.loads(measured_table().with_name("sources.toml").read_text(encoding="utf-8"))
    assert set(sources) == {r.source for r in table}
    assert all(set(entry) >= {"title", "where", "license", "read"} for entry in sources.values())
    assert measured_table().stat().st_size < 400_000
    assert all(traits.source for traits in PROGRAMS.values())
    with measured_table().open(encoding="utf-8", newline="") as file:
        assert csv.DictReader(file).fieldnames == list(MeasuredRow.model_fields)


def column_table() -> list[str]:
    """Return the columns as a table of Markdown."""
    lines = ["| column | meaning |", "|---|---|"]
    for name, field in MeasuredRow.model_fields.items():
        choices = [c for part in (field.annotation, *get_args(field.annotation)) for c in get_args(part)
                   if isinstance(c, str)]  # fmt: skip
        needed = " (needed)" if name in NEEDED else ""
        values = f" One of {', '.join(f'`{c}`' for c in choices)}." if choices else ""
        lines.append(f"| `{name}`{needed} | {' '.join((field.description or '').split())}{values} |")
    return lines


def test_the_page_lists_the_columns() -> None:
    page = (Path(__file__).parents[2] / "docs" / "measured-rows.md").read_text(encoding="utf-8")
    assert "\n".join(column_table()) in page


def test_out_of_memory_rows() -> None:
    failed = {"out_of_memory": "yes", "step_seconds": ""}
    assert row(**failed).out_of_memory
    scored = predict_rows([row(**failed, hidden=20480, heads=128), row(memory_gb=30)], Calibration())
    memory = memory_of(scored)
    assert memory["oom_recall"] == 1 and memory["fit_recall"] == 1 and memory["rows"] == 1
    assert row(memory_gb=30, memory_kind="device").work.program.count_runtime
    assert not row(memory_gb=30).work.program.count_runtime


def test_a_run_that_finished_fit_into_memory() -> None:
    """If a row has a step time but no memory, the run fit into memory. Such a row counts if it gives the recompute
    mode."""
    scored = predict_rows([row(), row(recompute=""), row(hidden=20480, heads=128)], Calibration())
    memory = memory_of(scored)
    assert memory["fitting_rows"] == 2 and memory["fit_recall"] == 0.5


def scored_row(measured: float, predicted: float) -> Scored:
    return Scored(row(step_seconds=measured), predicted, 1.0, 0.0, "dense")


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
