"""Test Loki in transformers models. If it attends to all keys, the results equal dense attention. Otherwise, they
follow the paper."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tiny_loki import SHAPES, SPARSE, changed, loki_model, prompt, slow_decode, step_by_step, windows, with_cache
from torch import Tensor

pytest.importorskip("transformers")

from transformers import DynamicCache

from fourfold.errors import UserError
from fourfold.inference.loki import LokiBasis, LokiConfig, calibrate, disable_loki, enable_loki
from fourfold.inference.loki.architecture import SUPPORTED
from fourfold.inference.loki.cache import GrowingLayer, LokiLayer

pytestmark = pytest.mark.usefixtures("no_gradients")
EVERY = LokiConfig(k_f=1.0, min_seq=0)


@pytest.fixture
def never_dense(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use Loki's own code even if it attends to all keys."""
    monkeypatch.setattr(LokiConfig, "is_dense_at", lambda *_: False)


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("kv_heads", [8, 2, 1], ids=lambda heads: f"group {8 // heads}")
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.usefixtures("never_dense")
def test_all_keys_are_eager_attention(name: str, kv_heads: int) -> None:
    model = loki_model(name, kv_heads)
    basis = calibrate(model, windows(2))
    tokens = prompt()
    expected = model(tokens).logits
    assert expected.abs().max() > 0.3
    for config in (EVERY, changed(EVERY, prefill="simulate", sink=1, recent=1)):
        enable_loki(model, basis, config)
        for logits in (step_by_step(model, tokens, 1), step_by_step(model, tokens, 30), model(tokens).logits):
            torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)
    disable_loki(model)
    assert model.config._attn_implementation == "eager"
    assert torch.equal(model(tokens).logits, expected)


OTHERS = (
    "Apertus", "Arcee", "FlexOlmo", "Gemma", "Gemma3Text", "Glm4Moe", "GptOss", "Granite", "GraniteMoe",
    "HunYuanDenseV1", "HunYuanMoEV1", "MiniMaxM2", "Ministral", "Ministral3", "Mixtral", "Nemotron", "Olmo", "Olmo2",
    "Olmo3", "Olmoe", "Phi3", "Phimoe", "Qwen2Moe", "Qwen3Moe", "SeedOss", "SmolLM3", "StableLm", "Starcoder2",
)  # fmt: skip
"""More supported model types."""

SMALL = {
    "num_key_value_heads": 2, "head_dim": 8, "initializer_range": 0.1, "layer_types": ["full_attention"] * 2,
    "moe_intermediate_size": 16, "num_experts": 2, "num_local_experts": 2, "n_routed_experts": 2,
    "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 0,
}  # fmt: skip
"""Keys of the configuration that make any of these models small and without windows."""


def other_model(kind: str) -> Any:
    import transformers
    from tiny_dense_models import SIZES

    config = getattr(transformers, f"{kind}Config")(**SIZES | SMALL)
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()


