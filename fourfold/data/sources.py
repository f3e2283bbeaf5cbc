"""Read documents from text, JSON lines, Parquet, and Arrow files, from folders, from the Hub, and from Python's
standard library."""

import glob
import gzip
import json
import re
import sysconfig
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, TypeVar, cast

from fourfold.data import hub
from fourfold.errors import UserError
from fourfold.extras import import_extra
from fourfold.parsing import parse_json
from fourfold.untrusted_files import check_regular

PYTHON_STDLIB = "python-stdlib"
SUFFIXES = (".txt", ".txt.gz", ".jsonl", ".jsonl.gz", ".parquet")
ARROW = ".arrow"
"""Suffix of the files that `datasets` keeps in its cache. Only inputs named hf:… read such files."""
TABLES = (".parquet", ARROW)
LONGEST_TEXT = 2**31 - 1
"""Maximum size in bytes of a decompressed text file or of a line. A corpus stores the length of a document as an int32,
so a document can have at most this many tokens."""

_KNOWN = ", ".join(SUFFIXES)
BLOCK = 1 << 24
_SPLIT = "a text file is one document, so split it, or write its documents as lines of a .jsonl file"
_OTHER_KEY = "choose one with --text-key, or several as in --text-key text,content"
_NOT_THE_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test"}

T = TypeVar("T")


@dataclass(frozen=True)
class InputFile:
    """An input file: its absolute path, size in bytes, and modification time. The size and the time show later whether
    the file has changed."""

    path: str
    size: int
    mtime_ns: int


def list_left_out(inputs: Iterable[str | Path]) -> dict[str, list[Path]]:
    """Return the files in `inputs` that `list_inputs` does not read, grouped by reason. Hidden files are not
    included."""
    found: dict[str, list[Path]] = {}
    for path in (path for item in inputs for path in _list_matching(str(item))):
        if not _is_input(path) and (path.is_symlink() or not path.is_dir()):
            why = "unsupported kind" if path.is_file() else "not a file (a pipe, a device, or a link to no file)"
            found.setdefault(why, []).append(path)
    return found


def list_inputs(inputs: Iterable[str | Path]) -> list[InputFile]:
    """List the files of `inputs` in the given order. Files of a folder or glob are sorted.

    Args:
        inputs: Each is a file, a folder (searched recursively, without hidden names), a glob, "python-stdlib", or
            "hf:NAME[:CONFIG][:SPLIT]". For hf:…, `datasets` downloads the dataset, and the list has the Arrow files in
            the cache of `datasets`.

    Raises:
        UserError: No input is given, or an input does not exist, is not a regular file, has an unknown suffix, holds no
            file of a known kind, or cannot be loaded from the Hub.
    """
    found = [path for item in inputs for path in _expand(str(item))]
    if not found:
        raise UserError(f'no input is given; name files ({_KNOWN}), folders, globs, "{PYTHON_STDLIB}", or hf:NAME')
    files = []
    for path in found:
        status = path.stat()
        files.append(InputFile(str(path.resolve()), status.st_size, status.st_mtime_ns))
    return files


def read_documents(path: str | Path, text_key: str = "text", start: int = 0, stop: int | None = None) -> Iterator[str]:
    """Yield the documents of one file, except empty documents.

    A .txt or .txt.gz file is one document in UTF-8. A .py file is also one document, and is skipped if it is not UTF-8.
    In all other types of files, every row is a document.

    Args:
        path: The file to read.
        text_key: Key or column of the text. You can give several keys, separated by commas. Each row uses the first of
            these keys that it has.
        start: First byte of the part of a .jsonl file to read. Only lines that begin at bytes [start, stop) are read,
            so several processes can share a large file.
        stop: First byte after this part. None reads to the end of the file.

    Raises:
        UserError: The file cannot be read, is too large, or has no text under `text_key`. The message names the line if
            there is one.
    """
    path = Path(path)
    with _name_file_in_errors(path):
        for text in _open_reader(path, text_key, start, stop):
            if text:
                yield text


def read_rows(path: str | Path) -> Iterator[tuple[object, dict[str, Any]]]:
    """Yield the location and the content of every row in a file. A location prints as "FILE, line 3" or "FILE, row 3".

    Raises:
        UserError: The file has no rows or cannot be read. The message names the file, and the line if there is one.
    """
    path = Path(path)
    if path.name.endswith(TABLES):
        with _name_file_in_errors(path), _open_table(path) as (_, batches):
            rows = (row for batch in batches(None) for row in batch.to_pylist())
            yield from ((f"{path}, row {number}", row) for number, row in enumerate(rows, start=1))
    elif path.name.endswith((".jsonl", ".jsonl.gz")):
        yield from read_json_lines(path)
    else:
        raise UserError(f"{path} has no rows; conversations must be in a .jsonl, .jsonl.gz or .parquet file")


