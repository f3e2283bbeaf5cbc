"""Text generation: its settings, and the sizes of caches of all kinds."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from fourfold.data.tokenizer import ByteTokenizer
from fourfold.errors import UserError
from fourfold.huggingface.transformers_models import load_model
from fourfold.inference.generate import Generation, Sampling, generate
from fourfold.reports.terminal import generation_line

transformers = pytest.importorskip("transformers")

PROMPT = "the quick brown fox"
LLAMA = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}


def saved(folder: Path, kind: str, settings: Any = None, **sizes: Any) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, kind)(vocab_size=320, **sizes)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.normal_(std=parameter.shape[-1] ** -0.5)
    model.save_pretrained(folder)
    if settings is not None:
        (folder / "generation_config.json").write_text(json.dumps(settings))
    return load_model(folder)


def generated(model: Any, sampling: Sampling = Sampling()) -> Generation:  # noqa: B008 (frozen)
    return generate(model, ByteTokenizer(), PROMPT, 12, sampling)


def most_likely(model: Any) -> str:
    ids = torch.tensor([list(PROMPT.encode())])
    with torch.no_grad():
        for _ in range(12):
            ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], 1)
    return ByteTokenizer().decode(ids[0, len(PROMPT) :].tolist())


@pytest.mark.parametrize(
    "settings",
    [
        {"do_sample": True, "repetition_penalty": 1.9, "temperature": 0.7, "top_k": 20},
        {"no_repeat_ngram_size": 1},
        {"num_return_sequences": 2},
        {"num_beams": 3, "length_penalty": 2.0},
        {"guidance_scale": 3.0, "prompt_lookup_num_tokens": 2, "cache_implementation": "static"},
        {"eos_token_id": "</s>", "suppress_tokens": list(range(256))},
    ],
    ids=str,
)
def test_temperature_0_takes_the_most_likely_token(tmp_path: Path, settings: dict[str, Any]) -> None:
    model = saved(tmp_path, "LlamaConfig", settings, **LLAMA, eos_token_id=None)
    done = generated(model)
    assert done.text == most_likely(model)
    assert done.settings == {"do_sample": False}
    assert "(always the most likely token)" in generation_line(asdict(done))


def test_the_file_of_a_model_counts_with_a_temperature(tmp_path: Path) -> None:
    settings = {"no_repeat_ngram_size": 1, "top_k": 3, "num_return_sequences": 2}
    done = generated(saved(tmp_path, "LlamaConfig", settings, **LLAMA, eos_token_id=None), Sampling(1e-4))
    assert done.text != most_likely(load_model(tmp_path))  # greedy text would repeat a token
    assert done.settings == {
        "do_sample": True, "temperature": 1e-4, "top_k": 0, "top_p": 1.0, "no_repeat_ngram_size": 1
    }  # fmt: skip
    assert "no_repeat_ngram_size 1" in generation_line(asdict(done))


def test_generation_ends_at_a_stop_string(tmp_path: Path) -> None:
    whole = generated(saved(tmp_path, "LlamaConfig", **LLAMA, eos_token_id=None)).text
    stop = next(text for text in whole[1:] if text.isascii())
    (tmp_path / "generation_config.json").write_text(json.dumps({"stop_strings": [stop, "none"]}))
    done = generated(load_model(tmp_path))
    assert whole.startswith(done.text) and done.text.endswith(stop)
    assert done.new_tokens < 12 and done.settings["stop_strings"] == [stop, "none"]


def test_without_stop_strings_each_token_decodes_the_text_once(tmp_path: Path) -> None:
    """Decode once for the streamer, and not again to look for texts that stop generation."""
    lengths = []

    class Counted(ByteTokenizer):
        def decode(self, ids: Sequence[int]) -> str:
            lengths.append(len(ids))
            return super().decode(ids)

    model = saved(tmp_path, "LlamaConfig", **LLAMA, eos_token_id=None)
    assert generate(model, Counted(), PROMPT, 12, Sampling()).new_tokens == 12
    # The last two lengths are the end of the stream and the result.
    assert lengths == [*range(1, 13), 12, 12]


def test_settings_that_transformers_refuses_are_named(tmp_path: Path) -> None:
    model = saved(tmp_path, "LlamaConfig", {"repetition_penalty": "x"}, **LLAMA)
    with pytest.raises(UserError, match=r"'repetition_penalty': 'x'.*strictly positive float"):
        generated(model, Sampling(1.0))


FLOAT, TOKENS = 4, len(PROMPT) + 12 - 1
ATTENTION = 2 * 2 * 16 * TOKENS * FLOAT  # keys and values, each with two heads of 16 dims
SMALL = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.mark.parametrize(
    ("kind", "sizes", "held"),
    [
        ("MptConfig", {"d_model": 64, "n_heads": 4, "n_layers": 2, "max_seq_len": 256}, None),
        (
            "MambaConfig",
            {"hidden_size": 64, "num_hidden_layers": 2, "state_size": 8, "expand": 2, "conv_kernel": 4},
            2 * 128 * (4 + 8) * FLOAT,
        ),
        ("RwkvConfig", {"hidden_size": 64, "num_hidden_layers": 2, "attention_hidden_size": 64}, 5 * 64 * 2 * FLOAT),
        (
            "Lfm2Config",
            SMALL | {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]},
            ATTENTION + 64 * 3 * FLOAT,
        ),
    ],
)
def test_every_tensor_of_a_cache_is_counted(tmp_path: Path, kind: str, sizes: dict[str, Any], held: int | None) -> None:
    done = generated(saved(tmp_path, kind, **sizes, eos_token_id=None))
    assert done.cache_bytes == held
    assert ("cache" in generation_line(asdict(done))) == (held is not None)
