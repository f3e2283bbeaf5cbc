"""Test the methods of benchmarks/sparse_attention against slow and plain implementations, one head at a time, and the
bytes that they count."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

from tiny_loki import encoder_of

from benchmarks.sparse_attention.rivals.eviction import H2O, SnapKV, StreamingLLM
from benchmarks.sparse_attention.rivals.exact import Dense, ExactTopK, RandomKeys
from benchmarks.sparse_attention.rivals.interface import Prompt, Rival, Step, weights_of
from benchmarks.sparse_attention.rivals.loki import Loki, LokiSharedBudget, PaperLoki
from benchmarks.sparse_attention.rivals.quest import Quest
from benchmarks.sparse_attention.rivals.reuse import ReusingLoki
from benchmarks.sparse_attention.rivals.sparq import SparQ
from benchmarks.sparse_attention.rivals.tidal import TidalDecode
from benchmarks.sparse_attention.rivals.top_p import ScoreRecorder, TopP, threshold_for
from fourfold.inference.loki import LokiConfig
from fourfold.inference.loki.attend import decode

BATCH, KV_HEADS, GROUP, LENGTH, HEAD_DIM = 2, 2, 3, 41, 8
SCALING = HEAD_DIM**-0.5


def random_step(seed: int = 0, length: int = LENGTH, layer: int = 0) -> Step:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(BATCH, KV_HEADS, *shape, HEAD_DIM, generator=generator)

    return Step(layer, 2 * normal(GROUP), normal(length), normal(length), SCALING)


def heads(step: Step) -> Iterator[tuple[int, int, Tensor, Tensor]]:
    """Yield the batch index, the KV head, its queries [G, D], and its keys [S, D]."""
    for batch in range(BATCH):
        for head in range(KV_HEADS):
            yield batch, head, step.query_BKGD[batch, head], step.key_BKSD[batch, head]


def softmaxes(scores_GS: Tensor) -> Tensor:
    return torch.softmax(scores_GS, -1).sum(0)


def best(worth: Tensor, k: int) -> set[int]:
    return set(worth.argsort(descending=True)[:k].tolist())


Reference = Callable[[Tensor, Tensor], set[int]]


def plain_top_k(queries_GD: Tensor, keys_SD: Tensor) -> set[int]:
    return best(softmaxes(queries_GD @ keys_SD.T * SCALING), 7)


def plain_top_p(queries_GD: Tensor, keys_SD: Tensor) -> set[int]:
    worth_S = softmaxes(queries_GD @ keys_SD.T * SCALING) / GROUP
    chosen: set[int] = set()
    for place in worth_S.argsort(descending=True).tolist():
        if sum(worth_S[each].item() for each in chosen) >= 0.6:
            break
        chosen.add(place)
    return chosen


def plain_quest(queries_GD: Tensor, keys_SD: Tensor) -> set[int]:
    pages = [keys_SD[first : first + 4] for first in range(0, len(keys_SD), 4)]
    bounds_GP = torch.tensor(
        [
            [
                sum(max((q * page[:, c].max()).item(), (q * page[:, c].min()).item()) for c, q in enumerate(query))
                for page in pages
            ]
            for query in queries_GD
        ]
    )
    chosen = best(softmaxes(bounds_GP * SCALING), 3)
    return {place for place in range(len(keys_SD)) if place // 4 in chosen}


def sparq_scores(queries_GD: Tensor, keys_SD: Tensor) -> Tensor:
    """Return approximate scores [G, S] by three channels."""
    channels = queries_GD.abs().sum(0).argsort(descending=True)[:3].tolist()
    scores_GS = torch.zeros(len(queries_GD), len(keys_SD))
    for scores_S, query in zip(scores_GS, queries_GD, strict=True):
        covered = sum(abs(query[c].item()) for c in channels) / query.abs().sum().item()
        for place, key in enumerate(keys_SD):
            product = sum(query[c].item() * key[c].item() for c in channels)
            scores_S[place] = product / math.sqrt(HEAD_DIM * covered)
    return scores_GS


def plain_sparq(queries_GD: Tensor, keys_SD: Tensor) -> set[int]:
    total_S = sparq_scores(queries_GD, keys_SD).sum(0)
    total_S[-2:] = math.inf
    return best(total_S, 7)


@pytest.mark.parametrize(
    ("rival", "reference"),
    [
        (ExactTopK(7), plain_top_k),
        (TopP(ExactTopK(7), 0.6), plain_top_p),
        (Quest(3, 4), plain_quest),
        (SparQ(7, 3, 2), plain_sparq),
    ],
    ids=["exact top-k", "exact top-p", "Quest", "SparQ"],
)
def test_it_chooses_the_keys_that_a_plain_loop_chooses(rival: Rival, reference: Reference) -> None:
    step = random_step()
    chosen_BKS = rival.select(step, rival.score(step))
    for batch, head, queries_GD, keys_SD in heads(step):
        found = set(chosen_BKS[batch, head].nonzero().flatten().tolist())
        assert found == reference(queries_GD, keys_SD)


def plain_attention(query_D: Tensor, keys_SD: Tensor, values_SD: Tensor) -> Tensor:
    return torch.softmax(keys_SD @ query_D * SCALING, 0) @ values_SD


def test_attention_to_the_chosen_keys_is_exact() -> None:
    step = random_step()
    chosen_BKS = RandomKeys(5).select(step, RandomKeys(5).score(step))
    out_BKGD = RandomKeys(5).attend(step, chosen_BKS)
    for batch, head, queries_GD, keys_SD in heads(step):
        kept = chosen_BKS[batch, head]
        for number, query_D in enumerate(queries_GD):
            expected = plain_attention(query_D, keys_SD[kept], step.value_BKSD[batch, head][kept])
            torch.testing.assert_close(out_BKGD[batch, head, number], expected)


def test_sparq_weights_the_mean_with_the_remaining_attention() -> None:
    step, rival = random_step(), SparQ(7, 3, 2, adds_mean=True)
    chosen_BKS = rival.select(step, rival.score(step))
    out_BKGD, sparse_BKGD = rival.attend(step, chosen_BKS), SparQ(7, 3, 2).attend(step, chosen_BKS)
    for batch, head, queries_GD, keys_SD in heads(step):
        share_G = torch.softmax(sparq_scores(queries_GD, keys_SD), -1)[:, chosen_BKS[batch, head]].sum(-1)
        mean_D = step.value_BKSD[batch, head].mean(0)
        expected = share_G[:, None] * sparse_BKGD[batch, head] + (1 - share_G[:, None]) * mean_D
        torch.testing.assert_close(out_BKGD[batch, head], expected)


def rotary(x_SD: Tensor, places_S: Tensor, frequencies: Tensor) -> Tensor:
    """Rotate each channel pair as a complex number."""
    first, second = x_SD.chunk(2, -1)
    turned = torch.complex(first, second) * torch.exp(1j * places_S[:, None] * frequencies)
    return torch.cat([turned.real, turned.imag], -1)


def test_streaming_llm_attends_as_if_the_sinks_were_next_to_the_window() -> None:
    frequencies = torch.tensor([1.0, 0.3, 0.1, 0.01])
    plain = random_step()
    places_S = torch.arange(LENGTH)
    key_BKSD = torch.stack(
        [torch.stack([rotary(head, places_S, frequencies) for head in row]) for row in plain.key_BKSD]
    )
    query_BKGD = torch.stack(
        [
            torch.stack([rotary(head, torch.full((GROUP,), LENGTH - 1), frequencies) for head in row])
            for row in plain.query_BKGD
        ]
    )
    step = Step(0, query_BKGD, key_BKSD, plain.value_BKSD, SCALING)
    out_BKGD = StreamingLLM(10, 4, frequencies).decode(step)
    kept = [0, 1, 2, 3, *range(LENGTH - 6, LENGTH)]
    for batch, head, queries_GD, keys_SD in heads(plain):
        keys_SD = rotary(keys_SD[kept], torch.arange(10), frequencies)
        for number, query_D in enumerate(rotary(queries_GD, torch.full((GROUP,), 9), frequencies)):
            expected = plain_attention(query_D, keys_SD, plain.value_BKSD[batch, head][kept])
            torch.testing.assert_close(out_BKGD[batch, head, number], expected)


def prompt_of(step: Step, window: int = 6) -> Prompt:
    queries = torch.randn(BATCH, KV_HEADS, GROUP, window, HEAD_DIM, generator=torch.Generator().manual_seed(3))
    mass = torch.rand(BATCH, KV_HEADS, step.length, generator=torch.Generator().manual_seed(4))
    return Prompt(step.key_BKSD, queries, mass, SCALING)


def longer(step: Step, seed: int) -> Step:
    """Return the next step: one more key, and another query."""
    other = random_step(seed, 1)
    return Step(
        step.layer,
        other.query_BKGD,
        torch.cat([step.key_BKSD, other.key_BKSD], 2),
        torch.cat([step.value_BKSD, other.value_BKSD], 2),
        SCALING,
    )


def test_h2o_forgets_the_key_with_the_least_attention() -> None:
    step = random_step()
    rival, prompt = H2O(9, 4), prompt_of(step)
    rival.start([prompt])
    alive = {
        (batch, head): best(prompt.mass_BKS[batch, head, : LENGTH - 4], 4) | set(range(LENGTH - 4, LENGTH))
        for batch, head, _, _ in heads(step)
    }
    mass = {place: dict(enumerate(prompt.mass_BKS[place].tolist())) for place in alive}
    for seed in (10, 11, 12):
        step = longer(step, seed)
        out_BKGD = rival.decode(step)
        for batch, head, queries_GD, keys_SD in heads(step):
            kept = sorted(alive[batch, head] | {step.length - 1})
            weights_Gk = torch.softmax(queries_GD @ keys_SD[kept].T * SCALING, -1)
            torch.testing.assert_close(out_BKGD[batch, head], weights_Gk @ step.value_BKSD[batch, head][kept])
            seen = mass[batch, head]
            for place, gained in zip(kept, weights_Gk.sum(0).tolist(), strict=True):
                seen[place] = seen.get(place, 0.0) + gained
            oldest = min((place for place in kept if place < step.length - 4), key=seen.__getitem__)
            alive[batch, head] = set(kept) - {oldest}


def test_snapkv_keeps_what_the_last_queries_attend_to() -> None:
    step = random_step()
    prompt, rival = prompt_of(step), SnapKV(12, 6, 5)
    rival.start([prompt])
    later = longer(longer(step, 20), 21)
    chosen_BKS = rival.select(later, rival.score(later))
    for batch, head, _, keys_SD in heads(step):
        votes_S = torch.zeros(LENGTH)
        for queries_WD in prompt.query_BKGWD[batch, head]:
            for row, query_D in enumerate(queries_WD):
                seen = LENGTH - 6 + row + 1
                votes_S[:seen] += torch.softmax(keys_SD[:seen] @ query_D * SCALING, 0)
        votes_S = votes_S[: LENGTH - 6]
        pooled = torch.stack([votes_S[max(0, at - 2) : at + 3].sum() / 5 for at in range(len(votes_S))])
        expected = best(pooled, 6) | set(range(LENGTH - 6, LENGTH + 2))
        assert set(chosen_BKS[batch, head].nonzero().flatten().tolist()) == expected


def test_tidal_decode_reuses_the_keys_of_one_layer() -> None:
    rival = TidalDecode(7, 1)
    steps = [random_step(seed, layer=seed) for seed in range(4)]
    chosen = [rival.select(step, rival.score(step)) for step in steps]
    assert chosen[0].all() and chosen[1].all()
    for batch, head, queries_GD, keys_SD in heads(steps[1]):
        expected = plain_top_k(queries_GD, keys_SD)
        for mask_BKS in chosen[2:]:
            assert set(mask_BKS[batch, head].nonzero().flatten().tolist()) == expected


def orthonormal(d: int) -> Tensor:
    return torch.linalg.qr(torch.randn(KV_HEADS, HEAD_DIM, HEAD_DIM, generator=torch.Generator().manual_seed(5))).Q[
        ..., :d
    ].contiguous()  # fmt: skip


def test_loki_reuses_the_choice_of_the_layer_before_it() -> None:
    config = LokiConfig(d=4, k=12, min_seq=0)
    encoder = encoder_of(orthonormal(4))
    usual, reusing = Loki([encoder] * 3, config), ReusingLoki([encoder] * 3, config, "layers")
    reusing.start([prompt_of(random_step())] * 3)
    chooser = random_step(0, layer=0)
    torch.testing.assert_close(reusing.decode(chooser), usual.decode(chooser))
    assert reusing.read == usual.read
    before, reuser = reusing.read, random_step(1, layer=1)
    out = reusing.decode(reuser)
    assert reusing.read - before == 2 * 12 * HEAD_DIM
    chosen_BKS = usual.select(chooser, usual.score(chooser))
    torch.testing.assert_close(out, torch.matmul(weights_of(reuser, chosen_BKS), reuser.value_BKSD))
    third = random_step(2, layer=2)
    torch.testing.assert_close(reusing.decode(third), usual.decode(third))


def test_loki_reuses_the_choice_of_the_step_before_it_and_keeps_the_last_keys() -> None:
    config = LokiConfig(d=4, k=12, min_seq=0)
    encoder = encoder_of(orthonormal(4))
    usual, reusing = Loki([encoder], config), ReusingLoki([encoder], config, "steps")
    reusing.start([prompt_of(random_step())])
    first, second = random_step(0), random_step(1, length=LENGTH + 1)
    torch.testing.assert_close(reusing.decode(first), usual.decode(first))
    chosen_BKS = torch.zeros(BATCH, KV_HEADS, LENGTH + 1, dtype=torch.bool)
    chosen_BKS[..., :LENGTH] = usual.select(first, usual.score(first))
    chosen_BKS[..., -3:] = True  # the last k / 4 = 3 keys
    expected = torch.matmul(weights_of(second, chosen_BKS), second.value_BKSD)
    torch.testing.assert_close(reusing.decode(second), expected)
    third = random_step(2, length=LENGTH + 2)
    torch.testing.assert_close(reusing.decode(third), usual.decode(third))


def test_loki_is_the_decoding_step_of_fourfold() -> None:
    step, encoder = random_step(), encoder_of(orthonormal(8))
    config = LokiConfig(k=9, sink=2, recent=3, min_seq=0)
    codes = encoder.encode(step.key_BKSD)
    value = step.value_BKSD
    query = step.query_BKGD.flatten(1, 2)
    expected = decode(query, step.key_BKSD, value, value.sum(2), codes, encoder, 9, config, SCALING)
    torch.testing.assert_close(Loki([encoder], config).decode(step).flatten(1, 2), expected)


def test_the_papers_loki_with_all_dims_is_exact_top_k() -> None:
    step, basis_KDD = random_step(), orthonormal(HEAD_DIM)
    rival = PaperLoki([torch.stack([basis_KDD] * 2)], LokiConfig(k=9, sink=0, recent=0, min_seq=0))
    torch.testing.assert_close(rival.decode(step), ExactTopK(9).decode(step))


def test_a_shared_budget_reads_the_same_number_of_keys_and_the_best_of_all_heads() -> None:
    step, encoder = random_step(), encoder_of(orthonormal(HEAD_DIM))
    rival = LokiSharedBudget([encoder], LokiConfig(k=9, sink=2, recent=3, min_seq=0))
    worth_BKS = rival.score(step)
    chosen_BKS = rival.select(step, worth_BKS)
    assert chosen_BKS.sum((1, 2)).tolist() == [9 * KV_HEADS] * BATCH
    assert chosen_BKS[..., :2].all() and chosen_BKS[..., -3:].all()
    middle_BKS, chosen_BKS = worth_BKS[..., 2:-3], chosen_BKS[..., 2:-3]
    for worth_KS, chosen_KS in zip(middle_BKS, chosen_BKS, strict=True):
        assert worth_KS[chosen_KS].min() >= worth_KS[~chosen_KS].max()


def all_rivals() -> Sequence[tuple[Rival, float]]:
    """Return each method with the number of elements that it reads for each KV head in the step with 41 keys."""
    per_key, basis_KDd = 2 * HEAD_DIM, orthonormal(5)
    return [
        (Dense(), LENGTH * per_key),
        (ExactTopK(7), 7 * per_key),
        (RandomKeys(7), 7 * per_key),
        (Quest(3, 41), 1 * per_key + LENGTH * per_key),
        (SparQ(7, 3, 2), 3 * LENGTH + 7 * per_key),
        (SparQ(7, 3, 2, adds_mean=True), 3 * LENGTH + 7 * per_key + 2 * HEAD_DIM),
        (StreamingLLM(10, 4, torch.ones(HEAD_DIM // 2)), 10 * per_key),
        # The codes of five components take two bytes, as many as one element. The sum of the values is in float32.
        (Loki([encoder_of(basis_KDd)], LokiConfig(k=9, min_seq=0)), LENGTH + 9 * per_key + 2 * HEAD_DIM),
        (LokiSharedBudget([encoder_of(basis_KDd)], LokiConfig(k=9, min_seq=0)), LENGTH + 9 * per_key + 2 * HEAD_DIM),
        (PaperLoki([torch.stack([basis_KDd] * 2)], LokiConfig(k=9, min_seq=0)), 5 * LENGTH + 9 * per_key),
    ]


@pytest.mark.parametrize(("rival", "elements"), all_rivals(), ids=lambda each: type(each).__name__)
def test_scoring_counts_in_what_a_step_reads(rival: Rival, elements: float) -> None:
    rival.decode(random_step())
    assert rival.share == pytest.approx(elements / (LENGTH * 2 * HEAD_DIM))


def test_h2o_counts_its_accumulators() -> None:
    step = random_step()
    rival = H2O(9, 4)
    rival.start([prompt_of(step)])
    step = longer(step, 1)
    rival.decode(step)
    assert rival.share == pytest.approx(9 * (2 * HEAD_DIM + 2) / (step.length * 2 * HEAD_DIM))


def test_the_threshold_reads_the_given_number_of_keys() -> None:
    recorder = ScoreRecorder(ExactTopK(1))
    steps = [random_step(seed) for seed in range(20)]
    for step in steps:
        torch.testing.assert_close(recorder.decode(step), Dense().decode(step))
    rival = TopP(ExactTopK(1), threshold_for(recorder.before, 8))
    for step in steps:
        rival.decode(step)
    assert 0.9 * 8 / LENGTH < rival.share <= 8 / LENGTH


def test_weights_of_keys_that_were_not_chosen_are_zero() -> None:
    step = random_step()
    chosen_BKS = ExactTopK(7).select(step, ExactTopK(7).score(step))
    weights_BKGS = weights_of(step, chosen_BKS)
    assert (weights_BKGS > 0).sum(-1).eq(7).all()
    torch.testing.assert_close(weights_BKGS.sum(-1), torch.ones(BATCH, KV_HEADS, GROUP))
