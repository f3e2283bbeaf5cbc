"""Draw the figures of docs/parallelism.md: python docs/figures/make.py"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).parent

RANKS = {(0, 0): "#4e79a7", (0, 1): "#a0cbe8", (1, 0): "#d9822b", (1, 1): "#f6c28b"}
"""Colors of the ranks (x, y) of a 2 × 2 plane. x sets the hue and y the shade."""

INK, SOFT, LINE, PAPER = "#1f2933", "#61707f", "#9aa5b1", "#ffffff"
X_AXIS, Y_AXIS, Z_AXIS = "#b5541c", "#2f5f8f", "#5b7a3a"
FONT = "font-family=\"'Helvetica Neue', Helvetica, Arial, 'Liberation Sans', sans-serif\""

Owners = Sequence[tuple[int, int]]


class Drawing:
    """An SVG image, drawn piece by piece. The y coordinate grows downwards."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
            f'{FONT} role="img"><title>{title}</title>',
            f'<rect width="{width}" height="{height}" rx="10" fill="{PAPER}"/>',
        ]
        self.patterns: dict[tuple[str, ...], str] = {}

    def rect(self, x: float, y: float, w: float, h: float, fill: str, stroke: str = PAPER, rx: float = 0) -> None:
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="{rx:g}" fill="{fill}" stroke="{stroke}"/>'
        )

    def text(
        self,
        x: float,
        y: float,
        text: str,
        size: float = 13,
        fill: str = INK,
        anchor: str = "middle",
        bold: bool = False,
    ) -> None:
        weight = ' font-weight="600"' if bold else ""
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size:g}" fill="{fill}" text-anchor="{anchor}"{weight}>{text}</text>'
        )

    def line(self, x1: float, y1: float, x2: float, y2: float, stroke: str = LINE, dash: str = "") -> None:
        dashes = f' stroke-dasharray="{dash}"' if dash else ""
        self.parts.append(
            f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" stroke="{stroke}" stroke-width="1.4"{dashes}/>'
        )

    def arrow(self, x1: float, x2: float, y: float, stroke: str) -> None:
        """Draw a horizontal arrow from x1 to x2."""
        tip = 6 if x2 > x1 else -6
        self.line(x1, y, x2 - tip / 2, y, stroke)
        self.parts.append(f'<path d="M{x2:g} {y:g} l{-tip} -4 v8 z" fill="{stroke}"/>')

    def fill_of(self, owners: Owners) -> str:
        """Return the fill for a tile: the color of the rank that holds it, or stripes in the colors of all ranks that
        hold it."""
        colors = tuple(RANKS[owner] for owner in owners)
        if len(colors) == 1:
            return colors[0]
        if colors not in self.patterns:
            name = f"p{len(self.patterns)}"
            self.patterns[colors] = name
            width = 7
            stripes = "".join(
                f'<rect x="{i * width}" width="{width}" height="{width * len(colors)}" fill="{color}"/>'
                for i, color in enumerate(colors)
            )
            size = width * len(colors)
            self.parts.append(
                f'<defs><pattern id="{name}" width="{size}" height="{size}" patternUnits="userSpaceOnUse" '
                f'patternTransform="rotate(45)">{stripes}</pattern></defs>'
            )
        return f"url(#{self.patterns[colors]})"

    def save(self, name: str) -> None:
        (HERE / name).write_text("\n".join([*self.parts, "</svg>\n"]), encoding="utf-8")


def matrix(d: Drawing, x: float, y: float, w: float, h: float, tiles: Sequence[Sequence[Owners]]) -> None:
    """Draw a matrix that is divided into tiles. Each tile has the colors of the ranks that hold it."""
    rows, columns = len(tiles), len(tiles[0])
    for i, row in enumerate(tiles):
        for j, owners in enumerate(row):
            d.rect(x + j * w / columns, y + i * h / rows, w / columns, h / rows, d.fill_of(owners))
    d.rect(x, y, w, h, "none", INK)


# How each kind of tensor is divided over 2 × 2 ranks (x, y). Rows are tokens, and columns are channels.
BOTH_X = [[(0, 0), (1, 0)], [(0, 1), (1, 1)]]
BOTH_Y = [[(0, 0), (0, 1)], [(1, 0), (1, 1)]]
RESIDUAL = [[[(0, 0)], [(0, 1)]], [[(1, 0)], [(1, 1)]]]
GATHERED_OVER_X = [BOTH_X]
GATHERED_OVER_Y = [BOTH_Y]
HEADS = [[[(0, 0)], [(0, 1)], [(1, 0)], [(1, 1)]]]
# Weights are drawn as [in, out], so that the reader can follow a matmul from left to right.
NORMAL = [[[(0, 0)], [(1, 0)]], [[(0, 1)], [(1, 1)]]]
TRANSPOSED = [[[(0, 0)], [(0, 1)]], [[(1, 0)], [(1, 1)]]]

