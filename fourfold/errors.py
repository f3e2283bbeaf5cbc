"""Define the error that a user's mistake raises."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

LONGEST = 1200
"""Largest length of a printed message. A message can quote the content of a damaged file, which may be long."""


class UserError(ValueError):
    """A sentence that says what is wrong, where, and what would work. The command line prints it and exits with code
    2."""


@contextmanager
def given_as(option: str) -> Iterator[None]:
    """Prefix errors in the block with the option or key whose value caused them. The code that raises these errors does
    not know the option or key."""
    try:
        yield
    except UserError as error:
        raise UserError(str(error) if str(error).startswith("--") else f"{option}: {error}") from error


def sentence(error: Exception) -> str:
    """Return the message of an error as one printable line of limited length."""
    text = "".join(each if each.isprintable() else ascii(each)[1:-1] for each in str(error).strip())
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 200]} … {text[-200:]}"


def first_line(error: Exception) -> str:
    """Return the first line of an error's message, or the error's type if it has no message."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