def read_json_lines(path: Path) -> Iterator[tuple[object, dict[str, Any]]]:
    """Yield the location and the JSON object of every nonblank line. The file may be gzipped.

    Raises:
        UserError: A line cannot be read.
    """
    with _name_file_in_errors(path):
        yield from _parse_lines(check_regular(path), _parse_row)


@contextmanager
def _name_file_in_errors(path: Path) -> Iterator[None]:
    """Turn an error in the block, such as a missing file, a damaged gzip file, or too little memory, into a UserError
    that names the file."""
    try:
        yield
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{path} cannot be read: {reason}; give another file, or leave it out") from error
    except MemoryError as error:
        raise UserError(f"{path} does not fit in memory; {_SPLIT}") from error


def _open_reader(path: Path, text_key: str, start: int, stop: int | None) -> Iterator[str | None]:
    """Return an iterator over the texts of a file. None stands for a row without text."""
    if path.name.endswith((".jsonl", ".jsonl.gz")):
        return (text for _, text in _parse_lines(path, partial(_parse_text, key=text_key), start, stop))
    assert start == 0, path
    if path.name.endswith(TABLES):
        return _read_column(path, text_key)
    return _read_text(path)


def _read_text(path: Path) -> Iterator[str]:
    content = _read_content(path)
    try:
        text = content.decode("utf-8-sig")
        if (control := re.search("[\0\x1b]", text)) is not None:  # Text in UTF-16 or ISO 2022 has these characters.
            raise ValueError(f"it has the control character {control.group()!r}")
    except ValueError as problem:
        if path.suffix != ".py":
            raise UserError(
                f"{path} is not text in UTF-8: {problem}; convert it with iconv -f ENCODING -t UTF-8 FILE > NEW.txt, "
                "or leave it out"
            ) from None
    else:
        yield text


def _read_content(path: Path) -> bytes | bytearray:
    """Return the bytes of a file. A .gz file is decompressed block by block, and only up to LONGEST_TEXT, because a
    small .gz file can expand to any size."""
    if path.suffix != ".gz":
        return path.read_bytes()
    content = bytearray()
    with _open(path) as file:
        while block := file.read(BLOCK):
            content += block
            if len(content) > LONGEST_TEXT:
                raise UserError(f"{path} expands to more than {LONGEST_TEXT:,} bytes; {_SPLIT}")
    return content


@dataclass(frozen=True)
class _Line:
    """A line of a file. The line number is computed only when the line is printed."""

    path: Path
    begin: int
    """Offset of the line's first byte."""

    def __str__(self) -> str:
        with _open(self.path) as file:
            missing, number = self.begin, 1
            while missing > 0:
                block = file.read(min(missing, 1 << 20))
                missing -= len(block)
                number += block.count(b"\n")
        return f"{self.path}, line {number}"


def _parse_lines(
    path: Path, parse: Callable[[bytes], T], start: int = 0, stop: int | None = None
) -> Iterator[tuple[_Line, T]]:
    """Parse the nonblank lines that begin at bytes [start, stop). Yield each line with its parsed value."""
    with _open(path) as file:
        if start > 0:
            # A line that crosses the boundary belongs to the previous part. A line that begins at `start` belongs to
            # this part.
            file.seek(start - 1)
            file.readline()
        begin = file.tell()
        while (stop is None or begin < stop) and (content := file.readline(LONGEST_TEXT)):
            line = _Line(path, begin)
            begin += len(content)
            if len(content) == LONGEST_TEXT and not content.endswith(b"\n"):
                raise UserError(f"{line} has more than {LONGEST_TEXT:,} bytes; a line is one document, so split it")
            if content.isspace():
                continue
            try:
                yield line, parse(content)
            except ValueError as error:
                raise UserError(f"{line}: {error}") from error


def _open(path: Path) -> BinaryIO:
    return cast(BinaryIO, gzip.open(path, "rb")) if path.suffix == ".gz" else path.open("rb")


def _parse_text(line: bytes, key: str) -> str | None:
    """Return the text in one JSON line, or None if the text is null. Raise ValueError if the line is invalid or has no
    text under `key`."""
    row = _parse_row(line, f' with "{key}"')
    if (found := _first_key(key, row)) is None:
        raise ValueError(f'no key "{key}" among {", ".join(sorted(row)) or "none"}; {_OTHER_KEY}')
    text = row[found]
    if text is not None and not isinstance(text, str):
        raise ValueError(f'"{found}" holds a {type(text).__name__}, not text; choose another with --text-key')
    # JSON can contain an escaped lone surrogate ("\\ud800"), which UTF-8 cannot encode. Replace it with "?".
    return text and text.encode(errors="replace").decode()


