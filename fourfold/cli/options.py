"""Options that several commands share, and the one way in which they print a record."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

RunFile = Annotated[Path, typer.Argument(metavar="RUN.toml", help="The run file.")]
Overrides = Annotated[
    list[str], typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Override a key of the run file; repeatable.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]
TaskLimit = Annotated[int | None, typer.Option("--limit", help="Documents per task. Default: all.")]
TaskFolder = Annotated[Path | None, typer.Option("--include-path", help="A folder of your own tasks.")]
StoredDtype = Literal["auto", "fp32", "bf16", "fp16"]
"""Type of a model's weights; auto: as stored."""


def show(record: dict[str, Any] | None, as_json: bool, tables: Callable[[dict[str, Any]], object]) -> None:
    """Print a record as JSON or as tables; nothing where it is None, as on all but the first process of a launcher."""
    if record is not None:
        if as_json:
            print(json.dumps(record))
        else:
            tables(record)
