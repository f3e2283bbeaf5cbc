"""Calibration finds the directions of the keys, and a basis works only with its own model."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_loki import encoder_of, loki_model, windows

pytest.importorskip("transformers")

from fourfold.errors import UserError
from fourfold.inference.loki import LokiBasis, LokiConfig, calibrate, enable_loki
from fourfold.inference.loki.basis import Components
from fourfold.inference.loki.key_hooks import observe_keys, undo_rotary
from fourfold.inference.loki.principal_components import Moments
from fourfold.inference.loki.select import always_chosen, choose_keys, keys_per_sequence
from fourfold.inference.loki.simulate import Probe, simulate


def test_streamed_covariance_equals_the_covariance_of_all_keys() -> None:
    keys = torch.randn(3, 2, 50, 6, generator=torch.Generator().manual_seed(0)) + 5.0
    moments = Moments.zero(2, 6)
    for part in keys.split(1):
        moments.add(part)
    for head in range(2):
        expected = torch.cov(keys[:, head].flatten(0, 1).double().T, correction=0)
        torch.testing.assert_close(moments.covariance_KDD()[head], expected, rtol=1e-4, atol=1e-4)
    vectors, variances = moments.components()
    assert (variances.diff() <= 0).all()
    rebuilt = vectors @ torch.diag_embed(variances) @ vectors.transpose(-1, -2)
    torch.testing.assert_close(rebuilt.double(), moments.covariance_KDD(), rtol=1e-3, atol=1e-4)


def test_planted_directions_are_found() -> None:
    """The keys vary along 3 of 16 directions, and their mean is not in these directions. The 3 directions give the
    scores up to a constant."""
    generator = torch.Generator().manual_seed(1)
    buffer = torch.linalg.qr(torch.randn(2, 16, 3, generator=generator)).Q
    inside = torch.randn(1, 2, 300, 3, generator=generator) @ buffer.transpose(-1, -2)
    keys = inside + 4 * torch.randn(1, 2, 1, 16, generator=generator)
    moments = Moments.zero(2, 16)
    moments.add(keys)
    vectors_KDD, variances_KD = moments.components()
    assert Components(vectors_KDD[None], variances_KD[None]).ranks_at(0.999).tolist() == [[3, 3]]
    found = vectors_KDD[..., :3] @ vectors_KDD[..., :3].transpose(-1, -2)
    torch.testing.assert_close(found, buffer @ buffer.transpose(-1, -2), rtol=1e-3, atol=1e-3)
    query = torch.randn(1, 2, 5, 16, generator=generator)
    approximate = (query @ vectors_KDD[..., :3]) @ (keys @ vectors_KDD[..., :3]).mT
    difference = approximate - query @ keys.mT
    torch.testing.assert_close(difference, difference[..., :1].expand_as(difference), rtol=1e-3, atol=1e-3)


def test_without_codes_all_dims_are_exact_top_k() -> None:
    """``bits=16`` ranks by the components themselves, as the paper does."""
    generator = torch.Generator().manual_seed(1)
    query, key = torch.randn(1, 4, 60, 12, generator=generator), torch.randn(1, 2, 60, 12, generator=generator)
    encoder = encoder_of(torch.linalg.qr(torch.randn(2, 12, 12, generator=generator)).Q)
    recalls = {}
    for bits in (2, 16):
        probe = Probe()
        simulate(query, key, key, encoder, LokiConfig(k=9, sink=0, recent=0, bits=bits), 0.3, None, probe)
        recalls[bits] = torch.cat(probe.recall)
    assert recalls[16].min() == 1
    assert 0.5 < recalls[2].mean() < 0.99


def test_directions_of_scores_approximate_them_best() -> None:
    """Queries and keys vary along different directions. The best approximation is the SVD of all scores."""
    generator = torch.Generator().manual_seed(1)
    stretch = torch.diag(torch.tensor([4.0, 3, 2, 1, 0.5, 0.4, 0.2, 0.1])).double()
    keys_SD, queries_SD = torch.randn(2, 4000, 8, generator=generator, dtype=torch.float64)
    keys_SD, queries_SD = keys_SD @ stretch + 3, queries_SD @ stretch.flip(0, 1)
    moments = Moments.zero(1, 8)
    moments.add(keys_SD[None, None])
    moments.add_queries(queries_SD[None, None])
    of_keys_KDD, variances_KD, of_queries_KDD = (each.double() for each in moments.components_of_scores())
    centered_SD = keys_SD - keys_SD.mean(0)
    scores = queries_SD @ centered_SD.T
    left, values, right = torch.linalg.svd(scores, full_matrices=False)
    torch.testing.assert_close(variances_KD[0].sqrt() * 4000, values[:8], rtol=1e-3, atol=0)
    found = (queries_SD @ of_queries_KDD[0, :, :3]) @ (centered_SD @ of_keys_KDD[0, :, :3]).T
    least = (left[:, :3] * values[:3] @ right[:3] - scores).square().mean()
    assert (found - scores).square().mean() < 1.01 * least
    of_keys_DD = moments.components()[0][0].double()
    plain = (queries_SD @ of_keys_DD[:, :3]) @ (centered_SD @ of_keys_DD[:, :3]).T
    assert (plain - scores).square().mean() > 1.3 * least


@pytest.mark.parametrize(("name", "keys"), [("llama", "k_proj"), ("qwen3", "k_norm"), ("yarn", "k_proj")])
def test_keys_before_their_rotary_embedding(name: str, keys: str) -> None:
    """Undoing the rotation gives the keys that the model computes before it rotates them."""
    from tiny_dense_models import YARN

    model = loki_model("llama", rope_parameters=YARN) if name == "yarn" else loki_model(name)
    attention, seen = model.model.layers[1].self_attn, {}
    getattr(attention, keys).register_forward_hook(lambda module, given, out: seen.update(before=out))
    turns = {}

    def watcher(layer: int, query: Any, found: dict[str, Any], scaling: float) -> None:
        turns[layer] = found

    with torch.no_grad(), observe_keys(model, [layer.self_attn for layer in model.model.layers], watcher):
        model.model(torch.tensor(windows(1)))
    expected = seen["before"].view(1, 64, 2, -1).transpose(1, 2)
    torch.testing.assert_close(turns[1]["pre"], expected, rtol=1e-4, atol=1e-5)
    assert (turns[1]["post"] - expected).abs().max() > 0.1


def test_a_part_of_a_head_may_be_turned() -> None:
    keys = torch.randn(1, 1, 5, 8)
    cos, sin = torch.ones(1, 5, 4), torch.zeros(1, 5, 4)
    torch.testing.assert_close(undo_rotary(keys, cos, sin), keys)


def test_what_a_calibration_says(llama: tuple[Any, LokiBasis]) -> None:
    _, basis = llama
    record = basis.record()
    assert record["tokens"] == 3 * 64  # one of the four windows is held out
    assert set(record["recall"]) == {"pre", "post", "scores"}
    for layer, kind in enumerate(basis.best):
        assert record["recall"][kind][layer] == max(recall[layer] for recall in record["recall"].values())
    for ranks in record["ranks"].values():
        assert all(1 <= rank <= 8 for heads in ranks for rank in heads)
    for components in basis.components.values():
        of_queries_KDD, of_keys_KDD = components.sides(1, 8)
        products_KDD = of_queries_KDD @ of_keys_KDD.mT
        torch.testing.assert_close(products_KDD, torch.eye(8).expand_as(products_KDD), rtol=0, atol=1e-4)


def test_a_file_gives_the_same_basis(llama: tuple[Any, LokiBasis], tmp_path: Path) -> None:
    model, basis = llama
    basis.save(tmp_path / "basis.safetensors")
    again = LokiBasis.load(tmp_path / "basis.safetensors")
    assert again.record() == basis.record()
    for kind in ("pre", "post", "scores"):
        assert torch.equal(again.components[kind].sides(1, 8), basis.components[kind].sides(1, 8))
        enable_loki(model, again, LokiConfig(basis=kind))
        used, expected = model.model.layers[1].self_attn.loki.recipe.encoder, basis.of_layer(1, LokiConfig(basis=kind))
        assert all(torch.equal(getattr(used, name), value) for name, value in vars(expected).items())


def test_another_model_is_refused(llama: tuple[Any, LokiBasis]) -> None:
    model, basis = llama
    with pytest.raises(UserError, match="belongs to a model with other weights"):
        enable_loki(loki_model(seed=1), basis)
    with pytest.raises(UserError, match="belongs to the model"):
        enable_loki(loki_model(kv_heads=4), basis)
    with pytest.raises(UserError, match="rotary embedding"):
        enable_loki(loki_model(rope_parameters={"rope_type": "default", "rope_theta": 5e4}), basis)
    for dtype in (torch.bfloat16, torch.float16):
        enable_loki(copy.deepcopy(model).to(dtype), basis, LokiConfig(kernels="torch"))


def test_files_that_are_not_a_basis_are_refused(llama: tuple[Any, LokiBasis], tmp_path: Path) -> None:
    _, basis = llama
    good, bad = tmp_path / "good.safetensors", tmp_path / "bad.safetensors"
    basis.save(good)
    from safetensors import safe_open

    with safe_open(good, framework="pt") as file:
        about = file.metadata()
    for name, change, message in (
        ("pre.vectors", lambda t: t.index_fill(0, torch.tensor(1), float("nan")), "NaN"),
        ("post.variances", lambda t: t / 0, "NaN or infinite"),
        ("post.vectors", lambda t: 1.1 * t, "differ from the exact scores"),
        ("scores.queries", lambda t: t.flip(-1), "differ from the exact scores"),
        ("scores.queries", lambda t: t / 0, "NaN or infinite"),
        ("scores.queries", lambda t: t[..., :1], "are not a basis"),
    ):
        tensors = load_file(good)
        tensors[name] = change(tensors[name]).contiguous()
        save_file(tensors, bad, about)
        with pytest.raises(UserError, match=message):
            LokiBasis.load(bad)
    save_file(load_file(good), bad, about | {"best": '[["post"], "post"]'})
    with pytest.raises(UserError, match="is damaged"):
        LokiBasis.load(bad)
    save_file({k: v.half() if k.endswith("vectors") else v for k, v in load_file(good).items()}, bad, about)
    assert LokiBasis.load(str(bad)).components["post"].vectors_LKDD.dtype == torch.float32
    save_file({"weight": torch.zeros(3)}, bad)
    with pytest.raises(UserError, match="is not a basis"):
        LokiBasis.load(bad)
    bad.write_bytes(good.read_bytes()[:500])
    with pytest.raises(UserError, match="damaged"):
        LokiBasis.load(bad)
    with pytest.raises(UserError, match="cannot read"):
        LokiBasis.load(tmp_path / "missing.safetensors")


def test_too_little_text(llama: tuple[Any, LokiBasis]) -> None:
    model, _ = llama
    with pytest.raises(UserError, match="too few windows of text to calibrate; give more text or --tokens"):
        calibrate(model, windows(1))
    with pytest.raises(UserError, match="cannot tell 8 directions apart"):
        calibrate(model, windows(2, 8))


@pytest.mark.parametrize("kind", ["GPT2Config", "Gemma2Config", "GPTNeoXConfig", "DeepseekV3Config"])
def test_unsupported_architectures_are_refused(kind: str) -> None:
    import transformers

    from fourfold.inference.loki.architecture import attentions_of

    class Bare(torch.nn.Module):
        config = getattr(transformers, kind)()

    with pytest.raises(UserError, match="use dense attention"):
        attentions_of(Bare())


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"k": 0}, "k = 0: must be an integer ≥ 1, such as 1"),
        ({"d": 0}, "d = 0"),
        ({"k_f": 0.0}, "must be a number > 0 and ≤ 1"),
        ({"d_f": 1.5}, "≤ 1"),
        ({"k": 5, "k_f": 0.5}, "k and k_f cannot be combined"),
        ({"d": 5, "d_f": 0.5}, "d and d_f cannot be combined"),
        ({"k": 5, "sink": 3, "recent": 3}, "raise k to at least 6"),
        ({"min_seq": -1}, "≥ 0"),
        ({"kernels": "cuda"}, "'auto', 'torch', 'triton' or 'numba'"),
        ({"prefill": "sparse"}, "'dense' or 'simulate'"),
        ({"basis": "worst"}, "'best', 'pre', 'post' or 'scores'"),
        ({"k": 2.5}, "k = 2.5: must be an integer"),
        ({"min_seq": float("nan")}, "min_seq = nan: must be an integer"),
        ({"k_f": "half"}, "k_f = 'half': must be a number"),
        ({"kf": 0.5}, "there is no key kf; use k_f"),
        ({"skip_layers": 0}, "skip_layers = 0: must be a list of integers"),
        ({"skip_layers": (0, 1.5)}, "skip_layers.1 = 1.5: must be an integer"),
    ],
)
def test_impossible_settings_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        LokiConfig(**values)


def test_more_dims_than_a_head_has(llama: tuple[Any, LokiBasis]) -> None:
    model, basis = llama
    with pytest.raises(UserError, match="d = 9 is more than the 8 dims"):
        enable_loki(model, basis, LokiConfig(d=9))


def test_how_many_keys() -> None:
    share = LokiConfig(k_f=0.25, min_k=20)
    assert [share.key_count(length) for length in (10, 20, 70, 81, 1000)] == [10, 20, 20, 21, 250]
    assert [LokiConfig(k=64).key_count(length) for length in (10, 1000)] == [10, 64]
    assert [LokiConfig(k=64, min_seq=100).is_dense_at(length) for length in (64, 99, 100)] == [True, True, False]


def test_first_and_last_are_always_chosen() -> None:
    worth = torch.rand(2, 3, 30)
    config = LokiConfig(k=8, sink=2, recent=3)
    for row in choose_keys(worth, 8, config).flatten(0, 1).tolist():
        assert {0, 1, 27, 28, 29} <= set(row)
    visible = torch.arange(30).expand(2, 1, 30) >= torch.tensor([5, 0])[:, None, None]
    chosen = choose_keys(worth.masked_fill(~visible, -torch.inf), 8, config, visible)
    for row in chosen[0].tolist():
        assert {5, 6, 27, 28, 29} <= set(row)


@pytest.mark.parametrize(
    ("given", "k", "ends"),
    [
        ({}, 2048, (4, 64)),
        ({}, 40, (4, 10)),
        ({}, 9, (2, 2)),
        ({}, 3, (0, 0)),
        ({"sink": 8}, 9, (8, 1)),
        ({"recent": 9}, 9, (0, 9)),
        ({"sink": 0, "recent": 0}, 2048, (0, 0)),
    ],
)
def test_how_many_first_and_last_keys_are_always_chosen(given: dict[str, int], k: int, ends: tuple[int, int]) -> None:
    config = LokiConfig(k=k, **given)
    for number in (torch.tensor(k), torch.tensor([k, k])):
        assert [each.unique().item() for each in config.ends(number)] == list(ends)


def test_each_sequence_of_a_batch_keeps_its_own_ends() -> None:
    visible = torch.arange(100).expand(2, 1, 100) >= torch.tensor([60, 0])[:, None, None]
    config = LokiConfig(k_f=0.5, min_k=1, min_seq=0)
    kept = always_chosen(config, 50, keys_per_sequence(visible[:, 0].sum(-1), config), visible, 100, "cpu")
    assert kept is not None
    assert kept[0, 0].nonzero().flatten().tolist() == [60, 61, 62, 63, *range(95, 100)]  # k = 20
    assert kept[1, 0].nonzero().flatten().tolist() == [0, 1, 2, 3, *range(88, 100)]  # k = 50
