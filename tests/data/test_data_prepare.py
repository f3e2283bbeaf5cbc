"""Preparing a corpus gives the same bytes every time, repeats no finished work, and leaves no half-written corpus."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from tiny_corpus import documents_of

from fourfold.data import prepare as module
from fourfold.data import shards as workers
from fourfold.data.atomic_files import WriteFailed
from fourfold.data.indexed import IndexedDataset
from fourfold.data.manifest import corpus_tokenizer, read_manifest, validation_prefix
from fourfold.data.prepare import prepare
from fourfold.data.prepare_conversations import prepare_conversations
from fourfold.data.run_data import ensure_builtin
from fourfold.data.shards import Shard
from fourfold.errors import UserError


@pytest.fixture
def inputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write a .jsonl that is cut into several shards, and small text files that share one shard."""
    monkeypatch.setattr("fourfold.data.shards.SMALLEST_SHARD", 2000)
    folder = tmp_path / "in"
    folder.mkdir()
    rows = [{"text": f"document {n} " + "word " * (n % 13)} for n in range(200)]
    (folder / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for number in range(5):
        (folder / f"b{number}.txt").write_text(f"text number {number} — ü")
    return folder


def tokenized(monkeypatch: pytest.MonkeyPatch) -> list[Shard]:
    """Record which shards this process tokenizes from now on."""
    seen: list[Shard] = []
    original = workers.tokenize

    def record(shard: Shard, folder: Path) -> None:
        original(shard, folder)
        seen.append(shard)

    monkeypatch.setattr(workers, "tokenize", record)
    return seen


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != "in")


def test_the_corpus_has_the_text_of_the_inputs(tmp_path: Path, inputs: Path) -> None:
    summary = prepare([inputs], tmp_path / "out" / "c", tokenizer="bytes", workers=1)
    corpus = IndexedDataset(tmp_path / "out" / "c")
    expected = [[*text.encode(), 256] for text in documents_of([inputs])]
    offsets = corpus.document_offsets
    assert [corpus.read(a, b - a).tolist() for a, b in pairwise(offsets)] == expected
    assert summary.train.documents == 205
    assert summary.train.tokens == corpus.tokens == summary.train.bytes + 205
    assert (summary.train.vocab_size, summary.train.eod_id, summary.train.dtype) == (257, 256, "uint16")
    assert read_manifest(tmp_path / "out" / "c") == summary.train
    assert names(tmp_path / "out") == ["c.bin", "c.idx", "c.json"]
    assert all(path.is_file() for path in summary.files)


def test_same_bytes_for_any_number_of_workers(tmp_path: Path, inputs: Path) -> None:
    for count in (1, 4):
        (tmp_path / f"{count}").mkdir()
        prepare(
            [inputs], tmp_path / f"{count}" / "c", train_tokenizer_vocab=300, workers=count, validation_fraction=0.1
        )
    assert len(names(tmp_path / "1")) == 7
    assert names(tmp_path / "1") == names(tmp_path / "4")
    for name in names(tmp_path / "1"):
        assert (tmp_path / "1" / name).read_bytes() == (tmp_path / "4" / name).read_bytes()
    tokenizer = corpus_tokenizer(tmp_path / "4" / "c")
    corpus = IndexedDataset(tmp_path / "4" / "c")
    decoded = tokenizer.decode(corpus.read(0, int(corpus.document_offsets[1])).tolist())
    assert decoded in documents_of([inputs])


def test_validation_split_partitions_the_documents(tmp_path: Path, inputs: Path) -> None:
    def documents(prefix: str | Path) -> list[bytes]:
        corpus = IndexedDataset(prefix)
        offsets = corpus.document_offsets
        return [corpus.read(a, b - a).astype(np.uint8).tobytes() for a, b in pairwise(offsets)]

    summary = prepare([inputs], tmp_path / "c", tokenizer="bytes", workers=1, validation_fraction=0.2, seed=1)
    held_out = documents(validation_prefix(tmp_path / "c"))
    kept = documents(tmp_path / "c")
    every = [text.encode() + b"\0" for text in documents_of([inputs])]
    assert sorted(held_out + kept) == sorted(every)
    assert 20 < len(held_out) == summary.validation.documents < 65
    other = prepare([inputs], tmp_path / "c", tokenizer="bytes", workers=1, validation_fraction=0.2, seed=2)
    assert documents(validation_prefix(tmp_path / "c")) != held_out
    assert not other.reused
    prepare([inputs], tmp_path / "c", tokenizer="bytes", workers=1)
    # The old validation split is gone, because all of its documents are in the new corpus.
    assert names(tmp_path) == ["c.bin", "c.idx", "c.json"]


