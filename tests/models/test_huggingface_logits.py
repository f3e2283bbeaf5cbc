"""With the same weights, the decoder computes what Hugging Face's models compute."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fourfold.config.model import ModelConfig
from fourfold.models.initialize import initialize
from fourfold.models.norms import RMSNorm
from fourfold.models.rope import rope_frequencies
from fourfold.models.transformer import Transformer

transformers = pytest.importorskip("transformers")

SIZES: dict[str, Any] = {
    "vocab_size": 201,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "intermediate_size": 80,
    "max_position_embeddings": 64,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}


def filled(**sizes: Any) -> Transformer:
    """Return a model whose every parameter affects the output: biases are not zero, and norm weights are not one."""
    config = ModelConfig(**{**SIZES, "initializer_range": 0.2, **sizes})
    model = Transformer(config)
    initialize(model, config, seed=1)
    generator = torch.Generator().manual_seed(2)
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.data += 0.3 * torch.randn(parameter.shape, generator=generator)
    return model


def hf_config(kind: str, model: Transformer, **more: Any) -> Any:
    config = model.config
    rope = {"rope_type": "default"} if config.rope_scaling is None else config.rope_scaling.model_dump()
    known = {"rope_type", "factor", "original_max_position_embeddings"}
    known |= {"low_freq_factor", "high_freq_factor"} if rope["rope_type"] == "llama3" else set()
    known |= {"beta_fast", "beta_slow", "attention_factor"} if rope["rope_type"] == "yarn" else set()
    rope = {key: value for key, value in rope.items() if key in known and value is not None}
    return getattr(transformers, kind)(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        num_hidden_layers=config.num_hidden_layers,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        intermediate_size=config.intermediate_size,
        max_position_embeddings=config.max_position_embeddings,
        rms_norm_eps=config.norm_eps,
        tie_word_embeddings=config.tie_word_embeddings,
        rope_parameters={"rope_theta": config.rope_theta, **rope},
        **more,
    )


def llama_weights(model: Transformer) -> dict[str, Tensor]:
    """Return the weights with Hugging Face's names and without vocabulary padding."""
    weights = {}
    for name, value in model.state_dict().items():
        for ours, theirs in (("self_attn.qkv.", "self_attn."), ("self_attn.core.", "self_attn."), ("mlp.up.", "mlp.")):
            name = name.replace(ours, theirs)
        if name in ("embed_tokens.weight", "lm_head.weight"):
            value = value[: model.config.vocab_size]
        weights[name if name.startswith("lm_head") else f"model.{name}"] = value
    return weights


def gpt2_weights(model: Transformer) -> dict[str, Tensor]:
    """Return the weights with GPT-2's names. GPT-2 stores linear layers as [in, out], and has one layer for queries,
    keys, and values."""
    ours = model.state_dict()
    vocab = model.config.vocab_size
    weights = {
        "transformer.wte.weight": ours["embed_tokens.weight"][:vocab],
        "lm_head.weight": ours["lm_head.weight"][:vocab],
        "transformer.wpe.weight": ours["embed_positions.weight"],
    }
    for kind in ("weight", "bias"):
        weights[f"transformer.ln_f.{kind}"] = ours[f"norm.{kind}"]
        for i in range(model.config.num_hidden_layers):
            mine, theirs = f"layers.{i}", f"transformer.h.{i}"
            qkv = torch.cat([ours[f"{mine}.self_attn.qkv.{p}_proj.{kind}"] for p in "qkv"])
            weights[f"{theirs}.attn.c_attn.{kind}"] = qkv
            weights[f"{theirs}.attn.c_proj.{kind}"] = ours[f"{mine}.self_attn.o_proj.{kind}"]
            weights[f"{theirs}.mlp.c_fc.{kind}"] = ours[f"{mine}.mlp.up.up_proj.{kind}"]
            weights[f"{theirs}.mlp.c_proj.{kind}"] = ours[f"{mine}.mlp.down_proj.{kind}"]
            weights[f"{theirs}.ln_1.{kind}"] = ours[f"{mine}.input_layernorm.{kind}"]
            weights[f"{theirs}.ln_2.{kind}"] = ours[f"{mine}.post_attention_layernorm.{kind}"]
    return {name: value.T if ".c_" in name and value.ndim == 2 else value for name, value in weights.items()}


@torch.no_grad()
def check_same_logits(model: Transformer, theirs: nn.Module, weights: dict[str, Tensor]) -> None:
    assert theirs.load_state_dict(weights, strict=False).unexpected_keys == []
    assert {name for name, _ in theirs.named_parameters()} <= set(weights)
    tokens = torch.randint(model.config.vocab_size, (2, 40), generator=torch.Generator().manual_seed(0))
    logits, expected = model(tokens), theirs.eval()(tokens).logits
    assert expected.abs().max() > 1  # not all zeros
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5 * expected.abs().max().item())
    labels = torch.roll(tokens, -1, 1)
    loss = nn.functional.cross_entropy(expected.flatten(0, 1), labels.flatten(), reduction="sum")
    torch.testing.assert_close(model(tokens, labels), loss, rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    "sizes",
    [
        {},
        {"num_key_value_heads": 2},
        {"num_key_value_heads": 1, "tie_word_embeddings": True},
        {"head_dim": 12, "norm_eps": 1e-3, "rope_theta": 500.0},
        {"num_key_value_heads": 3, "rope_scaling": {"rope_type": "linear", "factor": 2.5}},
        {"rope_scaling": LLAMA3},
        {"rope_scaling": YARN, "head_dim": 16},
        {"rope_scaling": {**YARN, "beta_fast": 8.0, "beta_slow": 2.0, "attention_factor": 1.3}, "head_dim": 16},
    ],
    ids=["mha", "gqa", "mqa-tied", "head_dim", "linear", "llama3", "yarn", "yarn-attention_factor"],
)
def test_llama(sizes: dict[str, Any]) -> None:
    model = filled(**sizes)
    theirs = transformers.LlamaForCausalLM(hf_config("LlamaConfig", model))
    check_same_logits(model, theirs, llama_weights(model))


