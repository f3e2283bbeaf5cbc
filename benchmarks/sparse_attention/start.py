"""Make the model that training starts from. Its weights are random, but its first layer attends to the previous two
tokens.

A model can look up facts in its context only after it has learned heads that attend to the previous tokens. A small
model would need most of its training to learn them. So we give these heads to the first layer: with large biases of
queries and keys, the rotary embedding makes each head attend to a fixed distance. Training can change these biases like
all other weights.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from benchmarks.sparse_attention.decoding import inverse_frequencies
from benchmarks.sparse_attention.tasks import VOCABULARY

SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
    "attention_bias": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}
DISTANCES = (1, 2, 1, 2)
"""For each query head of the first layer, the distance in tokens to the token that it attends to."""
SHARPNESS, PAIRS = 8.0, 8
"""The biases fill the ``PAIRS`` channel pairs that the rotary embedding turns fastest. At the right distance, each pair
adds ``SHARPNESS`` to the attention score."""


def write_start(folder: Path, seed: int = 0) -> None:
    """Write the initial model in the Hugging Face format.

    Args:
        folder: Folder for the model.
        seed: Seed of the random weights.
    """
    import transformers

    torch.manual_seed(seed)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE))
    attention = model.model.layers[0].self_attn
    head_dim = attention.head_dim
    size = (SHARPNESS * head_dim**0.5) ** 0.5
    angles = inverse_frequencies(model)[:PAIRS]
    with torch.no_grad():
        query_ND = attention.q_proj.bias.view(-1, 2, head_dim // 2)
        key_KD = attention.k_proj.bias.view(-1, 2, head_dim // 2)
        for head, distance in enumerate(DISTANCES):
            query_ND[head, 0, :PAIRS] = size * torch.cos(-distance * angles)
            query_ND[head, 1, :PAIRS] = size * torch.sin(-distance * angles)
        key_KD[:, 0, :PAIRS] = size
    model.save_pretrained(folder)
