"""Run the command line in this process, and capture what it prints. This is the fixture ``cli``."""

import sys
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

from fourfold.cli.app import main

Result = tuple[int, str, str]
"""Exit code, standard output, standard error."""

Cli = Callable[..., Result]


def exit_code(*arguments: object) -> int:
    """Return the exit code of ``fourfold ARGUMENTS``, run in this process."""
    with patch.object(sys, "argv", ["fourfold", *map(str, arguments)]):
        try:
            main()
        except SystemExit as leaving:
            return leaving.code if isinstance(leaving.code, int) else 0
    return 0


def files_in(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def one_sentence(result: Result) -> str:
    """Return the error message, and check how the command failed: exit code 2, one line on standard error, and nothing
    on standard output."""
    code, output, errors = result
    assert "Traceback" not in errors, errors
    assert code == 2, errors
    assert output == ""
    assert errors.startswith("fourfold: ")
    assert errors.count("\n") == 1, errors
    return errors
