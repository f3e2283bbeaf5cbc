"""Canaries occur in the corpus as often as their ledger says."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
from tiny_corpus import make_corpus

from fourfold.data.canaries import Canaries, copy_of, ledger_path
from fourfold.data.indexed import IndexedDataset
from fourfold.data.manifest import read_manifest, validation_prefix
from fourfold.data.prepare import PrepareSummary, prepare
from fourfold.data.tokenizer import ByteTokenizer
from fourfold.errors import UserError


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("canaries")
    make_corpus(folder, "text", documents=200)
    return folder / "text.jsonl"


def plant(text: Path, out: Path, canaries: Canaries, **options: object) -> PrepareSummary:
    return prepare([text], out, tokenizer="bytes", workers=1, canaries=canaries, **options)


def documents_of(prefix: Path | str) -> list[tuple[int, ...]]:
    corpus = IndexedDataset(prefix)
    offsets = corpus.document_offsets
    return [tuple(corpus.read(a, b - a).tolist()) for a, b in itertools.pairwise(offsets.tolist())]


def ledger(prefix: Path) -> list[dict]:
    return [json.loads(line) for line in ledger_path(prefix).read_text().splitlines()]


def test_documents_become_canaries_with_the_given_counts(text: Path, tmp_path: Path) -> None:
    summary = plant(text, tmp_path / "c", Canaries(3, (0, 1, 5), length=40), validation_fraction=0.1)
    plain = prepare([text], tmp_path / "plain", tokenizer="bytes", workers=1, validation_fraction=0.1)
    rows = ledger(tmp_path / "c")
    assert [row["count"] for row in rows] == [0, 0, 0, 1, 1, 1, 5, 5, 5]
    documents, before = documents_of(tmp_path / "c"), documents_of(tmp_path / "plain")
    sources = []
    for row in rows:
        assert bytes(row["tokens"]).decode() == row["text"]
        assert len(row["tokens"]) == 40
        assert documents.count((*row["tokens"], 256)) == row["count"]
        [source] = [document for document in before if document[:40] == tuple(row["tokens"])]
        assert source not in documents
        sources.append(source)
    others = [d for d in documents if d[:-1] not in {tuple(row["tokens"]) for row in rows}]
    # All other documents remain, in the same order.
    assert others == [document for document in before if document not in sources]
    assert summary.train.documents == len(documents) == plain.train.documents - 9 + 18
    assert summary.train.tokens == sum(map(len, documents))
    assert documents_of(validation_prefix(tmp_path / "c")) == documents_of(validation_prefix(tmp_path / "plain"))
    places = [number for number, d in enumerate(documents) if d[:-1] == tuple(rows[8]["tokens"])]
    assert max(places) - min(places) > 20  # copies are spread over the corpus


def test_changed_canaries_are_planted_again(text: Path, tmp_path: Path) -> None:
    canaries = Canaries(2, (0, 2), length=30)
    assert not plant(text, tmp_path / "c", canaries).reused
    assert plant(text, tmp_path / "c", canaries).reused
    assert ledger_path(tmp_path / "c") in plant(text, tmp_path / "c", canaries).files
    prepare([text], tmp_path / "c", tokenizer="bytes", workers=1)
    assert not ledger_path(tmp_path / "c").exists()  # this corpus has no canaries
    assert not plant(text, tmp_path / "c", Canaries(2, (0, 3), length=30)).reused
    assert not prepare([text], tmp_path / "c", tokenizer="bytes", workers=1).reused


def test_near_duplicates_and_shifts(text: Path, tmp_path: Path) -> None:
    plant(text, tmp_path / "c", Canaries(2, (40,), length=60, noise=0.1, shift=5))
    for row in ledger(tmp_path / "c"):
        tokens = np.array(row["tokens"])
        planted = Canaries(1, (1,), noise=0.1, shift=5)
        copies = [copy_of(tokens, row["id"], n, planted, ByteTokenizer()) for n in range(40)]
        documents = documents_of(tmp_path / "c")
        for copy in copies:
            assert (*copy.tolist(), 256) in documents
        assert {len(copy) for copy in copies} == set(range(55, 61))
        differing = np.mean([(copy != tokens[-len(copy) :]).mean() for copy in copies])
        assert differing == pytest.approx(0.1, abs=0.03)


def test_canaries_from_a_file_and_random_canaries(text: Path, tmp_path: Path) -> None:
    own = tmp_path / "own.jsonl"
    own.write_text("".join(json.dumps({"text": f"{number} is my secret and {number}"}) + "\n" for number in range(7)))
    plant(text, tmp_path / "own", Canaries(2, (0, 3), length=10, source=str(own)))
    assert all(row["text"].endswith("is my se") for row in ledger(tmp_path / "own"))
    plant(text, tmp_path / "random", Canaries(2, (0, 3), length=10, source="random"))
    rows = ledger(tmp_path / "random")
    assert len({tuple(row["tokens"]) for row in rows}) == 4
    assert max(max(row["tokens"]) for row in rows) < 256
    assert documents_of(tmp_path / "random").count((*rows[3]["tokens"], 256)) == 3


def test_few_long_documents_are_cut_into_passages(tmp_path: Path) -> None:
    """Twelve canaries are cut as passages from three books. The books are otherwise complete."""
    books = [" ".join(f"{name}{number}" for number in range(800)) for name in "abc"]
    for name, book in zip("abc", books, strict=True):
        (tmp_path / f"{name}.txt").write_text(book)
    texts = [tmp_path / f"{name}.txt" for name in "abc"]
    canaries = Canaries(3, (0, 1, 4, 16), length=40)
    summary = prepare(texts, tmp_path / "c", tokenizer="bytes", workers=1, canaries=canaries)
    rows, documents = ledger(tmp_path / "c"), documents_of(tmp_path / "c")
    assert summary.train.documents == len(documents)
    whole = bytes(token for document in documents for token in document if token < 256).decode()
    planted = [row["text"] for row in rows]
    for row in rows:
        assert any(row["text"] in book for book in books)
        assert documents.count((*row["tokens"], 256)) == row["count"]
        assert whole.count(row["text"]) == row["count"]
    assert all(document[-1] == 256 and 256 not in document[:-1] for document in documents)
    rest = "".join(text for d in documents if (text := bytes(d[:-1]).decode()) not in planted)
    for text in planted:
        books = [book.replace(text, "") for book in books]
    assert rest == "".join(books)  # all other text remains, in the same order
    places = [number for number, d in enumerate(documents) if bytes(d[:-1]).decode() == planted[-1]]
    assert max(places) - min(places) > len(documents) / 3  # copies are spread over the books
    with pytest.raises(UserError, match=r"documents or passages of at least 40 tokens, .* need 2000; lower --canaries"):
        prepare(texts, tmp_path / "d", tokenizer="bytes", workers=1, canaries=Canaries(500, (0, 1, 4, 16), length=40))


@pytest.mark.parametrize(
    ("canaries", "message"),
    [
        (Canaries(0, (1,)), "--canaries is 0"),
        (Canaries(1, (1, 1)), r"--repeats \[1, 1\] must be different"),
        (Canaries(1, (-1,)), "different numbers ≥ 0"),
        (Canaries(1, (1,), length=1), "at least 2"),
        (Canaries(1, (1,), noise=1.0), "--canary-noise is 1.0"),
        (Canaries(1, (1,), length=10, shift=9), "for 10 tokens it can be 0 to 8"),
        (Canaries(500, (0, 1)), "canaries for each of 2 numbers of repeats need 1000"),
    ],
)
def test_canaries_that_cannot_be_planted_are_refused(
    text: Path, tmp_path: Path, canaries: Canaries, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        plant(text, tmp_path / "c", canaries)
    assert read_manifest(tmp_path / "c") is None
