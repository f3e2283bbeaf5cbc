"""Read tables of measured runs, and turn each row into a workload for the planner. A row is one run. ``columns``
defines the columns of the tables.

A row with a mistake raises an error. If the planner cannot predict a correct row, the row is skipped, and the reason is
reported.
"""

import csv
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any

from fourfold.errors import UserError
from fourfold.planning.calibration.columns import MeasuredRow, check_header, parse_cells
from fourfold.planning.calibration.programs import PROGRAMS, ZERO3_HOOKS, ZERO3_MODULES, Traits
from fourfold.planning.machines.machine import Machine, load_machine
from fourfold.planning.model_shape import ModelShape
from fourfold.planning.program_flags import Program
from fourfold.planning.workload import CP_METHODS, OPTIMIZERS, RECOMPUTE, SCHEDULES, Workload
from fourfold.untrusted_files import check_regular

GPT_VOCABULARY = 51200
"""Size of GPT-2's vocabulary, with padding. Rows that give no vocabulary size get this size."""
FLOAT8 = ("fp8", "mxfp8")
BYTES_OF = {"fp32": 4, "bf16": 2, "int8": 1}
ERRATA = {("V1", "recompute", "full"): "none"}
"""Corrections of mistakes in the sources. A key is a source, a column, and a value that contradicts the source's own
measurements. The table maps each key to the value that we use instead.

The single-node configurations of vTrain (V1) ask for full recompute. With full recompute, the measured times would mean
that A100s run matmuls at 1.3 times the best rate that was ever measured on them. Also, vTrain's own simulator does not
recompute the last stage, and half of these rows have only one stage.
"""
OF_EXPERTS = ("experts", "experts_per_token", "expert_ffn_hidden")


@dataclass(frozen=True)
class Row:
    """One measured row as a workload, with its measurements. A measurement is None if the row does not have it."""

    row_id: str
    source: str
    work: Workload
    machine: Machine
    seconds: float | None
    memory_gb: float | None
    out_of_memory: bool
    ran: bool
    """Whether the run fit into memory and the row states its recompute mode. Only such rows show whether the planner
    correctly predicts that a run fits."""
    dense_half: bool
    """Whether the model is dense, the precision is 16 bits, and the row is complete and not doubtful."""
    sweep: tuple[str, ...]
    """Key of the row's sweep. Rows with the same key differ only in layout."""
    program: str = "fourfold"
    """Name of the training framework."""
    doubt: str = ""
    """Why the measurement is doubtful. Empty if it is not."""
    mixture: bool = False
    """Whether the model is an MoE model. No constant is fitted to MoE models."""


class Skipped(ValueError):
    """Raised if a row cannot be predicted. The message is the reason."""


def read_rows(paths: Sequence[str | Path]) -> tuple[list[Row], dict[str, list[str]]]:
    """Read the rows that can be predicted, and collect the names of skipped rows by reason.

    Raises:
        UserError: A file cannot be read or is not a table of runs, a cell has a value that its column does not allow,
            or a row names an unknown machine.
    """
    rows: list[Row] = []
    skipped: dict[str, list[str]] = {}
    for path in paths:
        for measured in read_table(Path(path)):
            try:
                rows.append(row_of(_corrected(measured)))
            except Skipped as reason:
                skipped.setdefault(str(reason), []).append(measured.row_id)
    return rows, skipped


def measured_table() -> Path:
    """Return the path of the table that comes with fourfold. ``sources.toml`` has the bibliography."""
    return Path(str(files("fourfold.planning.calibration") / "measured.csv"))


def read_table(path: Path) -> list[MeasuredRow]:
    """Read all rows of a table and check their values. Raise ``UserError`` if the file or a row is invalid."""
    try:
        with check_regular(path).open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file, strict=True)
            if mistake := check_header(list(reader.fieldnames or ())):
                raise UserError(f"{path} {mistake}")
            return [_checked(path, reader.line_num, record) for record in reader]
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}; give a CSV file with measured rows") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{path} is not a CSV file in UTF-8: {error}") from None


def _checked(path: Path, line: int, record: dict[str | None, Any]) -> MeasuredRow:
    if None in record:
        raise UserError(f"{path}, line {line} has more cells than columns; put quotes around a cell with commas")
    cells = {str(key): value.strip() for key, value in record.items() if value and value.strip()}
    try:
        measured = parse_cells(cells)
        if measured.machine is not None:
            load_machine(measured.machine, "machine =")
    except (ValueError, UserError) as error:
        name = f" ({cells['row_id']})" if "row_id" in cells else ""
        raise UserError(f"{path}, line {line}{name}: {error}") from None
    return measured


