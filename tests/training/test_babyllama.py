"""A trained Llama, from llama2.c's format by way of Hugging Face's into our decoder, is as good as it was."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from fourfold.config.huggingface import model_of, read_config
from fourfold.models.pretrained import Pretrained
from fourfold.models.transformer import Transformer

SHARED = Path(__file__).parents[3] / "shared" / "data"
NLL = 0.617
"""Per token, over the first 256 tokens of each of five stories, as the model's description says."""


def write_llama(source: Path, folder: Path) -> None:
    """llama2.c's file as a Hugging Face model.

    Seven int32 and then float32 tensors, by kind over all layers. Its rotary pairs are adjacent channels (2i, 2i + 1);
    Hugging Face's are i and i + D/2.
    """
    content = np.fromfile(source, dtype=np.int32, count=7)
    hidden, inner, layers, heads, kv_heads, vocab, context = map(int, content)
    values = torch.from_numpy(np.fromfile(source, dtype=np.float32, offset=28))
    keys = hidden // heads * kv_heads
    at = 0

    def take(*shape: int) -> Tensor:
        nonlocal at
        count = int(np.prod(shape))
        at += count
        return values[at - count : at].view(shape).clone()

    def halves(weight: Tensor, of: int) -> Tensor:
        return weight.view(of, -1, 2, hidden).transpose(1, 2).reshape(weight.shape).contiguous()

    embedding = take(vocab, hidden)
    kinds = {
        "input_layernorm": take(layers, hidden),
        "self_attn.q_proj": take(layers, hidden, hidden),
        "self_attn.k_proj": take(layers, keys, hidden),
        "self_attn.v_proj": take(layers, keys, hidden),
        "self_attn.o_proj": take(layers, hidden, hidden),
        "post_attention_layernorm": take(layers, hidden),
        "mlp.gate_proj": take(layers, inner, hidden),
        "mlp.down_proj": take(layers, hidden, inner),
        "mlp.up_proj": take(layers, inner, hidden),
    }
    weights = {"model.embed_tokens.weight": embedding, "model.norm.weight": take(hidden)}
    for kind, stacked in kinds.items():
        for i, weight in enumerate(stacked):
            turned = {"self_attn.q_proj": heads, "self_attn.k_proj": kv_heads}.get(kind)
            weight = weight if turned is None else halves(weight, turned)
            weights[f"model.layers.{i}.{kind}.weight"] = weight.contiguous()
    folder.mkdir()
    save_file(weights, folder / "model.safetensors")
    config = {
        "model_type": "llama",
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": context,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
    }
    (folder / "config.json").write_text(json.dumps(config))


def encode(text: str, pieces: list[str]) -> list[int]:
    """SentencePiece with a vocabulary of single characters: a space in front, and every space as ▁.

    What it does not know, such as the end of a line, is <unk>.
    """
    ids = {piece: number for number, piece in enumerate(pieces)}
    return [1, *(ids.get(character, 0) for character in "▁" + text.strip().replace(" ", "▁"))]


@torch.no_grad()
def test_a_trained_llama_is_as_good_as_it_was(tmp_path: Path) -> None:
    source = SHARED / "babyllama"
    if not source.is_dir():
        pytest.skip(f"the trained model is not at {source}")
    write_llama(source / "model5000.bin", tmp_path / "hf")
    model = Transformer(model_of(read_config(tmp_path / "hf"), "babyllama"))
    pretrained = Pretrained(tmp_path / "hf", model.config)
    for name, parameter in model.named_parameters():
        pretrained.read_into(parameter.data, name, tuple(slice(0, n) for n in parameter.shape))
    assert sum(p.numel() for p in model.parameters()) - 128 * (128 - 105) == 936_448

    pieces = [line.split("\t")[0] for line in (source / "tok105.vocab").read_text(encoding="utf-8").split("\n")]
    stories = (SHARED / "text" / "tinystories_sample.txt").read_text(encoding="utf-8").split("<|endoftext|>")
    total, count = 0.0, 0
    for story in filter(str.strip, stories):
        tokens = torch.tensor([encode(story, pieces)[:257]])
        total += model(tokens[:, :-1], tokens[:, 1:]).item()
        count += tokens.shape[1] - 1
    assert total / count == pytest.approx(NLL, abs=0.0005)
