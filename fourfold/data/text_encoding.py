"""Decode text files as UTF-8, by their byte-order mark, or in the encoding that the user names. Never guess the
encoding."""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from fourfold.errors import UserError

UTF_8 = "utf-8"
MOST_NAMED = 10
"""Largest number of files that one message names."""

_MARKS = {  # UTF-32 comes first, because its little-endian mark begins with UTF-16's mark.
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
    codecs.BOM_UTF8: "utf-8-sig",
}
_WITHOUT = "remove such characters, or leave the file out"
_CONVERT = "iconv -f ENCODING -t UTF-8 FILE > NEW.txt"
_CONTROL = re.compile("[\0-\x08\x0e-\x19\x1b-\x1f\x7f-\x84\x86-\x9f\ud800-\udfff]")
"""Characters that only a wrong encoding produces: lone surrogates, and control characters except whitespace and
end-of-file marks."""


class UnreadableFile(UserError):
    """A file that cannot be read at all."""


class UnknownEncoding(UnreadableFile):
    """The encoding of a text file is unknown, or is not the one that the user named. Naming another encoding may
    help."""


class UnreadableFiles(UserError):
    """One error for all files that cannot be read."""

    def __init__(self, errors: Sequence[UnreadableFile]) -> None:
        super().__init__(errors)  # The paths are pickled with the error, so that the parent process can name the files.
        self.errors = errors

    def __str__(self) -> str:
        problems = [str(error) for error in self.errors[:MOST_NAMED]]
        more = len(self.errors) - MOST_NAMED
        problems += [f"{more} more files cannot be read"] if more > 0 else []
        if any(isinstance(error, UnknownEncoding) for error in self.errors):
            problems.append(
                "name the encoding of files that are not UTF-8 with --encoding, or, if they have several encodings, "
                f"convert each file to UTF-8 with {_CONVERT}"
            )
        return "; ".join(problems)


def resolve_encoding(name: str) -> str:
    """Return Python's name of a text encoding.

    Raises:
        UserError: The encoding is unknown.
    """
    try:
        found = codecs.lookup(name).name
        if b"x".decode(name, errors="replace"):  # False for punycode, which encodes host names.
            return found
    except (LookupError, UnicodeError):
        pass
    raise UserError(f"--encoding {name} is not a text encoding of Python; examples are latin-1, cp1252 and shift_jis")


def decode(path: Path, content: bytes | bytearray, named: str | None) -> tuple[str, str | None]:
    """Decode the content of a text file.

    If there is a byte-order mark, it determines the encoding. Without one:
        1. If all bytes are ASCII, and the encoding `named` writes all text in ASCII bytes (as iso2022_jp does), the
          content is decoded as `named`.
        2. Otherwise, if the content is valid UTF-8 without NUL bytes, it is decoded as UTF-8.
        3. Otherwise, it is decoded as `named`.

    Args:
        path: The file, for messages.
        content: The bytes of the file.
        named: The encoding that the user named.

    Returns:
        The text, and the encoding that decoded it (None for UTF-8).

    Raises:
        UnreadableFile: The text cannot be decoded, or has control characters that only a wrong encoding produces.
    """
    mark = next((mark for mark in _MARKS if content.startswith(mark)), None)
    certain = _MARKS[mark] if mark else UTF_8
    if mark is None and (b"\0" in content or (named and content.isascii() and _is_seven_bit(named))):
        return _decode_as_named(path, content, named or UTF_8)
    try:
        text = content.decode(certain)
    except UnicodeDecodeError as error:
        if mark is None:
            return _decode_as_named(path, content, named or UTF_8)
        promise = f"{path} is not {certain} text, although its byte-order mark says so (byte {error.start})"
        remedy = f"drop the damaged bytes with iconv -c -f {certain} -t utf-8 FILE > NEW.txt"
        if mark == codecs.BOM_UTF8:
            remedy = "remove the mark with tail -c +4 FILE > NEW.txt, and name the encoding of NEW.txt with --encoding"
        raise UnreadableFile(f"{promise}; {remedy}, or leave the file out") from error
    if "\0" in text:
        raise UnreadableFile(f"{path} has NUL bytes, so it is not text; {_WITHOUT}")
    if (start := content.find(b"\x1b")) >= 0 and "\x1b" in text:
        kind = UnreadableFile if mark else UnknownEncoding  # Text in iso-2022-jp has ESC too.
        raise kind(f"{path} has the control character ESC (byte {start}); {_WITHOUT}")
    return text, None if "utf-8" in certain else f"{certain} (byte-order mark)"


def _decode_as_named(path: Path, content: bytes | bytearray, encoding: str) -> tuple[str, str | None]:
    if encoding in ("utf-16", "utf-32"):
        wide = f"{encoding}-le or {encoding}-be"
        raise UnknownEncoding(f"{path} has no byte-order mark, so --encoding {encoding} is ambiguous; name {wide}")
    try:
        text = content.decode(encoding).removeprefix("\ufeff")
    except UnicodeError as error:
        start = error.start if isinstance(error, UnicodeDecodeError) else 0
        if content.isascii():
            apart = f"prepare it separately from {encoding} text, without --encoding"
            raise UnreadableFile(f"{path} is {UTF_8} text and not {encoding} (byte {start}); {apart}") from error
        neither = f"is not {encoding}" if encoding == UTF_8 else f"is neither {UTF_8} nor {encoding}"
        raise UnknownEncoding(f"{path} {neither} text (byte {start})") from error
    if (found := _CONTROL.search(text)) is not None:
        if b"\0" in content:
            wide = "if it is UTF-16, name utf-16-le or utf-16-be with --encoding"
            raise UnknownEncoding(f"{path} has NUL bytes, so it is not {encoding} text; {_WITHOUT}; {wide}")
        raise UnknownEncoding(f"{path} is not {encoding} text: it would have the character {found.group()!r}")
    is_utf_8 = content.isascii() and text == content.decode()
    return text, None if is_utf_8 else f"{encoding} (--encoding)"


def describe_files(what: str, paths: Iterable[str | Path]) -> str:
    """Return a line that names the first few files."""
    each = [str(path) for path in paths]
    more = f" and {len(each) - MOST_NAMED} more" if len(each) > MOST_NAMED else ""
    return f"{what}: {', '.join(each[:MOST_NAMED])}{more}"


def _is_seven_bit(encoding: str) -> bool:
    """Return whether an encoding writes all text in ASCII bytes."""
    try:
        return "日本".encode(encoding).isascii()
    except UnicodeError:
        return False