CARD, PILL, GAP = 84, 118, 10


class Row:
    """Draw one half of a block, from left to right."""

    def __init__(self, d: Drawing, x: float, y: float) -> None:
        self.d, self.x, self.y = d, x, y

    def card(self, title: str, shape: str, tiles: Sequence[Sequence[Owners]], weight: bool = False) -> None:
        d = self.d
        d.text(self.x + CARD / 2, self.y - 12, title, 13.5, bold=True, fill=SOFT if weight else INK)
        inset = 10 if weight else 0
        matrix(d, self.x + inset, self.y + inset, CARD - 2 * inset, CARD - 2 * inset, tiles)
        d.text(self.x + CARD / 2, self.y + CARD + 18, shape, 12, SOFT)
        self.x += CARD + GAP

    def sign(self, text: str) -> None:
        self.d.text(self.x + 5, self.y + CARD / 2 + 6, text, 19, SOFT)
        self.x += 10 + GAP

    def pill(self, axis: str, forward: str, backward: str) -> None:
        """Draw a collective, with its operation in the forward pass above, and its operation in the backward pass
        below."""
        d, middle = self.d, self.x + PILL / 2
        color = X_AXIS if axis == "x" else Y_AXIS
        left, right, y = self.x + 4, self.x + PILL - 4, self.y + CARD / 2
        for text, line, begin, end in ((forward, y - 12, left, right), (backward, y + 12, right, left)):
            d.arrow(begin, end, line, color if text else LINE)
        d.text(
            middle, y - 20, f"{forward} {axis}" if forward else "same on every rank", 12.5, color if forward else SOFT
        )
        d.text(
            middle,
            y + 30,
            f"{backward} {axis}" if backward else "same on every rank",
            12.5,
            color if backward else SOFT,
        )
        self.x += PILL + GAP

    def step(self, text: str, width: float = 58) -> None:
        """Draw a computation without a collective."""
        d, y = self.d, self.y + CARD / 2
        d.text(self.x + width / 2, y - 8, text, 12.5, INK)
        d.arrow(self.x + 2, self.x + width - 2, y, LINE)
        self.x += width + GAP


def block() -> None:
    """Draw a transformer block on 2 × 2 ranks, with all collectives of its forward and backward pass."""
    d = Drawing(1348, 450, "One block on a plane of x = 2 by y = 2 ranks")
    for i, ((x, y), color) in enumerate(RANKS.items()):
        d.rect(40 + i * 118, 24, 18, 18, color, INK)
        d.text(64 + i * 118, 38, f"rank x={x}, y={y}", 13, anchor="start")
    d.text(524, 38, "two stripes: both ranks hold it", 13, SOFT, anchor="start")
    d.text(1308, 30, "rows: tokens (of weights: in); columns: channels (of weights: out)", 12.5, SOFT, anchor="end")
    d.text(1308, 48, "upper arrow: forward; lower arrow: its mirror in the backward", 12.5, SOFT, anchor="end")

    top = 126
    d.text(40, top - 46, "Attention", 17, anchor="start", bold=True)
    row = Row(d, 40, top)
    row.card("residual", "[S/x, H/y]", RESIDUAL)
    norm_x = row.x
    row.pill("x", "all-gather", "reduce-scatter")
    row.card("tokens", "[S, H/y]", GATHERED_OVER_X)
    row.sign("×")
    row.card("Wq, Wk, Wv", "normal", NORMAL, weight=True)
    row.pill("y", "reduce-scatter", "all-gather")
    row.card("heads", "N/(x·y) heads", HEADS)
    row.step("attend")
    row.card("heads", "N/(x·y) heads", HEADS)
    row.pill("y", "all-gather", "reduce-scatter")
    row.card("heads of x", "[S, Q/x]", GATHERED_OVER_Y)
    row.sign("×")
    row.card("Wo", "transposed", TRANSPOSED, weight=True)
    first_end = row.x
    d.line(40, top + CARD + 40, 1308, top + CARD + 40, "#e4e7eb")
    norm_note(d, norm_x, top)

    bottom = 322
    d.text(40, bottom - 46, "MLP", 17, anchor="start", bold=True)
    row = Row(d, 40, bottom)
    row.card("residual", "[S/x, H/y]", RESIDUAL)
    norm_x = row.x
    row.pill("x", "all-gather", "reduce-scatter")
    row.card("tokens", "[S, H/y]", GATHERED_OVER_X)
    row.sign("×")
    row.card("Wup, Wgate", "normal", NORMAL, weight=True)
    row.pill("y", "all-reduce", "")
    row.card("inner", "[S, F/x]", GATHERED_OVER_Y)
    row.step("activate")
    row.card("inner", "[S, F/x]", GATHERED_OVER_Y)
    row.pill("y", "", "all-reduce")
    row.sign("×")
    row.card("Wdown", "transposed", TRANSPOSED, weight=True)
    row.pill("x", "reduce-scatter", "all-gather")
    row.card("residual", "[S/x, H/y]", RESIDUAL)
    norm_note(d, norm_x, bottom)

    # Draw the two collectives between attention and the MLP: a reduce-scatter to the residual stream, and an
    # all-gather.
    middle = top + CARD / 2
    d.arrow(first_end + 2, first_end + 96, middle - 12, X_AXIS)
    d.arrow(first_end + 96, first_end + 2, middle + 12, X_AXIS)
    d.text(first_end + 49, middle - 38, "reduce-scatter x", 12.5, X_AXIS)
    d.text(first_end + 49, middle - 21, "to the residual", 12, SOFT)
    d.text(first_end + 49, middle + 30, "all-gather x", 12.5, X_AXIS)
    d.save("block.svg")


