"""List layouts of models that predict several tokens ahead (multi-token prediction) for the parity suite."""

from __future__ import annotations

from layouts import FULL, GOLDFISH, NODES_OF_2, OFFLOADED, ONE_SEQUENCE, PACKED, SELECTIVE, Case
from layouts_of_experts import BIAS, CAPACITY, LOSSES, MUON, PADDED
from tiny_runs import DEEPSEEK_V3, GEMMA2, GPT, GRANITE, HYBRID, LLAMA, OLMO2, QWEN3_NEXT

ONE, TWO = {"num_nextn_predict_layers": 1}, {"num_nextn_predict_layers": 2}
HEAVY = {"training": {"mtp_loss_weight": 0.7}}
BF16 = {"training": {"precision": "bf16"}}
SIX_HEADS = {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 8}
DEEP = LLAMA | {"num_hidden_layers": 4}

CASES: dict[str, Case] = {
    "x2 y2 packed": (LLAMA | TWO, {"x": 2, "y": 2}, PACKED | GOLDFISH),
    "cp2 ring packed": (LLAMA | ONE, {"cp": 2, "cp_method": "ring"}, PACKED | HEAVY),
    "pp2 dp2 ep2": (DEEPSEEK_V3 | ONE, {"pp": 2, "dp": 2, "ep": 2}, ONE_SEQUENCE | BIAS),
    "dp2 zero 3": (LLAMA | ONE, {"dp": 2, "zero": 3}, SELECTIVE),
}

SLOW_CASES: dict[str, Case] = {
    "one process": (LLAMA | TWO, {}, PACKED | HEAVY),
    "one process, padded experts": (DEEPSEEK_V3 | ONE, {}, BIAS | PADDED),
    "x2": (LLAMA | ONE, {"x": 2}, GOLDFISH),
    "x4 latents": (DEEPSEEK_V3 | ONE, {"x": 4}, BIAS | PADDED),
    "y2": (GPT | ONE, {"y": 2}, FULL),
    "y4": (LLAMA | TWO, {"y": 4}, SELECTIVE),
    "x2 y2, y shares the batch": (LLAMA | SIX_HEADS | ONE, {"x": 2, "y": 2}, PACKED),
    "x2 y2, y shares the queries": (LLAMA | SIX_HEADS | ONE, {"x": 2, "y": 2}, PACKED | ONE_SEQUENCE),
    "x2 y2 hybrid": (QWEN3_NEXT | TWO, {"x": 2, "y": 2}, PACKED | LOSSES),
    "x2 y2 softcaps, sliding": (GEMMA2 | ONE, {"x": 2, "y": 2}, PACKED),
    "x2 z2 factors": (GRANITE | ONE, {"x": 2, "z": 2}, {}),
    "y2 norms after": (OLMO2 | ONE, {"y": 2}, FULL),
    **{f"z2 dp2 zero {zero}": (LLAMA | TWO, {"z": 2, "dp": 2, "zero": zero}, PACKED) for zero in (0, 1, 2, 3)},
    "dp2 zero 3 tied": (LLAMA | ONE | {"tie_word_embeddings": True}, {"dp": 2, "zero": 3}, PACKED),
    "z4 in nodes of 2": (LLAMA | ONE, {"z": 4}, NODES_OF_2 | ONE_SEQUENCE),
    "cp2 ulysses packed": (LLAMA | TWO, {"cp": 2, "cp_method": "ulysses"}, PACKED),
    "cp2 ring": (LLAMA | TWO, {"cp": 2, "cp_method": "ring"}, GOLDFISH),
    "cp2 hybrid packed": (HYBRID | ONE, {"cp": 2}, PACKED),
    "x2 cp2 ring packed": (DEEPSEEK_V3 | TWO, {"x": 2, "cp": 2, "cp_method": "ring"}, PACKED | BIAS | SELECTIVE),
    "cp4 ring packed": (LLAMA | TWO, {"cp": 4, "cp_method": "ring"}, PACKED | FULL),
    "pp2": (LLAMA | ONE, {"pp": 2}, ONE_SEQUENCE | PACKED),
    **{
        f"pp2 {schedule}": (DEEP | TWO, {"pp": 2, "dp": 2, "schedule": schedule}, ONE_SEQUENCE)
        for schedule in ("GPipe", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
    },
    "pp2 x2 ZBV packed": (DEEP | ONE, {"pp": 2, "x": 2, "schedule": "ZBVZeroBubble"}, ONE_SEQUENCE | PACKED),
    "pp2 cp2 interleaved": (DEEP | ONE, {"pp": 2, "cp": 2, "schedule": "Interleaved1F1B"}, ONE_SEQUENCE | PACKED),
    "pp2 z2 offloaded": (DEEP | ONE, {"pp": 2, "z": 2}, ONE_SEQUENCE | OFFLOADED),
    "pp2 dp2 zero 3": (DEEP | ONE, {"pp": 2, "dp": 2, "zero": 3}, ONE_SEQUENCE),
    "pp2 dp2 zero 1": (DEEP | ONE, {"pp": 2, "dp": 2, "zero": 1}, ONE_SEQUENCE | PACKED),
    "x2 y2 z2 ep2": (DEEPSEEK_V3 | ONE, {"x": 2, "y": 2, "z": 2, "ep": 2}, ONE_SEQUENCE | BIAS),
    "ep2 dp2 x2 with capacity": (DEEPSEEK_V3 | ONE, {"x": 2, "dp": 2, "ep": 2}, CAPACITY),
    "x2 y2 bf16": (LLAMA | TWO, {"x": 2, "y": 2}, BF16 | PACKED),
    "pp2 x2 bf16": (DEEP | ONE, {"pp": 2, "x": 2}, {"training": {"precision": "bf16", "micro_batch_size": 1}}),
    "x2 z2 fp16": (LLAMA | ONE, {"x": 2, "z": 2}, {"training": {"precision": "fp16"}}),
    "x2 y2 muon": (LLAMA | ONE, {"x": 2, "y": 2}, MUON),
    "pp2 z2 average": (DEEP | ONE, {"pp": 2, "z": 2}, ONE_SEQUENCE | {"ema": {"decay": 0.5}}),
}