def test_finished_corpus_is_kept(tmp_path: Path, inputs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = tokenized(monkeypatch)
    first = prepare([inputs], tmp_path / "c", tokenizer="bytes", workers=1)
    again = prepare([inputs], tmp_path / "c", tokenizer="bytes", workers=1)
    assert (first.reused, again.reused, again.train) == (False, True, first.train)
    count = len(seen)
    assert count > 3
    assert not prepare([inputs], tmp_path / "c", tokenizer="bytes", workers=1, force=True).reused
    assert len(seen) == 2 * count
    (tmp_path / "c.bin").write_bytes(b"damaged")
    assert not prepare([inputs], tmp_path / "c", tokenizer="bytes", workers=1).reused
    os.utime(inputs / "b0.txt", (1, 1))
    assert not prepare([inputs], tmp_path / "c", tokenizer="bytes", workers=1).reused


def test_restart_after_an_interruption(tmp_path: Path, inputs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare([inputs], tmp_path / "expected", train_tokenizer_vocab=300, workers=1)
    seen = tokenized(monkeypatch)
    trained = []
    monkeypatch.setattr(module, "train_bpe", lambda *args, train=module.train_bpe: (trained.append(1), train(*args)))

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(module, "merge", interrupt)
        with pytest.raises(KeyboardInterrupt):
            prepare([inputs], tmp_path / "c", train_tokenizer_vocab=300, workers=1)
    assert not (tmp_path / "c.json").exists()
    all_shards = len(seen)
    (tmp_path / "c.parts" / f"{seen[0].key}.npy").unlink()  # act as if it was not finished
    (tmp_path / "c.parts" / ".half.bin.1.tmp").write_bytes(b"half")
    seen.clear()
    prepare([inputs], tmp_path / "c", train_tokenizer_vocab=300, workers=1)
    assert (len(seen), len(trained)) == (1, 1)
    assert all_shards > 3
    assert not (tmp_path / "c.parts").exists()
    for name in ("bin", "idx"):
        assert (tmp_path / f"c.{name}").read_bytes() == (tmp_path / f"expected.{name}").read_bytes()


def test_changed_input_is_tokenized_again(tmp_path: Path, inputs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = tokenized(monkeypatch)
    (inputs / "z.jsonl").write_text("{")
    with pytest.raises(UserError, match=r"z\.jsonl, line 1"):
        prepare([inputs], tmp_path / "c", tokenizer="bytes", workers=1)
    count = len(seen)
    seen.clear()
    (inputs / "z.jsonl").unlink()
    (inputs / "b4.txt").write_text("another text")
    prepare([inputs], tmp_path / "c", tokenizer="bytes", workers=1)
    assert 1 <= len(seen) < count
    assert any(piece.file.path.endswith("b4.txt") for shard in seen for piece in shard.pieces)


def test_an_error_in_a_worker_process_is_raised_here(tmp_path: Path, inputs: Path) -> None:
    (inputs / "z.jsonl").write_text('{"text": "good"}\n{"text": 1}\n')
    with pytest.raises(UserError, match=r"z\.jsonl, line 2"):
        prepare([inputs], tmp_path / "c", tokenizer="bytes", workers=2)
    assert names(tmp_path) == ["c.parts"]


def test_the_same_input_can_be_given_twice(tmp_path: Path, inputs: Path) -> None:
    once = prepare([inputs], tmp_path / "c", tokenizer="bytes", workers=1)
    twice = prepare([inputs, inputs], tmp_path / "d", tokenizer="bytes", workers=1)
    assert twice.train.tokens == 2 * once.train.tokens


def test_refusals(tmp_path: Path, inputs: Path) -> None:
    def refused(match: str, **options: object) -> None:
        with pytest.raises(UserError, match=match):
            prepare([inputs / "b0.txt"], tmp_path / "c", **options)

    refused("choose one tokenizer: --tokenizer bytes, .* or --train-tokenizer VOCAB")
    refused("choose one tokenizer", tokenizer="bytes", train_tokenizer_vocab=300)
    refused("--workers is 0; it must be at least 1", tokenizer="bytes", workers=0)
    refused("--validation-fraction is 1.0; it must be at least 0", tokenizer="bytes", validation_fraction=1.0)
    refused("leaves no document for", tokenizer="bytes", validation_fraction=0.5)
    (inputs / "b0.txt").write_text("")
    refused("no document has text", tokenizer="bytes")
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot write .*: Not a directory; choose another path"):
        prepare([inputs], tmp_path / "file" / "c", tokenizer="bytes")
    for folder in (".", "..", "/"):
        with pytest.raises(UserError, match="is a folder; name the corpus in it"):
            prepare([inputs], folder, tokenizer="bytes")


def test_second_preparation_of_the_same_corpus_is_refused(tmp_path: Path, inputs: Path) -> None:
    fcntl = pytest.importorskip("fcntl")
    (tmp_path / "c.parts").mkdir()
    with (tmp_path / "c.parts" / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(UserError, match="another process"):
            prepare([inputs], tmp_path / "c", tokenizer="bytes")


@contextmanager
def files_of_at_most(most: int) -> Iterator[None]:
    """Make writes beyond this size of a file fail, as on a full disk."""
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("options", [{"tokenizer": "bytes"}, {"train_tokenizer_vocab": 300}], ids=str)
@pytest.mark.parametrize("most", [0, 600, 2500, 5000])
def test_a_full_disk_is_reported_and_loses_nothing(tmp_path: Path, inputs: Path, most: int, options: dict) -> None:
    with files_of_at_most(most), pytest.raises(WriteFailed, match=r"cannot write .*c\.parts: File too large"):
        prepare([inputs], tmp_path / "c", workers=1, **options)
    assert not list(tmp_path.rglob("*.tmp")) and not (tmp_path / "c.json").exists()
    prepare([inputs], tmp_path / "c", workers=1, **options)
    prepare([inputs], tmp_path / "expected", workers=1, **options)
    for name in ("bin", "idx"):
        assert (tmp_path / f"c.{name}").read_bytes() == (tmp_path / f"expected.{name}").read_bytes()


def test_a_full_disk_is_reported_for_conversations(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"prompt": "what", "completion": "that"}\n' * 300)
    with files_of_at_most(1000), pytest.raises(WriteFailed, match=r"cannot write .*c\.parts: File too large"):
        prepare_conversations([tmp_path / "a.jsonl"], tmp_path / "c", tokenizer="bytes")
    assert names(tmp_path) == ["a.jsonl"]


def test_an_unwritable_folder_of_the_built_in_corpus_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(WriteFailed, match=r"cannot write .*file/cache: Not a directory"):
        ensure_builtin(tokenizer="bytes", cache_dir=tmp_path / "file" / "cache")
