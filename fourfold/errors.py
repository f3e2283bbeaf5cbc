"""The one error that a user can cause."""

LONGEST = 1200
"""Characters of a sentence, of which a damaged file may fill more."""


class UserError(ValueError):
    """One sentence: what is wrong, where, and what would work. The command line prints it and exits with 2."""


def sentence(error: Exception) -> str:
    """The message of an error in one line that a terminal shows as it is, and that is not too long to read."""
    text = "".join(each if each.isprintable() else ascii(each)[1:-1] for each in str(error).strip())
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 200]} … {text[-200:]}"


def first_line(error: Exception) -> str:
    """The first line of an error's message, or its type where it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
