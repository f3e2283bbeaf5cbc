"""List layouts of models with latent attention for the parity suite."""

from __future__ import annotations

from layouts import FULL, GOLDFISH, NODES_OF_2, OFFLOADED, ONE_SEQUENCE, PACKED, SELECTIVE, Case
from layouts_of_experts import BIAS, CAPACITY, LOSSES, MUON, PADDED
from tiny_runs import DEEPSEEK_V2, DEEPSEEK_V3, YOUTU

ADAPTERS = {"lora": {"rank": 4}}
SIX_HEADS = YOUTU | {"num_attention_heads": 6, "num_key_value_heads": 6, "hidden_size": 48}
DEEP = YOUTU | {"num_hidden_layers": 4}

CASES: dict[str, Case] = {
    "x2": (DEEPSEEK_V3, {"x": 2}, BIAS | GOLDFISH),
    "y2 packed": (YOUTU, {"y": 2}, PACKED),
    "x2 y2 selective": (DEEPSEEK_V2, {"x": 2, "y": 2}, LOSSES | SELECTIVE),
    "cp2 ring packed": (YOUTU, {"cp": 2, "cp_method": "ring"}, PACKED),
    "pp2 ep2 dp2": (DEEPSEEK_V3, {"pp": 2, "dp": 2, "ep": 2}, ONE_SEQUENCE | BIAS),
}

SLOW_CASES: dict[str, Case] = {
    "one process": (DEEPSEEK_V3, {}, BIAS | PADDED),
    "x4": (DEEPSEEK_V3, {"x": 4}, BIAS),
    "y4": (YOUTU, {"y": 4}, FULL),
    "z2": (DEEPSEEK_V3, {"z": 2}, BIAS | MUON),
    "dp2 zero 3": (YOUTU, {"dp": 2, "zero": 3}, MUON),
    "z4 in nodes of 2": (YOUTU, {"z": 4}, NODES_OF_2),
    "x2 y2 padded": (YOUTU, {"x": 2, "y": 2}, PADDED | FULL),
    "x2 y2 ep2 z2": (DEEPSEEK_V3, {"x": 2, "y": 2, "z": 2, "ep": 2}, ONE_SEQUENCE | BIAS),
    "cp2 ulysses packed": (DEEPSEEK_V2, {"cp": 2, "cp_method": "ulysses"}, PACKED),
    "x2 cp2 ring": (DEEPSEEK_V3, {"x": 2, "cp": 2, "cp_method": "ring"}, PACKED | BIAS | SELECTIVE),
    "y2 cp2 ulysses": (YOUTU, {"y": 2, "cp": 2, "cp_method": "ulysses"}, PADDED),
    "cp4 ring": (YOUTU, {"cp": 4, "cp_method": "ring"}, PACKED),
    **{
        f"pp2 {schedule}": (DEEP, {"pp": 2, "dp": 2, "schedule": schedule}, ONE_SEQUENCE)
        for schedule in ("Interleaved1F1B", "ZBVZeroBubble", "DualPipeV")
    },
    "pp2 x2 ZBV": (DEEP, {"pp": 2, "x": 2, "schedule": "ZBVZeroBubble"}, ONE_SEQUENCE | GOLDFISH),
    "pp2 z2 offloaded": (DEEP, {"pp": 2, "z": 2}, ONE_SEQUENCE | OFFLOADED),
    "x2 y2, y shares the batch": (SIX_HEADS, {"x": 2, "y": 2}, PACKED),
    "x2 y2, y shares the queries": (SIX_HEADS, {"x": 2, "y": 2}, PACKED | ONE_SEQUENCE),
    "y4, y shares the queries, selective": (SIX_HEADS, {"y": 4}, ONE_SEQUENCE | SELECTIVE),
    "x2 y2 muon": (YOUTU, {"x": 2, "y": 2}, MUON),
    "x2 y2 muon, y shares the queries": (SIX_HEADS, {"x": 2, "y": 2}, ONE_SEQUENCE | MUON),
    "x2 z2 muon": (DEEPSEEK_V3, {"x": 2, "z": 2}, MUON | BIAS),
    "x2 y2 adapters": (YOUTU, {"x": 2, "y": 2}, ADAPTERS),
    "x2 ep2 dp2 with capacity": (DEEPSEEK_V3, {"x": 2, "dp": 2, "ep": 2}, CAPACITY),
    "compiled": (YOUTU, {"x": 2}, {"training": {"compile": True}}),
}
