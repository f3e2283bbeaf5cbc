"""Test the table of benchmarks/sparse_attention: tasks, decoding, and intervals."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")

from tiny_loki import loki_model

from benchmarks.sparse_attention.decoding import Decoder, inverse_frequencies
from benchmarks.sparse_attention.evaluate import Answered, answer
from benchmarks.sparse_attention.page import defaults_table, mean_table, verdict
from benchmarks.sparse_attention.rivals.eviction import rotated
from benchmarks.sparse_attention.rivals.exact import Dense, ExactTopK
from benchmarks.sparse_attention.settings import DEFAULTS, METHODS, Setup, loki_with_defaults, rival
from benchmarks.sparse_attention.start import DISTANCES, write_start
from benchmarks.sparse_attention.table import Results, estimate
from benchmarks.sparse_attention.tasks import (
    COMMON,
    EQUALS,
    FILLER,
    HAYSTACK_TASKS,
    RANKS,
    START,
    TASKS,
    haystack,
    tail_of,
    training_document,
    word_list,
)
from benchmarks.sparse_attention.train import answers
from fourfold.data.dataset import Windows
from fourfold.huggingface.transformers_models import load_model
from fourfold.inference.loki import LokiConfig, calibrate


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


@pytest.mark.parametrize("length", [56, 300, 4096])
def test_the_context_has_every_answer_after_its_question(length: int) -> None:
    document = haystack(length, rng())
    assert len(document.context) == length and set(document.questions) == set(HAYSTACK_TASKS)
    places = document.context.tolist()
    for task, asked in document.questions.items():
        for turns in asked:
            key: list[int] = []
            for question, value in turns:
                key = question or key
                fact = [*key, value]
                found = [at for at in range(length) if places[at : at + len(fact)] == fact]
                assert found, (task, fact)
                key = [value]


def test_a_question_has_one_answer() -> None:
    document = haystack(1024, rng())
    asked = [turn for task in ("multi-key", "multi-value") for turns in document.questions[task] for turn in turns]
    assert len({tuple(question) for question, _ in asked}) == len(asked)


@pytest.mark.parametrize("length", [112, 4096])
def test_the_answers_are_the_most_frequent_words(length: int) -> None:
    for task, markers in (("common word", [COMMON]), ("frequent words", list(RANKS))):
        document = word_list(length, rng(), task)
        [turns] = document.questions[task]
        assert [question for question, _ in turns] == [[marker] for marker in markers]
        counts = np.bincount(document.context[1:], minlength=FILLER[-1] + 1)
        best = np.sort(counts)[::-1][: len(turns) + 1]
        assert [counts[word] for _, word in turns] == best[:-1].tolist() and best[-2] > best[-1]
        assert len(document.context) == length


def test_the_loss_covers_the_answers_and_nothing_else() -> None:
    documents = [training_document(128, rng(seed)) for seed in range(20)]
    tokens = np.stack([np.append(document, START) for document in documents])
    kept = answers(Windows(tokens, np.zeros_like(tokens), np.arange(len(tokens))))
    for row, flags in zip(tokens, kept, strict=True):
        assert {at + 1 for at in np.flatnonzero(row == EQUALS)} == {at + 1 for at in np.flatnonzero(flags)}


def test_training_asks_for_no_name_again() -> None:
    document = training_document(512, rng(1)).tolist()
    begin = document.index(1)
    questions = "/".join(map(str, document[begin:])).split("/1/")
    keys = [question.split("/2/")[0] for question in questions]
    assert len(keys) > 20 and len(set(keys)) == len(keys)


@pytest.fixture
def model() -> Any:
    return loki_model(attn_implementation="sdpa")


@torch.no_grad()
def test_dense_decoding_gives_the_logits_of_one_pass(model: Any) -> None:
    tokens = torch.randint(1, 100, (2, 70), generator=torch.Generator().manual_seed(0))
    expected = model(tokens).logits
    weights = torch.stack(model(tokens[:, :50], output_attentions=True).attentions)
    decoder = Decoder(model, 80)
    torch.testing.assert_close(decoder.prefill(tokens[:, :40]), expected[:, 39])
    for _ in range(2):  # the first round leaves no tokens in the cache
        with decoder.returning():
            decoder.extend(tokens[:, 40:50])
            torch.testing.assert_close(decoder.decode(Dense(), tokens[:, 50:]), expected[:, 50:], atol=1e-4, rtol=1e-4)
            sparse = decoder.decode(ExactTopK(10), tokens[:, 50:])
            assert not torch.allclose(sparse, expected[:, 50:], atol=1e-2)
            record = decoder.records[1]
            assert record is not None
            mass = weights[1].unflatten(1, (2, -1)).sum((2, 3))
            torch.testing.assert_close(record.mass_BKS, mass)


@torch.no_grad()
def test_rotated_keys_are_the_models_keys_at_later_places(model: Any) -> None:
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    keys = torch.randn(1, 2, 5, model.config.hidden_size // model.config.num_attention_heads)

    def at(first: int) -> Any:
        cos, sin = model.model.rotary_emb(keys, torch.arange(first, first + 5)[None])
        return apply_rotary_pos_emb(keys, keys, cos, sin)[1]

    torch.testing.assert_close(rotated(at(3), 30, inverse_frequencies(model)), at(33), atol=1e-4, rtol=1e-4)


def test_every_method_answers_within_its_budget(model: Any) -> None:
    length = 400
    basis = calibrate(model, [training_document(128, rng(seed)).tolist() for seed in range(3)])
    dims = {(name, 0.25): 2 for name in METHODS} | {("Quest", 0.25): 16}
    thresholds = {(name, 0.25, length): 0.2 for name in METHODS}
    setup = Setup(basis, inverse_frequencies(model), dims, thresholds)
    rivals = {name: rival(name, 0.25, length, setup) for name in METHODS}
    assert rivals.pop("TidalDecode") is None or basis.layers > 4
    document = haystack(length, rng())
    decoder = Decoder(model, 500)
    decoder.prefill(torch.tensor([document.context.tolist()] * 2))
    [turns, *_] = document.questions["multi-query"]
    found = {
        name: share
        for name, right, share in answer(decoder, [turns, turns], {n: r for n, r in rivals.items() if r is not None})
        if 0 <= min(right) <= max(right) <= 1
    }
    assert set(found) == set(rivals)
    for name, share in found.items():
        # top-p reads as many keys as its threshold asks for, and the threshold was chosen for another model.
        if name.endswith("top-p"):
            continue
        # SnapKV also keeps all keys of the questions and of the answers.
        assert 0.01 < share <= 0.25 + (len(tail_of(turns)) / length if name == "SnapKV" else 1e-6), name


@torch.no_grad()
def test_loki_with_its_defaults_reads_256_keys_of_a_short_context(model: Any) -> None:
    basis = calibrate(model, [training_document(128, rng(seed)).tolist() for seed in range(3)])
    document, decoder = haystack(1024, rng()), Decoder(model, 1100)
    decoder.prefill(torch.tensor([document.context.tolist()]))
    rivals = {DEFAULTS: loki_with_defaults(Setup(basis, inverse_frequencies(model)))}
    [(_, _, share)] = answer(decoder, [document.questions["single"][0]], rivals)
    # A byte has the codes of four components. Dense attention reads 4 bytes per dim.
    codes = math.ceil(LokiConfig().dim_count(basis.head_dim) / 4) / (4 * basis.head_dim)
    assert share == pytest.approx(256 / 1024 + codes, rel=0.02)


def results(right: dict[str, list[float]]) -> Results:
    return Results(
        (1.0 if method in ("dense", DEFAULTS) else 0.1, Answered(task, 64, context, 0, method, value, 0.09))
        for task in TASKS
        for method, values in right.items()
        for context, value in enumerate(values)
    )


def test_a_better_rival_is_called_better() -> None:
    noise = [1.0, 0.0] * 20
    found = results({"dense": [1.0] * 40, "Loki": noise, "Quest": [1.0] * 40, "SparQ": noise, "H2O": [0.0] * 40})
    assert found.solved(64, TASKS) == list(TASKS)
    sentence = verdict(found, 64, TASKS, 0.1)
    assert "Better: Quest (+50)" in sentence and "Worse: H2O (-50)" in sentence
    assert "No clear difference: SparQ (+0)" in sentence
    assert "| Quest | 100 (100–100), 9.0 % |" in mean_table(found, 64, TASKS, [0.1])
    assert "| TidalDecode | – |" in mean_table(found, 64, TASKS, [0.1])


def test_the_defaults_have_a_table_of_their_own() -> None:
    found = results({"dense": [1.0] * 4, DEFAULTS: [1.0, 0.5, 1.0, 0.5]})
    text = defaults_table(found, [64], {64: TASKS[:2]})
    assert text.splitlines()[-1].startswith("| 64 | 9.0 % | 75 % | 75 % | – |")


def test_the_interval_covers_the_mean_of_most_samples() -> None:
    covered = 0
    for seed in range(200):
        found = estimate(rng(seed).random((3, 30)))
        covered += found.low <= 0.5 <= found.high
    assert 180 <= covered <= 199


@torch.no_grad()
def test_the_first_layer_starts_with_heads_for_the_previous_two_tokens(tmp_path: Path) -> None:
    write_start(tmp_path)
    start = load_model(tmp_path)
    start.set_attn_implementation("eager")
    weights_NSS = start(torch.arange(64)[None] * 37 % 128, output_attentions=True).attentions[0][0]
    for head, distance in enumerate(DISTANCES):
        assert weights_NSS[head, 10:].diagonal(10 - distance).mean() > 0.9
