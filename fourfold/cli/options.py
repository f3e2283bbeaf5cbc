"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

RunFile = Annotated[Path, typer.Argument(metavar="RUN.toml", help="The run file.")]
Overrides = Annotated[
    list[str], typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Override a key of the run file; repeatable.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]