@pytest.mark.fast_cases(8)
@pytest.mark.parametrize("kind", OTHERS)
@pytest.mark.usefixtures("never_dense")
def test_other_architectures(kind: str) -> None:
    model = other_model(kind)
    tokens = prompt(length=40)
    expected = model(tokens).logits
    basis = calibrate(model, windows(2, 40))
    for config in (EVERY, changed(EVERY, prefill="simulate")):
        enable_loki(model, basis, config)
        torch.testing.assert_close(step_by_step(model, tokens, 30), expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(model(tokens).logits, expected, rtol=1e-5, atol=1e-5)


def test_keys_of_gpt_oss_are_known_before_their_rotary_embedding() -> None:
    """Its cos and sin have half as many dims as in other models."""
    from fourfold.inference.loki.architecture import attentions_of
    from fourfold.inference.loki.key_hooks import observe_keys

    model = other_model("GptOss")
    found: list[Tensor] = []
    with observe_keys(model, attentions_of(model), lambda layer, query, keys, scaling: found.append(keys["pre"])):
        hidden = []
        hook = model.model.layers[1].self_attn.k_proj.register_forward_hook(lambda *call: hidden.append(call[-1]))
        model(prompt(1, 20))
        hook.remove()
    torch.testing.assert_close(found[1], hidden[0].unflatten(-1, (2, -1)).transpose(1, 2), rtol=1e-5, atol=1e-5)


def test_what_is_supported_is_tested() -> None:
    import transformers

    assert {*SHAPES, *(getattr(transformers, f"{kind}Config").model_type for kind in OTHERS)} == set(SUPPORTED)


def test_a_model_decodes_as_the_paper_says(llama: tuple[Any, LokiBasis]) -> None:
    """In every step and layer, compare the attention with a slow implementation on the model's own cache."""
    model, basis = llama
    enable_loki(model, basis, SPARSE)
    from fourfold.inference.loki import loki_attention as attention

    seen = []

    def watching(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **more: Any) -> Any:
        out = attention.loki_attention(module, query, key, value, mask, **more)
        if query.shape[2] == 1:
            layer = module.layer_idx
            basis_2KDd = basis.components[basis.best[layer]].sides(layer, 8)
            statistics = basis.mean_LKD[layer], basis.covariance_LKDD[layer]
            expected = slow_decode(query[0, :, 0], key[0], value[0], basis_2KDd, 12, more["scaling"], *statistics)
            seen.append((out[0][0, 0], expected))
        return out

    from transformers import AttentionInterface

    AttentionInterface.register("loki", watching)
    try:
        logits = step_by_step(model, prompt(1), 40)
    finally:
        AttentionInterface.register("loki", attention.loki_attention)
        disable_loki(model)
    assert len(seen) == 10 * 2
    for out, expected in seen:
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    assert (logits - model(prompt(1)).logits).abs().max() > 1e-3  # a large difference shows that attention was sparse


@pytest.mark.parametrize("config", [SPARSE, changed(SPARSE, sink=2, recent=3)], ids=str)
def test_padding_on_the_left_changes_nothing(llama: tuple[Any, LokiBasis], config: LokiConfig) -> None:
    model, basis = llama
    enable_loki(model, basis, config)
    tokens, padding = prompt(2, 40), 9
    alone = model.generate(tokens[:1], max_new_tokens=8, do_sample=False, attention_mask=torch.ones(1, 40).long())
    padded = torch.cat([torch.zeros(1, padding).long(), tokens[:1]], 1)
    other = torch.randint(1, 201, (1, 49), generator=torch.Generator().manual_seed(3))
    mask = torch.ones(2, 49).long()
    mask[0, :padding] = 0
    together = model.generate(torch.cat([padded, other]), max_new_tokens=8, do_sample=False, attention_mask=mask)
    logits = model(torch.cat([padded, other]), attention_mask=mask).logits
    disable_loki(model)
    assert torch.equal(together[0, padding:], alone[0])
    assert logits.isfinite().all()


def test_prompts_in_chunks(llama: tuple[Any, LokiBasis]) -> None:
    model, basis = llama
    tokens = prompt()
    enable_loki(model, basis, SPARSE)
    expected = step_by_step(model, tokens, 45)
    cache = DynamicCache(config=model.config)
    model(tokens[:, :20], **with_cache(cache))
    model(tokens[:, 20:45], **with_cache(cache))
    again = [model(tokens[:, i : i + 1], **with_cache(cache)).logits for i in range(45, 50)]
    disable_loki(model)
    torch.testing.assert_close(torch.cat(again, 1), expected[:, 45:])


def test_beam_search_with_all_keys_equals_dense_attention(llama: tuple[Any, LokiBasis]) -> None:
    model, basis = llama
    tokens = prompt()
    options = {"num_beams": 3, "max_new_tokens": 12, "do_sample": False, "attention_mask": torch.ones_like(tokens)}
    expected = model.generate(tokens, **options)
    enable_loki(model, basis, EVERY)
    found = model.generate(tokens, **options)
    enable_loki(model, basis, SPARSE)
    sparse = model.generate(tokens, **options)
    disable_loki(model)
    assert torch.equal(found, expected)
    assert sparse.shape[1] > tokens.shape[1]


def test_skipped_and_short(llama: tuple[Any, LokiBasis]) -> None:
    model, basis = llama
    tokens = prompt()
    dense = model(tokens).logits
    enable_loki(model, basis, changed(SPARSE, min_seq=51))
    short = step_by_step(model, tokens, 30)
    enable_loki(model, basis, SPARSE)
    both = step_by_step(model, tokens, 30)
    enable_loki(model, basis, changed(SPARSE, skip_layers=(0,)))
    held = DynamicCache(config=model.config)
    half = step_by_step(model, tokens, 30, cache=held)
    assert [type(layer) for layer in held.layers] == [GrowingLayer, LokiLayer]
    with pytest.raises(UserError, match="layers are 0 to 1"):
        enable_loki(model, basis, changed(SPARSE, skip_layers=(2,)))
    disable_loki(model)
    torch.testing.assert_close(short, dense, rtol=0, atol=1e-5)
    assert (half[:, 31:] - dense[:, 31:]).abs().max() > 1e-3
    assert (half[:, 31:] - both[:, 31:]).abs().max() > 1e-3


def test_layers_with_a_window_stay_dense(caplog: pytest.LogCaptureFixture) -> None:
    model = loki_model("qwen2", use_sliding_window=True, sliding_window=16, max_window_layers=1)
    tokens = prompt()
    expected = model(tokens).logits
    basis = calibrate(model, windows(2))
    enable_loki(model, basis, EVERY)
    assert "layers 1 have a sliding window" in caplog.text
    torch.testing.assert_close(step_by_step(model, tokens, 30), expected, rtol=0, atol=1e-5)
    every = loki_model("mistral", sliding_window=16)
    with pytest.raises(UserError, match="only the last 16 tokens"):
        enable_loki(every, calibrate(every, windows(2)), EVERY)


def test_two_models_may_share_a_configuration(llama: tuple[Any, LokiBasis]) -> None:
    """transformers stores the choice of attention in the configuration. The second model must not change."""
    model, basis = llama
    other = type(model)(model.config).eval()
    tokens = prompt()
    expected = other(tokens).logits
    enable_loki(model, basis, SPARSE)
    found = step_by_step(other, tokens, 30)
    disable_loki(model)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_a_copy_of_a_model_is_on_its_own(llama: tuple[Any, LokiBasis]) -> None:
    model, basis = llama
    tokens = prompt()
    enable_loki(model, basis, SPARSE)
    expected = step_by_step(model, tokens, 40)
    copied = copy.deepcopy(model)
    disable_loki(model)
    torch.testing.assert_close(step_by_step(copied, tokens, 40), expected)


@pytest.mark.slow
@pytest.mark.usefixtures("never_dense")
def test_half_precision(llama: tuple[Any, LokiBasis]) -> None:
    """With the same weights in half precision, Loki is as close to float32 as dense attention is."""
    model, basis = llama
    half = copy.deepcopy(model).bfloat16()
    tokens = prompt()
    expected = model(tokens).logits
    rounding = (half(tokens).logits.float() - expected).abs().mean()
    enable_loki(half, basis, EVERY)
    found = step_by_step(half, tokens, 20).float()
    assert (found - expected).abs().mean() < 1.3 * rounding
