"""Options that all benchmarks have."""

from __future__ import annotations

import argparse


def add_tiny(parser: argparse.ArgumentParser) -> None:
    """Add ``--tiny``, with which the tests run every benchmark on a CPU."""
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, to try the script; its numbers mean nothing")
