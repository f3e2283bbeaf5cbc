"""Turn a stream of documents into samples. Documents are tokenized in the background. A run can resume at the exact
position where it stopped.

The dataset is divided into V streams. Sample n is window n // V of stream n mod V, so it depends only on n and not on
the number of processes. A process opens only the streams of its own samples.
"""

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from queue import Empty, Full, Queue
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fourfold.data.dataset import Windows, windows_of
from fourfold.data.tokenizer import Tokenizer, as_document
from fourfold.errors import UserError

_GLANCE = 0.1  # Seconds after which a waiting thread checks again whether it must stop.
_PATIENCE = 2.0  # Seconds to wait for threads to end. Threads may never end if the network is down.
# Number of steps whose end positions are kept. The loader is at most one step ahead, so this is more than enough.
_KEPT = 8


class DocumentStream(Protocol):
    """An endless sequence of documents. Reading can begin at any document."""

    def read(self, place: Any) -> Iterator[tuple[Any, str]]:
        """Yield each document's place and text. The place says where the document is in the stream, as a JSON value.

        Args:
            place: Place that an earlier call yielded. Reading begins with the document at this place. None begins with
                the first document.
        """
        ...


@dataclass(frozen=True)
class Position:
    """The start of a window. A run can resume here without reading any earlier document."""

    place: Any = None
    """Place of the document with the first token to read: the first token of the window's look-back, or of the window
    itself if there is no look-back. See `DocumentStream.read`."""
    skip: int = 0
    """Number of tokens in that document before the first token to read."""
    before: int = 0
    """Number of tokens in the window's look-back (tokens before the window, which only masks read). The look-back is
    shorter at the start of a stream."""


class StreamWindow(NamedTuple):
    """A window of a stream. It becomes one row of `Windows`."""

    tokens: NDArray[np.int64]
    """Tokens of the look-back and the window [`Position.before` of this window + seq_length + 1]."""
    document_starts: NDArray[np.int64]
    """Document starts, as indices into `tokens`."""
    next: Position
    """Position of the next window."""


def cut_into_windows(
    documents: DocumentStream, tokenizer: Tokenizer, position: Position, seq_length: int, look_back: int
) -> Iterator[StreamWindow]:
    """Cut a stream of documents into windows of `seq_length` + 1 tokens, starting at a position. Neighboring windows
    share one token.

    The windows equal the windows of the corpus that `fourfold prepare` would make from the same documents.

    Args:
        documents: The stream of documents to cut.
        tokenizer: Tokenizer that turns each document into tokens.
        position: Start of the first window.
        seq_length: Number of tokens of a window without its last token, which is only a target.
        look_back: Number of extra tokens before each window. Only masks read these tokens.
    """
    tokens = np.empty(0, dtype=np.int64)
    starts: list[tuple[int, Any]] = []  # Starts of documents in `tokens`, and their places in the stream.
    before, skip = position.before, position.skip
    for place, text in documents.read(position.place):
        [ids] = tokenizer.encode_batch([text])
        starts.append((len(tokens) - skip, place))
        tokens = np.concatenate([tokens, np.array(as_document(ids, tokenizer), dtype=np.int64)[skip:]])
        skip = 0
        while len(tokens) > before + seq_length:
            length = before + seq_length + 1
            inside = np.array([start for start, _ in starts if 0 <= start < length], dtype=np.int64)
            window = tokens[:length]
            begin = max(0, length - 1 - look_back)  # Start of the next window's look-back.
            current = max(index for index, (start, _) in enumerate(starts) if start <= begin)
            starts = [(start - begin, place) for start, place in starts[current:]]
            tokens, before = tokens[begin:], length - 1 - begin
            yield StreamWindow(window, inside, Position(starts[0][1], -starts[0][0], before))


