"""What all benchmarks share: the tiny form, and figures in a file."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any


def add_tiny(parser: argparse.ArgumentParser) -> None:
    """Add ``--tiny``, with which the tests run every benchmark on a CPU."""
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, to try the script; its numbers mean nothing")


def write_figures(path: str | Path | None, record: Any) -> None:
    """Write JSON to a file in one piece: a reader, or a kill, never finds half a file. None writes nothing.

    Programs call it after every row, so that a program that is killed leaves its rows.
    """
    if path is not None:
        new = Path(f"{path}.new")
        new.write_text(json.dumps(record, indent=1, default=str) + "\n", encoding="utf-8")
        os.replace(new, path)
