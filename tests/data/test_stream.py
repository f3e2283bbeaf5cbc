"""Streamed samples equal the samples of the same text on disk, on any grid and after any stop."""

from __future__ import annotations

import json
import threading
import time
import weakref
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from patience import PATIENCE, wait_until
from tiny_hub import make_dataset, texts_of

from fourfold.config.loss_masks import GoldfishConfig
from fourfold.data.dataset import TokenWindows
from fourfold.data.goldfish import Goldfish
from fourfold.data.hub import HubDataset
from fourfold.data.indexed import IndexedWriter
from fourfold.data.loader import Loader
from fourfold.data.order import sample_permutation
from fourfold.data.shuffled_documents import ShuffledDocuments
from fourfold.data.stream import StreamedWindows
from fourfold.data.tokenizer import ByteTokenizer
from fourfold.errors import UserError

S = 32
LOOK_BACK = 5


class Listed:
    """Documents from a list, repeated endlessly. Reading can wait before each document."""

    def __init__(self, texts: list[str], wait: Any = lambda number: None) -> None:
        self.texts, self.wait, self.given = texts, wait, 0

    def read(self, place: Any) -> Iterator[tuple[Any, str]]:
        number = 0 if place is None else place["number"]
        while True:
            self.wait(number)
            self.given += 1
            yield {"epoch": number // len(self.texts), "number": number}, self.texts[number % len(self.texts)]
            number += 1


def streamed(*streams: Any, batch: int = 4, **options: Any) -> StreamedWindows:
    options = {"look_back": LOOK_BACK, "ahead": 8, "timeout": PATIENCE, **options}
    return StreamedWindows("hf:tales", streams, ByteTokenizer(), S, batch, **options)


TEXTS = [chr(ord("a") + number % 26) * (1 + 7 * number % 90) for number in range(300)]


@pytest.fixture(scope="module")
def in_order(tmp_path_factory: pytest.TempPathFactory) -> TokenWindows:
    """Read the same texts as a corpus on disk, in the corpus's own order."""
    prefix = tmp_path_factory.mktemp("corpus") / "c"
    with IndexedWriter(prefix, 257) as writer:
        for ids in ByteTokenizer().encode_batch(TEXTS):
            writer.add_document([*ids, 256])
    return TokenWindows(prefix, S, 0, LOOK_BACK)


def window_of(corpus: TokenWindows, window: int) -> tuple[list[int], list[int]]:
    """Return tokens and document starts, straight from the file."""
    start = window * S - LOOK_BACK
    absent = max(0, -start)
    tokens = corpus.corpus.read(start + absent, LOOK_BACK + S + 1 - absent)
    return [0] * absent + tokens.tolist(), (corpus.corpus.document_starts(start + LOOK_BACK + 1, S) + 1).tolist()


def test_streamed_windows_equal_the_corpus_on_disk(in_order: TokenWindows) -> None:
    count = len(in_order)
    samples = streamed(Listed(TEXTS))
    windows = samples.read(np.arange(count))
    samples.close()
    for window in range(count):
        tokens, starts = window_of(in_order, window)
        assert windows.stream[window].tolist() == tokens
        changes = np.flatnonzero(np.diff(windows.documents[window])) + 1
        assert changes.tolist() == starts
    assert (windows.documents[:, 0] == 0).all()
    assert (windows.stream_documents[0, :LOOK_BACK] < -1000).all()  # no document comes before the first token


def test_a_stream_resumes_exactly_from_every_position() -> None:
    """Continue in a new reader after each of 30 steps, even if the look-back of a window begins inside a document."""
    whole, straight = (streamed(Listed(TEXTS), Listed(TEXTS[::-1])) for _ in range(2))
    for steps in range(30):
        batch = whole.read(np.arange(4 * steps, 4 * steps + 4))
        saved = json.loads(json.dumps(whole.positions(steps + 1, range(4 * steps, 4 * steps + 4))))
        again = streamed(Listed(TEXTS), Listed(TEXTS[::-1]))
        again.go_to(steps + 1, [saved["0"], saved["1"]])
        numbers = np.arange(4 * steps + 4, 4 * steps + 8)
        found, expected = again.read(numbers), straight.read(numbers)
        assert (found.stream == expected.stream).all()
        assert (found.stream_documents == expected.stream_documents).all()
        assert sum(stream.given for stream in again.streams) < 80
        again.close()
    assert batch.numbers.tolist() == [116, 117, 118, 119]
    whole.close()
    straight.close()


def test_a_run_with_less_look_back_resumes_with_the_same_samples() -> None:
    whole, shorter = streamed(Listed(TEXTS)), streamed(Listed(TEXTS), look_back=2)
    for steps in range(1, 9):
        numbers = np.arange(4 * steps, 4 * steps + 4)
        whole.read(numbers - 4)
        shorter.go_to(steps, [whole.positions(steps, (numbers - 4).tolist())[0]])
        expected, found = whole.read(numbers), shorter.read(numbers)
        assert (found.stream == expected.stream[:, LOOK_BACK - 2 :]).all()
        assert (found.stream_documents == expected.stream_documents[:, LOOK_BACK - 2 :]).all()
    whole.close()
    shorter.close()


def test_any_order_gives_the_same_samples() -> None:
    """The steps of this test go back to an earlier checkpoint, skip a step, and read the beginning twice."""
    samples, expected = streamed(Listed(TEXTS)), streamed(Listed(TEXTS)).read(np.arange(80))
    for first in (0, 8, 4, 76, 0, 40, 20):
        numbers = np.arange(first, first + 4)[::-1]
        assert (samples.read(numbers).stream == expected.stream[numbers]).all()
    samples.close()


def test_reading_the_beginning_again_keeps_all_positions() -> None:
    """A resumed run reads the beginning of the stream again, because it measures its masks there."""
    whole, again = streamed(Listed(TEXTS)), streamed(Listed(TEXTS))
    expected = whole.read(np.arange(40, 48))
    again.go_to(10, [whole.positions(10, range(36, 40))[0]])
    again.read(np.arange(100))
    given = again.streams[0].given
    assert (again.read(np.arange(40, 48)).stream == expected.stream).all()
    assert again.positions(12, range(44, 48)) == whole.positions(12, range(44, 48))
    # The stream continued near its old position and did not start over.
    assert again.streams[0].given - given < 60
    whole.close()
    again.close()


def test_a_skipped_step_has_a_position() -> None:
    samples, other = streamed(Listed(TEXTS)), streamed(Listed(TEXTS))
    samples.read(np.arange(4))
    other.read(np.arange(8))
    assert samples.positions(2, range(4, 8)) == other.positions(2, range(4, 8))


GRIDS = (1, 2, 4)


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(("streams", "shuffled"), [(1, 0), (4, 0), (2, 40), (2, 0)])
def test_the_ledger_has_each_sample_once_over_200_steps_10_stops_and_3_grids(
    streams: int, shuffled: int, tmp_path: Path
) -> None:
    """Each document has its own word. In every step, the tokens of all ranks together equal the tokens of one
    process."""
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    dataset = HubDataset.parse(make_dataset(tmp_path / "tales", documents=1200))
    batch, ledger, saved = 4, [], None

    def opened() -> StreamedWindows:
        found = dataset.streams(streams, "text")
        return streamed(*(ShuffledDocuments(s, shuffled, 3) if shuffled else s for s in found), batch=batch)

    stops = [13, 40, 41, 77, 90, 104, 130, 151, 170, 188, 200]
    for attempt, (first, last) in enumerate(zip([0, *stops], stops, strict=False)):
        size = GRIDS[attempt % 3]
        loaders = [Loader(opened(), S, batch, 1, rank, size, masks=(), prefetch=True) for rank in range(size)]
        for loader in loaders:
            if saved is not None:
                loader.dataset.go_to(first, saved)
        for step in range(first, last):
            batches = [loader.step(step) for loader in loaders]
            ledger += [
                [*batches[rank][micro].tokens[0].tolist(), int(batches[rank][micro].labels[0, -1])]
                for micro in range(loaders[0].micro_batches)
                for rank in range(size)
            ]
        merged: dict[int, Any] = {}
        for loader in loaders:
            merged |= loader.dataset.positions(last, loader.sample_numbers(last - 1).reshape(-1).tolist())
            loader.dataset.close()
            loader.close()
        saved = json.loads(json.dumps([merged[stream] for stream in range(streams)]))

    texts = [ByteTokenizer().encode_batch([text])[0] + [256] for text in texts_of(f"hf:{tmp_path}/tales")]
    parts = np.array_split(np.arange(4), streams)  # the files of each stream
    of_file = [texts[file * 299 : (file + 1) * 299] for file in range(4)]
    for stream, files in enumerate(parts):
        documents = [document for file in files for document in of_file[file]]
        tokens = np.concatenate(in_blocks(documents, shuffled) if shuffled else documents)
        own = ledger[stream::streams]
        assert len(own) * S < len(tokens)  # no document is read twice
        for window, row in enumerate(own):
            assert row == tokens[window * S : window * S + S + 1].tolist()
    assert len(ledger) == 200 * batch


def in_blocks(documents: list[Any], size: int) -> list[Any]:
    """Return all full blocks of documents, each in the order of its own permutation."""
    found = []
    for number in range(len(documents) // size):
        order = sample_permutation(np.arange(size), size, 3, number)
        assert sorted(order.tolist()) == list(range(size)) != order.tolist()
        found += [documents[number * size + place] for place in order.tolist()]
    return found


def test_a_shuffled_stream_resumes_from_every_document_and_holds_one_block() -> None:
    source = Listed([str(number) for number in range(25)])
    whole = list(islice(ShuffledDocuments(source, 10, 7).read(None), 60))
    assert source.given <= 65
    texts = [text for _, text in whole]
    assert sorted(texts[:10], key=int) == [str(number) for number in range(10)] != texts[:10]
    assert texts != [text for _, text in islice(ShuffledDocuments(source, 10, 8).read(None), 60)]
    for number, (place, _) in enumerate(whole[:40]):
        source.given = 0
        again = list(islice(ShuffledDocuments(source, 10, 7).read(json.loads(json.dumps(place))), 12))
        assert again == whole[number : number + 12] and source.given <= 30


class Text(str):
    """A string that supports weak references."""


@pytest.mark.parametrize("size", [1, 10, 24, 25, 26, 1000])
def test_each_epoch_has_every_document_once_and_is_held_once(size: int) -> None:
    count = 25
    living: list[weakref.ref[Text]] = []

    class Fresh:
        def read(self, place: Any) -> Iterator[tuple[Any, str]]:
            for number in range(4 * count):
                living.append(weakref.ref(text := Text(number % count)))
                yield {"epoch": number // count, "number": number}, text

    texts = []
    for place, text in islice(ShuffledDocuments(Fresh(), size, 7).read(None), 3 * count):
        texts.append(int(text))
        assert place["block"]["epoch"] == (len(texts) - 1) // count
        assert sum(each() is not None for each in living) <= min(size, count) + 2
    epochs = [texts[:count], texts[count : 2 * count], texts[2 * count :]]
    assert [sorted(epoch) for epoch in epochs] == [list(range(count))] * 3
    assert size == 1 or epochs[0] != epochs[1] != epochs[2]


def test_goldfish_drops_the_same_tokens_of_a_stream_wherever_it_is_cut() -> None:
    mask = Goldfish(GoldfishConfig(strategy="hash", k=3, h=LOOK_BACK))
    words = [f"{number} " + "the same tale of a grid " * 4 for number in range(200)]
    samples = streamed(Listed(words))
    windows = samples.read(np.arange(100))
    kept, decided = mask(windows), {}
    for row in range(100):
        stream = windows.stream[row].tolist()
        for place in range(S):
            history = windows.stream_documents[row, place + 1 : place + LOOK_BACK + 2]
            if (history == history[0]).all() and history[0] > -1000:
                key = tuple(stream[place + 1 : place + LOOK_BACK + 1])
                assert decided.setdefault(key, kept[row, place]) == kept[row, place]
    assert 0.1 < 1 - kept.mean() < 0.6
    samples.close()


def test_a_slow_source_does_not_stall_buffered_steps() -> None:
    released = threading.Event()
    source = Listed(["x" * 4 * S] * 50, wait=lambda number: number < 6 or released.wait(PATIENCE))
    loader = Loader(streamed(source, look_back=0, ahead=24), S, 4, 4, masks=(), prefetch=True)
    for step in range(5):
        loader.step(step)
    assert source.given == 6, "the source stands still all the while"
    released.set()
    assert loader.step(5)[0].tokens.shape == (4, S)
    loader.dataset.close()
    loader.close()


def test_the_buffer_is_bounded() -> None:
    source = Listed(["x" * S] * 50)
    samples = streamed(source, ahead=8)
    samples.read([0])
    time.sleep(0.5)
    assert source.given < 20
    samples.close()


def test_a_dead_source_is_reported_after_its_timeout() -> None:
    released = threading.Event()
    samples = streamed(Listed(TEXTS, wait=lambda number: number != 5 or released.wait(PATIENCE)), timeout=0.5)
    with pytest.raises(UserError, match=r"hf:tales has sent no text for 0.5 s; check the network"):
        samples.read(np.arange(40))
    released.set()
    samples.close()


def test_a_slow_source_is_not_dead_while_a_block_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading 16 documents at 0.4 s each takes much longer than the timeout, but this is not an error. Only when no
    document arrives anymore does the reader give up. The test controls the clock."""
    released, now, looks, is_dead = threading.Event(), 0.0, 0, False

    def monotonic() -> float:
        nonlocal looks, now
        looks += 1
        now += 0.1 * is_dead
        return now

    def wait(number: int) -> None:
        nonlocal now, is_dead
        # Wait until the reader has asked whether the source is dead.
        if number in (0, 8):
            before = looks
            wait_until(lambda: looks > before)
        now += 0.4
        if number == 16:
            is_dead = True
            released.wait(PATIENCE)

    monkeypatch.setattr("fourfold.data.stream.time", SimpleNamespace(monotonic=monotonic))
    samples = streamed(
        Listed(TEXTS, wait=wait), timeout=0.5, order=lambda documents: ShuffledDocuments(documents, 16, 3)
    )
    assert samples.read([0]).numbers.tolist() == [0]
    with pytest.raises(UserError, match=r"hf:tales has sent no text for 0.5 s"):
        samples.read(np.arange(1, 200))
    released.set()
    samples.close()


def test_a_failing_source_is_reported() -> None:
    def fail(number: int) -> None:
        if number == 5:
            raise ConnectionError("the line\nis cut")

    samples = streamed(Listed(TEXTS, wait=fail))
    with pytest.raises(UserError, match="hf:tales can no longer be read: ConnectionError: the line is cut"):
        samples.read(np.arange(40))


def test_closing_ends_a_read_that_waits() -> None:
    released = threading.Event()
    loader = Loader(streamed(Listed(TEXTS, wait=lambda number: released.wait(PATIENCE))), S, 4, 4, prefetch=True)
    closing = threading.Timer(0.3, loader.dataset.close)
    closing.start()
    with pytest.raises(UserError, match="is closed"):
        loader.step(0)
    released.set()
    closing.join()
    loader.close()


def test_missing_files_and_columns_of_a_dataset_are_reported(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    dataset = HubDataset.parse(make_dataset(tmp_path / "tales"))
    with pytest.raises(UserError, match=r"has only 4 files, so data.streams = 5 is too many"):
        dataset.streams(5, "text")
    for key, said in {"story": "has no 'story' among number, text", "number": "'number' is int, not text"}.items():
        with pytest.raises(UserError, match=said):
            next(dataset.streams(1, key)[0].read(None))
