"""The page of Loki's ranks has every number in its cell, on wide screens and on narrow ones."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from report_pages import SCHEMES, WIDTHS, check_looks, opened

from fourfold.reports.loki_report import write_rank_report

if TYPE_CHECKING:
    from playwright.sync_api import Browser

LAYERS, HEADS = 32, 8


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_ranks_are_in_their_cells(browser: Browser, tmp_path: Path, width: int, scheme: str) -> None:
    ranks = [[1 + (7 * layer + head) % 128 for head in range(HEADS)] for layer in range(LAYERS)]
    kinds = ("pre", "post")
    record = {
        "model": "/models/a-name-that-is-long-and-has-no-space/" * 3,
        "tokens": 100_000,
        "seq_length": 2048,
        "head_dim": 128,
        "mean_rank": dict.fromkeys(kinds, 64.5),
        "ranks": dict.fromkeys(kinds, ranks),
        "recall": {kind: [0.9] * LAYERS for kind in kinds},
        "best": ["post"] * LAYERS,
    }
    path = tmp_path / "page.html"
    write_rank_report(record, path)
    with opened(browser, path, width, scheme) as page:
        drawn = check_looks(page)
    assert len(drawn) == 2
    for chart in drawn.values():
        assert {"layer", "KV head"} <= set(chart.texts)
        for layer in range(LAYERS):
            assert all(str(rank) in chart.texts for rank in ranks[layer])
