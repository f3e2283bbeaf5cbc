"""Tokenize the input in parallel. The input is cut into shards: a shard is a few files, or a part of a large file. Each
process turns one shard after another into small corpora, and then the small corpora are merged."""

import hashlib
import json
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import lru_cache
from io import BytesIO
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fourfold.data.atomic_files import write_whole
from fourfold.data.indexed import IndexedDataset, IndexedWriter
from fourfold.data.manifest import CorpusSplit
from fourfold.data.order import falls_within
from fourfold.data.progress import show_progress
from fourfold.data.sources import InputFile, read_documents
from fourfold.data.tokenizer import Tokenizer, as_document, load_tokenizer
from fourfold.errors import UserError
from fourfold.processes import end_with_parent

SMALLEST_SHARD = 1 << 20  # In bytes.
_MOST_SHARDS = 8192
_CHARACTERS_AT_ONCE = 1 << 20  # Number of characters per call of the tokenizer.


@dataclass(frozen=True)
class FileRange:
    """Bytes [start, stop) of a file. Only .jsonl files are split. Any other file is one range."""

    file: InputFile
    start: int
    stop: int


@dataclass(frozen=True)
class Shard:
    """A part of the input that one process tokenizes: file ranges in input order, and the settings that determine how
    the text becomes tokens."""

    pieces: tuple[FileRange, ...]
    text_key: str
    tokenizer: str
    fingerprint: str
    eod: int | None
    bos: int | None

    @property
    def bytes(self) -> int:
        """Return the number of input bytes of the shard."""
        return sum(piece.stop - piece.start for piece in self.pieces)

    @property
    def key(self) -> str:
        """Return the file name, without suffix, of the shard's tokenized corpus.

        Two shards have the same name only if they have the same tokenizer, the same text key, and the same ranges of
        the same files. Files are the same if path, size, and modification time are equal.
        """
        return digest([[asdict(piece) for piece in self.pieces], self.text_key, self.fingerprint])


def digest(content: object) -> str:
    """Return a short hexadecimal digest of anything that JSON can express."""
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:24]


def cut_into_shards(files: Sequence[InputFile], text_key: str, name: str, tokenizer: Tokenizer) -> list[Shard]:
    """Cut the input into shards of similar size, in input order.

    Small files are grouped, and large .jsonl files are split. The sizes depend only on the input, not on the number of
    processes, so a restart finds the same shards.

    Args:
        files: The input files.
        text_key: Key or column of the text.
        name: "bytes" or the path of the tokenizer. The tokenizing processes open it with `load_tokenizer`.
        tokenizer: The opened tokenizer.
    """
    shard_bytes = SMALLEST_SHARD
    while shard_bytes * _MOST_SHARDS < sum(file.size for file in files):
        shard_bytes *= 2
    groups: list[list[FileRange]] = []
    room = 0
    for piece in _pieces(files, shard_bytes):
        if room <= 0:
            groups.append([])
            room = shard_bytes
        groups[-1].append(piece)
        room -= piece.stop - piece.start
    bos = tokenizer.bos_id if tokenizer.begins_documents else None
    about = (text_key, name, tokenizer.fingerprint, tokenizer.eod_id, bos)
    return [Shard(tuple(group), *about) for group in groups]


def tokenize(shard: Shard, folder: Path) -> None:
    """Write the corpus of one shard to `folder`. Then write a file with the number of text bytes of each document. This
    file marks the shard as complete.

    Raises:
        UserError: A file cannot be read, or a document is too long or does not fit in memory.
    """
    tokenizer = _load_once(shard.tokenizer, shard.fingerprint, shard.eod, shard.bos)
    text_bytes: list[int] = []
    try:
        with IndexedWriter(folder / shard.key, tokenizer.vocab_size) as writer:
            for texts in _batches(shard):
                text_bytes.extend(len(text.encode()) for text in texts)
                for ids in tokenizer.encode_batch(texts):
                    writer.add_document(as_document(ids, tokenizer))
    except MemoryError as error:
        files = ", ".join(piece.file.path for piece in shard.pieces[:3])
        raise UserError(
            f"a document of {files} does not fit in memory while it is tokenized; split it, or lower --workers"
        ) from error
    buffer = BytesIO()
    np.save(buffer, np.array(text_bytes, dtype=np.int64), allow_pickle=False)
    write_whole(_mark(shard, folder), buffer.getvalue())


def tokenize_all(shards: Sequence[Shard], folder: Path, workers: int) -> None:
    """Tokenize every shard that is not complete in `folder`.

    Shards that were completed before an error are kept.

    Args:
        shards: All shards of the input.
        folder: Folder for the tokenized corpora of the shards.
        workers: Maximum number of processes. With 1, this process does all the work.

    Raises:
        UserError: Input cannot be read, a document is too long or does not fit in memory, or a process was killed.
    """
    missing = list({shard.key: shard for shard in shards if not is_done(shard, folder)}.values())
    with show_progress("tokenize", sum(shard.bytes for shard in missing)) as advance:
        _tokenize(missing, folder, min(workers, len(missing)), advance)


