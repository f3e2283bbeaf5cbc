"""Reads documents from text, JSON lines, Parquet and Arrow files, folders of them, Python's library, and the Hub."""

import codecs
import glob
import gzip
import json
import sysconfig
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NoReturn, TypeVar, cast

from fourfold.data import hub
from fourfold.errors import UserError
from fourfold.extras import import_extra
from fourfold.parsing import parse_json

PYTHON_STDLIB = "python-stdlib"
SUFFIXES = (".txt", ".txt.gz", ".jsonl", ".jsonl.gz", ".parquet")
ARROW = ".arrow"
"""The kind of file that `datasets` keeps in its cache; only a name hf:… leads to one."""
TABLES = (".parquet", ARROW)
UTF_8 = "utf-8"

_KNOWN = ", ".join(SUFFIXES)
_TEXT_SUFFIXES = (".txt", ".txt.gz")
_MOST_NAMED = 10  # files named in one message
_STDLIB_LEAST_BYTES = 5_000_000
_INSTALLED_FOLDERS = {"site-packages", "dist-packages"}
_TEST_FOLDERS = {"test", "tests", "idle_test"}

T = TypeVar("T")


@dataclass(frozen=True)
class InputFile:
    """A file as it was found: its absolute path, with size and modification time to notice a change."""

    path: str
    size: int
    mtime_ns: int


def list_inputs(inputs: Iterable[str | Path]) -> list[InputFile]:
    """List the files of `inputs` in the order given; those of a folder or glob are sorted.

    Each input is a file, a folder (searched recursively, hidden names left out), a glob, "python-stdlib", or
    "hf:NAME[:CONFIG][:SPLIT]": the Arrow files of a dataset in the cache of `datasets`, which first downloads it.
    Raises UserError for one that does not exist, has an unknown suffix, or holds no file of a known one.
    """
    found = [path for item in inputs for path in _expand(str(item))]
    if not found:
        raise UserError(f'nothing to prepare; name files ({_KNOWN}), folders, globs, "{PYTHON_STDLIB}", or hf:NAME')
    files = []
    for path in found:
        status = path.stat()
        files.append(InputFile(str(path.resolve()), status.st_size, status.st_mtime_ns))
    return files


def text_encoding(name: str) -> str:
    """Return Python's own name of a text encoding. Raises UserError for an unknown one."""
    try:
        b"x".decode(name, errors="replace")
        return codecs.lookup(name).name
    except LookupError:
        raise UserError(
            f"--encoding {name} is not a text encoding of Python; utf-8, latin-1, cp1252 and utf-16 are some"
        ) from None


def check_encoding(files: Sequence[InputFile], encoding: str) -> None:
    """Raise a UserError that names every text file that is not in this encoding."""
    texts = [Path(file.path) for file in files if file.path.endswith(_TEXT_SUFFIXES)]
    if encoding != UTF_8 and not texts:
        raise UserError(f"--encoding {encoding} is for {' and '.join(_TEXT_SUFFIXES)} files, and the input has none")
    wrong, unreadable = [], []
    for path in texts:
        try:
            with _naming(path):
                _decoded(path, encoding)
        except UnicodeDecodeError as error:
            wrong.append((path, error.start))
        except UserError as error:
            unreadable.append(str(error))
    problems = unreadable[:_MOST_NAMED]
    if len(unreadable) > _MOST_NAMED:
        problems.append(f"{len(unreadable) - _MOST_NAMED} more files cannot be read")
    if wrong:
        problems.append(_not_of_encoding(wrong, len(texts), encoding))
    if problems:
        raise UserError("; ".join(problems))


def read_documents(
    path: str | Path, text_key: str = "text", start: int = 0, stop: int | None = None, encoding: str = UTF_8
) -> Iterator[str]:
    """Yield the documents of one file that have any text.

    A .txt or .txt.gz file is one document in `encoding`; so is a .py file, which is left out unless it is UTF-8. In
    the other kinds every row is a document, under `text_key`. For .jsonl, `start` and `stop` keep the lines that begin
    at bytes [start, stop), so that several processes can share a large file.

    Raises UserError with the file, and the line if there is one, for what cannot be read.
    """
    path = Path(path)
    with _naming(path):
        for text in _reader(path, text_key, start, stop, encoding):
            if text:
                yield text


