"""Goldfish masks: the published vectors, and the guarantees of our own masks."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fourfold.config.loss_masks import GoldfishConfig
from fourfold.data.dataset import SourceMixture, TokenWindows, Windows
from fourfold.data.goldfish import TABLE_SEED, Goldfish, build_goldfish_mask, hash_table_drops, published_table
from fourfold.data.indexed import IndexedDataset, IndexedWriter
from fourfold.data.loader import Loader
from fourfold.data.masks import document_boundary
from fourfold.errors import UserError

VECTOR = ((7919 * np.arange(1, 41) + 13) % 32000)[None]
"""Tokens to compare with the published code at commit 35d29f9."""


def windows_of(tokens: np.ndarray, documents: np.ndarray | None = None, first_number: int = 0) -> Windows:
    documents = np.zeros_like(tokens) if documents is None else documents
    return Windows(tokens, documents, first_number + np.arange(len(tokens)))


def drops(tokens: np.ndarray, **config: object) -> np.ndarray:
    return ~Goldfish(GoldfishConfig(**{"strategy": "hash", **config}))(windows_of(tokens))


@pytest.fixture(scope="module")
def text() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 32_000, (8, 2001))


@pytest.mark.parametrize(
    ("k", "h", "expected"),
    [
        (2, 13, [12, 14, 15, 17, 18, 20, 21, 22, 23, 24, 30, 32, 33, 37, 38]),
        (3, 13, [14, 15, 17, 18, 20, 21, 23, 24, 32, 33, 37, 38]),
        (4, 13, [15, 18, 20, 24, 32, 33, 38]),
        (8, 13, [15, 18, 38]),
        (32, 13, [18, 38]),
        (4, 4, [3, 4, 7, 22, 24, 26, 39]),
    ],
)
def test_hash_table_is_the_published_one(k: int, h: int, expected: list[int]) -> None:
    assert np.flatnonzero(hash_table_drops(VECTOR, k, h)[0]).tolist() == expected
    # The first token is no target, so put an arbitrary token before the vector.
    tokens = np.concatenate([[[5]], VECTOR], axis=1)
    assert np.flatnonzero(drops(tokens, strategy="hash-table", k=k, h=h)[0]).tolist() == expected


def test_the_published_table_is_torchs() -> None:
    table = published_table()
    assert np.allclose(table[:4], [0.23368388, 0.44126403, 0.74114770, 0.90927190], atol=1e-8)
    assert (table == torch.rand(len(table), generator=torch.Generator().manual_seed(TABLE_SEED)).numpy()).all()
    for k, share in ((2, 0.499236), (3, 0.332313), (4, 0.249533), (50, 0.019901)):
        assert (table < np.float32(1 / k)).mean() == pytest.approx(share, abs=2e-6)


def test_hash_table_of_the_paper_sees_only_earlier_tokens(text: np.ndarray) -> None:
    """The paper's window ends one token earlier than the code's. So the paper's mask of a target is the code's mask of
    the previous target."""
    official = hash_table_drops(text, 4, 13)
    paper = hash_table_drops(text, 4, 13, include_target=False)
    assert (paper[:, 13:] == official[:, 12:-1]).all()
    assert not paper[:, :13].any()


def test_hash_table_against_its_definition(text: np.ndarray) -> None:
    row, table = text[0].astype(np.int64), published_table()
    for place in range(49, 90):
        product = 1
        for token in row[place - 49 : place + 1].tolist():
            product = (product * token) % 2**64
        signed = product - 2**64 if product >= 2**63 else product
        assert hash_table_drops(row[None], 50, 50)[0, place] == (table[signed % 1_000_003] < np.float32(1 / 50))


@pytest.mark.parametrize("strategy", ["hash", "hash-table", "random"])
def test_one_in_k_is_dropped_and_masks_are_nested(text: np.ndarray, strategy: str) -> None:
    before = np.ones((8, 2000), dtype=bool)
    for k in (2, 3, 4, 8, 32):
        dropped = drops(text, strategy=strategy, k=k, h=5)
        assert dropped.mean() == pytest.approx(1 / k, rel=0.15)
        assert (dropped <= before).all()
        before = dropped


def test_static_drops_every_kth_place(text: np.ndarray) -> None:
    assert np.flatnonzero(drops(text, strategy="static", k=7)[3]).tolist() == list(range(0, 2000, 7))


def test_random_masks_differ_for_every_sample_and_epoch(text: np.ndarray) -> None:
    one = ~Goldfish(GoldfishConfig(strategy="random"))(windows_of(text))
    again = ~Goldfish(GoldfishConfig(strategy="random"))(windows_of(text))
    next_epoch = ~Goldfish(GoldfishConfig(strategy="random"))(windows_of(text, first_number=8))
    other_seed = ~Goldfish(GoldfishConfig(strategy="random", seed=1))(windows_of(text))
    assert (one == again).all()
    for other in (next_epoch, other_seed, one[::-1]):
        assert (one & other).mean() == pytest.approx(1 / 16, rel=0.15)  # k = 4, so 1/4²
    assert not (one[1:, :-1] == one[:-1, 1:]).all(axis=1).any()  # not the next sample's mask, shifted


def test_hash_depends_only_on_the_preceding_tokens_and_their_order(text: np.ndarray) -> None:
    h = 6
    dropped = drops(text, k=2, h=h)
    shuffled = text.copy()
    shuffled[:, 100 : 100 + h] = text[:, 100 : 100 + h][:, ::-1]
    assert not (drops(shuffled, k=2, h=h) == dropped)[:, 100 + h - 1].all()
    assert (hash_table_drops(text, 2, h)[:, 100 + h - 1] == hash_table_drops(shuffled, 2, h)[:, 100 + h - 1]).all()
    # Change the target, and the token right before the h tokens that the hash reads. The target's mask must not change.
    elsewhere = text.copy()
    elsewhere[:, 100 + h] = 7
    elsewhere[:, 99] = 7
    assert (drops(elsewhere, k=2, h=h)[:, 100 + h - 1] == dropped[:, 100 + h - 1]).all()
    # The same text at another place and in another row has the same mask.
    moved = np.concatenate([text[:, 500:503], text], axis=1)
    assert (drops(moved, k=2, h=h)[:, 3 + h :] == dropped[:, h:]).all()
    assert (drops(text[::-1], k=2, h=h) == dropped[::-1]).all()
    assert not (drops(text, k=2, h=h, seed=1) == dropped).all()


def test_the_token_after_a_phrase_of_h_tokens_is_dropped_in_all_copies_or_in_none(text: np.ndarray) -> None:
    """For one in k phrases, the next token is always dropped. If h is longer than the phrase, the decision also depends
    on the text before the phrase."""
    phrases = np.random.default_rng(1).integers(0, 32_000, (200, 4))
    found = {h: [] for h in (3, 20)}
    for h, phrase in ((h, phrase) for h in found for phrase in phrases):
        copies = np.concatenate([text[:, :30], np.tile(phrase, (len(text), 1))], axis=1)
        found[h].append(drops(copies, k=4, h=h)[:, -1].mean())
    assert set(found[3]) == {0, 1}
    assert np.mean(found[3]) == pytest.approx(1 / 4, abs=0.1)
    assert not set(found[20]) <= {0, 1}


def test_token_zero_and_powers_of_two_do_not_collapse_the_hash() -> None:
    """A product of 50 English bytes is nearly always 0 modulo 2^64, so the published mask does not work there."""
    letters = np.frombuffer(b"the cat sat on the mat and saw that it was a good mat. ", dtype=np.uint8)
    rows = np.random.default_rng(0).choice(letters, (4, 4000)).astype(np.int64)
    assert drops(rows, k=50, h=50).mean() == pytest.approx(0.02, rel=0.2)
    assert drops(rows, strategy="hash-table", k=50, h=50).mean() < 0.01
    rows[:, ::5] = 0
    assert drops(rows, k=4, h=13).mean() == pytest.approx(0.25, rel=0.1)


def test_documents_shorter_than_h_are_kept(text: np.ndarray) -> None:
    documents = np.arange(2001)[None] // 13 + np.zeros((8, 1), dtype=np.int64)
    mask = Goldfish(GoldfishConfig(strategy="hash"))
    assert mask(windows_of(text, documents)).all()
    assert mask(windows_of(text[:, :10])).all()
    assert not drops(text[:, :10], strategy="hash-table").any()


def test_a_document_has_the_same_mask_everywhere(text: np.ndarray) -> None:
    """A document has the same mask at any place in the stream."""
    documents = (np.arange(2001) >= 700).astype(np.int64)[None] + np.zeros((8, 1), dtype=np.int64)
    packed = ~Goldfish(GoldfishConfig(strategy="hash"))(windows_of(text, documents))
    assert (packed[:, 700:] == drops(text[:, 700:])).all()
    assert (packed[:, :699] == drops(text[:, :700])).all()


def test_special_tokens_and_the_first_steps_are_kept(text: np.ndarray) -> None:
    plain = drops(text, k=2)
    exempt = tuple(text[0, 20:400].tolist())
    mask = build_goldfish_mask(GoldfishConfig(strategy="hash", k=2, exempt=[int(text[1, 500])]), exempt, 2000, 3)
    kept = mask(windows_of(text))
    assert kept[np.isin(text[:, 1:], [*exempt, text[1, 500]])].all()
    others = ~np.isin(text[:, 1:], [*exempt, text[1, 500]])
    assert (~kept[others] == plain[others]).all()
    late = build_goldfish_mask(GoldfishConfig(strategy="hash", k=2, start_step=2), (), 2000, 3)
    assert late(windows_of(text))[:6].all()  # steps 0 and 1 have the samples 0 to 5
    assert (~late(windows_of(text))[6:] == plain[6:]).all()


def test_a_mask_that_would_drop_nothing_is_refused() -> None:
    with pytest.raises(UserError, match=r"h = 64 is not below training\.seq_length = 64"):
        build_goldfish_mask(GoldfishConfig(strategy="hash-table", h=64), (), 64, 8)
    assert build_goldfish_mask(GoldfishConfig(strategy="hash", h=64), (), 64, 8) is not None
    assert build_goldfish_mask(GoldfishConfig(), (), 64, 8) is None


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> IndexedDataset:
    generator = np.random.default_rng(1)
    prefix = tmp_path_factory.mktemp("goldfish") / "c"
    with IndexedWriter(prefix, 1000) as writer:
        for length in generator.integers(1, 400, 60):
            writer.add_document(generator.integers(0, 1000, length))
    return IndexedDataset(prefix)


def drops_in_the_stream(corpus: IndexedDataset, seq_length: int, goldfish: Goldfish) -> dict[int, bool]:
    """Return whether each target is dropped, by its place in the stream."""
    windows = TokenWindows(corpus.prefix, seq_length, 3, goldfish.look_back)
    read = windows.read(np.arange(len(windows)))
    whole = corpus.read(0, corpus.tokens)
    found = {}
    for row, dropped in zip(read.tokens, ~goldfish(read), strict=True):
        start = next(s for s in range(0, corpus.tokens, seq_length) if (whole[s : s + seq_length + 1] == row).all())
        found |= {start + 1 + place: bool(d) for place, d in enumerate(dropped)}
    return found


def test_the_mask_does_not_depend_on_the_cuts_of_the_stream(corpus: IndexedDataset) -> None:
    goldfish = Goldfish(GoldfishConfig(strategy="hash", k=3, h=7))
    coarse, fine = (drops_in_the_stream(corpus, length, goldfish) for length in (128, 19))
    assert set(coarse.values()) == {True, False}
    assert all(coarse[place] == fine[place] for place in coarse.keys() & fine.keys())


@pytest.mark.parametrize("strategy", ["hash", "hash-table", "static", "random"])
@pytest.mark.parametrize("size", [2, 3, 6])
def test_every_grid_drops_the_same_tokens(corpus: IndexedDataset, strategy: str, size: int) -> None:
    goldfish = Goldfish(GoldfishConfig(strategy=strategy, h=5))
    dataset = SourceMixture([(TokenWindows(corpus.prefix, 32, 0, goldfish.look_back), 1.0)], 0)

    def labels(size: int, micro_batch_size: int) -> np.ndarray:
        loaders = [
            Loader(dataset, 32, 12, micro_batch_size, rank, size, (document_boundary, goldfish)) for rank in range(size)
        ]
        steps = zip(*(loader.step(4) for loader in loaders), strict=True)
        return np.concatenate([batch.labels for of_all in steps for batch in of_all])

    assert (labels(1, 12) == -100).mean() == pytest.approx(0.25, abs=0.08)
    assert (labels(size, 2) == labels(1, 12)).all()
    assert (labels(size, 1) == labels(1, 12)).all()
