"""Options that benchmarks share, and helpers that record failures and write results to files."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def add_tiny(parser: argparse.ArgumentParser) -> None:
    """Add the option ``--tiny``. The tests use it to run every benchmark quickly on a CPU."""
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, to try the script. Its numbers mean nothing.")


def add_device(parser: argparse.ArgumentParser) -> None:
    """Add ``--device``, ``--json``, and ``--tiny``."""
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--json", metavar="FILE", help="also write the results to this file")
    add_tiny(parser)


@contextlib.contextmanager
def failure_in(row: dict[str, Any]) -> Iterator[None]:
    """Catch any error inside this context, and store its message in the row as ``error``."""
    try:
        yield
    except Exception as error:
        # Catch every error, so that the benchmark continues with the next row.
        row["error"] = f"{type(error).__name__}: {error}"[:2000]


def write_figures(path: str | Path | None, record: Any) -> None:
    """Write JSON to a file atomically: even after a kill, the file is complete. If the path is None, write nothing.

    Benchmarks call this after every row, so the finished rows are kept if a benchmark is killed.
    """
    if path is not None:
        new = Path(f"{path}.new")
        new.write_text(json.dumps(record, indent=1, default=str) + "\n", encoding="utf-8")
        os.replace(new, path)
