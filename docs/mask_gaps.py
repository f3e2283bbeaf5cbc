"""Measure how many passages of real text have no gap (a token that a goldfish mask drops). Writes
docs/figures/mask_gaps.json:

fourfold prepare python-stdlib --out runs/mask-gaps --train-tokenizer 8192
python docs/mask_gaps.py runs/mask-gaps
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fourfold.config.loss_masks import GoldfishConfig
from fourfold.data.dataset import TokenWindows, Windows
from fourfold.data.goldfish import Goldfish
from fourfold.data.mask_preview import longest_run
from fourfold.memorization.goldfish_laws import exact_match_law

STORED = Path(__file__).parent / "figures" / "mask_gaps.json"
SEQ, TOKENS = 4096, 1_000_000
PASSAGES = (50, 100, 500)
MASKS = {
    "hash, k 4, h 13": GoldfishConfig(strategy="hash", k=4, h=13),
    "hash, k 50, h 50": GoldfishConfig(strategy="hash", k=50, h=50),
    "hash-table, k 4, h 13": GoldfishConfig(strategy="hash-table", k=4, h=13),
    "hash-table, k 50, h 50": GoldfishConfig(strategy="hash-table", k=50, h=50),
}
"""The masks to measure. hash-table is the strategy of the goldfish paper's code. k = 50 and h = 50 are the settings of
the Apertus models."""


def measured(corpus: Path, tokens: int = TOKENS) -> dict[str, dict[str, Any]]:
    """For every mask, count the dropped tokens in the first ``tokens`` tokens of a corpus. No counted passage crosses
    the end of a document."""
    found = {}
    for name, config in MASKS.items():
        goldfish = Goldfish(config)
        windows = TokenWindows(corpus, SEQ, 0, goldfish.look_back).read(np.arange(tokens // SEQ))
        found[name] = counts(windows, ~goldfish(windows), config.k)
    return found


def counts(windows: Windows, dropped: NDArray[np.bool_], k: int) -> dict[str, Any]:
    documents = windows.documents[:, 1:]
    starts = np.diff(documents, axis=1, prepend=documents[:, :1]) != 0
    gaps = dropped.cumsum(axis=1)
    return {
        "k": k,
        "tokens": int(dropped.size),
        "drop_rate": float(dropped.mean()),
        "without_gap": {str(passage): without_gap(dropped, gaps, documents, passage) for passage in PASSAGES},
        "law": {str(passage): exact_match_law(k, passage) for passage in PASSAGES},
        "longest_span": max(longest_run(row[None]) for row in pieces(~dropped, starts)),
    }


def without_gap(
    dropped: NDArray[np.bool_], gaps: NDArray[np.int64], documents: NDArray[np.int64], passage: int
) -> float:
    """Return the fraction of passages of this length that have no dropped token. Only passages within one document
    count."""
    last = gaps[:, passage - 1 :]
    before = (gaps - dropped)[:, : last.shape[1]]
    inside = documents[:, passage - 1 :] == documents[:, : last.shape[1]]
    return float((last == before)[inside].mean())


def pieces(kept: NDArray[np.bool_], starts: NDArray[np.bool_]) -> list[NDArray[np.bool_]]:
    """Split each window at the points where a document starts."""
    return [part for row, start in zip(kept, starts, strict=True) for part in np.split(row, np.flatnonzero(start))]


if __name__ == "__main__":
    STORED.write_text(json.dumps(measured(Path(sys.argv[1])), indent=1) + "\n", encoding="utf-8")
