"""Test Loki on a trained model. With all keys, it writes the same text as dense attention. With few keys, it is better
than random directions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from babyllama import babyllama, needs_babyllama, stories

pytest.importorskip("transformers")

from fourfold.inference.loki import LokiBasis, LokiConfig, calibrate, choose_settings, disable_loki, enable_loki
from fourfold.inference.loki.quality import measure_quality

Trained = tuple[Any, LokiBasis, list[list[int]]]


@pytest.fixture(scope="module")
def trained() -> Trained:
    """Return the model, a basis from three stories, and two more stories in windows as long as its context."""
    data = needs_babyllama()
    model, tokens = babyllama(data), stories(data)

    def windows(some: list[list[int]]) -> list[list[int]]:
        return [[1, *story[i : i + 255]] for story in some for i in range(1, len(story) - 254, 255)]

    return model, calibrate(model, windows(tokens[:3])), windows(tokens[3:])


def test_it_is_the_model_that_was_trained(trained: Trained) -> None:
    model = trained[0]
    losses = []
    for story in stories(needs_babyllama()):
        tokens = torch.tensor([story[:257]])
        with torch.no_grad():
            logits = model(tokens[:, :-1]).logits[0]
        losses.append(torch.nn.functional.cross_entropy(logits, tokens[0, 1:]).item())
    assert sum(losses) / len(losses) == pytest.approx(0.617, abs=5e-4)


def test_all_keys_write_the_same_story(trained: Trained, monkeypatch: pytest.MonkeyPatch) -> None:
    model, basis, held = trained
    monkeypatch.setattr(LokiConfig, "is_dense_at", lambda *_: False)
    prompt = torch.tensor([held[0][:40]])
    options = {"max_new_tokens": 200, "do_sample": False, "attention_mask": torch.ones_like(prompt)}
    expected = model.generate(prompt, **options)
    enable_loki(model, basis, LokiConfig(k_f=1.0))
    found = model.generate(prompt, **options)
    disable_loki(model)
    assert len(set(expected[0].tolist())) > 20  # the text is not one repeated letter
    assert torch.equal(found, expected)


def test_a_quarter_of_keys_and_dims_beats_random_directions(trained: Trained) -> None:
    model, basis, held = trained
    by_score = LokiConfig(k_f=0.25, d_f=0.25, min_k=1, sink=0, recent=0)
    record = measure_quality(model, held, basis, by_score)
    perplexity, found = record["perplexity"], record["all"]
    assert record["k"] == 64
    for name in ("oracle", "loki"):
        assert perplexity[name] == pytest.approx(perplexity["dense"], rel=0.01)
    assert perplexity["random"] > 1.02 * perplexity["dense"]
    assert found["oracle"]["recall"] == pytest.approx(1, abs=1e-3)
    for measure in ("recall", "mass"):
        assert found["random"][measure] < found["loki"][measure] <= found["oracle"][measure] + 1e-6


def test_few_dims_of_scores_lose_less_than_few_dims_of_keys(trained: Trained) -> None:
    model, basis, held = trained
    assert set(basis.best) == {"scores"}
    lost = {}
    for kind in ("scores", "post"):
        config = LokiConfig(k_f=0.25, d_f=0.125, min_k=1, sink=0, recent=0, basis=kind)
        perplexity = measure_quality(model, held, basis, config)["perplexity"]
        lost[kind] = perplexity["loki"] - perplexity["dense"]
    assert lost["scores"] < 0.5 * lost["post"]


def test_the_defaults_lose_little_of_stories(trained: Trained) -> None:
    model, basis, held = trained
    record = measure_quality(model, held, basis, LokiConfig(k_f=0.125, d_f=0.25, min_k=1))
    assert record["perplexity"]["loki"] < 1.02 * record["perplexity"]["dense"]
    assert record["all"]["random"]["recall"] < record["all"]["loki"]["recall"] < 1


def test_the_cheapest_settings_within_the_tolerance_are_chosen(trained: Trained) -> None:
    """The third pair increases the perplexity by less than the tolerance, but the upper bound is too large."""
    model, basis, held = trained
    gate = choose_settings(model, held, basis, 0.03).gate
    assert gate is not None
    assert gate["chosen"] == {"d_f": 0.5, "k_f": 0.06}
    tried = gate["trials"]
    assert [(each["d_f"], each["k_f"]) for each in tried] == [(0.25, 0.03), (0.5, 0.03), (0.25, 0.06), (0.5, 0.06)]
    assert [each["k"] for each in tried] == [8, 8, 16, 16]
    assert [each["bytes"] for each in tried] == pytest.approx([0.045625, 0.06125, 0.075625, 0.09125])
    assert tried[0]["increase"] > 0.5 and tried[0]["same_token"] < 0.8
    assert 0 < tried[2]["increase"] < 0.03 < tried[2]["increase_bound"]
    assert 0 < tried[3]["increase"] < tried[3]["increase_bound"] <= 0.03


def test_no_settings_are_chosen_if_all_lose_too_much(trained: Trained) -> None:
    model, basis, held = trained
    gate = choose_settings(model, held, basis, -0.1).gate
    assert gate is not None
    assert (gate["chosen"], len(gate["trials"])) == ({}, 8)
    shares = [each["bytes"] for each in gate["trials"]]
    assert shares == sorted(shares)
