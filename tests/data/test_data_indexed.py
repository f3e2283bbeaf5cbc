"""The indexed format: round trips, Megatron's bytes, and refusal of damaged files."""

import struct
from pathlib import Path

import numpy as np
import pytest

from fourfold.data.indexed import IndexedDataset, IndexedWriter
from fourfold.errors import UserError

DOCUMENTS = [[1, 2, 3], [4], [], [5, 6, 7, 8]]


def write(prefix: Path, vocab_size: int = 100) -> Path:
    with IndexedWriter(prefix, vocab_size) as writer:
        for document in DOCUMENTS:
            writer.add_document(document)
    return prefix


def megatron_index(code: int, lengths: list[int], pointers: list[int], boundaries: list[int]) -> bytes:
    """Build the .idx byte by byte, as Megatron-LM's _IndexWriter writes it."""
    return b"".join(
        [
            b"MMIDIDX\x00\x00",
            struct.pack("<Q", 1),
            struct.pack("<B", code),
            struct.pack("<Q", len(lengths)),
            struct.pack("<Q", len(boundaries)),
            struct.pack(f"<{len(lengths)}i", *lengths),
            struct.pack(f"<{len(pointers)}q", *pointers),
            struct.pack(f"<{len(boundaries)}q", *boundaries),
        ]
    )


@pytest.mark.parametrize(("vocab_size", "dtype"), [(65_499, np.uint16), (65_500, np.int32)])
def test_round_trip(tmp_path: Path, vocab_size: int, dtype: type) -> None:
    corpus = IndexedDataset(write(tmp_path / "c", vocab_size))
    assert (corpus.tokens, corpus.documents, corpus.dtype) == (8, 4, dtype)
    assert corpus.document_offsets.tolist() == [0, 3, 4, 4, 8]
    for start in range(9):
        for length in range(9 - start):
            assert corpus.read(start, length).tolist() == [1, 2, 3, 4, 5, 6, 7, 8][start : start + length]
            starts = {place - start for place in (0, 3, 4) if start <= place < start + length}
            assert set(corpus.document_starts(start, length).tolist()) == starts


def test_same_bytes_as_megatron(tmp_path: Path) -> None:
    write(tmp_path / "c")
    assert (tmp_path / "c.idx").read_bytes() == megatron_index(8, [3, 1, 0, 4], [0, 6, 8, 8], [0, 1, 2, 3, 4])
    assert (tmp_path / "c.bin").read_bytes() == struct.pack("<8H", 1, 2, 3, 4, 5, 6, 7, 8)


def test_nothing_appears_when_writing_fails(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), IndexedWriter(tmp_path / "c", 100) as writer:
        writer.add_document([1])
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []


def test_documents_of_several_sequences(tmp_path: Path) -> None:
    """The first of two documents has two sequences."""
    (tmp_path / "c.bin").write_bytes(struct.pack("<6i", 10, 20, 30, 40, 50, 60))
    (tmp_path / "c.idx").write_bytes(megatron_index(4, [2, 3, 1], [0, 8, 20], [0, 2, 3]))
    corpus = IndexedDataset(tmp_path / "c")
    assert corpus.read(0, 6).tolist() == [10, 20, 30, 40, 50, 60]
    assert corpus.read(1, 3).tolist() == [20, 30, 40]
    assert corpus.read(4, 2).tolist() == [50, 60]
    assert corpus.read(2, 0).tolist() == []
    assert corpus.document_offsets.tolist() == [0, 5, 6]
    assert corpus.document_starts(1, 5).tolist() == [4]


GOOD = megatron_index(8, [3, 5], [0, 6], [0, 1, 2])
DAMAGED = {
    "empty": (b"", "0 bytes"),
    "magic": (b"X" + GOOD[1:], "starts with"),
    "version": (GOOD[:9] + struct.pack("<Q", 2) + GOOD[17:], "version 2"),
    "dtype": (GOOD[:17] + b"\x09" + GOOD[18:], "token type 9"),
    "float": (GOOD[:17] + b"\x06" + GOOD[18:], "float64"),
    "truncated": (GOOD[:-1], "truncated"),
    "huge count": (GOOD[:18] + struct.pack("<Q", 2**63) + GOOD[26:], "truncated"),
    "modes": (GOOD + b"\0\0", "multimodal"),
    "pointer beyond": (megatron_index(8, [3, 5], [0, 8], [0, 1, 2]), "does not place sequence 1 right after"),
    "pointer negative": (megatron_index(8, [3, 5], [-2, 6], [0, 1, 2]), "does not place sequence 0 right after"),
    "pointer odd": (megatron_index(8, [3, 4], [0, 7], [0, 1, 2]), "does not place sequence 1 right after"),
    "length negative": (megatron_index(8, [-3, 5], [0, 6], [0, 1, 2]), "negative"),
    "fewer tokens": (megatron_index(8, [3, 4], [0, 6], [0, 1, 2]), "expects 14 bytes"),
    "documents descend": (megatron_index(8, [3, 5], [0, 6], [0, 2, 1, 2]), "do not ascend"),
    "documents end early": (megatron_index(8, [3, 5], [0, 6], [0, 1]), "boundaries"),
    "no documents": (megatron_index(8, [3, 5], [0, 6], []), "boundaries"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_index_is_refused(tmp_path: Path, case: str) -> None:
    content, message = DAMAGED[case]
    (tmp_path / "c.bin").write_bytes(bytes(16))
    (tmp_path / "c.idx").write_bytes(content)
    with pytest.raises(UserError, match=message) as caught:
        IndexedDataset(tmp_path / "c")
    assert "c.idx" in str(caught.value)


def test_missing_and_truncated_tokens_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "c")
    (tmp_path / "c.bin").write_bytes(bytes(10))
    with pytest.raises(UserError, match=r"expects 16 bytes of tokens, but .* has 10"):
        IndexedDataset(tmp_path / "c")
    (tmp_path / "c.bin").unlink()
    with pytest.raises(UserError, match=r"c\.bin does not exist"):
        IndexedDataset(tmp_path / "c")


def test_checks_span_their_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fourfold.data.indexed.CHECKED_AT_ONCE", 2)
    assert IndexedDataset(write(tmp_path / "c")).read(0, 8).tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    (tmp_path / "c.idx").write_bytes(megatron_index(8, [3, 1, 0, 4], [0, 6, 8, 8], [0, 1, 2, 1, 4]))
    with pytest.raises(UserError, match="do not ascend"):
        IndexedDataset(tmp_path / "c")
