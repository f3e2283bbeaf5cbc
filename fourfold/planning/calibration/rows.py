"""Reads measured rows: CSV with one training configuration per line, its step time and memory.

docs/planner.md lists the columns; others are ignored. Empty cells are inferred from the rest of the row, or the row is
skipped with a reason.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fourfold.errors import UserError
from fourfold.planning.machines.machine import Machine, load_machine
from fourfold.planning.workload import OTHER_PROGRAM, ModelShape, Workload

NEEDED = ("gpu_type", "n_gpus", "layers", "hidden", "heads", "seq_len", "global_batch_seqs", "tp", "pp", "precision")

MACHINES = (
    (r"A100.*40", "dgx-a100-40"),
    (r"A100", "dgx-a100"),
    (r"H100.*9[56]GB HBM2e", "grand-teton-h100"),
    (r"GH200|H100.*GH200", "alps"),
    (r"H100", "dgx-h100"),
    (r"H200", "h200"),
    (r"GB200", "gb200"),
    (r"GB300", "gb300"),
    (r"B200", "b200"),
    (r"B300", "b300"),
    (r"MI250X", "frontier"),
    (r"MI300X", "mi300x"),
)
"""Machines by a pattern of the GPU's name; the first match counts."""

LARGEST = 1e12
"""Bound of every number in a row."""
WHOLE = ("n_gpus", "layers", "hidden", "ffn_hidden", "heads", "kv_heads", "vocab", "seq_len", "tp", "pp", "cp", "vpp",
         "micro_batch", "gpus_per_node")  # fmt: skip

GPT_VOCABULARY = 51200
"""GPT-2's, padded: assumed where a row names none."""


@dataclass(frozen=True)
class Row:
    """One measured row; None: not measured."""

    row_id: str
    source: str
    work: Workload
    machine: Machine
    seconds: float | None
    memory_gb: float | None
    out_of_memory: bool
    ran: bool
    """The run fitted, and the row names its recompute."""
    dense_half: bool
    """A complete configuration of a dense model in 16 bits."""
    sweep: tuple[str, ...]
    """Equal in rows that differ only in layout."""


class Skipped(ValueError):
    """A row that cannot be predicted, with the reason."""


def read_rows(paths: Sequence[str | Path]) -> tuple[list[Row], dict[str, int]]:
    """Read the rows that can be predicted; count the others by reason."""
    rows: list[Row] = []
    skipped: dict[str, int] = {}
    for path in paths:
        for record in _records(Path(path)):
            try:
                rows.append(row_of(record))
            except Skipped as reason:
                skipped[str(reason)] = skipped.get(str(reason), 0) + 1
    return rows, skipped


def _records(path: Path) -> list[dict[str, str]]:
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file)
            missing = [name for name in NEEDED if name not in (reader.fieldnames or ())]
            if missing:
                hint = "; its columns must be separated by commas" if ";" in "".join(reader.fieldnames or ()) else ""
                raise UserError(f"{path} has no column {', '.join(missing)}; docs/planner.md lists the columns{hint}")
            return list(reader)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{path} is not a CSV file in UTF-8: {error}") from None


