"""Find the options that a shell script passes to a training program, without running the script.

This module replaces variables and arrays by their values. It does no arithmetic, and it does not check conditions. It
reads every branch and every loop once, in the order of the script. If an option occurs several times, its last value
counts.
"""

import re
import shlex

LONGEST = 1 << 13
"""Largest number of characters of a variable's value. Longer values are cut off."""
WITHOUT_QUOTES = str.maketrans("\"'\n", "   ")
ARRAY = re.compile(r"(\w\+?=)\(((?:[^()]|\$\([^()]*\)|\$\(\([^()]*\)\))*)\)")
ASSIGNMENT = re.compile(r"(\w+)(\+?)=(.*)", re.DOTALL)
CONDITION = re.compile(r"^\s*((?:if|elif|else|case|for|while|until)\b.*?)\s*$", re.MULTILINE)
VARIABLE = re.compile(r"\$\{(\w+)(?:\[[@*]\])?(?::?[-=]([^{}$]*))?\}|\$(\w+)")
OPTION = re.compile(r"(?<!\S)--(\w[\w.-]*)[= ]?((?: ?(?!-[^\d.]|\S*\.py\b|\d?[|&>);}])\S+)*)")
"""An option with its values. The values end before a word that starts with a dash (unless it is a negative number), the
name of a Python file, or an operator of the shell."""


def read_options(text: str) -> tuple[dict[str, str], list[str]]:
    """Return the options in a shell script, or in a list of arguments.

    Args:
        text: The script.

    Returns:
        First, the value of each option, by the option's name without leading dashes. An option without a value is
        ``true``. Second, a list with the conditions that were not checked, and with the values of options that later
        values replace.

    Raises:
        ValueError: A quote is not closed.
    """
    text = re.sub(r";(?=\s)", " ; ", text)
    text = re.sub(r"\\[ \t]*\n", " ", re.sub(r"(?m)(^|\s)#.*$", r"\1", text))
    arrays = ARRAY.sub(lambda array: f'{array[1]}"{array[2].translate(WITHOUT_QUOTES)}"', text)
    lexer = shlex.shlex(arrays.replace("\n", " \n "), posix=True)
    lexer.whitespace, lexer.whitespace_split, lexer.commenters = " \t\r", True, ""
    variables: dict[str, str] = {}
    words = []
    for word in lexer:
        if match := ASSIGNMENT.fullmatch(word):
            before = variables.get(match[1], "") + " " if match[2] else ""
            variables[match[1]] = (before + _replaced(match[3], variables))[:LONGEST]
        else:
            words.append(re.sub(r"\s+", " ", _replaced(word, variables)) if word != "\n" else word)
    pairs = OPTION.findall(" ".join(words))
    options = {name: value or "true" for name, value in pairs}
    earlier = [
        f"--{name} {value} (a later value replaces it)" for name, value in pairs if value not in (options[name], "")
    ]
    return options, CONDITION.findall(text) + earlier


def _replaced(text: str, variables: dict[str, str]) -> str:
    """Replace each variable by the value that the script has set, or by its default in the text (``${NAME:-default}``).
    A variable that has neither stays."""

    def value_of(match: re.Match[str]) -> str:
        value = variables.get(match[1] or match[3])
        return (value or match[2]) if match[2] is not None else match[0] if value is None else value

    for _ in range(3):  # The default of a variable can be another variable.
        text = VARIABLE.sub(value_of, text)[:LONGEST]
    return text
