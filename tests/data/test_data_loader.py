"""The loader returns the same global batch on every grid, with and without prefetching."""

import sys
import threading
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from fourfold.data.dataset import TokenWindows
from fourfold.data.indexed import IndexedWriter
from fourfold.data.loader import Loader, MicroBatch

SEQ_LENGTH = 16
BY_TOKEN = ("tokens", "labels", "positions")
FIELDS = (*BY_TOKEN, "document_ends")


@pytest.fixture(scope="module")
def windows(tmp_path_factory: pytest.TempPathFactory) -> TokenWindows:
    prefix = tmp_path_factory.mktemp("loader") / "c"
    with IndexedWriter(prefix, 50_000) as writer:
        for number in range(100):
            writer.add_document(np.arange(number % 7 * 5 + 1) + 37 * number)
    return TokenWindows(prefix, SEQ_LENGTH, seed=0)


def documents_of_tokens(batch: MicroBatch) -> np.ndarray:
    places = np.arange(SEQ_LENGTH)
    return np.stack([np.searchsorted(ends, places, side="right") for ends in batch.document_ends])


def same(one: MicroBatch, other: MicroBatch) -> bool:
    return all((getattr(one, field) == getattr(other, field)).all() for field in FIELDS)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 6, 12, 24])
def test_every_grid_sees_the_global_batch(windows: TokenWindows, size: int) -> None:
    for micro_batch_size in (each for each in (1, 2, 3, 4, 24) if 24 % (each * size) == 0):
        loaders = [Loader(windows, SEQ_LENGTH, 24, micro_batch_size, rank, size) for rank in range(size)]
        micro_batches = zip(*(loader.step(5) for loader in loaders), strict=True)
        gathered = [batch for of_all_ranks in micro_batches for batch in of_all_ranks]
        assert all(
            getattr(batch, field).shape == (micro_batch_size, SEQ_LENGTH) for batch in gathered for field in BY_TOKEN
        )
        expected = windows.read(np.arange(5 * 24, 6 * 24))
        assert (np.concatenate([batch.tokens for batch in gathered]) == expected.tokens[:, :-1]).all()
        assert (np.concatenate(list(map(documents_of_tokens, gathered))) == expected.documents[:, :-1]).all()


def test_batch_fields_agree(windows: TokenWindows) -> None:
    [batch] = Loader(windows, SEQ_LENGTH, 32, 32).step(0)
    documents = documents_of_tokens(batch)
    following = documents[:, 1:] == documents[:, :-1]
    assert (batch.document_ends[:, -1] == SEQ_LENGTH).all()
    assert (batch.positions[:, 0] == 0).all()
    assert (batch.positions[:, 1:] == np.where(following, batch.positions[:, :-1] + 1, 0)).all()
    assert (batch.labels[:, :-1] == np.where(following, batch.tokens[:, 1:], -100)).all()
    assert (batch.labels == -100).any()
    assert all(getattr(batch, field).dtype == np.int64 for field in FIELDS)
    assert all(getattr(batch, field).flags.c_contiguous for field in FIELDS)


def test_without_masks_every_token_counts(windows: TokenWindows) -> None:
    [batch] = Loader(windows, SEQ_LENGTH, 4, 4, masks=()).step(0)
    assert (batch.labels >= 0).all()


def test_prefetch_changes_nothing_and_ends(windows: TokenWindows) -> None:
    plain = Loader(windows, SEQ_LENGTH, 8, 2, 1, 2)
    with closing(Loader(windows, SEQ_LENGTH, 8, 2, 1, 2, prefetch=True)) as ahead:
        for step in (0, 1, 2, 7, 8, 3):  # in order, and after jumps
            assert all(map(same, plain.step(step), ahead.step(step)))
    assert not any(thread.name.startswith("loader") for thread in threading.enumerate())
    assert all(map(same, plain.step(4), ahead.step(4)))
    ahead.close()


def calls_of_a_batch(prefix: Path, seq_length: int) -> int:
    """Count the function calls, in Python and in libraries, for a batch of 8 sequences."""
    loader = Loader(TokenWindows(prefix, seq_length, 0), seq_length, 8, 8)
    # The first call imports modules and opens files, so do not measure it.
    loader.step(0)
    calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        loader.step(1)
    finally:
        sys.setprofile(None)
    return calls


def test_a_batch_takes_no_more_calls_when_sequences_are_longer(tmp_path: Path) -> None:
    """Equal numbers of calls show that all loops over tokens run in NumPy. `benchmarks/loader.py` measures the time."""
    with IndexedWriter(tmp_path / "c", 50_000) as writer:
        writer.add_documents(np.arange(2_000_000) % 50_000, np.full(400, 5000))
    assert calls_of_a_batch(tmp_path / "c", 4096) == pytest.approx(calls_of_a_batch(tmp_path / "c", 64), rel=0.2)