def row_of(record: Mapping[str, str]) -> Row:
    """Make a row from its cells; raises ``Skipped`` with the reason."""
    cells = {key: (value or "").strip() for key, value in record.items() if key}
    machine = _machine(cells)
    text = cells["precision"].lower()
    if any(word in text for word in ("fp4", "nvfp4", "int8")):
        raise Skipped("precision below 8 bits")
    eight = "8" in text
    if (
        (_number(cells, "ep") or 1) > 1
        or "moe" in cells.get("notes", "").lower()
        or "grok" in cells.get("model", "").lower()
    ):
        raise Skipped("mixture of experts")
    layers, hidden, heads, seq, batch, gpus = (
        _required(cells, name) for name in ("layers", "hidden", "heads", "seq_len", "global_batch_seqs", "n_gpus")
    )
    tp, pp, cp = (_number(cells, name) or 1 for name in ("tp", "pp", "cp"))
    if not cells["tp"] or not cells["pp"]:
        raise Skipped("no tp or pp")
    copies = gpus / (tp * pp * cp)
    if copies < 1 or copies != int(copies):
        raise Skipped("tp · pp · cp does not divide the GPUs")
    micro_batch = _required(cells, "micro_batch")
    if micro_batch * copies > batch * 1.0001:
        raise Skipped("micro_batch · dp is more than the global batch")
    seconds = _number(cells, "step_time_s")
    if seconds is None:
        seconds = _number(cells, "calc_step_time_s")
    kind = cells.get("mem_kind", "").lower()
    out_of_memory = "oom" in kind or "oom" in cells.get("mem_gb_per_gpu", "").lower() or cells.get("grade") == "M"
    memory = None if out_of_memory else _number(cells, "mem_gb_per_gpu")
    if memory is not None and "gib" in kind:
        memory *= 2**30 / 1e9
    if seconds is None and memory is None and not out_of_memory:
        raise Skipped("nothing measured")
    work = _model(cells, layers, hidden, heads).but(**_program(cells, machine, text, eight, copies), seq=seq,
                   batch=batch, micro_batch=micro_batch, x=tp, pp=pp, cp=cp,
                   interleave=max(_number(cells, "vpp") or 1, 1),
                   count_runtime=memory is None or "smi" in kind)  # fmt: skip
    chunks = work.layout.pp * work.layout.interleave
    if chunks > work.model.layers + 2:
        raise Skipped("pp · vpp is more than the layers")
    ends = work.model.layers % chunks != 0 and (work.model.layers + 2) % chunks == 0
    work = work.but(ends=float(ends or "embedding counted as a layer" in cells.get("notes", "")))
    source = cells.get("source_id") or "unnamed"
    complete = cells.get("grade", "A") in ("A", "A-")
    return Row(
        row_id=cells.get("row_id", ""),
        source=source,
        work=work,
        machine=machine,
        seconds=seconds,
        memory_gb=memory,
        out_of_memory=out_of_memory,
        ran=not out_of_memory and bool(cells.get("act_ckpt")),
        dense_half=not eight and complete and "32" not in text,
        sweep=tuple(cells.get(k, "") for k in ("source_id", "model", "layers", "hidden", "heads", "n_gpus",
                                               "global_batch_seqs", "seq_len", "precision", "gpu_type")),
    )  # fmt: skip


def _required(cells: Mapping[str, str], name: str) -> float:
    number = _number(cells, name)
    if number is None:
        raise Skipped(f"no {name}")
    return number


def _number(cells: Mapping[str, str], name: str) -> float | None:
    """Read a positive number; None where the cell is empty."""
    if not cells.get(name):
        return None
    try:
        number = float(cells[name])
    except ValueError:
        raise Skipped(f"{name} is not a number") from None
    if not 0 < number < LARGEST:
        raise Skipped(f"{name} is not between 0 and {LARGEST:g}")
    if name in WHOLE and number != int(number):
        raise Skipped(f"{name} is not a whole number")
    return number


def _machine(cells: Mapping[str, str]) -> Machine:
    """Load the machine of the GPU, with the node size and the network adapters that the row names."""
    name = next((name for pattern, name in MACHINES if re.search(pattern, cells["gpu_type"], re.IGNORECASE)), None)
    if name is None:
        raise Skipped("unknown GPU")
    machine = load_machine(name)
    changes: dict[str, Any] = {}
    per_node = _number(cells, "gpus_per_node")
    if per_node and machine.domain <= 8:
        changes["gpus_per_node"] = per_node
        changes["domain"] = per_node
    link = cells.get("interconnect", "")
    adapters = re.search(r"(\d+)\s*x[^;]*?(\d+)\s*Gb/s", link, re.IGNORECASE)
    node = re.search(r"(\d+)\s*Gb/s per node", link, re.IGNORECASE)
    if adapters:
        changes["node"] = float(adapters[1]) * float(adapters[2]) / 8 * 1e9
    elif node:
        changes["node"] = float(node[1]) / 8 * 1e9
    elif per_gpu := re.search(r"(\d+)\s*Gb/s(?: \w+)* per GPU", link, re.IGNORECASE):
        changes["node"] = float(per_gpu[1]) / 8 * 1e9 * (per_node or machine.gpus_per_node)
    return replace(machine, **changes)


def _model(cells: Mapping[str, str], layers: float, hidden: float, heads: float) -> Workload:
    gated = cells.get("mlp_type", "").lower() in ("swiglu", "geglu")
    inner = _number(cells, "ffn_hidden") or 4 * hidden
    vocab = _number(cells, "vocab")
    if vocab is None:
        vocab = GPT_VOCABULARY
    # Models of GPT's kind have one table for both ends; Llama's and Nemotron's have two.
    tied = cells.get("mlp_type", "").lower() in ("gelu", "geglu", "")
    kv_heads = _number(cells, "kv_heads") or heads
    head_dim = hidden / heads
    return Workload(
        ModelShape(layers=layers, hidden=hidden, queries=hidden, keys=kv_heads * head_dim,
                   head_dim=head_dim, inner=inner, gate_up=inner * (2 if gated else 1), vocab=vocab, tied=tied),
        program=OTHER_PROGRAM,
    )  # fmt: skip


