"""List layouts of models with linear attention for the parity suite."""

from __future__ import annotations

from layouts import FULL, GOLDFISH, NODES_OF_2, OFFLOADED, ONE_SEQUENCE, PACKED, SELECTIVE, Case
from layouts_of_experts import LOSSES, MUON, PADDED
from tiny_runs import HYBRID, QWEN3_NEXT

ADAPTERS = {"lora": {"rank": 4, "targets": ["q_proj", "z_proj", "b_proj", "o_proj", "gate_proj"]}}
LINEAR_ONLY = {key: value for key, value in HYBRID.items() if key != "attention_output_gate"} | {
    "layer_types": ["linear_attention"],
    "tie_word_embeddings": True,
}
SIX_HEADS = HYBRID | {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 8, "linear_num_key_heads": 2}
WINDOWS = HYBRID | {"layer_types": ["linear_attention", "sliding_attention"], "sliding_window": 5, "norm": "layernorm"}
WINDOWS |= {"zero_centered_norm": False, "linear_conv_kernel_dim": 3, "linear_num_value_heads": 4}
LONG = {"training": {"seq_length": 96}}
"""Sequences that are longer than a chunk, so packed documents begin in one chunk and end in the next."""
BF16 = {"training": {"precision": "bf16"}}

CASES: dict[str, Case] = {
    "x2 y2 packed": (HYBRID, {"x": 2, "y": 2}, PACKED | LONG),
    "cp2 ulysses packed": (HYBRID, {"cp": 2, "cp_method": "ulysses"}, PACKED | LONG | SELECTIVE),
    "pp2 dp2 zero 1 experts": (QWEN3_NEXT, {"pp": 2, "dp": 2, "zero": 1, "ep": 2}, ONE_SEQUENCE | LOSSES),
    "x2 y2, y shares the batch": (SIX_HEADS, {"x": 2, "y": 2}, PACKED | FULL),
}

SLOW_CASES: dict[str, Case] = {
    "one process, packed": (HYBRID, {}, PACKED | LONG),
    "x2": (HYBRID, {"x": 2}, GOLDFISH),
    "y2 full": (HYBRID, {"y": 2}, PACKED | FULL),
    "z2 padded": (QWEN3_NEXT, {"z": 2}, PADDED),
    "x4": (HYBRID, {"x": 4}, SELECTIVE),
    "y4 padded": (QWEN3_NEXT, {"y": 4}, PADDED),
    "x2 y2, y shares a padded batch": (SIX_HEADS, {"x": 2, "y": 2}, PADDED),
    **{f"z2 dp2 zero {zero}": (HYBRID, {"z": 2, "dp": 2, "zero": zero}, PACKED) for zero in (0, 1, 2, 3)},
    "z4 in nodes of 2": (HYBRID, {"z": 4}, NODES_OF_2 | ONE_SEQUENCE),
    "cp2 ring": (HYBRID, {"cp": 2, "cp_method": "ring"}, LONG),
    "cp2 ring packed, recomputed": (HYBRID, {"cp": 2, "cp_method": "ring"}, PACKED | FULL),
    "cp4 packed": (HYBRID, {"cp": 4}, PACKED | LONG),
    "x2 cp2 packed": (QWEN3_NEXT, {"x": 2, "cp": 2}, PACKED | SELECTIVE),
    "y2 cp2 padded": (HYBRID, {"y": 2, "cp": 2, "cp_method": "ulysses"}, PADDED),
    "x2 y2 cp2, y shares the batch": (SIX_HEADS | {"linear_num_key_heads": 4}, {"x": 2, "y": 2, "cp": 2}, PACKED),
    **{
        f"pp2 {schedule}": (HYBRID, {"pp": 2, "dp": 2, "schedule": schedule}, ONE_SEQUENCE)
        for schedule in ("Interleaved1F1B", "ZBVZeroBubble", "DualPipeV")
    },
    "pp2 x2 ZBV packed": (HYBRID, {"pp": 2, "x": 2, "schedule": "ZBVZeroBubble"}, ONE_SEQUENCE | PACKED),
    "pp2 cp2 interleaved": (HYBRID, {"pp": 2, "cp": 2, "schedule": "Interleaved1F1B"}, ONE_SEQUENCE | PACKED),
    "pp2 z2 offloaded": (HYBRID, {"pp": 2, "z": 2}, ONE_SEQUENCE | OFFLOADED),
    "x2 y2 z2 ep2": (QWEN3_NEXT, {"x": 2, "y": 2, "z": 2, "ep": 2}, ONE_SEQUENCE | LOSSES),
    "cp2 ep2 recomputed": (QWEN3_NEXT, {"cp": 2, "ep": 2}, PACKED | FULL),
    "x2 y2 bf16": (HYBRID, {"x": 2, "y": 2}, PACKED | BF16),
    "z2 dp2 zero 3 bf16": (HYBRID, {"z": 2, "dp": 2, "zero": 3}, BF16 | FULL),
    "x2 cp2 bf16": (HYBRID, {"x": 2, "cp": 2}, BF16 | PACKED),
    "x2 z2 fp16": (HYBRID, {"x": 2, "z": 2}, {"training": {"precision": "fp16"}}),
    "y2 linear attention in every layer": (LINEAR_ONLY, {"y": 2}, PACKED | LONG),
    "x2 z2 linear attention in every layer": (LINEAR_ONLY, {"x": 2, "z": 2}, SELECTIVE),
    "x2 y2 windows": (WINDOWS, {"x": 2, "y": 2}, PACKED),
    "x2 y2 muon": (HYBRID, {"x": 2, "y": 2}, MUON),
    "z2 muon": (HYBRID, {"z": 2}, MUON),
    "x2 y2 adapters": (HYBRID, {"x": 2, "y": 2}, ADAPTERS),
    "cp2 z2 adapters": (HYBRID, {"cp": 2, "z": 2}, ADAPTERS | PACKED),
    "x2 preferences": (
        HYBRID,
        {"x": 2},
        {"dpo": {"beta": 0.2}, "data": {"format": "preferences", "train": [{"path": "nowhere"}]}},
    ),
}
