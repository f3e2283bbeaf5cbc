"""Measure how fast the loader assembles batches from disk: python -m benchmarks.loader [--rounds 50]

The benchmark measures the wall time of one process without prefetching. The time of the fastest batch counts, because
other work on the machine can only make batches slower.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks.options import add_tiny
from fourfold.data.dataset import TokenWindows
from fourfold.data.indexed import IndexedWriter
from fourfold.data.loader import Loader

SIZES = ((2048, 8), (8192, 8), (2048, 64))
"""For each case, the sequence length and the number of sequences in a batch."""
TINY = ((64, 8),)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=50)
    add_tiny(parser)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        prefix = Path(folder) / "c"
        with IndexedWriter(prefix, 50_000) as writer:
            writer.add_documents(np.arange(20_000_000) % 50_000, np.full(40_000, 500))
        print(f"{'tokens':>8}{'sequences':>11}{'milliseconds':>14}{'tokens a second':>17}")
        for seq_length, batch in TINY if arguments.tiny else SIZES:
            loader = Loader(TokenWindows(prefix, seq_length, 0), seq_length, batch, batch)
            times = []
            for step in range(3 if arguments.tiny else arguments.rounds):
                begin = time.perf_counter()
                loader.step(step)
                times.append(time.perf_counter() - begin)
            rate = seq_length * batch / min(times)
            print(f"{seq_length:8,}{batch:11,}{1000 * min(times):14.2f}{rate:17,.0f}", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