def read_rows(path: str | Path) -> Iterator[tuple[object, dict[str, Any]]]:
    """Yield every row of a file that has rows, each after its place, which prints as "FILE, line 3".

    Raises UserError with the file, and the line if there is one, for what cannot be read.
    """
    path = Path(path)
    if path.name.endswith(TABLES):
        with _naming(path), _opened_table(path) as (_, batches):
            rows = (row for batch in batches(None) for row in batch.to_pylist())
            yield from ((f"{path}, row {number}", row) for number, row in enumerate(rows, start=1))
    elif path.name.endswith((".jsonl", ".jsonl.gz")):
        yield from read_json_lines(path)
    else:
        raise UserError(f"{path} has no rows; conversations are read from .jsonl, .jsonl.gz and .parquet")


def read_json_lines(path: Path) -> Iterator[tuple[object, dict[str, Any]]]:
    """Yield the JSON object of every line, each after its place. The file may be gzipped. Raises as ``read_rows``."""
    with _naming(path):
        yield from _parsed_lines(path, _row)


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Turn errors of reading (a missing file or permission, a damaged gzip) into a UserError that names the file."""
    try:
        yield
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from error


def _reader(path: Path, text_key: str, start: int, stop: int | None, encoding: str) -> Iterator[str | None]:
    if path.name.endswith((".jsonl", ".jsonl.gz")):
        return (text for _, text in _parsed_lines(path, partial(_text, key=text_key), start, stop))
    assert start == 0, path
    if path.name.endswith(TABLES):
        return _read_column(path, text_key)
    return _read_text(path, encoding)


def _read_text(path: Path, encoding: str) -> Iterator[str]:
    is_python = path.suffix == ".py"
    try:
        yield _decoded(path, UTF_8 if is_python else encoding)
    except UnicodeDecodeError as error:
        if not is_python:
            raise UserError(_not_of_encoding([(path, error.start)], 1, encoding)) from error


def _decoded(path: Path, encoding: str) -> str:
    content = path.read_bytes()
    if path.suffix == ".gz":
        content = gzip.decompress(content)
    return content.decode("utf-8-sig" if encoding == UTF_8 else encoding)


def _not_of_encoding(wrong: Sequence[tuple[Path, int]], files: int, encoding: str) -> str:
    """Return the message about these of so many text files, each with the place of its first wrong byte."""
    name = "UTF-8" if encoding == UTF_8 else encoding
    others = [other for other in ("latin-1", "utf-16", "cp1252") if codecs.lookup(other).name != encoding]
    remedy = f"name their encoding with --encoding (such as {others[0]} or {others[1]}), or convert them with iconv"
    if files == 1:
        path, byte = wrong[0]
        return f"{path} is not {name} text (byte {byte}); {remedy.replace('their', 'its').replace('them', 'it')}"
    named = ", ".join(f"{path} (byte {byte})" for path, byte in wrong[:_MOST_NAMED])
    more = f" and {len(wrong) - _MOST_NAMED} more" if len(wrong) > _MOST_NAMED else ""
    are = "is" if len(wrong) == 1 else "are"
    return f"{len(wrong)} of {files} text files {are} not {name}: {named}{more}; {remedy}"


@dataclass(frozen=True)
class _Line:
    """A line of a file; its number is counted only to be shown."""

    path: Path
    begin: int
    """The byte at which it begins."""

    def __str__(self) -> str:
        with _opened(self.path) as file:
            missing, number = self.begin, 1
            while missing > 0:
                block = file.read(min(missing, 1 << 20))
                missing -= len(block)
                number += block.count(b"\n")
        return f"{self.path}, line {number}"


def _parsed_lines(
    path: Path, parse: Callable[[bytes], T], start: int = 0, stop: int | None = None
) -> Iterator[tuple[_Line, T]]:
    """Parse the lines that begin at bytes [start, stop) and are not blank; yields each line before its value."""
    with _opened(path) as file:
        if start > 0:
            # A line across the border belongs to the part before; a line that begins at `start` is ours.
            file.seek(start - 1)
            file.readline()
        begin = file.tell()
        while (stop is None or begin < stop) and (content := file.readline()):
            line = _Line(path, begin)
            begin += len(content)
            if content.isspace():
                continue
            try:
                yield line, parse(content)
            except ValueError as error:
                raise UserError(f"{line}: {error}") from error


def _opened(path: Path) -> BinaryIO:
    return cast(BinaryIO, gzip.open(path, "rb")) if path.suffix == ".gz" else path.open("rb")


def _text(line: bytes, key: str) -> str | None:
    """Return the text in one JSON line; raises ValueError for an invalid one."""
    row = _row(line, f' with "{key}"')
    if key not in row:
        raise ValueError(f'no key "{key}" among {", ".join(sorted(row)) or "none"}; choose one with --text-key')
    text = row[key]
    if text is not None and not isinstance(text, str):
        raise ValueError(f'"{key}" holds a {type(text).__name__}, not text; choose another with --text-key')
    # JSON may escape half a character ("\\ud800"), which no encoding of Unicode can hold.
    return text and text.encode(errors="replace").decode()


def _row(line: bytes, having: str = "") -> dict[str, Any]:
    """Return the object in one JSON line; raises ValueError for an invalid one."""
    try:
        row = parse_json(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ValueError("not UTF-8") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON ({error.msg} at character {error.pos + 1})") from error
    except ValueError as error:  # a number too long, or lists too deep
        raise ValueError(f"not JSON that can be read ({error})") from error
    if not isinstance(row, dict):
        raise ValueError(f"a {type(row).__name__} where an object{having} is expected")
    return row


def _read_column(path: Path, key: str) -> Iterator[str | None]:
    with _opened_table(path) as (schema, batches):
        if key not in schema.names:
            raise UserError(f'{path} has no column "{key}" among {", ".join(schema.names)}; choose one with --text-key')
        kind = schema.field(key).type
        if str(kind) not in ("string", "large_string"):
            raise UserError(f'{path}: column "{key}" holds {kind}, not text; choose another with --text-key')
        for batch in batches([key]):
            yield from batch.column(key).to_pylist()


@contextmanager
def _opened_table(path: Path) -> Iterator[tuple[Any, Callable[[list[str] | None], Iterable[Any]]]]:
    """The schema of a Parquet file, or of one that `datasets` keeps, and a function that reads columns in batches."""
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
        return _python_stdlib()
    if item.startswith(hub.PREFIX):
        return hub.HubDataset.parse(item).cached_files()
    path = Path(item)
    if path.is_dir():
        files = (file for file in sorted(path.rglob("*")) if _is_input(file))
        shown = [file for file in files if not any(part.startswith(".") for part in file.relative_to(path).parts)]
        return shown or _nothing_in(item)
    if path.is_file():
        if not _is_input(path):
            raise UserError(f"{item} is of an unknown kind; readable are {_KNOWN}")
        return [path]
    if glob.has_magic(item):
        found = [Path(name) for name in sorted(glob.glob(item, recursive=True)) if _is_input(Path(name))]
        return found or _nothing_in(item)
    raise UserError(f'input {item} does not exist; give a file, a folder, a glob, "{PYTHON_STDLIB}", or hf:NAME')


def _nothing_in(item: str) -> NoReturn:
    raise UserError(f"{item} holds no file of a readable kind ({_KNOWN})")


def _is_input(path: Path) -> bool:
    return path.name.endswith(SUFFIXES) and path.is_file()


def _python_stdlib() -> list[Path]:
    """List the sources of the running interpreter's library, sorted; with its tests only if the rest is small."""
    root = Path(sysconfig.get_paths()["stdlib"])
    every = sorted(path for path in root.rglob("*.py") if not _INSTALLED_FOLDERS & set(path.relative_to(root).parts))
    without_tests = [path for path in every if not _TEST_FOLDERS & set(path.relative_to(root).parts)]
    if not every:
        raise UserError(f"the library of this Python ({root}) has no sources; prepare a corpus of your own instead")
    enough = sum(path.stat().st_size for path in without_tests) >= _STDLIB_LEAST_BYTES
    return without_tests if enough else every