def _tokenize(shards: Sequence[Shard], folder: Path, workers: int, advance: Callable[[int], None]) -> None:
    if workers <= 1:
        for shard in shards:
            tokenize(shard, folder)
            advance(shard.bytes)
        return
    # Spawn processes instead of forking, because a forked process can use neither torch's threads nor the GPU.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context, initializer=_start_worker) as pool:
        running = {pool.submit(tokenize, shard, folder): shard for shard in shards}
        try:
            for future in as_completed(running):
                future.result()
                advance(running[future].bytes)
        except BrokenProcessPool as error:
            raise UserError(
                f"a tokenizing process ended early, probably because memory ran out (finished parts stay in {folder});"
                ' try fewer workers (workers=1 if your script has no `if __name__ == "__main__":`)'
            ) from error
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _start_worker() -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # One process per core is already parallel enough.
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # With the default handler, Ctrl-C ends a worker without a traceback.
    end_with_parent()


def is_done(shard: Shard, folder: Path) -> bool:
    """Return whether `folder` has the complete result of `tokenize` for this shard."""
    return _mark(shard, folder).is_file()


def open_result(shard: Shard, folder: Path) -> tuple[IndexedDataset, NDArray[np.int64]]:
    """Return the corpus of a completed shard, and then the number of bytes of text in each document of the corpus."""
    return IndexedDataset(folder / shard.key), np.load(_mark(shard, folder), allow_pickle=False)


def merge(
    shards: Sequence[Shard], folder: Path, vocab_size: int, validation_fraction: float, seed: int
) -> dict[str, CorpusSplit]:
    """Merge the tokenized shards in `folder` into one corpus in this folder, or into two if documents are held out.

    The index of a document in the input and `seed` determine whether it is held out.

    Args:
        shards: The shards in input order.
        folder: Folder of the shards and of the result.
        vocab_size: Size of the tokenizer's vocabulary.
        validation_fraction: Approximate fraction of the documents to hold out.
        seed: Seed of the choice.

    Returns:
        The corpora "train" and, if `validation_fraction` > 0, "validation".
    """
    names = ("train", "validation") if validation_fraction > 0 else ("train",)
    splits = {name: CorpusSplit(folder / f"merged-{name}") for name in names}
    with ExitStack() as stack:
        writers = {name: stack.enter_context(IndexedWriter(split.prefix, vocab_size)) for name, split in splits.items()}
        seen = 0
        for shard in shards:
            corpus, text_bytes = open_result(shard, folder)
            offsets = corpus.document_offsets
            held_out = falls_within(np.arange(seen, seen + corpus.documents), validation_fraction, seed)
            seen += corpus.documents
            for begin, end in _runs(held_out):
                name = "validation" if held_out[begin] else "train"
                tokens = corpus.read(int(offsets[begin]), int(offsets[end] - offsets[begin]))
                writers[name].add_documents(tokens, corpus.lengths[begin:end])
                splits[name].count(end - begin, len(tokens), int(text_bytes[begin:end].sum()))
    return splits


def _runs(values: NDArray[np.bool_]) -> Iterator[tuple[int, int]]:
    """Yield the index range [begin, end) of each run of equal values."""
    borders = np.flatnonzero(np.diff(values)) + 1
    edges = [0, *borders.tolist(), len(values)] if len(values) else []
    yield from pairwise(edges)


def _mark(shard: Shard, folder: Path) -> Path:
    return folder / f"{shard.key}.npy"


def _pieces(files: Sequence[InputFile], most_bytes: int) -> Iterator[FileRange]:
    for file in files:
        step = most_bytes if file.path.endswith(".jsonl") else max(file.size, 1)
        for start in range(0, max(file.size, 1), step):
            yield FileRange(file, start, min(start + step, file.size))


def _batches(shard: Shard) -> Iterator[list[str]]:
    texts: list[str] = []
    characters = 0
    for piece in shard.pieces:
        is_part = piece.start > 0 or piece.stop < piece.file.size
        start, stop = (piece.start, piece.stop) if is_part else (0, None)
        for text in read_documents(piece.file.path, shard.text_key, start, stop):
            texts.append(text)
            characters += len(text)
            if characters >= _CHARACTERS_AT_ONCE:
                yield texts
                texts, characters = [], 0
    if texts:
        yield texts


@lru_cache(maxsize=1)
def _load_once(name: str, fingerprint: str, eod: int | None, bos: int | None) -> Tokenizer:
    """Load the tokenizer once, because a process tokenizes many shards with it."""
    tokenizer = load_tokenizer(name, eod, bos)
    assert tokenizer.fingerprint == fingerprint, f"{name} changed while it was in use"
    return tokenizer
