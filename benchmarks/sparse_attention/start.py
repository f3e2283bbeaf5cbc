"""Make the model that training starts from: random weights, and a first layer that sees the previous two tokens.

A model must learn such heads before it can look up facts, and a small model needs most of its training for this. So the
first layer begins with them: large biases of queries and keys attend to a fixed distance through the rotary embedding.
Training may change them like all other weights.
"""

from __future__ import annotations

from pathlib import Path

import torch

from benchmarks.sparse_attention.decoding import inverse_frequencies
from benchmarks.sparse_attention.tasks import VOCABULARY

SHAPE = {
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
"""How far back each query head of the first layer attends."""
SHARPNESS, PAIRS = 8.0, 8
"""Score of a rotary pair at the right distance, and number of pairs (the fastest ones) that have this score."""


def write_start(folder: Path, seed: int = 0) -> None:
    """Write the model in the Hugging Face format.

    Args:
        folder: Folder to write.
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