def _corrected(measured: MeasuredRow) -> MeasuredRow:
    """Apply ``ERRATA`` to a row."""
    changes = {column: right for (source, column, wrong), right in ERRATA.items()
               if measured.source == source and getattr(measured, column) == wrong}  # fmt: skip
    return measured.model_copy(update=changes)


def row_of(measured: MeasuredRow) -> Row:
    """Convert a row to a workload. Raise ``Skipped`` with the reason if the planner cannot predict the row."""
    if measured.precision == "nvfp4":
        raise Skipped("precision below 8 bits")
    if measured.architecture == "hybrid":
        raise Skipped("hybrid model")
    if measured.lora:
        raise Skipped("LoRA")
    if (measured.architecture == "moe" or measured.ep > 1) and not all(map(partial(getattr, measured), OF_EXPERTS)):
        raise Skipped("MoE model of unknown sizes")
    divided = measured.ep * (measured.pp or 1) * (measured.tp or 1 if measured.experts_over_tp else 1)
    if measured.ep > 1 and measured.gpus % divided:
        raise Skipped("ep does not divide the GPUs of a stage")
    for name in ("machine", "layers", "hidden", "heads", "seq_len", "global_batch", "tp", "pp", "micro_batch"):
        if getattr(measured, name) is None:
            raise Skipped(f"no {name}")
    if measured.step_seconds is None and measured.memory_gb is None and not measured.out_of_memory:
        raise Skipped("nothing measured")
    experts = bool(measured.experts)
    work, machine = _model(measured).but(**_step(measured), **_program(measured)), _machine(measured)
    if measured.offload != "none" and not machine.host:
        raise Skipped("offload, but the machine file does not say how fast the host's memory is")
    work = _divided(work.but(**_layout(measured, machine)), measured)
    return Row(
        row_id=measured.row_id, source=measured.source, program=measured.program, work=work, machine=machine,
        seconds=measured.step_seconds, memory_gb=None if measured.out_of_memory else measured.memory_gb,
        out_of_memory=measured.out_of_memory, doubt=measured.doubt, mixture=experts,
        ran=not measured.out_of_memory and measured.recompute is not None,
        dense_half=measured.precision in ("bf16", "fp16") and measured.complete and not measured.doubt and not experts,
        sweep=tuple(_text(getattr(measured, name)) for name in (
            "source", "model", "layers", "hidden", "heads", "gpus", "global_batch", "seq_len", "precision", "machine")),
    )  # fmt: skip


def _text(value: Any) -> str:
    return f"{value:.15g}" if isinstance(value, float) else str(value)


def _machine(measured: MeasuredRow) -> Machine:
    """Load the row's machine. A network bandwidth or a node size in the row replaces the machine's value. But if
    the machine's fast links connect more than 8 devices, the machine keeps its node size."""
    assert measured.machine is not None
    machine = load_machine(measured.machine)
    if measured.gpus_per_node and machine.domain <= 8:
        machine = replace(machine, gpus_per_node=measured.gpus_per_node, domain=measured.gpus_per_node)
    return machine if measured.node_gbits is None else replace(machine, node=measured.node_gbits / 8 * 1e9)


