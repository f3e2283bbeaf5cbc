r"""Read and write tokens on disk, in Megatron-LM's indexed format.

PREFIX.bin holds the tokens. PREFIX.idx holds the length and the position of each sequence, and the document boundaries.

Layout of the .idx, little-endian throughout:

    9 bytes   b"MMIDIDX\0\0"
    uint64    version, always 1
    uint8     code of the token type, see DTYPES
    uint64    number of sequences, n
    uint64    number of document boundaries, d (one more than there are documents)
    int32[n]  tokens in each sequence
    int64[n]  first byte of each sequence in the .bin
    int64[d]  first sequence of each document, then n

fourfold writes one sequence per document. Multimodal files, which have n more bytes (the mode of each sequence), are
refused.
"""

import array
import os
import struct
from bisect import bisect_left
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import NoReturn, Self

import numpy as np
from numpy.typing import NDArray

from fourfold.data.atomic_files import temporary_name, write_whole
from fourfold.errors import UserError

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}

_HEADER = struct.Struct("<9sQBQQ")
_CODES = {np.dtype(name): code for code, name in DTYPES.items()}
_UINT16_VOCABULARY = 65_500  # Below this vocabulary size, Megatron stores tokens as uint16.
_LONGEST_SEQUENCE = 2**31 - 1
CHECKED_AT_ONCE = 1 << 20
"""Number of index entries to check at a time. Checking them all at once would need much memory for a huge index."""


def bin_path(prefix: str | Path) -> Path:
    """Return the path of a corpus's token file."""
    return Path(f"{prefix}.bin")


def idx_path(prefix: str | Path) -> Path:
    """Return the path of a corpus's index file."""
    return Path(f"{prefix}.idx")


def token_dtype(vocab_size: int) -> np.dtype:
    """Return the dtype that Megatron uses for this vocabulary size: uint16 below 65,500, and otherwise int32."""
    return np.dtype("<u2") if vocab_size < _UINT16_VOCABULARY else np.dtype("<i4")


def check_exists(prefix: str | Path) -> None:
    """Check that both files of a corpus exist.

    Raises:
        UserError: A file is missing or is not a regular file.
    """
    for path in (idx_path(prefix), bin_path(prefix)):
        if path.exists() and not path.is_file():
            raise UserError(f"{path} is not a file, but a folder, a named pipe or a device; prepare the corpus again")
        if not path.is_file():
            stem = Path(prefix).with_suffix("")
            if Path(prefix).suffix in (".bin", ".idx") and bin_path(stem).is_file():
                raise UserError(
                    f"path = '{prefix}' is one file of a corpus, but a prefix is needed; path = '{stem}' works"
                )
            where = "" if path.is_absolute() else f" in {Path.cwd()}, the current folder"
            raise UserError(f"{path} does not exist{where}; `fourfold prepare INPUTS --out {prefix}` makes it")


