"""Define the error for users' mistakes, and shorten error messages."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

LONGEST = 1200
"""Maximum length of a printed message, in characters. A message can quote a damaged file, whose content may be long."""


class UserError(ValueError):
    """A user's mistake. The message is one sentence that says what is wrong, where, and what would work. The command
    line prints the message and exits with code 2."""


@contextmanager
def given_as(option: str) -> Iterator[None]:
    """Put the option or key whose value is wrong before the message of each ``UserError`` of the ``with`` block. The
    code that raises the error does not know the option. Messages that already begin with an option stay unchanged."""
    try:
        yield
    except UserError as error:
        raise UserError(str(error) if str(error).startswith("--") else f"{option}: {error}") from error


def sentence(error: Exception) -> str:
    """Return an error's message as one line of printable characters. If the message is longer than ``LONGEST``
    characters, an ellipsis replaces its middle."""
    text = "".join(each if each.isprintable() else ascii(each)[1:-1] for each in str(error).strip())
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 200]} … {text[-200:]}"


def first_line(error: Exception) -> str:
    """Return the first line of an error's message, or the error's type if it has no message."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