def _model(measured: MeasuredRow) -> Workload:
    hidden, heads = measured.hidden, measured.heads
    assert measured.layers and hidden and heads
    inner = measured.ffn_hidden or 4 * hidden
    gated = measured.mlp in ("swiglu", "geglu")
    head_dim = measured.head_dim or hidden / heads
    experts, latent = measured.experts or 0, measured.kv_lora_rank or 0
    rope_dim, tied = measured.qk_rope_head_dim or 0, measured.tie_word_embeddings
    windows = (measured.sliding_layers or measured.layers) if measured.sliding_window else 0
    # The planner assumes gated experts, which have three matrices. Experts without a gate have two. Gated experts that
    # are 2/3 as wide have the same number of weights and FLOPs.
    inner_of_expert = (measured.expert_ffn_hidden or 0) * (1 if measured.gated_experts else 2 / 3)
    return Workload(
        ModelShape(num_hidden_layers=measured.layers, hidden_size=hidden,
                   queries=heads * head_dim if measured.head_dim else hidden,
                   keys=(measured.kv_heads or heads) * head_dim,
                   head_dim=head_dim, intermediate_size=inner, gate_up=inner * (2 if gated else 1),
                   padded_vocab_size=measured.vocab or GPT_VOCABULARY,
                   tie_word_embeddings=measured.mlp in ("gelu", "geglu") if tied is None else tied,
                   rope=measured.mlp == "swiglu", rotated=measured.mlp == "swiglu",
                   rotary_share=rope_dim / head_dim if latent else 1.0, sliding_window=measured.sliding_window or 0,
                   sliding=windows / measured.layers,
                   q_latent=measured.q_lora_rank or 0, kv_latent=latent, shared_key=rope_dim if latent else 0,
                   latent_values=heads * (measured.v_head_dim or head_dim) if latent else 0,
                   num_experts=experts, num_experts_per_tok=measured.experts_per_token or 0,
                   moe_intermediate_size=inner_of_expert,
                   shared_expert_intermediate_size=measured.shared_ffn_hidden,
                   sparse=1 - measured.dense_layers / measured.layers if experts else 0),
        program=PROGRAMS[measured.program].flags,
    )  # fmt: skip


def _step(measured: MeasuredRow) -> dict[str, Any]:
    traits = PROGRAMS[measured.program]
    half_sums = measured.precision == "fp16" or measured.sharding in ("fsdp", "hsdp") or traits.half_sums
    half_sums = half_sums and measured.program != "fourfold"
    return {
        "seq_length": measured.seq_len,
        "global_batch_size": measured.global_batch,
        "bits": 8 if measured.precision in FLOAT8 else 32 if measured.precision == "fp32" else 16,
        "reduce_bytes": BYTES_OF.get(measured.reduce_dtype or "", 2 if half_sums else 4),
        "weight_bytes": BYTES_OF[measured.master_weights],
        "moment_bytes": BYTES_OF[measured.moments],
        "optimizer": float(OPTIMIZERS.index(measured.optimizer)),
        "capacity": measured.capacity_factor or 0.0,
        "imbalance": measured.imbalance,
    }


def _layout(measured: MeasuredRow, machine: Machine) -> dict[str, Any]:
    """Return the fields of the layout: the sizes of the axes, the micro-batch size, the ZeRO stage, recompute, and
    offload."""
    assert measured.tp and measured.pp and measured.micro_batch and measured.global_batch
    copies = measured.gpus / (measured.tp * measured.pp * measured.cp)
    if copies < 1 or copies != int(copies):
        raise Skipped("tp · pp · cp does not divide the GPUs")
    if measured.micro_batch * copies > measured.global_batch * 1.0001:
        raise Skipped("micro_batch · dp is more than the global batch")
    z, zero = 1.0, float(measured.sharding[-1]) if measured.sharding.startswith("zero") else 0.0
    if measured.sharding in ("fsdp", "hsdp"):
        whole = float(machine.gpus_per_node) if measured.sharding == "hsdp" else copies
        z = min(measured.shard_group or whole, copies)
        z = copies if copies % z else z
    elif _shares_optimizer(measured):
        zero = max(zero, 1.0)
    return {
        "x": measured.tp, "pp": measured.pp, "cp": measured.cp, "ep": measured.ep, "stages_per_rank": measured.vpp,
        "micro_batch_size": measured.micro_batch, "z": z, "dp": copies / z, "zero": zero,
        "recompute": float(RECOMPUTE.index(measured.recompute or "none")), "recompute_every": measured.recompute_every,
        "cp_method": float(CP_METHODS.index(measured.cp_method)), "offload": measured.offload in ("inputs", "both"),
        "schedule": float(SCHEDULES.index(measured.schedule)),
    }  # fmt: skip


def _shares_optimizer(measured: MeasuredRow) -> bool:
    """Return whether the run uses DeepSpeed's BF16_Optimizer. This optimizer shards optimizer states even at ZeRO stage
    0, and all-reduces gradients."""
    traits = PROGRAMS[measured.program]
    return traits.deepspeed and measured.precision == "bf16" and measured.sharding in ("none", "zero1")