class IndexedDataset:
    """A corpus on disk, read as one stream of tokens with known document starts.

    Both files are memory-mapped. Opening reads the index once, in small blocks, so it needs little memory.

    Attributes:
        prefix: Path of the two files without their suffixes.
        dtype: Dtype of the stored tokens.
        lengths: Number of tokens in each sequence, int32 [sequences].
        tokens: Number of tokens in the corpus.

    Raises:
        UserError: A file is missing or damaged, or the files contradict each other. The message names the file.
    """

    def __init__(self, prefix: str | Path) -> None:
        self.prefix = str(prefix)
        self._idx = idx_path(prefix)
        self._bin = bin_path(prefix)
        check_exists(prefix)
        self._map_index()
        self._bin_bytes = self._bin.stat().st_size
        self._check_documents()
        self._check_sequences()
        self.tokens = self._bin_bytes // self.dtype.itemsize
        self._stream = np.empty(0, self.dtype)
        if self._bin_bytes:  # An empty file cannot be mapped.
            self._stream = np.memmap(self._bin, dtype=self.dtype, mode="r").view(np.ndarray)

    @property
    def documents(self) -> int:
        """Return the number of documents."""
        return len(self._boundaries) - 1

    @property
    def document_offsets(self) -> NDArray[np.int64]:
        """Return the token index at which each document starts, followed by the number of tokens [documents + 1]."""
        sequence_starts = np.append(self._starts // self.dtype.itemsize, self.tokens)
        document_starts: NDArray[np.int64] = sequence_starts[self._boundaries]
        return document_starts

    def read(self, start: int, length: int) -> NDArray[np.integer]:
        """Return tokens [start, start + length) of the stream, in the stored dtype. Do not write to the returned
        array."""
        assert 0 <= start <= start + length <= self.tokens, (start, length, self.tokens)
        return self._stream[start : start + length]

    def document_starts(self, start: int, length: int) -> NDArray[np.int64]:
        """Return where documents start within tokens [start, start + length): ascending positions, relative to `start`.

        An empty document starts at the same position as the next document, so a position can occur twice.
        """
        itemsize = self.dtype.itemsize
        first = bisect_left(self._starts, start * itemsize)
        last = bisect_left(self._starts, (start + length) * itemsize, lo=first)
        begin = bisect_left(self._boundaries, first)
        end = bisect_left(self._boundaries, last, lo=begin)
        starts: NDArray[np.int64] = self._starts[self._boundaries[begin:end]] // itemsize - start
        return starts

    def _map_index(self) -> None:
        size = self._idx.stat().st_size
        if size < _HEADER.size:
            self._refuse(f"has {size} bytes, fewer than the {_HEADER.size} of a header")
        mapped = np.memmap(self._idx, dtype=np.uint8, mode="r").view(np.ndarray)
        magic, version, code, sequences, boundaries = _HEADER.unpack(mapped[: _HEADER.size].tobytes())
        if magic != MAGIC:
            self._refuse(f"starts with {magic!r} instead of {MAGIC!r}")
        if version != VERSION:
            self._refuse(f"has version {version}, but only version {VERSION} is supported")
        if code not in DTYPES:
            self._refuse(f"has the unknown token type {code}, not one of 1 to 8")
        self.dtype = np.dtype(DTYPES[code])
        if self.dtype.kind == "f":
            self._refuse(f"stores {self.dtype.name}, which cannot be tokens")
        expected = _HEADER.size + 12 * sequences + 8 * boundaries
        if size == expected + sequences and sequences > 0:
            self._refuse("is a multimodal index, but only text is supported")
        if size != expected:
            self._refuse(f"has {size} bytes, but its header announces {expected}: it is truncated or damaged")
        lengths_end = _HEADER.size + 4 * sequences
        pointers_end = lengths_end + 8 * sequences
        self.lengths = mapped[_HEADER.size : lengths_end].view("<i4")
        self._starts = mapped[lengths_end:pointers_end].view("<i8")
        self._boundaries = mapped[pointers_end:].view("<i8")

    def _check_documents(self) -> None:
        boundaries = self._boundaries
        if len(boundaries) == 0 or boundaries[0] != 0 or boundaries[-1] != len(self.lengths):
            self._refuse(f"has document boundaries that do not run from 0 to its {len(self.lengths)} sequences")
        for begin in range(0, len(boundaries), CHECKED_AT_ONCE):
            if (np.diff(boundaries[begin : begin + CHECKED_AT_ONCE + 1]) < 0).any():
                self._refuse("has document boundaries that do not ascend")

    def _check_sequences(self) -> None:
        """Check that the sequences follow each other in the .bin without gaps, as Megatron's own tools write them."""
        total = 0
        for begin in range(0, len(self.lengths), CHECKED_AT_ONCE):
            sizes = self.lengths[begin : begin + CHECKED_AT_ONCE].astype(np.int64) * self.dtype.itemsize
            if (sizes < 0).any():
                self._refuse("has a sequence of negative length")
            astray = self._starts[begin : begin + CHECKED_AT_ONCE] != total + sizes.cumsum() - sizes
            if astray.any():
                self._refuse(f"does not place sequence {begin + int(astray.argmax())} right after the previous one")
            total += int(sizes.sum())
        if total != self._bin_bytes:
            self._refuse(f"expects {total} bytes of tokens, but {self._bin} has {self._bin_bytes}")

    def _refuse(self, what: str) -> NoReturn:
        raise UserError(f"{self._idx} {what}; prepare the corpus again")


class IndexedWriter:
    """Writes a corpus. Its .bin and .idx appear when the `with` block ends without an exception.

    Every document becomes one sequence.

    Args:
        prefix: Path of the two files without their suffixes.
        vocab_size: Size of the vocabulary. It determines the stored dtype, as in Megatron.
    """

    def __init__(self, prefix: str | Path, vocab_size: int) -> None:
        self.dtype = token_dtype(vocab_size)
        self._idx = idx_path(prefix)
        self._bin = bin_path(prefix)
        self._temporary = temporary_name(self._bin)
        self._lengths = array.array("i")  # Use compact arrays, because a corpus can have a hundred million documents.

    def __enter__(self) -> Self:
        self._file = self._temporary.open("wb")
        return self

    def add_document(self, tokens: Sequence[int] | NDArray[np.integer]) -> None:
        """Append one document.

        Raises:
            UserError: The document has more than 2,147,483,647 tokens, the format's limit.
        """
        tokens = np.asarray(tokens, dtype=np.int64)
        if len(tokens) > _LONGEST_SEQUENCE:
            raise UserError(
                f"{self._bin}: one document has {len(tokens)} tokens, more than {_LONGEST_SEQUENCE}; split the document"
            )
        self.add_documents(tokens, np.array([len(tokens)]))

    def add_documents(self, tokens: NDArray[np.integer], lengths: NDArray[np.integer]) -> None:
        """Append many documents.

        Args:
            tokens: Tokens of all documents, concatenated.
            lengths: Number of tokens of each document.
        """
        assert int(lengths.sum()) == len(tokens), (int(lengths.sum()), len(tokens))
        if tokens.dtype != self.dtype:
            limits = np.iinfo(self.dtype)
            assert len(tokens) == 0 or (limits.min <= tokens.min() and tokens.max() <= limits.max), self.dtype
            tokens = tokens.astype(self.dtype)
        self._file.write(np.ascontiguousarray(tokens).data)
        self._lengths.frombytes(lengths.astype(np.intc).tobytes())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            # If the block has raised an error, an error of `close` must not replace it.
            with suppress(*[] if kind is None else [OSError]):
                self._file.close()
            if kind is None:
                # Write the index last. If the index exists, the tokens exist too.
                os.replace(self._temporary, self._bin)
                write_whole(self._idx, self._index())
        finally:
            self._temporary.unlink(missing_ok=True)

    def _index(self) -> bytes:
        lengths = np.array(self._lengths, dtype="<i4")
        sizes = lengths.astype("<i8") * self.dtype.itemsize
        boundaries = np.arange(len(lengths) + 1, dtype="<i8")
        header = _HEADER.pack(MAGIC, VERSION, _CODES[self.dtype], len(lengths), len(boundaries))
        pointers = (sizes.cumsum() - sizes).astype("<i8")
        return b"".join([header, lengths.tobytes(), pointers.tobytes(), boundaries.tobytes()])
