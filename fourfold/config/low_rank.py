"""The section [lora] of the run file, for fine-tuning with low-rank adapters."""

from typing import Literal

from pydantic import Field

from fourfold.config.strict import Strict

Target = Literal[
    "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
    "q_a_proj", "kv_a_proj", "q_nope_proj", "q_rope_proj", "k_nope_proj", "k_rope_proj",
    "z_proj", "b_proj", "a_proj",
]  # fmt: skip
"""Linear layers that can have an adapter. The second row has the layers of latent attention, and the third row has the
layers of linear attention."""


class LoRAConfig(Strict):
    """Fine-tuning with low-rank adapters (LoRA). The model's own weights are frozen: they have no optimizer states, and
    are stored in the dtype of training.precision.

    LoRA needs `model.from_hf`. Checkpoints hold only the adapters. `fourfold checkpoint export-hf` writes the adapters
    in peft's format, or merges them into the model ([huggingface.md](huggingface.md#lora)).
    """

    rank: int = Field(0, ge=0)
    """Rank of the adapters. 0 turns LoRA off and trains all weights."""
    alpha: float = Field(32.0, gt=0)
    """The outputs of adapters are multiplied by alpha / rank."""
    targets: list[Target] | None = Field(None, min_length=1, examples=[["q_proj", "v_proj"]])
    """Linear layers that get an adapter. Default: all linear layers of a block."""
