"""The section of the run file for low-rank adapters."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from fourfold.config.strict import Strict

Target = Literal[
    "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
    "q_a_proj", "kv_a_proj", "q_nope_proj", "q_rope_proj", "k_nope_proj", "k_rope_proj",
    "z_proj", "b_proj", "a_proj",
]  # fmt: skip
"""The linear layers that can have an adapter. The second line names the layers of latent attention, and the third line
the layers of linear attention."""


class LoRAConfig(Strict):
    """Fine-tuning with low-rank adapters. The model itself is frozen. It is stored in the dtype of training.precision,
    without optimizer states.

    It needs `model.from_hf`. Checkpoints hold only the adapters. `fourfold checkpoint export-hf` writes the adapters in
    peft's format, or merges them into the model ([huggingface.md](huggingface.md#lora)).
    """

    rank: int = Field(0, ge=0)
    """Rank r of the adapters. 0 trains the whole model."""
    alpha: float = Field(32.0, gt=0)
    """The adapters' outputs are multiplied by alpha / rank."""
    targets: list[Target] | None = Field(None, min_length=1, examples=[["q_proj", "v_proj"]])
    """Linear layers with an adapter. Default: all linear layers of a block."""
