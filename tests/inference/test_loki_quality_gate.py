"""After calibration, Loki uses the cheapest settings that keep the perplexity close to dense attention."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny_loki import SPARSE, loki_model, windows

pytest.importorskip("transformers")

from fourfold.errors import UserError
from fourfold.inference.loki import (
    LokiBasis,
    LokiConfig,
    calibrate,
    choose_settings,
    disable_loki,
    enable_loki,
    quality_gate,
)
from fourfold.inference.loki.quality import measure_quality
from fourfold.reports.loki_report import verdict

Calibrated = tuple[Any, LokiBasis]
HELD_OUT = windows(2, 48, seed=5)


def settings_of(model: Any) -> LokiConfig:
    config: LokiConfig = model.model.layers[0].self_attn.loki.recipe.config
    return config


@pytest.fixture
def chosen(llama: Calibrated, monkeypatch: pytest.MonkeyPatch) -> Calibrated:
    """Return a model, and a basis whose settings are not Loki's defaults."""
    monkeypatch.setattr(quality_gate, "GRID", ((0.5, 0.25),))
    model, basis = llama
    return model, choose_settings(model, HELD_OUT, basis, 10)


@pytest.fixture
def nothing_passed(llama: Calibrated, monkeypatch: pytest.MonkeyPatch) -> Calibrated:
    monkeypatch.setattr(quality_gate, "GRID", ((0.5, 0.25),))
    model, basis = llama
    return model, choose_settings(model, HELD_OUT, basis, -0.9)


def test_only_tokens_that_leave_out_keys_count(chosen: Calibrated) -> None:
    """The first 12 tokens of a window see no more than k = 12 keys."""
    model, basis = chosen
    assert basis.gate is not None
    found = basis.gate["trials"][0]
    assert (basis.gate["windows"], basis.gate["seq_length"], found["k"]) == (2, 48, 12)
    assert model.config._attn_implementation == "eager"
    losses: dict[str, list[float]] = {"dense": [], "loki": []}
    best: dict[str, list[int]] = {"dense": [], "loki": []}
    for name in losses:
        if name == "loki":
            enable_loki(model, basis, LokiConfig(d_f=0.5, k=12, min_seq=0, prefill="simulate"))
        for window in HELD_OUT:
            with torch.no_grad():
                logits_SV = model(torch.tensor([window]), use_cache=False).logits[0]
            for place in range(12, 47):
                target = torch.tensor(window[place + 1])
                losses[name].append(torch.nn.functional.cross_entropy(logits_SV[place], target).item())
                best[name].append(int(logits_SV[place].argmax()))
    disable_loki(model)
    before, after = (torch.tensor(losses[name]).double() for name in ("dense", "loki"))
    assert found["dense_perplexity"] == pytest.approx(before.mean().exp().item(), rel=1e-5)
    assert found["perplexity"] == pytest.approx(after.mean().exp().item(), rel=1e-5)
    more = after - before
    assert found["increase"] == pytest.approx(math.expm1(more.mean()), abs=1e-5)
    bound = math.expm1(more.mean() + 2 * more.std() / math.sqrt(2 * 35))
    assert found["increase_bound"] == pytest.approx(bound, abs=1e-5)
    assert abs(found["increase"]) > 1e-4  # the settings make a difference
    same = sum(a == b for a, b in zip(best["dense"], best["loki"], strict=True))
    assert found["same_token"] == pytest.approx(same / 70)


def test_the_file_keeps_the_chosen_settings(chosen: Calibrated, tmp_path: Path) -> None:
    model, basis = chosen
    basis.save(tmp_path / "basis.safetensors")
    again = LokiBasis.load(tmp_path / "basis.safetensors")
    assert again.gate == basis.gate
    enable_loki(model, again)
    assert (settings_of(model).d_f, settings_of(model).k_f) == (0.5, 0.25)


@pytest.mark.parametrize(
    ("given", "d", "k"),
    [
        ({}, 4, 25),
        ({"min_k": 1}, 4, 25),
        ({"k": 9}, 4, 9),
        ({"k_f": 0.5}, 4, 50),
        ({"d": 3}, 3, 25),
        ({"d_f": 0.25}, 2, 25),
        ({"d": 3, "k": 9}, 3, 9),
    ],
)
def test_given_settings_take_precedence(chosen: Calibrated, given: dict[str, Any], d: int, k: int) -> None:
    model, basis = chosen
    enable_loki(model, basis, LokiConfig(**{"min_k": 1, **given}))
    used = settings_of(model)
    assert (used.dim_count(8), used.key_count(100)) == (d, k)


def test_an_evaluation_uses_the_chosen_settings(chosen: Calibrated) -> None:
    model, basis = chosen
    record = measure_quality(model, HELD_OUT, basis, LokiConfig(min_k=1))
    assert (record["k"], record["layers"][0]["d"]) == (12, 4)


def test_if_nothing_passed_the_user_must_choose(nothing_passed: Calibrated) -> None:
    model, basis = nothing_passed
    for config in (None, LokiConfig(min_seq=0)):
        with pytest.raises(
            UserError, match="all settings lost too much quality in the calibration; choose d_f and k_f yourself"
        ):
            enable_loki(model, basis, config)
    enable_loki(model, basis, SPARSE)
    assert settings_of(model).k == 12
    assert measure_quality(model, HELD_OUT, basis, LokiConfig(min_k=1))["k"] == 2


