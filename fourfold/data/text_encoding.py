"""The encoding of a text file: UTF-8, what a byte-order mark says, or what the user names. It is never a guess."""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import charset_normalizer

from fourfold.errors import UserError

UTF_8 = "utf-8"
MOST_NAMED = 10
"""Files named in one message."""

_MARKS = {  # UTF-32 first: its little-endian mark begins with UTF-16's
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
    codecs.BOM_UTF8: "utf-8-sig",
}
_WIDE = ("utf_16_le", "utf_16_be", "utf_32_le", "utf_32_be")
_NUL_SHARE = 0.25  # half of the bytes of English in UTF-16 are NUL
_SAMPLE = 1 << 16  # bytes that detection looks at
_WITHOUT_NUL = "remove them, or leave the file out"
_CONTEXT = 12  # characters shown before and after the first one that is not ASCII
_CONTROL = re.compile("[\0\x80-\x84\x86-\x9f]")
"""Characters that no text has. Latin-1 makes them of the bytes of another encoding."""


class UnreadableFile(UserError):
    """A file that cannot be read at all."""


class UnknownEncoding(UnreadableFile):
    """A text file whose encoding is neither marked nor named, or that is not in the named one."""


class UnreadableFiles(UserError):
    """One error for all files that cannot be read."""

    def __init__(self, errors: Sequence[UnreadableFile]) -> None:
        super().__init__(errors)  # which another process needs, to name the files of all processes
        self.errors = errors

    def __str__(self) -> str:
        problems = [str(error) for error in self.errors[:MOST_NAMED]]
        more = len(self.errors) - MOST_NAMED
        problems += [f"{more} more files cannot be read"] if more > 0 else []
        if any(isinstance(error, UnknownEncoding) for error in self.errors):
            problems.append("name the encoding of files that are not UTF-8 with --encoding, or convert them with iconv")
        return "; ".join(problems)


def text_encoding(name: str) -> str:
    """Return Python's own name of a text encoding. Raises UserError for an unknown one."""
    try:
        b"x".decode(name, errors="replace")
        return codecs.lookup(name).name
    except LookupError:
        raise UserError(
            f"--encoding {name} is not a text encoding of Python; latin-1, cp1252, shift_jis and utf-16 are some"
        ) from None


def decode(path: Path, content: bytes | bytearray, named: str | None) -> tuple[str, str | None]:
    """Decode the content of a text file.

    A byte-order mark decides. A file without one is UTF-8 if it can be, and UTF-16 or UTF-32 if as many of its bytes
    are NUL as in such text. Only another file is decoded as `named`.

    Returns:
        The text, and how it was decoded, for a report; None for UTF-8.

    Raises:
        UnknownEncoding: The text cannot be decoded, or not as text.
    """
    mark = next((mark for mark in _MARKS if content.startswith(mark)), None)
    has_nul = b"\0" in content
    certain = _MARKS[mark] if mark else _wide_encoding(content) if has_nul else UTF_8
    if certain is not None:
        try:
            text = content.decode(certain)
        except UnicodeDecodeError as error:
            if mark:
                promise = f"{certain} text, which its byte-order mark promises"
                raise UnknownEncoding(f"{path} is not {promise} (byte {error.start})") from error
        else:
            if "\0" in text:
                raise UnknownEncoding(f"{path} has NUL bytes, so it is not text; {_WITHOUT_NUL}")
            how = "byte-order mark" if mark else "found by its NUL bytes"
            return text, None if certain in (UTF_8, "utf-8-sig") else f"{certain} ({how})"
    other = named or UTF_8
    try:
        text = content.decode(other)
    except UnicodeDecodeError as error:
        neither = f"is not {other}" if other == UTF_8 else f"is neither {UTF_8} nor {other}"
        where = f"byte {error.start}{_readings(content, error.start)}"
        raise UnknownEncoding(f"{path} {neither} text ({where})") from error
    if (found := _CONTROL.search(text)) is not None:
        if has_nul:
            wide = "if it is UTF-16, name utf-16-le or utf-16-be with --encoding"
            raise UnknownEncoding(f"{path} has NUL bytes, so it is not {other} text; {_WITHOUT_NUL}; {wide}")
        raise UnknownEncoding(f"{path} is not {other} text: it would have the character {found.group()!r}")
    return text, f"{other} (--encoding)"


def named_files(what: str, paths: Iterable[str | Path]) -> str:
    """Return a line about files, of which it names the first few."""
    each = [str(path) for path in paths]
    more = f" and {len(each) - MOST_NAMED} more" if len(each) > MOST_NAMED else ""
    return f"{what}: {', '.join(each[:MOST_NAMED])}{more}"


def _wide_encoding(content: bytes | bytearray) -> str | None:
    """Return UTF-16 or UTF-32 if as many bytes are NUL as in text of Latin letters."""
    sample = content[:_SAMPLE]
    if sample.count(0) < len(sample) * _NUL_SHARE:
        return None
    best = charset_normalizer.from_bytes(sample, cp_isolation=list(_WIDE)).best()
    return None if best is None else codecs.lookup(best.encoding).name


def _readings(content: bytes | bytearray, start: int) -> str:
    """The text around the first byte that is not ASCII, in the encodings that it may be in, for the user to choose."""
    begin, end = max(content.rfind(b"\n", 0, start) + 1, start - _CONTEXT), start + _CONTEXT
    sample = content[max(0, start - _SAMPLE // 2) : start + _SAMPLE // 2]
    names = [match.encoding for match in charset_normalizer.from_bytes(sample) if match.encoding not in _WIDE]
    shown: dict[str, str] = {}
    for name in ["cp1252", *names]:
        try:
            content.decode(name)
            text = content[begin:end].decode(name, errors="ignore").split("\n")[0].strip()
        except (UnicodeDecodeError, LookupError):
            continue
        if text.isprintable():
            shown.setdefault(text, name)
    readings = [f'"{text}" in {name}' for text, name in list(shown.items())[:3]]
    return f": {' or '.join(readings)}" if readings else ""
