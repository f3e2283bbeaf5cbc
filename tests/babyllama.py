"""Load a small trained Llama, for tests that need more than random weights. Its files are not part of the
repository."""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

DATA = Path(os.environ.get("FOURFOLD_TEST_DATA", Path(__file__).parents[2] / "shared" / "data"))


def needs_babyllama() -> Path:
    """Return the folder with the model's data. Skip the test if the data or the package sentencepiece is missing."""
    pytest.importorskip("sentencepiece")
    if not (DATA / "babyllama" / "model5000.bin").is_file():
        pytest.skip(f"no trained model in {DATA}: set FOURFOLD_TEST_DATA")
    return DATA


def stories(data: Path) -> list[list[int]]:
    """Return five stories as tokens. The model was not trained on them."""
    from sentencepiece import SentencePieceProcessor

    tokenizer = SentencePieceProcessor(str(data / "babyllama" / "tok105.model"))
    text = (data / "text" / "tinystories_sample.txt").read_text(encoding="utf-8")
    return [[1, *tokenizer.encode(story.strip())] for story in text.split("<|endoftext|>") if story.strip()]


def babyllama(data: Path) -> Any:
    """Load the model from llama2.c's format, and reorder its rotary channels. In llama2.c, the two channels of a rotary
    pair are neighbors. In transformers, they are half a head apart."""
    import transformers

    content = (data / "babyllama" / "model5000.bin").read_bytes()
    dim, hidden, layers, heads, kv_heads, vocab, length = struct.unpack("7i", content[:28])
    numbers = torch.from_numpy(np.frombuffer(content, np.float32, offset=28).copy())
    size, place = dim // heads, 0

    def take(*shape: int) -> torch.Tensor:
        nonlocal place
        count = int(np.prod(shape))
        place += count
        return numbers[place - count : place].view(shape)

    def halves(weight: torch.Tensor, count: int) -> torch.Tensor:
        return weight.view(count, size // 2, 2, dim).transpose(1, 2).reshape(count * size, dim)

    config = transformers.LlamaConfig(
        vocab_size=vocab,
        hidden_size=dim,
        intermediate_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=length,
        tie_word_embeddings=True,
        rms_norm_eps=1e-5,
        bos_token_id=1,
        eos_token_id=2,
    )
    weights = {"model.embed_tokens.weight": take(vocab, dim)}
    widths = {
        "input_layernorm": (dim,),
        "self_attn.q_proj": (dim, dim),
        "self_attn.k_proj": (kv_heads * size, dim),
        "self_attn.v_proj": (kv_heads * size, dim),
        "self_attn.o_proj": (dim, dim),
        "post_attention_layernorm": (dim,),
        "mlp.gate_proj": (hidden, dim),
        "mlp.down_proj": (dim, hidden),
        "mlp.up_proj": (hidden, dim),
    }
    for name, shape in widths.items():
        for layer, weight in enumerate(take(layers, *shape)):
            count = {"self_attn.q_proj": heads, "self_attn.k_proj": kv_heads}.get(name)
            weights[f"model.layers.{layer}.{name}.weight"] = weight if count is None else halves(weight, count)
    weights["model.norm.weight"] = take(dim)
    model = transformers.LlamaForCausalLM(config)
    missing = model.load_state_dict(weights, strict=False)
    assert not missing.unexpected_keys and set(missing.missing_keys) <= {"lm_head.weight"}
    model.tie_weights()
    return model.eval()