def norm_note(d: Drawing, x: float, y: float) -> None:
    d.text(x + PILL / 2, y + CARD + 4, "norm first: all-reduce y", 11.5, Y_AXIS)
    d.text(x + PILL / 2, y + CARD + 19, "of its sums, both ways", 11.5, Y_AXIS)


def grid() -> None:
    """Draw how the axes split a weight (x, y, z), the residual stream (x, y, z, dp), and the processes."""
    d = Drawing(1140, 376, "What each axis of the grid splits")
    x, y, side = 60, 96, 208
    d.text(x + side / 2, 40, "A weight (normal layer)", 16, bold=True)
    d.text(x + side / 2, 60, "z cuts each tile again: what a rank stores", 12.5, SOFT)
    matrix(d, x, y, side, side, [[[(0, 0)], [(0, 1)]], [[(1, 0)], [(1, 1)]]])
    for i in range(2):
        d.line(x, y + side * (1 + 2 * i) / 4, x + side, y + side * (1 + 2 * i) / 4, PAPER, "5 3")
    for i in range(4):
        for j in range(2):
            d.text(x + side * (j + 0.5) / 2, y + side * (i + 0.5) / 4 + 5, f"z={i % 2}", 13, INK)
    for i in range(2):
        d.text(x + side * (i + 0.5) / 2, y - 8, f"y={i}", 13, Y_AXIS, bold=True)
        d.text(x - 22, y + side * (i + 0.5) / 2 + 5, f"x={i}", 13, X_AXIS, bold=True)
    d.text(x + side / 2, y + side + 22, "input features over y →", 12.5, Y_AXIS)
    d.text(x + side / 2, y + side + 40, "output features over x ↓, rows of a tile over z", 12.5, X_AXIS)

    x, width, height, shift = 440, 150, 54, 9
    d.text(x + 105, 40, "The residual stream", 16, bold=True)
    d.text(x + 105, 60, "no two ranks hold the same part", 12.5, SOFT)
    for batch in range(4):
        top, left = 84 + (batch % 2) * (height + 10) + (batch // 2) * (2 * height + 28), x + shift
        matrix(d, left, top, width, height, RESIDUAL)
        d.text(
            left + width + 12, top + height / 2 + 5, f"dp={batch // 2}, z={batch % 2}", 13, Z_AXIS, "start", bold=True
        )
    d.text(x + 105, 356, "sequences over z and dp; tokens over x ↓; channels over y →", 12.5, SOFT)

    x, y = 780, 92
    d.text(x + 160, 40, "The processes", 16, bold=True)
    d.text(x + 160, 60, "numbered with x fastest: a node holds x, then y, then z", 12.5, SOFT)
    for node in range(2):
        top = y + node * 122
        d.rect(x, top, 320, 104, "#f5f7fa", LINE, rx=8)
        d.text(x + 12, top + 22, f"node {node}: dp={node}", 12.5, SOFT, "start")
        for rank in range(8):
            rx, ry, rz = rank % 2, rank // 2 % 2, rank // 4
            left = x + 14 + rank * 36 + rz * 10
            d.rect(left, top + 36, 32, 32, RANKS[rx, ry], INK, rx=4)
            d.text(left + 16, top + 57, str(node * 8 + rank), 13, INK, bold=True)
        d.text(x + 14 + 70, top + 90, "z=0", 12.5, Z_AXIS, bold=True)
        d.text(x + 14 + 4 * 36 + 10 + 70, top + 90, "z=1", 12.5, Z_AXIS, bold=True)
    d.text(x + 160, 356, "x = y = z = dp = 2: sixteen processes", 12.5, SOFT)
    d.save("grid.svg")


if __name__ == "__main__":
    block()
    grid()