def _program(
    cells: Mapping[str, str], machine: Machine, precision: str, eight: bool, copies: float
) -> dict[str, float | bool]:
    """Infer layout and program from the texts of the row."""
    sharding = cells.get("zero_fsdp", "").lower()
    checkpoint = cells.get("act_ckpt", "").lower()
    attention = cells.get("attention_impl", "").lower()
    notes = cells.get("notes", "").lower()
    unfused = "unfused" in attention or (not attention and precision.startswith("fp16"))
    deepspeed = "deepspeed" in sharding or "deepspeed" in notes
    fsdp = "fsdp" in sharding or "hsdp" in sharding
    compiled = "compile" in notes.replace("no torch.compile", "")
    program = cells.get("source_ref", "").lower()
    # NVIDIA's recipes: gradients in bf16 (grad_reduce_in_fp32 = False), fused SwiGLU and loss, Transformer Engine.
    recipe = not fsdp and any(name in program for name in ("nvidia/nemo", "megatron-bridge", "dgxc-benchmarking"))
    distributed = "distributed optimizer" in sharding
    zero = next((int(d) for d in re.findall(r"zero-(\d+)", sharding)), 1 if distributed else 0)
    shares_state = deepspeed and precision.startswith("bf16") and zero < 2
    reduce_bytes = 2 if precision.startswith("fp16") or (fsdp and not distributed) or recipe else 4
    if shares_state:
        zero = 1  # DeepSpeed's BF16_Optimizer shards its state whatever the stage, and sums gradients in all-reduces
    if zero > 3:
        raise Skipped("zero_fsdp names a ZeRO stage above 3")
    z = 1.0
    if fsdp and "zero-1" not in sharding:
        group = re.search(r"group (\d+)", sharding)
        if group and int(group[1]) < 1:
            raise Skipped("zero_fsdp names a group of no GPUs")
        z = min(float(group[1]) if group else (machine.gpus_per_node if "hsdp" in sharding else copies), copies)
        if copies % z:
            z = copies
        zero = 0
    elif fsdp:
        zero = 1
    parallel_sequence = cells.get("seq_parallel", "").lower()[:1] == "y" or (recipe and not cells.get("seq_parallel"))
    return {
        "z": z,
        "dp": copies / z,
        "zero": zero,
        "bits": 8 if eight else (32 if precision == "fp32" else 16),
        "reduce_bytes": reduce_bytes,
        "recompute": 2 if checkpoint.startswith("full") else 1 if checkpoint.startswith("selective") else 0,
        "split_residual": parallel_sequence,
        "flash": not unfused,
        "fused": compiled or not (fsdp or deepspeed),
        "overlap_x": not deepspeed and "unfused" not in attention and "vanilla tp" not in notes,
        # NVIDIA's recipes since Hopper (tp_comm_overlap), and torchtitan's AsyncTP, split products and their
        # collectives into pieces.
        "overlap_forward": "asynctp" in notes or (distributed and machine.units > 108 and parallel_sequence),
        "overlap_z": True,
        "overlap_dp": distributed or fsdp,
        "weights_kept": zero in (1, 2),
        "half_weights": not fsdp,
        "rope": cells.get("mlp_type", "").lower() == "swiglu",
        "chunk_logits": 1 << 40,
        "blocking": "launch_blocking=1" in notes,
        "regather": parallel_sequence and "mode" not in cells.get("seq_parallel", ""),
        "gradient_copy": deepspeed and precision.startswith("fp16"),
        "gradient_bytes": 6 if shares_state else 0,
        "all_reduces_gradients": shares_state,
        # DeepSpeed's stages keep what they have sent, and the first, which is the fullest, its dropout's mask.
        "stage_keeps": 1.5 if deepspeed else 0,
        # Megatron-LM's gradient_accumulation_fusion.
        "fuses_accumulation": not (fsdp or deepspeed),
        "fused_loss": recipe or "llm-foundry" in program,
        "fused_gate": recipe or compiled,
        "keeps_float8_inputs": recipe and eight,
        "recomputes_per_op": "per-op" in checkpoint or "2nd layer" in checkpoint,
    }
