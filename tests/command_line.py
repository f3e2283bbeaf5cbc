"""The command line in this process; with what it prints, the fixture ``cli``."""

import sys
from collections.abc import Callable
from unittest.mock import patch

from fourfold.cli.app import main

Result = tuple[int, str, str]
"""Exit code, standard output, standard error."""

Cli = Callable[..., Result]


def exit_code(*arguments: object) -> int:
    """Of ``fourfold ARGUMENTS``."""
    with patch.object(sys, "argv", ["fourfold", *map(str, arguments)]):
        try:
            main()
        except SystemExit as leaving:
            return leaving.code if isinstance(leaving.code, int) else 0
    return 0
