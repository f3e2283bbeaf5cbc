"""Windows, packing, masks, and mixtures."""

from pathlib import Path

import numpy as np
import pytest

from fourfold.data.dataset import BLOCK, NO_DOCUMENT, SourceMixture, TokenWindows, Windows, documents_of, positions_of
from fourfold.data.indexed import IndexedWriter
from fourfold.data.masks import IGNORE_INDEX, document_boundary, labels_of
from fourfold.errors import UserError


def corpus(prefix: Path, lengths: list[int], first_token: int = 0) -> Path:
    """Make documents of these lengths, and return their prefix. Tokens count upwards over all documents."""
    with IndexedWriter(prefix, 10_000) as writer:
        for length in lengths:
            writer.add_document(np.arange(first_token, first_token + length))
            first_token += length
    return prefix


def test_an_epoch_predicts_every_token_once(tmp_path: Path) -> None:
    windows = TokenWindows(corpus(tmp_path / "c", [50, 1, 52]), seq_length=10, seed=3)
    assert len(windows) == 10
    for epoch in range(3):
        tokens = windows.read(np.arange(10) + 10 * epoch).tokens
        assert (tokens[:, :1] + np.arange(11) == tokens).all()
        assert sorted(tokens[:, 1:].reshape(-1).tolist()) == list(range(1, 101))
    orders = [windows.read(np.arange(10) + 10 * epoch).tokens[:, 0].tolist() for epoch in range(3)]
    assert orders[0] != orders[1] != orders[2]


def test_a_corpus_of_exactly_one_window(tmp_path: Path) -> None:
    exactly = corpus(tmp_path / "c", [5, 6])
    assert TokenWindows(exactly, 10, 0).read([0, 1]).tokens.tolist() == [list(range(11))] * 2
    with pytest.raises(UserError, match=r"c\.bin has 11 tokens.*seq_length 10 is the longest"):
        TokenWindows(exactly, 11, 0)
    with pytest.raises(UserError, match="add text"):
        TokenWindows(corpus(tmp_path / "d", [1]), 1, 0)


def test_documents_within_a_window(tmp_path: Path) -> None:
    windows = TokenWindows(corpus(tmp_path / "c", [3, 0, 1, 7, 10]), seq_length=10, seed=0)
    found = windows.read(np.arange(2))
    order = found.tokens[:, 0].argsort()
    assert found.documents[order].tolist() == [[0, 0, 0, 1, 2, 2, 2, 2, 2, 2, 2], [0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1]]


def test_packing() -> None:
    documents = documents_of([np.array([0, 3, 3]), np.array([1, 4]), np.array([], dtype=np.int64)], 5)
    assert documents.tolist() == [[0, 0, 0, 1, 1], [0, 1, 1, 1, 2], [0, 0, 0, 0, 0]]
    assert positions_of(documents).tolist() == [[0, 1, 2, 0, 1], [0, 0, 1, 2, 0], [0, 1, 2, 3, 4]]


def test_masks() -> None:
    tokens = np.array([[5, 6, 7, 8, 9]])
    windows = Windows(tokens, np.array([[0, 0, 1, 1, 2]]), np.array([0]))
    assert labels_of(windows, []).tolist() == [[6, 7, 8, 9]]
    assert labels_of(windows, [document_boundary]).tolist() == [[6, IGNORE_INDEX, 8, IGNORE_INDEX]]

    def below_8(windows: Windows) -> np.ndarray:
        return windows.tokens[:, 1:] < 8

    assert labels_of(windows, [document_boundary, below_8]).tolist() == [[6, -100, -100, -100]]
    assert tokens.tolist() == [[5, 6, 7, 8, 9]]


def test_look_back_has_the_tokens_before_a_window(tmp_path: Path) -> None:
    text = corpus(tmp_path / "c", [3, 9, 10], first_token=100)
    plain = TokenWindows(text, seq_length=7, seed=0).read(np.arange(3))
    looking_back = TokenWindows(text, seq_length=7, seed=0, look_back=5).read(np.arange(3))
    assert (looking_back.tokens == plain.tokens).all()
    assert (looking_back.documents == plain.documents).all()
    for stream, documents in zip(looking_back.stream, looking_back.stream_documents, strict=True):
        first = stream[5] - 100
        before = range(first - 5, first)
        assert stream[:5].tolist() == [100 + place if place >= 0 else 0 for place in before]
        number = [0 if place < 3 else 1 if place < 12 else 2 for place in range(22)]
        assert documents[:5].tolist() == [number[p] - number[first] if p >= 0 else NO_DOCUMENT for p in before]


def sources(tmp_path: Path) -> list[TokenWindows]:
    return [
        TokenWindows(corpus(tmp_path / f"s{number}", [101 + 40 * number], 1000 * number), seq_length=10, seed=number)
        for number in range(3)
    ]


def test_mixture_proportions_are_exact_and_even(tmp_path: Path) -> None:
    mixture = SourceMixture(list(zip(sources(tmp_path), [5, 3, 2], strict=True)), seed=1)
    source = mixture.read(np.arange(2 * BLOCK)).tokens[:, 0] // 1000
    for block in source.reshape(2, BLOCK):
        assert np.bincount(block).tolist() == [5000, 3000, 2000]
    for length in (100, 777):
        assert np.abs(np.bincount(source[:length]) - length * np.array([0.5, 0.3, 0.2])).max() <= 3


def test_mixture_reads_each_source_in_order(tmp_path: Path) -> None:
    """The mixture uses samples 0, 1, 2, … of each source in order, also across blocks, and for any number of samples
    read at once."""
    parts = sources(tmp_path)
    mixture = SourceMixture(list(zip(parts, [1, 1, 1], strict=True)), seed=0)
    numbers = np.arange(BLOCK - 300, BLOCK + 300)
    together = mixture.read(numbers)
    source = together.tokens[:, 0] // 1000
    for number, part in enumerate(parts):
        rows = np.flatnonzero(source == number)
        before = mixture.counts[number] - (rows < 300).sum()
        assert (together.tokens[rows] == part.read(before + np.arange(len(rows))).tokens).all()
    backwards = mixture.read(numbers[::-1])
    assert (backwards.tokens[::-1] == together.tokens).all()
    assert (backwards.documents[::-1] == together.documents).all()


def test_mixture_of_one_is_the_source(tmp_path: Path) -> None:
    part = sources(tmp_path)[0]
    numbers = np.array([0, 3, BLOCK + 1, 5 * BLOCK])
    assert (SourceMixture([(part, 0.3)], 9).read(numbers).tokens == part.read(numbers).tokens).all()


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([], "at least one source"),
        ([1.0, 0.0], "source 2 .* weight 0.0"),
        ([float("nan")], "nan"),
        ([1e6, 1], "no sample"),
    ],
)
def test_bad_mixtures_are_refused(tmp_path: Path, weights: list[float], message: str) -> None:
    with pytest.raises(UserError, match=message):
        SourceMixture(list(zip(sources(tmp_path), weights, strict=False)), 0)
