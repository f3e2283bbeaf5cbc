"""List layouts of mixtures of experts for the parity suite."""

from __future__ import annotations

from layouts import FULL, GOLDFISH, NODES_OF_2, OFFLOADED, ONE_SEQUENCE, PACKED, SELECTIVE, Case
from tiny_runs import DEEPSEEK, GPT_OSS, LLAMA, MIXTURE, QWEN_MOE

LOSSES = {"moe": {"load_balancing_loss": 0.5, "z_loss": 0.01}}
BIAS = {"moe": {"bias_update_rate": 0.02}}
CAPACITY = {"moe": {"capacity_factor": 0.75, "load_balancing_loss": 0.5}}
ADAPTERS = {"lora": {"rank": 4, "targets": ["q_proj", "o_proj"]}}
DEEP = MIXTURE | {"num_hidden_layers": 4}
TOP_1, TOP_8 = MIXTURE | {"num_experts_per_tok": 1}, QWEN_MOE | {"num_experts_per_tok": 8}
MANY = MIXTURE | {"num_experts": 64, "num_experts_per_tok": 1, "moe_intermediate_size": 16}
"""There are more experts than tokens in a small micro-batch, so some experts get no token."""
FEW = MIXTURE | {"num_experts": 2}
"""More ranks shard the experts than a rank has experts, so each expert is split."""
FEW_OSS = GPT_OSS | {"num_experts": 2, "num_experts_per_tok": 1}
PADDED = {"data": {"format": "sft", "train": [{"path": "nowhere"}]}}
MUON = {"optimizer": {"name": "muon"}}
SIX_HEADS = GPT_OSS | {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 8}
DENSE_OSS = LLAMA | {key: GPT_OSS[key] for key in ("attention_sinks", "mlp_bias", "norm_rounds_last", "swiglu_limit")}
DEEP_OSS = GPT_OSS | {"num_hidden_layers": 4}

CASES: dict[str, Case] = {
    "one process": (QWEN_MOE, {}, LOSSES),
    "dp2, experts whole": (MIXTURE, {"dp": 2}, LOSSES),
    "ep2 dp2": (QWEN_MOE, {"dp": 2, "ep": 2}, LOSSES),
    "ep2 z2": (DEEPSEEK, {"z": 2, "ep": 2}, BIAS),
    "ep2 cp2 with capacity": (MIXTURE, {"cp": 2, "ep": 2}, CAPACITY),
    "x2 ep2 dp2": (MIXTURE, {"x": 2, "dp": 2, "ep": 2}, LOSSES),
    "y2 ep2 z2": (QWEN_MOE, {"y": 2, "z": 2, "ep": 2}, LOSSES | FULL),
    "ep2 dp4 zero 3": (MIXTURE, {"dp": 4, "ep": 2, "zero": 3}, ONE_SEQUENCE | LOSSES),
    "split experts, dp4 zero 3": (FEW, {"dp": 4, "zero": 3}, ONE_SEQUENCE | LOSSES),
    "pp2 ep2 dp2": (DEEPSEEK, {"pp": 2, "dp": 2, "ep": 2}, ONE_SEQUENCE | BIAS),
    "gpt-oss, x2 cp2 ring packed": (GPT_OSS, {"x": 2, "cp": 2, "cp_method": "ring"}, PACKED | LOSSES),
    "gpt-oss, y2 ep2 dp2 padded": (GPT_OSS, {"y": 2, "dp": 2, "ep": 2}, PADDED | FULL),
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
    **{
        f"split experts, ep2 z2 dp2 zero {zero}": (
            FEW,
            {"z": 2, "dp": 2, "ep": 2, "zero": zero},
            ONE_SEQUENCE | {"optimizer": {"name": name}},
        )
        for zero, name in ((1, "muon"), (2, "lion"), (3, "muon"))
    },
    "split experts, z4": (FEW, {"z": 4}, LOSSES | SELECTIVE | MUON),
    "split experts, z4 in nodes of 2": (FEW, {"z": 4}, LOSSES | NODES_OF_2),
    "split experts, x2 y2 dp4 zero 1": (FEW, {"x": 2, "y": 2, "dp": 4, "zero": 1}, ONE_SEQUENCE | MUON),
    "split experts, pp2 cp2 dp2 zero 2": (FEW, {"pp": 2, "cp": 2, "dp": 2, "zero": 2}, ONE_SEQUENCE | PACKED | FULL),
    "split experts, gpt-oss, ep2 dp4 zero 1": (FEW_OSS, {"dp": 4, "ep": 2, "zero": 1}, ONE_SEQUENCE | MUON),
    "split experts, gpt-oss, x2 z2 zero 2": (FEW_OSS, {"x": 2, "z": 2, "dp": 2, "zero": 2}, ONE_SEQUENCE | LOSSES),
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
        # The bias sends all tokens to one expert. After the bias is updated, it sends them to the other expert.
        MIXTURE | {"num_experts": 2, "num_experts_per_tok": 1, "router_bias": True},
        {"dp": 2, "ep": 2},
        {"moe": {"bias_update_rate": 100.0}},
    ),
    "gpt-oss, one process, padded": (GPT_OSS, {}, PADDED),
    "gpt-oss, x2 y2 ep2 z2": (GPT_OSS, {"x": 2, "y": 2, "z": 2, "ep": 2}, ONE_SEQUENCE | SELECTIVE),
    "gpt-oss, x2 cp2 ulysses": (GPT_OSS, {"x": 2, "cp": 2, "cp_method": "ulysses"}, PACKED | FULL),
    "gpt-oss, cp4 ring, ep4, padded": (GPT_OSS, {"cp": 4, "ep": 4, "cp_method": "ring"}, PADDED | FULL),
    "gpt-oss, ep2 dp4 zero 3": (GPT_OSS, {"dp": 4, "ep": 2, "zero": 3}, ONE_SEQUENCE | MUON),
    "gpt-oss, pp2 ep2 dp2 ZBV": (DEEP_OSS, {"pp": 2, "dp": 2, "ep": 2, "schedule": "ZBVZeroBubble"}, ONE_SEQUENCE),
    "gpt-oss, x2 y2, y shares the batch": (SIX_HEADS, {"x": 2, "y": 2}, PACKED),
    "gpt-oss, x2 y2, y shares the queries": (SIX_HEADS, {"x": 2, "y": 2}, PACKED | ONE_SEQUENCE),
    "gpt-oss, x2 ep2 dp2 adapters": (GPT_OSS, {"x": 2, "dp": 2, "ep": 2}, ADAPTERS),
    "gpt-oss, x2 ep2 dp2 with capacity": (GPT_OSS, {"x": 2, "dp": 2, "ep": 2}, CAPACITY),
    "dense with sinks, x2 y2 in parts": (DENSE_OSS, {"x": 2, "y": 2}, {"overlap": {"batch_parts": 2}} | SELECTIVE),
    "sinks with capped scores, cp2 ring": (
        GPT_OSS | {"attn_logit_softcapping": 0.7},
        {"cp": 2, "cp_method": "ring"},
        PACKED,
    ),
    "geglu": (MIXTURE | {"mlp": "geglu"}, {"dp": 2, "ep": 2}, {}),
    "neox's parallel residual": (MIXTURE | {"parallel_residual": True}, {"x": 2, "dp": 2, "ep": 2}, FULL),
}
