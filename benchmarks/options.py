"""Options that benchmarks share, and helpers for rows that may fail and for files of figures."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def add_tiny(parser: argparse.ArgumentParser) -> None:
    """Add ``--tiny``, which the tests use to run every benchmark on a CPU."""
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, to try the script. Its numbers mean nothing.")


def add_device(parser: argparse.ArgumentParser) -> None:
    """Add ``--device``, ``--json``, and ``--tiny``."""
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--json", metavar="FILE", help="also write the figures there")
    add_tiny(parser)


@contextlib.contextmanager
def failure_in(row: dict[str, Any]) -> Iterator[None]:
    """Record any failure in the row as ``error``, so that it does not end the table."""
    try:
        yield
    except Exception as error:
        # Catch every error, so that the remaining rows are still measured.
        row["error"] = f"{type(error).__name__}: {error}"[:2000]


def write_figures(path: str | Path | None, record: Any) -> None:
    """Write JSON to a file atomically, so that no reader sees an incomplete file, even after a kill. If the path is
    None, write nothing.

    Programs call this after every row, so a program that is killed leaves its finished rows.
    """
    if path is not None:
        new = Path(f"{path}.new")
        new.write_text(json.dumps(record, indent=1, default=str) + "\n", encoding="utf-8")
        os.replace(new, path)
