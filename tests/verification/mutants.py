"""Define a fault that parity must catch: a change of a line or two, and a run that computes wrong results with it."""

from __future__ import annotations

from typing import Any, NamedTuple

from tiny_runs import GPT, LLAMA, QWEN

from fourfold.verification.not_compared import Against

QWEN3 = QWEN | {"attention_bias": False}
"""QK-norm without biases, as transformers has it."""

SIX_HEADS = {
    "preset": "llama-tiny",
    "hidden_size": 48,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 8,
}
DEEP_GPT, DEEP_LLAMA = GPT | {"num_hidden_layers": 4}, LLAMA | {"num_hidden_layers": 4}

PACKED = {"data": {"source": "python-stdlib", "mask_documents": True}}
FULL = {"activation_checkpoint": {"mode": "full"}}
TWO_PARTS = {"overlap": {"batch_parts": 2}}
ONE_SEQUENCE = {"training": {"micro_batch_size": 1}}
WARMUP = {"lr_scheduler": {"warmup_steps": 100}}
GROUPS = {"optimizer": {"groups": [{"parameters": ["layers.0.*"], "lr_ratio": 0.1}]}}
TUNED = {"training": {"tuned_products": "cached"}}
AVERAGE = {"ema": {"decay": 0.8}}
LORA = {"lora": {"rank": 4, "alpha": 12.0}}
HASH = {"masks": {"goldfish": {"strategy": "hash", "h": 2}}}
STATIC = {"masks": {"goldfish": {"strategy": "static"}}}
TABLE = {"masks": {"goldfish": {"strategy": "hash-table", "h": 4}}}
FROM_STEP_1 = {"masks": {"goldfish": {"strategy": "static", "start_step": 1}}}


class Mutant(NamedTuple):
    """A fault: in ``module``, ``old`` becomes ``new``, which makes a run of this model, grid, and sections wrong.

    ``module`` can name a function of a module too, as in ``parallel.head:cross_entropy``. ``old`` and ``new`` are
    expressions or statements. ``mutation.mutated`` finds them by their syntax trees, so layout and comments do not
    matter.
    """

    fault: str
    module: str
    old: str
    new: str
    model: dict[str, Any] = LLAMA
    grid: dict[str, Any] = {}  # noqa: RUF012 (never written to)
    sections: dict[str, Any] = {}  # noqa: RUF012
    against: Against = "transformers"
    """The model of the reference. It must not share the faulty code."""


IN_NODES = {"overlap": {"shards_per_node": 2}}
X2, Y2, Z2, DP2, Z4, DP2Z2 = {"x": 2}, {"y": 2}, {"z": 2}, {"dp": 2}, {"z": 4}, {"dp": 2, "z": 2}
X2Y2, CP2 = {"x": 2, "y": 2}, {"cp": 2, "cp_method": "ring"}
ULYSSES = {"cp": 2, "cp_method": "ulysses"}
