"""Draw the figure of docs/memorization-measured.md: python docs/figures/memorization.py

It reads docs/figures/memorization.json, a copy of the file results.json that examples/memorization/protocol.py
writes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from make import HERE, INK, LINE, PAPER, SOFT, Drawing

DATA = HERE / "memorization.json"
LEFT, SPAN, TOP, ROW = 320, 400, 74, 34
MEMBERS, CEILING = "#d9822b", "#2f5f8f"


def draw(results: dict[str, Any], path: Path) -> None:
    """Draw a bar for each arm (way of training): the share of documents that the model repeats, with its interval. A
    dashed line shows the share of documents whose suffix has no gap."""
    height = TOP + ROW * len(results) + 62
    d = Drawing(LEFT + SPAN + 110, height, "Documents repeated exactly, for each way of training")
    d.text(24, 34, "Documents of which the last 50 tokens are repeated exactly", 16, INK, "start", bold=True)
    bottom = TOP + ROW * len(results)
    for share in (0, 0.25, 0.5, 0.75, 1):
        x = LEFT + SPAN * share
        d.line(x, TOP - 6, x, bottom, "#e3e7eb")
        d.text(x, bottom + 18, f"{share:.0%}", 12, SOFT)
    for number, row in enumerate(results.values()):
        y = TOP + ROW * number
        low, high = row["exact_match_ci"]
        d.text(LEFT - 14, y + 17, row["title"], 13, INK, "end")
        d.rect(LEFT, y + 3, max(1.5, SPAN * row["exact_match"]), 18, MEMBERS, PAPER, rx=2)
        d.line(LEFT + SPAN * low, y + 12, LEFT + SPAN * high, y + 12, INK)
        for end in (low, high):
            d.line(LEFT + SPAN * end, y + 8, LEFT + SPAN * end, y + 16, INK)
        if row["suffix_kept_whole"]:
            x = LEFT + SPAN * row["suffix_kept_whole"]
            d.line(x, y, x, y + 24, CEILING, "3 2")
        d.text(LEFT + SPAN + 14, y + 17, f"{row['exact_match']:.1%} of {row['documents']}", 13, INK, "start")
    d.line(LEFT, TOP - 6, LEFT, bottom, LINE)
    d.text(
        24, height - 18, "bars with 95 % intervals; dashed: suffixes without a gap. Controls: none.", 12, SOFT, "start"
    )
    d.parts.append("</svg>\n")
    path.write_text("\n".join(d.parts), encoding="utf-8")


def main() -> None:
    results = json.loads(DATA.read_text(encoding="utf-8"))
    assert all(row["control_exact_match"] == 0 for row in results.values()), "the caption says that no control is"
    draw(results, HERE / "memorization.svg")


if __name__ == "__main__":
    main()
