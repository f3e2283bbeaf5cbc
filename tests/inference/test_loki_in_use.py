"""Loki in other uses of a model: training, switching, interruptions, and several models."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny_loki import SPARSE, changed, prompt, step_by_step, windows, with_cache
from torch import Tensor

pytest.importorskip("transformers")

from transformers import DynamicCache, StaticCache
from transformers.cache_utils import DynamicLayer

from fourfold.errors import UserError
from fourfold.inference.loki import LokiBasis, LokiConfig, calibrate, disable_loki, enable_loki
from fourfold.inference.loki.architecture import attentions_of
from fourfold.inference.loki.cache import LokiLayer
from fourfold.inference.loki.fingerprint import sample_matrix
from fourfold.inference.loki.key_hooks import observe_keys
from fourfold.inference.loki.quality import measure_quality


def test_a_sample_of_a_large_matrix() -> None:
    """The matrix has more numbers than float32 can count."""
    large = torch.empty(8192, 8192, dtype=torch.bfloat16)
    large[0, 0], large[-1, -1] = 2.0, 3.0
    sample = sample_matrix(large)
    assert (len(sample), sample[0].item(), sample[-1].item()) == (32, 2.0, 3.0)


def test_attention_with_dropout_is_dense(llama: tuple[Any, LokiBasis]) -> None:
    model, basis = llama
    tokens = prompt()
    expected = model(tokens).logits
    enable_loki(model, basis, SPARSE)
    model.train()
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 1e-9
    logits = model(tokens, **with_cache(DynamicCache(config=model.config))).logits
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)


def test_a_step_with_autograd(llama: tuple[Any, LokiBasis]) -> None:
    model, basis = llama
    enable_loki(model, basis, SPARSE)
    tokens, found = prompt(), []
    for is_taped in (True, False):
        with torch.set_grad_enabled(is_taped):
            cache = DynamicCache(config=model.config)
            model(tokens[:, :40], **with_cache(cache))
            found.append(model(tokens[:, 40:41], **with_cache(cache)).logits)
    torch.testing.assert_close(found[0], found[1])


def test_an_evaluation_begins_without_loki(llama: tuple[Any, LokiBasis]) -> None:
    model, basis = llama
    expected = measure_quality(model, windows(2), basis, SPARSE)
    enable_loki(model, basis, changed(SPARSE, prefill="simulate", k=4))
    assert measure_quality(model, windows(2), basis, SPARSE) == expected
    assert model.config._attn_implementation == "eager"


def test_a_cache_is_offloaded_before_the_attention_reads_it(llama: tuple[Any, LokiBasis]) -> None:
    """Replace the copies on the device with NaN, and the codes with zeros, because transformers frees the copies after
    each update."""
    model, basis = llama
    enable_loki(model, basis, SPARSE)
    tokens, found = prompt(), []
    with torch.no_grad():
        for is_offloaded in (False, True):
            held = DynamicCache(config=model.config)
            model(tokens[:, :40], **with_cache(held))
            for layer in held.layers if is_offloaded else []:
                layer.update = _then_away(layer)
            found.append(model(tokens[:, 40:41], **with_cache(held)).logits)
    torch.testing.assert_close(found[0], found[1])


def _then_away(layer: Any) -> Any:
    def update(*arguments: Any, **keywords: Any) -> Any:
        out = type(layer).update(layer, *arguments, **keywords)
        for buffer in (layer.key_buffer, layer.value_buffer, layer.code_buffer):
            buffer.storage = torch.full_like(buffer.storage, math.nan if buffer.storage.is_floating_point() else 0)
        return out

    return update


def test_the_cache_is_released_after_a_pass(llama: tuple[Any, LokiBasis]) -> None:
    model, basis = llama
    enable_loki(model, basis, SPARSE)
    model.generate(prompt(), max_new_tokens=3, do_sample=False, attention_mask=torch.ones(2, 50).long())
    assert all(layer.self_attn.loki.layer is None for layer in model.model.layers)


def test_the_part_and_the_whole_of_a_model(llama: tuple[Any, LokiBasis]) -> None:
    model, basis = llama
    expected = model(prompt()).logits
    enable_loki(model.model, basis, changed(SPARSE, prefill="simulate"))
    enable_loki(model, basis, changed(SPARSE, prefill="simulate", k=5))
    assert model.model.layers[0].self_attn.loki.recipe.config.k == 5
    disable_loki(model.model)
    assert model.config._attn_implementation == "eager"
    assert torch.equal(model(prompt()).logits, expected)


def test_an_attention_that_was_set_later_is_kept(llama: tuple[Any, LokiBasis]) -> None:
    model, basis = llama
    enable_loki(model, basis, SPARSE)
    model.set_attn_implementation("sdpa")
    disable_loki(model)
    assert model.config._attn_implementation == "sdpa"


def test_two_models_of_one_configuration_both_with_loki(llama: tuple[Any, LokiBasis]) -> None:
    model, basis = llama
    other = type(model)(model.config).eval()
    enable_loki(model, basis, SPARSE)
    enable_loki(other, calibrate(other, windows()), SPARSE)
    disable_loki(model)
    disable_loki(other)
    assert model.config._attn_implementation == "eager"


def steps(model: Any, tokens_BS: Tensor, mask_BS: Tensor, begin: int, count: int) -> Tensor:
    """Return the logits of the last rows of a prompt, and then of single tokens."""
    cache, out = DynamicCache(config=model.config), []
    with torch.no_grad():
        for first, last in ((0, begin), *((i, i + 1) for i in range(begin, begin + count))):
            mask, positions = mask_BS[:, :last], (mask_BS[:, :last].cumsum(-1) - 1).clamp(min=0)[:, first:last]
            out.append(
                model(
                    tokens_BS[:, first:last],
                    attention_mask=mask,
                    position_ids=positions,
                    **with_cache(cache),
                ).logits
            )
    return torch.cat(out, 1)


def test_decoding_steps_need_codes(llama: tuple[Any, LokiBasis]) -> None:
    model, basis = llama
    enable_loki(model, basis, changed(SPARSE, bits=16))
    with pytest.raises(UserError, match="bits = 16 works only in `fourfold loki evaluate --text`; use 2"):
        step_by_step(model, prompt(1), 40)


@pytest.mark.parametrize(
    "config",
    [
        LokiConfig(d=8, k_f=0.25, min_k=4, min_seq=0),
        LokiConfig(d=8, k_f=0.25, min_k=4, min_seq=0, sink=1, recent=2),
        LokiConfig(d=8, k_f=0.25, min_k=4, min_seq=60),
        LokiConfig(d=8, k=7, min_seq=60),
        LokiConfig(d=8, k_f=0.25, min_k=4, min_seq=0, prefill="simulate"),
    ],
    ids=["share", "ends", "share, min_seq", "number, min_seq", "simulated"],
)
def test_padding_does_not_count(llama: tuple[Any, LokiBasis], config: LokiConfig) -> None:
    """A sequence of 46 tokens chooses the same number of keys alone and in a batch with a sequence of 86 tokens."""
    model, basis = llama
    enable_loki(model, basis, config)
    tokens, padding = prompt(2, 90), 40
    mask = torch.ones(2, 90).long()
    mask[0, :padding] = 0
    together = steps(model, tokens, mask, 86, 4)
    for row, begin in ((0, padding), (1, 0)):
        alone = steps(model, tokens[row : row + 1, begin:], mask[row : row + 1, begin:], 86 - begin, 4)
        torch.testing.assert_close(together[row, begin:], alone[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["static", "chunk"])
def test_what_cannot_be_simulated_is_refused(llama: tuple[Any, LokiBasis], kind: str) -> None:
    model, basis = llama
    enable_loki(model, basis, changed(SPARSE, prefill="simulate"))
    tokens, held = prompt(), DynamicCache(config=model.config)
    with torch.no_grad():
        if kind == "static":
            held = StaticCache(config=model.config, max_cache_len=90)
        else:
            model(tokens[:, :20], **with_cache(held))
        with pytest.raises(UserError, match="simulate"):
            model(tokens[:, 20:], **with_cache(held))


def test_a_layer_that_was_skipped_is_ranked_later(llama: tuple[Any, LokiBasis]) -> None:
    model, basis = llama
    tokens, held = prompt(), DynamicCache(config=model.config)
    with torch.no_grad():
        enable_loki(model, basis, changed(SPARSE, skip_layers=(0,)))
        model(tokens[:, :40], **with_cache(held))
        enable_loki(model, basis, SPARSE)
        model(tokens[:, 40:41], **with_cache(held))
    assert isinstance(held.layers[0], LokiLayer)
    with pytest.raises(UserError, match="no layer to Loki"):
        enable_loki(model, basis, changed(SPARSE, skip_layers=(0, 1)))


def test_a_prompt_in_inference_mode_continues_outside_of_it(llama: tuple[Any, LokiBasis]) -> None:
    model, basis = llama
    enable_loki(model, basis, SPARSE)
    tokens, found = prompt(), []
    for mode in (torch.inference_mode, torch.no_grad):
        held = DynamicCache(config=model.config)
        with mode():
            model(tokens[:, :40], **with_cache(held))
        with torch.no_grad():
            found.append(model(tokens[:, 40:41], **with_cache(held)).logits)
    assert torch.equal(found[0], found[1])


def test_a_damaged_header(llama: tuple[Any, LokiBasis], tmp_path: Path) -> None:
    good, bad = tmp_path / "good.safetensors", tmp_path / "bad.safetensors"
    llama[1].save(good)
    with safe_open(good, framework="pt") as file:
        about = file.metadata()
    for change in ({"best": None}, {"best": "[["}, {"tokens": "many"}, {"best": '["post", "none"]'}):
        kept = {key: value for key, value in (about | change).items() if value is not None}
        save_file(load_file(good), bad, kept)
        with pytest.raises(UserError, match="is damaged"):
            LokiBasis.load(bad)
    tensors = load_file(good)
    del tensors["pre.variances"]
    save_file(tensors, bad, about)
    with pytest.raises(UserError, match="is damaged"):
        LokiBasis.load(bad)
    with pytest.raises(UserError, match="is a folder"):
        LokiBasis.load(tmp_path)


def test_an_adapter_leaves_the_fingerprint(llama: tuple[Any, LokiBasis]) -> None:
    model, basis = llama
    projection = model.model.layers[0].self_attn.q_proj
    projection.lora_A = torch.nn.Linear(64, 4, bias=False)
    enable_loki(model, basis, SPARSE)
    assert model.config._attn_implementation == "loki"


def test_layers_without_a_rotary_embedding() -> None:
    """In layers without a rotary embedding, keys "before" and "after" the embedding are the same."""
    import transformers
    from tiny_dense_models import SIZES

    sizes = SIZES | {"layer_types": ["full_attention"] * 2, "no_rope_layers": [1, 0], "num_key_value_heads": 2}
    model = transformers.AutoModelForCausalLM.from_config(transformers.SmolLM3Config(**sizes)).eval()
    seen = {}
    with (
        torch.no_grad(),
        observe_keys(model, attentions_of(model), lambda layer, query, keys, _: seen.update({layer: keys})),
    ):
        model(prompt(1, 30))
    assert not torch.equal(seen[0]["pre"], seen[0]["post"])
    assert torch.equal(seen[1]["pre"], seen[1]["post"])


def test_a_window_of_all_positions_hides_nothing() -> None:
    import transformers
    from tiny_dense_models import SIZES

    config = transformers.Phi3Config(**SIZES | {"num_key_value_heads": 2, "sliding_window": 64})
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    tokens, found = prompt(length=60), []
    basis = calibrate(model, windows(2, 40))
    with torch.no_grad():
        for keys in (LokiConfig(k_f=1.0, min_seq=0), SPARSE):
            enable_loki(model, basis, keys)
            held = DynamicCache(config=model.config)
            model(tokens[:, :50], **with_cache(held))
            rows = [model(tokens[:, i : i + 1], **with_cache(held)).logits for i in range(50, 60)]
            assert isinstance(held.layers[0], LokiLayer)
            found.append(torch.cat(rows, 1))
        disable_loki(model)
        expected = model(tokens).logits[:, 50:]
    torch.testing.assert_close(found[0], expected, rtol=0, atol=1e-4)
    assert (found[1] - expected).abs().max() > 1e-3


def test_another_cache_type_causes_one_warning(llama: tuple[Any, LokiBasis], caplog: pytest.LogCaptureFixture) -> None:
    class OwnLayer(DynamicLayer):
        pass

    model, basis = llama
    tokens, held = prompt(), DynamicCache()
    held.layer_class_to_replicate = OwnLayer
    enable_loki(model, basis, SPARSE)
    with torch.no_grad():
        for begin in (0, 25):
            model(tokens[:, begin : begin + 25], **with_cache(held))
    assert caplog.text.count("a cache of type OwnLayer is dense") == 1


def test_attention_to_a_cache_of_fixed_size_is_dense(
    llama: tuple[Any, LokiBasis], caplog: pytest.LogCaptureFixture
) -> None:
    model, basis = llama
    tokens, found = prompt(), []
    with torch.no_grad():
        for is_loki in (False, True):
            if is_loki:
                enable_loki(model, basis, SPARSE)
            held = StaticCache(config=model.config, max_cache_len=90)
            model(tokens[:, :40], **with_cache(held))
            found.append(model(tokens[:, 40:41], **with_cache(held)).logits)
            disable_loki(model)
    torch.testing.assert_close(found[1], found[0])
    assert caplog.text.count("a cache of type StaticLayer is dense") == 1


def test_a_benchmark_of_a_short_context() -> None:
    from benchmarks.loki_decode import Shape, measure

    row = measure(Shape(1, 4, 2, 16, 4, 2048, torch.float32, "cpu"), 100, 1)
    assert row.ratio > 0