def test_the_verdict_says_what_was_measured(chosen: Calibrated, nothing_passed: Calibrated) -> None:
    gate = chosen[1].gate
    assert gate is not None
    gate["trials"][-1] |= {"increase": -1e-6, "increase_bound": 0.0034, "bytes": 0.2812}
    assert verdict(gate) == (
        "Use d_f = 0.5 and k_f = 0.25: 28.1% of the bytes of dense attention. The perplexity changes by +0.0% (at most "
        "+0.3%). `fourfold generate --basis` uses these settings by default. Contexts longer than 48 tokens were not "
        "measured."
    )
    failed = nothing_passed[1].gate
    assert failed is not None
    assert verdict(failed | {"tolerance": 0.015}).startswith(
        "No settings pass: with all of them, the perplexity may be more than 1.5% above dense attention."
    )


def test_a_failure_leaves_dense_attention(llama: Calibrated, monkeypatch: pytest.MonkeyPatch) -> None:
    model, basis = llama
    passes = iter([quality_gate.predict(model, HELD_OUT)])
    monkeypatch.setattr(quality_gate, "predict", lambda *_: next(passes))
    with pytest.raises(StopIteration):
        choose_settings(model, HELD_OUT, basis)
    assert model.config._attn_implementation == "eager"


def test_a_file_with_impossible_settings_is_refused(chosen: Calibrated, tmp_path: Path) -> None:
    good, bad = tmp_path / "good.safetensors", tmp_path / "bad.safetensors"
    chosen[1].save(good)
    with safe_open(good, framework="pt") as file:
        about = file.metadata()
    for gate in ("{}", "[]", "3", '{"chosen": {"k_f": 7}}', '{"chosen": {"keys": 7}}', '{"chosen": 7}'):
        save_file(load_file(good), bad, about | {"gate": gate})
        with pytest.raises(UserError, match="is damaged"):
            LokiBasis.load(bad)
    save_file(load_file(good), bad, about | {"gate": '{"chosen": {"k_f": "0.5"}}'})
    assert LokiBasis.load(bad).filled(LokiConfig()).k_f == 0.5
    del about["gate"]
    save_file(load_file(good), bad, about)
    assert LokiBasis.load(bad).gate is None


@pytest.mark.parametrize("lengths", [[], [1], [2], [3], [2, 2]])
def test_windows_that_are_too_short_to_measure_settings_are_refused(llama: Calibrated, lengths: list[int]) -> None:
    model, basis = llama
    with pytest.raises(UserError, match="too few tokens to choose settings; give more or longer windows"):
        choose_settings(model, [[1, 2, 3][:length] for length in lengths], basis)


def test_a_random_basis_has_no_settings_of_the_calibration(chosen: Calibrated, nothing_passed: Calibrated) -> None:
    for model, basis in (chosen, nothing_passed):
        assert basis.random().gate is None
        enable_loki(model, basis.random())
        assert (settings_of(model).d_f, settings_of(model).k_f) == (0.25, 0.03)


def test_a_model_gets_one_warning_about_its_sliding_windows(caplog: pytest.LogCaptureFixture) -> None:
    model = loki_model("qwen2", use_sliding_window=True, sliding_window=16, max_window_layers=1)
    basis = calibrate(model, windows(2))
    assert len((choose_settings(model, HELD_OUT, basis, -0.9).gate or {})["trials"]) == len(quality_gate.GRID)
    assert caplog.text.count("have a sliding window and stay dense") == 1


def test_a_random_basis_can_be_saved(llama: Calibrated, tmp_path: Path) -> None:
    model, basis = llama
    random = basis.random()
    random.save(tmp_path / "random.safetensors")
    again = LokiBasis.load(tmp_path / "random.safetensors")
    assert again.record() == random.record()
    assert torch.equal(again.components["post"].vectors_LKDD, random.components["post"].vectors_LKDD)
    enable_loki(model, again, SPARSE)
    with pytest.raises(UserError, match="the file has no scores components; set basis to best or post"):
        enable_loki(model, again, LokiConfig(basis="scores"))


def test_a_calibration_computes_no_attention_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calibration only needs the keys that Loki chooses."""
    from fourfold.inference.loki import simulate

    monkeypatch.delattr(simulate, "share_of_chosen")
    assert calibrate(loki_model(), windows(3)).recall["scores"]


@pytest.mark.parametrize("call", ["generate_batch", "init_continuous_batching", "continuous_batching_context_manager"])
def test_continuous_batching_is_refused(llama: Calibrated, call: str) -> None:
    """transformers would refuse Loki's name, or switch to FlashAttention without Loki."""
    model, basis = llama
    enable_loki(model, basis, SPARSE)
    with pytest.raises(UserError, match=r"continuous batching \(generate_batch\) is not supported"):
        begun = getattr(model, call)(*([[[1, 2, 3]]] if call == "generate_batch" else []))
        begun.__enter__()
    disable_loki(model)
    assert model.init_continuous_batching.__func__ is type(model).init_continuous_batching