def _first_key(key: str, names: Iterable[str]) -> str | None:
    """Return `key` if `names` contains it. Otherwise, split `key` at its commas, and return the first part that `names`
    contains, or None."""
    known = set(names)
    return next((each for each in (key, *key.split(",")) if each in known), None)


def _parse_row(line: bytes, having: str = "") -> dict[str, Any]:
    """Return the object in one JSON line. Raise ValueError if the line is invalid."""
    try:
        row = parse_json(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ValueError("not UTF-8, the encoding of JSON; convert the file with iconv") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON ({error.msg} at character {error.pos + 1})") from error
    except ValueError as error:  # Python refuses very long numbers and deeply nested lists.
        raise ValueError(f"JSON that cannot be read ({error})") from error
    if not isinstance(row, dict):
        raise ValueError(f"expected an object{having}, found a {type(row).__name__}")
    return row


def _read_column(path: Path, key: str) -> Iterator[str | None]:
    with _open_table(path) as (schema, batches):
        if (found := _first_key(key, schema.names)) is None:
            raise UserError(f'{path} has no column "{key}" among {", ".join(schema.names)}; {_OTHER_KEY}')
        kind = schema.field(found).type
        if str(kind) not in ("string", "large_string"):
            raise UserError(f'{path}: column "{found}" holds {kind}, not text; choose another with --text-key')
        for batch in batches([found]):
            yield from batch.column(found).to_pylist()


@contextmanager
def _open_table(path: Path) -> Iterator[tuple[Any, Callable[[list[str] | None], Iterable[Any]]]]:
    """Yield the schema of a Parquet or Arrow file, and a function that reads the file's rows in batches. The function
    takes the names of the columns to read, or None for all. For an Arrow file, it always reads all columns."""
    import_extra("pyarrow", "parquet", f"reading {path} needs")
    import pyarrow.parquet

    try:
        if path.suffix == ARROW:
            with pyarrow.memory_map(str(path)) as mapped, pyarrow.ipc.open_stream(mapped) as stream:
                yield stream.schema, lambda columns: stream
        else:
            with pyarrow.parquet.ParquetFile(path) as file:
                yield file.schema_arrow, lambda columns: file.iter_batches(columns=columns)
    except pyarrow.ArrowInvalid as error:
        kind = "an Arrow stream" if path.suffix == ARROW else "a Parquet file"
        raise UserError(f"{path} is not {kind}: {error}") from error


def _expand(item: str) -> list[Path]:
    if item == PYTHON_STDLIB:
        return _list_python_stdlib()
    if item.startswith(hub.PREFIX):
        return hub.HubDataset.parse(item).cached_files()
    path = Path(item)
    with _name_file_in_errors(path):
        if not path.is_dir():
            check_regular(path)
    if path.is_file() and not _is_input(path):
        raise UserError(f"{item} has an unsupported suffix; supported are {_KNOWN}")
    if path.exists() or glob.has_magic(item):
        found = [path for path in _list_matching(item) if _is_input(path)]
        if not found:
            raise UserError(f"{item} has no supported file ({_KNOWN})")
        return found
    raise UserError(f'input {item} does not exist; give a file, a folder, a glob, "{PYTHON_STDLIB}", or hf:NAME')


def _list_matching(item: str) -> list[Path]:
    """List the files that a path matches, sorted. The path is a file, a folder (searched recursively, without hidden
    names), or a glob."""
    named = [item] if Path(item).exists() else sorted(glob.glob(item, recursive=True))
    return list(dict.fromkeys(file for name in named for file in _list_within(Path(name))))


def _list_within(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    files = sorted(path.rglob("*"))
    return [file for file in files if not any(part.startswith(".") for part in file.relative_to(path).parts)]


def _is_input(path: Path) -> bool:
    return path.name.endswith(SUFFIXES) and path.is_file()


def _list_python_stdlib() -> list[Path]:
    """List the source files of the running interpreter's standard library without its tests, sorted."""
    root = Path(sysconfig.get_paths()["stdlib"])
    found = sorted(path for path in root.rglob("*.py") if not _NOT_THE_LIBRARY & set(path.relative_to(root).parts))
    if not found:
        raise UserError(f"the library of this Python ({root}) has no sources; prepare your own corpus instead")
    return found