def _program(measured: MeasuredRow) -> dict[str, Any]:
    """Return the framework's flags. The row's columns override some of the flags."""
    traits = PROGRAMS[measured.program]
    fsdp = measured.sharding in ("fsdp", "hsdp")
    parallel_sequence = traits.seq_parallel if measured.seq_parallel is None else measured.seq_parallel
    shared = {
        "flash": measured.attention != "unfused",
        "blocking": measured.blocking,
        "count_runtime": measured.memory_gb is None or measured.memory_kind == "device",
        "count_cached": measured.memory_gb is None or measured.memory_kind != "tensors",
        "experts_over_x": measured.experts_over_tp,
        "sends_once": measured.dispatcher == "deepep",
        "fused_experts": measured.fused_experts,
        "adds_expert_bias": measured.expert_bias,
        "overlap_ep": measured.ep_overlap,
        "captured": measured.cuda_graph != "none",
        "captured_experts": measured.cuda_graph == "step",
    }
    if measured.program == "fourfold":
        return {**shared, "fused": measured.compiled}
    overlap = measured.tp_overlap or traits.tp_overlap
    return {
        **shared, **_deepspeed(measured, traits),
        "fused": measured.compiled or traits.flags.fused, "half_weights": not fsdp,
        "fused_gate": measured.compiled or traits.flags.fused_gate, "tiled_mlp": measured.tiled == "both",
        "eager_loss": traits.flags.eager_loss and not measured.compiled,
        "keeps_float8_inputs": traits.flags.keeps_float8_inputs and measured.precision in FLOAT8,
        "split_residual": parallel_sequence, "regather": parallel_sequence and traits.flags.regather,
        "overlap_x": overlap != "none", "overlap_forward": overlap == "pieces", "overlap_z": True,
        "overlap_dp": fsdp or (traits.hides_sums and measured.sharding != "none"),
        "weights_kept": measured.sharding in ("zero1", "zero2") or _shares_optimizer(measured),
        "chunk_logits": 1 << 40 if measured.tiled == "none" else Program().chunk_logits,
        "recomputes_per_op": measured.recompute_what == "ops", "autocast": measured.autocast,
        "offloads_optimizer": measured.offload in ("optimizer", "both"),
        **_chosen_kernels(measured),
        "recomputes_attention": measured.recompute_what != "activations",
        "recomputes_mlp": measured.recompute_what == "activations", "expandable_segments": measured.expandable_segments,
        "recomputes_norms": measured.recompute_what == "activations",
    }  # fmt: skip


def _chosen_kernels(measured: MeasuredRow) -> dict[str, Any]:
    """Return the flags that the row sets for the attention kernel and the loss kernel."""
    chosen: dict[str, Any] = {}
    if measured.attention in ("flash2", "flash3", "cudnn"):
        chosen["flash2"] = measured.attention == "flash2"
    if measured.loss is not None:
        chosen |= {"fused_loss": measured.loss == "fused", "eager_loss": measured.loss == "eager"}
    return chosen


def _deepspeed(measured: MeasuredRow, traits: Traits) -> dict[str, Any]:
    shares, zero3 = _shares_optimizer(measured), measured.sharding == "zero3"
    return {
        "host_operations": ZERO3_HOOKS if zero3 else traits.flags.host_operations,
        "gathers_per_block": ZERO3_MODULES if traits.deepspeed and zero3 else 1,
        "gradient_copy": traits.deepspeed and measured.precision == "fp16",
        "gradient_bytes": 6 if shares else 0,
        "all_reduces_gradients": shares,
        # In DeepSpeed, a stage keeps each tensor that it has sent. The first stage, which needs the most memory, also
        # keeps a dropout mask that is half as large as this tensor.
        "stage_keeps": 1.5 if traits.deepspeed else 0,
    }


def _divided(work: Workload, measured: MeasuredRow) -> Workload:
    """Set ``end_layers``. When layers are divided into stages, the embedding counts as this number of layers, and so
    does the head.

    The number is 1 if the row says so, or if the layers cannot be divided evenly in any other way. Otherwise it is 0.
    """
    layers, chunks = work.model.num_hidden_layers, work.layout.pp * work.layout.stages_per_rank
    if chunks > layers + 2:
        raise Skipped("pp · vpp is more than the layers")
    fits_with_ends = layers % chunks != 0 and (layers + 2) % chunks == 0
    return work.but(end_layers=float(measured.end_layers or fits_with_ends))