@pytest.mark.parametrize("kind", ["Llama", "GptOss"])
def test_norms_round_at_the_same_points_as_transformers(kind: str) -> None:
    modeling = getattr(transformers.models, {"Llama": "llama", "GptOss": "gpt_oss"}[kind])
    theirs = getattr(modeling, f"modeling_{modeling.__name__.rpartition('.')[2]}")
    norms = [getattr(theirs, f"{kind}RMSNorm")(64, eps=1e-5), RMSNorm(64, 1e-5, rounds_last=kind == "GptOss")]
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(shape, generator=generator).bfloat16() for shape in ((5, 7, 64), (64,)))
    for norm in norms:
        norm.weight.data = weight.clone()
    expected, found = (norm(x) for norm in norms)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("rope", [LLAMA3, YARN], ids=["llama3", "yarn"])
def test_stretched_frequencies(rope: dict[str, Any]) -> None:
    """With the real head size, there are channels in every range of frequencies that the scaling distinguishes."""
    model = filled(head_dim=128, rope_theta=500000.0, rope_scaling={**rope, "original_max_position_embeddings": 8192})
    frequencies, factor = rope_frequencies(model.config)
    theirs = transformers.LlamaForCausalLM(hf_config("LlamaConfig", model)).model.rotary_emb
    torch.testing.assert_close(frequencies, theirs.inv_freq, rtol=1e-5, atol=0)
    assert factor == pytest.approx(theirs.attention_scaling)
    plain, _ = rope_frequencies(filled(head_dim=128, rope_theta=500000.0).config)
    assert (frequencies == plain).any()
    assert (frequencies < plain * 0.26).any()
    assert ((frequencies < plain * 0.95) & (frequencies > plain * 0.3)).any()


@pytest.mark.parametrize("keys", [(300.0, 8, 8.0), (20.0, 1_000_000, 1.0), (1e4, 28, 8.0)], ids=["<0", ">d", "="])
def test_yarn_whose_borders_are_out_of_order_or_equal(keys: tuple[float, int, float]) -> None:
    theta, length, slow = keys
    rope = {**YARN, "original_max_position_embeddings": length, "beta_slow": slow}
    model = filled(head_dim=16, rope_theta=theta, rope_scaling=rope)
    theirs = transformers.LlamaForCausalLM(hf_config("LlamaConfig", model)).model.rotary_emb
    torch.testing.assert_close(rope_frequencies(model.config)[0], theirs.inv_freq, rtol=1e-5, atol=0)


def test_llama_with_biases() -> None:
    model = filled(attention_bias=True, attention_output_bias=True, mlp_bias=True)
    theirs = transformers.LlamaForCausalLM(hf_config("LlamaConfig", model, attention_bias=True, mlp_bias=True))
    check_same_logits(model, theirs, llama_weights(model))


def test_mistral() -> None:
    model = filled(num_key_value_heads=2, head_dim=10)
    theirs = transformers.MistralForCausalLM(hf_config("MistralConfig", model, sliding_window=None))
    check_same_logits(model, theirs, llama_weights(model))


def test_qwen2() -> None:
    model = filled(num_key_value_heads=2, attention_bias=True, tie_word_embeddings=True)
    theirs = transformers.Qwen2ForCausalLM(hf_config("Qwen2Config", model))
    check_same_logits(model, theirs, llama_weights(model))


def test_qwen3() -> None:
    model = filled(num_key_value_heads=2, head_dim=16, qk_norm=True, norm_eps=1e-6)
    theirs = transformers.Qwen3ForCausalLM(hf_config("Qwen3Config", model))
    check_same_logits(model, theirs, llama_weights(model))


@pytest.mark.parametrize("inner", [None, 100])
def test_gpt2(inner: int | None) -> None:
    biases = dict.fromkeys(("attention_bias", "attention_output_bias", "mlp_bias", "tie_word_embeddings"), True)
    model = filled(
        **biases, mlp="gelu", norm="layernorm", position_embedding="learned", intermediate_size=inner, norm_eps=1e-4
    )
    config = transformers.GPT2Config(
        vocab_size=201, n_positions=64, n_embd=48, n_layer=2, n_head=6, n_inner=inner, layer_norm_epsilon=1e-4
    )
    check_same_logits(model, transformers.GPT2LMHeadModel(config), gpt2_weights(model))
