"""List layouts of dense models for the parity suite. On each layout, the grid must compute the same results as one
process."""

from __future__ import annotations

from typing import Any, get_args

from tiny_runs import (
    ARCEE,
    EXAONE4,
    GEMMA,
    GEMMA2,
    GEMMA3,
    GPT,
    GRANITE,
    LLAMA,
    NEOX,
    OLMO,
    OLMO2,
    QWEN,
    SLIDING,
    SMOLLM3,
)

from fourfold.config.run import PipelineSchedule

Case = tuple[dict[str, Any], dict[str, Any], dict[str, Any]]
"""The model, the grid, and further sections of the run file."""

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
SCHEDULES = get_args(PipelineSchedule)
FAST_SCHEDULES = ("1F1B", "ZBVZeroBubble", "Interleaved1F1B")
SIX_HEADS = {"preset": "llama-tiny", "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 8}
TWO_PARTS, FOUR_PARTS = ({"overlap": {"batch_parts": parts}, "training": {"micro_batch_size": 4}} for parts in (2, 4))
NODES_OF_2 = {"overlap": {"shards_per_node": 2}}
ONE_SEQUENCE = {"training": {"micro_batch_size": 1}}
TOKENS_IN_TWO, TOKENS_IN_FOUR = ({"overlap": {"batch_parts": parts}, **ONE_SEQUENCE} for parts in (2, 4))
TUNED = {"training": {"tuned_products": "cached"}}
TUNED_ONE_SEQUENCE = {"training": {"tuned_products": "cached", "micro_batch_size": 1}}
ADAPTERS = {"lora": {"rank": 4, "targets": ["up_proj", "q_proj", "o_proj"]}}
OF_GEMMA2 = {key: GEMMA2[key] for key in ("sliding_window", "layer_types", "attn_logit_softcapping", "norm_placement")}
OF_OLMO = {"qk_norm": True, "qk_norm_over": "all_heads", "zero_centered_norm": True}
UNEVEN = {"preset": "llama-tiny", "hidden_size": 56, "head_dim": 8, "intermediate_size": 72}

# Each row has the model, the grid, and further settings of the run file. A step has 8 sequences in micro-batches of 2,
# so most grids accumulate gradients. The masked labels are spread unevenly over the ranks.
CASES: dict[str, Case] = {
    "one process": (LLAMA, {}, {}),
    "x2": (LLAMA, {"x": 2}, {}),
    "z2": (LLAMA, {"z": 2}, {}),
    "x2 gpt": (GPT, {"x": 2}, {}),
    "dp2 zero 1 packed": (LLAMA, {"dp": 2, "zero": 1}, PACKED),
    "dp2 zero 3 qwen": (QWEN, {"dp": 2, "zero": 3}, {}),
    "x2 y2": (LLAMA, {"x": 2, "y": 2}, {}),
    "x2 y2, y shares the batch": (SIX_HEADS, {"x": 2, "y": 2}, {}),
    "x2 y2 in parts": (GPT, {"x": 2, "y": 2}, TWO_PARTS | FULL | GOLDFISH),
    "y2 z2": (GPT, {"y": 2, "z": 2}, {}),
    "z2 dp2 zero 2": (QWEN, {"z": 2, "dp": 2, "zero": 2}, {}),
    "cp2 ulysses": (LLAMA, {"cp": 2, "cp_method": "ulysses"}, PACKED),
    "x2 cp2 packed": (LLAMA, {"x": 2, "cp": 2}, PACKED),
    "z2 cp2 zero 1 qwen": (QWEN, {"z": 2, "cp": 2, "zero": 1}, {}),
    "pp4": (DEEP_LLAMA, {"pp": 4}, ONE_SEQUENCE),
    "pp4 two micro-batches": (
        DEEP_GPT,
        {"pp": 4, "layers_per_stage": [1, 1, 1, 1]},
        {"training": {"micro_batch_size": 4}},
    ),
    **{f"pp2 {schedule}": (DEEP_GPT, {"pp": 2, "schedule": schedule}, ONE_SEQUENCE) for schedule in FAST_SCHEDULES},
    **{f"pp2 dp2 zero {zero}": (DEEP_LLAMA, {"pp": 2, "dp": 2, "zero": zero}, ONE_SEQUENCE) for zero in (0, 3)},
    "pp2 x2 packed": (DEEP_GPT, {"pp": 2, "x": 2}, ONE_SEQUENCE | PACKED),
    "pp2 cp2 interleaved": (DEEP_GPT, {"pp": 2, "cp": 2, "schedule": "Interleaved1F1B"}, ONE_SEQUENCE | PACKED),
    "y2 neox recomputed": (NEOX, {"y": 2}, FULL),
    "x2 z2 learning-rate groups": (GPT, {"x": 2, "z": 2}, GROUPS),
    "x2 y2 norms over all heads": (OLMO, {"x": 2, "y": 2}, {}),
    "x2 cp2 norms over all heads": (OLMO, {"x": 2, "cp": 2}, PACKED | SELECTIVE),
    "x2 y2 gemma": (GEMMA, {"x": 2, "y": 2}, SELECTIVE),
    "pp2 dp2 zero 2 gemma": (GEMMA | {"num_hidden_layers": 4}, {"pp": 2, "dp": 2, "zero": 2}, ONE_SEQUENCE),
    "one process, sliding": (SLIDING, {}, PACKED),
    "x2 y2 olmo2": (OLMO2, {"x": 2, "y": 2}, FULL),
    "cp2 ulysses, sliding packed": (SLIDING, {"cp": 2, "cp_method": "ulysses"}, PACKED | SELECTIVE),
    "cp2 ring, sliding": (SLIDING, {"cp": 2, "cp_method": "ring"}, {}),
    "x2 y2 gemma2": (GEMMA2, {"x": 2, "y": 2}, SELECTIVE | PACKED),
    "x2 cp2 ring gemma2": (GEMMA2, {"x": 2, "cp": 2, "cp_method": "ring"}, PACKED),
    "pp2 z2 gemma3": (GEMMA3, {"pp": 2, "z": 2}, ONE_SEQUENCE | FULL),
    "x2 y2 granite in parts": (GRANITE, {"x": 2, "y": 2}, TWO_PARTS),
    "x2 z2 arcee": (ARCEE, {"x": 2, "z": 2}, SELECTIVE),
    "pp2 cp2 smollm3": (SMOLLM3, {"pp": 2, "cp": 2}, ONE_SEQUENCE | PACKED),
    "x2 y2 exaone4": (EXAONE4, {"x": 2, "y": 2}, PACKED),
    "x2 goldfish": (LLAMA, {"x": 2}, GOLDFISH),
    "z4 in nodes of 2": (GPT, {"z": 4}, ONE_SEQUENCE | NODES_OF_2),
    "z2 dp2 zero 3 goldfish packed": (GPT, {"z": 2, "dp": 2, "zero": 3}, GOLDFISH | PACKED),
    "x2 z2 tuned products": (LLAMA, {"x": 2, "z": 2}, TUNED),
    "x2 y2 tuned products, recomputed": (GPT, {"x": 2, "y": 2}, TUNED | FULL),
    "pp2 ZBV tuned products": (DEEP_GPT, {"pp": 2, "schedule": "ZBVZeroBubble"}, TUNED_ONE_SEQUENCE),
}

SLOW_CASES: dict[str, Case] = {
    "x2 y2 sliding, y shares the batch": (SIX_HEADS | OF_GEMMA2, {"x": 2, "y": 2}, PACKED),
    "x2 y2 sliding, y shares the queries": (SIX_HEADS | OF_GEMMA2, {"x": 2, "y": 2}, ONE_SEQUENCE | PACKED),
    "x2 y2 sliding alone, y shares the queries": (SIX_HEADS | {"sliding_window": 6}, {"x": 2, "y": 2}, ONE_SEQUENCE),
    "x2 y2 z2 olmo2 in parts": (OLMO2, {"x": 2, "y": 2, "z": 2}, TWO_PARTS),
    "x2 gemma2 parts of tokens": (GEMMA2, {"x": 2}, TOKENS_IN_TWO | FULL | PACKED),
    "cp4 ring, sliding packed": (SLIDING, {"cp": 4, "cp_method": "ring"}, PACKED),
    "cp4 ring gemma3": (GEMMA3, {"cp": 4, "cp_method": "ring"}, FULL),
    "pp2 cp2 gemma2 interleaved": (
        GEMMA2 | {"num_hidden_layers": 4},
        {"pp": 2, "cp": 2, "schedule": "Interleaved1F1B"},
        ONE_SEQUENCE | PACKED,
    ),
    "z2 dp2 zero 3 gemma3": (GEMMA3, {"z": 2, "dp": 2, "zero": 3}, SELECTIVE),
    "pp2 ZBV olmo2": (OLMO2 | {"num_hidden_layers": 4}, {"pp": 2, "schedule": "ZBVZeroBubble"}, ONE_SEQUENCE),
    "x2 y2 norms over all heads, y shares the batch": (SIX_HEADS | OF_OLMO, {"x": 2, "y": 2}, FULL),
    "x2 y2 norms over all heads, y shares the queries": (SIX_HEADS | OF_OLMO, {"x": 2, "y": 2}, ONE_SEQUENCE),
    "x2 y2 z2 norms over all heads in parts": (OLMO, {"x": 2, "y": 2, "z": 2}, TWO_PARTS),
    "one process, tuned products": (QWEN, {}, TUNED | GROUPS),
    "z4 uneven, tuned products": (UNEVEN, {"z": 4}, TUNED),
    "y2 z2 tuned products, packed": (GPT, {"y": 2, "z": 2}, TUNED | PACKED | SELECTIVE),
    "dp2 cp2 tuned products": (LLAMA, {"dp": 2, "cp": 2}, TUNED | PACKED),
    "x2 tuned products with adapters": (LLAMA, {"x": 2, "z": 2}, TUNED | ADAPTERS),
    "y2 tuned products with adapters": (QWEN, {"y": 2, "dp": 2, "zero": 3}, TUNED | ADAPTERS | FULL),
    **{
        f"z2 dp2 zero {zero} tuned products": (GPT, {"z": 2, "dp": 2, "zero": zero}, TUNED_ONE_SEQUENCE)
        for zero in (0, 1, 2, 3)
    },
    "dp2 zero 2 tuned products": (NEOX, {"dp": 2, "zero": 2}, TUNED),
    "x2 y2 tuned products in parts": (
        QWEN,
        {"x": 2, "y": 2},
        {"training": {"tuned_products": "cached", "micro_batch_size": 4}, "overlap": {"batch_parts": 2}} | FULL,
    ),
    "pp2 x2 z2 tuned products": (DEEP_LLAMA, {"pp": 2, "x": 2, "z": 2}, TUNED_ONE_SEQUENCE),
    "pp2 dp2 zero 1 ZBV tuned products": (
        DEEP_GPT,
        {"pp": 2, "dp": 2, "zero": 1, "schedule": "ZBVZeroBubble"},
        TUNED_ONE_SEQUENCE,
    ),
    "x2 y2 z2 tuned products from the CPU": (
        GEMMA | {"num_hidden_layers": 4},
        {"x": 2, "y": 2, "z": 2},
        TUNED_ONE_SEQUENCE | OFFLOADED,
    ),
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
    "x2 in parts": (LLAMA, {"x": 2}, TWO_PARTS),
    "y2 in parts": (LLAMA, {"y": 2}, TWO_PARTS | PACKED),
    "x2 in four parts, some parts recomputed": (LLAMA, {"x": 2}, FOUR_PARTS | SELECTIVE | PACKED),
    "x2 y2 in parts, y shares the batch": (SIX_HEADS, {"x": 2, "y": 2}, TWO_PARTS | PACKED),
    "x2 y2 in four parts, y shares the queries": (SIX_HEADS, {"x": 2, "y": 2}, FOUR_PARTS | FULL),
    "x2 y2 neox in parts, recomputed": (NEOX, {"x": 2, "y": 2}, TWO_PARTS | FULL),
    "x2 y2 gemma in parts": (GEMMA, {"x": 2, "y": 2}, FOUR_PARTS | GROUPS),
    "x2 in parts, no other overlap": (
        QWEN,
        {"x": 2, "y": 2},
        TWO_PARTS | {"overlap": {"batch_parts": 2, "input_gradients": False, "gate_sum": False, "weight_prefetch": 0}},
    ),
    "x2 z2 in parts from the CPU": (DEEP_GPT, {"x": 2, "z": 2}, TWO_PARTS | OFFLOADED),
    "y2 dp2 zero 2 in parts": (LLAMA, {"y": 2, "dp": 2, "zero": 2}, FULL | {"overlap": {"batch_parts": 2}}),
    "x2 cp2 in parts": (LLAMA, {"x": 2, "cp": 2}, TWO_PARTS | FULL | PACKED),
    "y2 cp2 ring in parts": (GPT, {"y": 2, "cp": 2, "cp_method": "ring"}, FOUR_PARTS | GOLDFISH),
    "pp2 x2 in parts": (DEEP_GPT, {"pp": 2, "x": 2}, FULL | {"overlap": {"batch_parts": 2}}),
    "pp2 y2 ZBV in parts": (
        DEEP_GPT,
        {"pp": 2, "y": 2, "schedule": "ZBVZeroBubble"},
        {"overlap": {"batch_parts": 2}},
    ),
    "x2 y2 adapters in parts": (
        LLAMA,
        {"x": 2, "y": 2},
        TWO_PARTS | {"lora": {"rank": 4, "targets": ["up_proj", "q_proj"]}},
    ),
    "x2 y2 z2 in parts": (QWEN, {"x": 2, "y": 2, "z": 2}, FULL | {"overlap": {"batch_parts": 2}}),
    "x2 z2 in parts, recomputed, outputs normalized": (
        GEMMA2,
        {"x": 2, "z": 2},
        FULL | {"overlap": {"batch_parts": 2}},
    ),
    "x2 z2 in four parts": (DEEP_LLAMA, {"x": 2, "z": 2}, FOUR_PARTS),
    "x2 y2 z2 in parts, weights gathered late": (
        DEEP_GPT,
        {"x": 2, "y": 2, "z": 2},
        TWO_PARTS | {"overlap": {"batch_parts": 2, "weight_prefetch": 0}},
    ),
    "x2 dp2 zero 3 in four parts, some parts recomputed": (
        DEEP_LLAMA,
        {"x": 2, "dp": 2, "zero": 3},
        {"overlap": {"batch_parts": 4, "weight_prefetch": 3}, "training": {"micro_batch_size": 4}} | SELECTIVE | PACKED,
    ),
    "pp2 x2 z2 in parts": (DEEP_LLAMA, {"pp": 2, "x": 2, "z": 2}, TWO_PARTS | GOLDFISH),
    "x2 z2 olmo adapters, parts of tokens": (
        OLMO2 | {"num_hidden_layers": 4},
        {"x": 2, "z": 2},
        TOKENS_IN_FOUR | ADAPTERS,
    ),
    "x2 y2 parts of tokens": (LLAMA, {"x": 2, "y": 2}, TOKENS_IN_TWO | FULL),
    "x2 z2 parts of packed tokens": (QWEN, {"x": 2, "z": 2}, TOKENS_IN_FOUR | SELECTIVE | PACKED),
    "x2 y2 parts of tokens, y shares the batch": (
        SIX_HEADS,
        {"x": 2, "y": 2},
        {"overlap": {"batch_parts": 4}} | PACKED,
    ),
    "y2 cp2 ring parts of tokens": (GPT, {"y": 2, "cp": 2, "cp_method": "ring"}, TOKENS_IN_FOUR | GOLDFISH),
    "x2 cp2 parts of tokens": (LLAMA, {"x": 2, "cp": 2}, TOKENS_IN_TWO | PACKED),
    "x2 gpt parts of tokens of several sequences": (GPT, {"x": 2, "dp": 2, "zero": 3}, {"overlap": {"batch_parts": 8}}),
    "pp2 x2 ZBV parts of tokens": (DEEP_GPT, {"pp": 2, "x": 2, "schedule": "ZBVZeroBubble"}, TOKENS_IN_TWO),
    "pp2 y2 neox parts of tokens": (NEOX, {"pp": 2, "y": 2}, TOKENS_IN_TWO | FULL),
    "x4 y2, kv not in x, parts of tokens": (
        LLAMA | {"num_key_value_heads": 2},
        {"x": 4, "y": 2},
        TOKENS_IN_TWO | SELECTIVE,
    ),
    "x2 y2 adapters, parts of tokens": (
        LLAMA,
        {"x": 2, "y": 2},
        TOKENS_IN_TWO | {"lora": {"rank": 4, "targets": ["up_proj", "q_proj"]}},
    ),
    "x4 y2, kv not in x, in parts": (
        LLAMA | {"num_key_value_heads": 2},
        {"x": 4, "y": 2},
        TWO_PARTS | SELECTIVE,
    ),
    "x4 y2, kv not in x": (LLAMA | {"num_key_value_heads": 2}, {"x": 4, "y": 2}, SELECTIVE),
    "x4, heads repeat kv": (LLAMA | {"num_attention_heads": 12, "num_key_value_heads": 6, "head_dim": 8}, {"x": 4}, {}),
    "x8 one kv head": (QWEN | {"num_key_value_heads": 1}, {"x": 8}, {}),
    "y8": (GPT | {"num_attention_heads": 8}, {"y": 8}, {}),
    "z8 uneven": (UNEVEN, {"z": 8}, ONE_SEQUENCE),
    "z4 in nodes of 2, uneven, recomputed": (UNEVEN, {"z": 4}, FULL | NODES_OF_2),
    "z4 in nodes of 2, bf16 weights": (
        LLAMA,
        {"z": 4},
        NODES_OF_2 | {"training": {"precision": "bf16", "master_weights": "bf16", "micro_batch_size": 1}},
    ),
    **{
        f"z4 dp2 zero {zero} in nodes of {per_node}": (
            DEEP_GPT,
            {"z": 4, "dp": 2, "zero": zero},
            ONE_SEQUENCE | {"overlap": {"shards_per_node": per_node, "weight_prefetch": 3}},
        )
        for zero in (0, 1, 2, 3)
        for per_node in (2, 4)
    },
    "z2 dp4 zero 2 in nodes of 2": (QWEN, {"z": 2, "dp": 4, "zero": 2}, ONE_SEQUENCE | NODES_OF_2),
    "z2 cp2 zero 1 in nodes of 2": (QWEN, {"z": 2, "cp": 2, "zero": 1}, NODES_OF_2 | PACKED),
    "dp6 zero 3 in nodes of 3": (
        LLAMA,
        {"dp": 6, "zero": 3},
        {"overlap": {"shards_per_node": 3}, "training": {"global_batch_size": 12, "micro_batch_size": 1}},
    ),
    "z4 in nodes of 2, tuned products": (UNEVEN, {"z": 4}, TUNED | NODES_OF_2),
    "x2 z4 in nodes of 2 in parts": (LLAMA, {"x": 2, "z": 4}, {"overlap": {"shards_per_node": 2, "batch_parts": 2}}),
    "pp2 z4 in nodes of 2": (DEEP_GPT, {"pp": 2, "z": 4}, ONE_SEQUENCE | NODES_OF_2 | OFFLOADED),
    "pp2 z2 dp2 zero 2 interleaved in nodes of 2": (
        DEEP_LLAMA,
        {"pp": 2, "z": 2, "dp": 2, "zero": 2, "schedule": "Interleaved1F1B"},
        ONE_SEQUENCE | NODES_OF_2,
    ),
    "z4 adapters in nodes of 2": (LLAMA, {"z": 4}, NODES_OF_2 | {"lora": {"rank": 4}}),
    **{
        f"x2 {axis}2 dp2 zero {zero} {name}": (model, {"x": 2, axis: 2, "dp": 2, "zero": zero}, ONE_SEQUENCE)
        for axis in ("y", "z")
        for zero in (0, 1, 2, 3)
        # Use the two models in turn.
        for name, model in [(("gpt", GPT), ("qwen", QWEN))[(zero + (axis == "z")) % 2]]
    },
    **{
        f"x2 y2 z2 dp2 zero {zero}": (LLAMA, {"x": 2, "y": 2, "z": 2, "dp": 2, "zero": zero}, ONE_SEQUENCE)
        for zero in (0, 3)
    },
    "x2 y2 z2 dp2 gpt": (GPT, {"x": 2, "y": 2, "z": 2, "dp": 2}, ONE_SEQUENCE | FULL),
}