class _Heard:
    """A stream that records in `last` when its latest document arrived (`time.monotonic()`, in seconds). Before the
    first document, `last` is the time of creation."""

    def __init__(self, documents: DocumentStream) -> None:
        self._documents, self.last = documents, time.monotonic()

    def read(self, place: Any) -> Iterator[tuple[Any, str]]:
        for found in self._documents.read(place):
            self.last = time.monotonic()
            yield found


@dataclass(eq=False)
class StreamedWindows:
    """Samples from streams of documents.

    Reading samples in ascending order is fast. Reading an earlier sample again is slow, because the stream is read
    again from the nearest known position before the sample.

    Args:
        name: Name of the dataset, for messages.
        streams: The document streams that the dataset is divided into.
        tokenizer: Tokenizer that turns each document into tokens.
        seq_length: Number of tokens per sample.
        global_batch_size: Number of samples per step, a multiple of the number of streams.
        look_back: Number of extra tokens before each window. Only masks read these tokens.
        ahead: Maximum number of windows of one stream to hold in memory.
        timeout: If a stream yields no document for this many seconds, `read` raises UserError.
        order: Function that reorders the documents of a stream. It may read many documents before it yields one.
    """

    name: str
    streams: Sequence[DocumentStream]
    tokenizer: Tokenizer
    seq_length: int
    global_batch_size: int
    look_back: int = 0
    ahead: int = 64
    timeout: float = 300.0
    order: Callable[[DocumentStream], DocumentStream] = lambda documents: documents

    def __post_init__(self) -> None:
        assert self.global_batch_size % len(self.streams) == 0, (self.global_batch_size, len(self.streams))
        self._of_a_step = self.global_batch_size // len(self.streams)  # Number of windows per stream and step.
        self._begin: list[dict[int, Position]] = [{0: Position()} for _ in self.streams]
        self._marks: list[dict[int, Position]] = [{} for _ in self.streams]
        self._open: dict[int, _Ahead] = {}
        self._lock = threading.Lock()

    def read(self, numbers: ArrayLike) -> Windows:
        """Read the samples with these indices (int [B], from 0), in this order.

        Raises:
            UserError: A stream sends no document within `timeout`, cannot be read, or is closed.
        """
        numbers = np.asarray(numbers, dtype=np.int64)
        with self._lock:
            found = {number: self._window(number) for number in sorted(numbers.tolist())}
        length = self.look_back + self.seq_length + 1
        tokens = np.zeros((len(numbers), length), dtype=np.int64)
        starts, missing = [], []
        for row, number in enumerate(numbers.tolist()):
            window = found[number]
            absent = length - len(window.tokens)
            # If the position comes from a run with a longer look-back, the window has more tokens than this run needs.
            # Drop the additional tokens.
            unseen = max(0, -absent)
            tokens[row, max(absent, 0) :] = window.tokens[unseen:]
            begins = absent + window.document_starts
            starts.append(begins[begins >= 0])
            missing.append(max(absent, 0))
        return windows_of(tokens, starts, missing, numbers, self.look_back)

    def positions(self, steps: int, mine: Iterable[int]) -> dict[int, dict[str, Any]]:
        """Return the positions of this process's streams after `steps` steps.

        Args:
            steps: Number of finished steps.
            mine: Indices of this process's samples in the last of these steps.

        Returns:
            The fields of `Position`, by index of the stream, for each stream whose last finished sample is in `mine`.
            With 0 steps, all streams are included.
        """
        count, places = len(self.streams), steps * self._of_a_step
        own = {number % count for number in mine if number // count == places - 1} if steps else set(range(count))
        return {stream: asdict(self._mark(stream, places)) for stream in own}

    def go_to(self, steps: int, positions: Sequence[dict[str, Any]]) -> None:
        """Prepare to continue a run after `steps` steps. `positions` has the fields of `Position` for every stream."""
        with self._lock:
            places = steps * self._of_a_step
            self._begin = [{0: Position(), places: Position(**position)} for position in positions]

    def close(self) -> None:
        """End the threads that read the streams. If a `read` is waiting for a stream, it raises UserError."""
        for ahead in list(self._open.values()):
            ahead.stop()
        latest = time.monotonic() + _PATIENCE
        for ahead in list(self._open.values()):
            ahead.wait(latest - time.monotonic())

    def _mark(self, stream: int, place: int) -> Position:
        def known() -> Position | None:
            return self._marks[stream].get(place) or self._begin[stream].get(place)

        # The position is unknown if this run skipped the step without reading its samples. So read them now.
        if (position := known()) is None:
            with self._lock:
                self._window((place - 1) * len(self.streams) + stream)
            position = known()
        assert position is not None, (stream, place)
        return position

    def _window(self, number: int) -> StreamWindow:
        place, stream = divmod(number, len(self.streams))
        ahead = self._open.get(stream)
        nearest = max(mark for mark in (*self._begin[stream], *self._marks[stream]) if mark <= place)
        if ahead is None or not nearest <= ahead.next <= place:
            if ahead is not None:
                ahead.stop()
            ahead = self._open[stream] = self._start(stream, nearest)
        while True:
            window = ahead.take()
            if ahead.next % self._of_a_step == 0:
                self._set_mark(stream, ahead.next, window.next)
            if ahead.next > place:
                return window

    def _start(self, stream: int, place: int) -> "_Ahead":
        source, position = _Heard(self.streams[stream]), {**self._begin[stream], **self._marks[stream]}[place]

        def windows() -> Iterator[StreamWindow]:
            return cut_into_windows(self.order(source), self.tokenizer, position, self.seq_length, self.look_back)

        return _Ahead(self.name, source, windows, place, self.ahead, self.timeout)

    def _set_mark(self, stream: int, place: int, position: Position) -> None:
        marks = {mark: known for mark, known in self._marks[stream].items() if mark != place}
        self._marks[stream] = dict([*marks.items(), (place, position)][-_KEPT:])


@dataclass(eq=False)
class _Ahead:
    """Windows of one stream, read ahead in a thread. `next` is the index of the window that `take` will return."""

    name: str
    source: _Heard
    windows: Callable[[], Iterator[StreamWindow]]
    next: int
    most: int
    timeout: float

    def __post_init__(self) -> None:
        self._ready: Queue[StreamWindow | UserError] = Queue(self.most)
        self._closed = threading.Event()
        # A read from a dead network may never return, and a daemon thread does not keep the process alive.
        self._thread = threading.Thread(target=self._work, name="stream", daemon=True)
        self._thread.start()

    def take(self) -> StreamWindow:
        """Return the next window.

        Raises:
            UserError: No document arrives in time, or the stream cannot be read or is closed.
        """
        began = time.monotonic()
        while not self._closed.is_set():
            try:
                found = self._ready.get(timeout=_GLANCE)
            except Empty:
                if time.monotonic() < max(began, self.source.last) + self.timeout:
                    continue
                raise UserError(
                    f"{self.name} has sent no text for {self.timeout:g} s; check the network, or raise "
                    "data.read_timeout, then start the run again"
                ) from None
            if isinstance(found, UserError):
                self.stop()
                raise found
            self.next += 1
            return found
        raise UserError(f"{self.name} is closed")

    def stop(self) -> None:
        """Ask the thread to end. After this, `take` raises UserError."""
        self._closed.set()

    def wait(self, seconds: float) -> None:
        """Wait for the thread to end, for at most `seconds`."""
        self._thread.join(max(seconds, 0))

    def _work(self) -> None:
        try:
            for window in self.windows():
                if not self._put(window):
                    return
        except UserError as error:
            self._put(error)
        except Exception as error:  # The network or the file system may raise any exception.
            text = " ".join(str(error).split())
            self._put(UserError(f"{self.name} can no longer be read: {type(error).__name__}: {text}"))

    def _put(self, item: StreamWindow | UserError) -> bool:
        while not self._closed.is_set():
            try:
                self._ready.put(item, timeout=_GLANCE)
            except Full:
                continue
            return True
        return False
