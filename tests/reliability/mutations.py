"""Damage files: any bytes, or trees of values (TOML, JSON) according to the types of the values."""

from __future__ import annotations

import copy
import datetime
import json
import math
from collections.abc import Callable, Iterator
from typing import Any

from hypothesis import strategies as st

Place = tuple[str | int, ...]
"""Keys and indices that lead to a value in a tree."""

DEPTH = 3000
"""A nesting depth beyond Python's recursion limit."""


def _nested() -> list[Any]:
    value: list[Any] = []
    for _ in range(DEPTH):
        value = [value]
    return value


STRANGE: tuple[Any, ...] = (
    0, -1, 1, 2, 3, 7, 255, 2**16, 2**31 - 1, 2**31, 2**53 + 1, 2**63 - 1, 2**63, 2**64, 10**30, 10**400,
    0.0, -0.0, 0.5, -1.5, 5e-324, 1e-300, 1e300, math.nan, math.inf, -math.inf,
    True, False, None, [], {}, [[]], {"": 0}, [1], [-1, 2], ["a"], {"a": {"b": 1}},
    "", " ", "x", "0", "nan", "auto", "bytes", "é\u202e𝄞", "a\nb", "\0", "\x1b[2J", "a" * 300, "n" * 100_000, "%s{}",
    ".", "..", "../../../up", "../../../../../../etc/passwd", "/dev/null", "/proc/self/mem", "a/b", "~", "-x",
    datetime.date(2026, 1, 1),
)  # fmt: skip
"""Values that can replace a file's own values. `_nested` makes one more, which is too deep to compare or copy."""

NUMBERS = tuple(n % 256**8 for n in (0, 1, -1, 2, 127, 128, 255, 256, 2**15, 2**16, 2**31 - 1, 2**31, 2**32, 2**62,
                                     2**63 - 1, 2**63, -(2**31), 10**12))  # fmt: skip
"""Numbers that a header could hold."""


def places(tree: Any, here: Place = ()) -> Iterator[Place]:
    """Yield every place in a tree except its root."""
    items: Any = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in items:
        yield (*here, key)
        yield from places(value, (*here, key))


@st.composite
def trees(draw: st.DrawFn, good: Any, strange: tuple[Any, ...] = STRANGE) -> Any:
    """Make one to three changes to a good tree: replace or scale a value, or remove, rename, or add a key."""
    tree = copy.deepcopy(good)
    for _ in range(draw(st.integers(1, 3))):
        place = draw(st.sampled_from(list(places(tree)) or [()]))
        if not place:
            return draw(st.sampled_from(strange))
        *way, key = place
        holder = tree
        for step in way:
            holder = holder[step]
        match draw(st.sampled_from(["replace"] * 5 + ["scale"] * 2 + ["remove", "rename", "add", "nest"])):
            case "replace":
                # Copy the value, because the next change may be inside it.
                holder[key] = copy.deepcopy(draw(st.sampled_from(strange)))
            case "scale" if isinstance(holder[key], int | float):
                factor = draw(st.sampled_from([-1, 2, 3, 10, 1000, 10**6, 10**12, 0.5]))
                if abs(holder[key]) < 1e300:
                    holder[key] = holder[key] * factor
            case "remove":
                del holder[key]
            case "rename" if isinstance(holder, dict):
                holder[draw(st.sampled_from(["", "x", "é", "n" * 300, f"{key}s", "a.b"]))] = holder.pop(key)
            case "add" if isinstance(holder, list):
                holder.extend(copy.deepcopy(holder))
            case "nest":
                holder[key] = _nested()
                return tree
    return tree


@st.composite
def contents(draw: st.DrawFn, good: bytes) -> bytes:
    """Change the bytes in one to three places. Half of the places are in the first 64 bytes, which hold the header."""
    content = bytearray(good)
    for _ in range(draw(st.integers(1, 3))):
        end = len(content) if draw(st.booleans()) else min(64, len(content))
        at = draw(st.integers(0, max(0, end - 1)))
        width = draw(st.sampled_from([1, 2, 4, 8]))
        match draw(st.sampled_from(["flip"] * 3 + ["number"] * 4 + ["cut", "insert", "remove", "repeat", "noise"])):
            case "flip" if content:
                content[at] ^= 1 << draw(st.integers(0, 7))
            case "number":
                number = draw(st.sampled_from(NUMBERS)).to_bytes(8, "little")
                content[at : at + width] = number[:width]
            case "cut":
                del content[at:]
            case "insert":
                content[at:at] = draw(st.binary(min_size=1, max_size=16))
            case "remove":
                del content[at : at + width]
            case "repeat":
                content += content[at:]
            case "noise":
                content = bytearray(draw(st.binary(max_size=200)))
    return bytes(content)


def texts(good: Any, write: Callable[[Any], str]) -> st.SearchStrategy[bytes]:
    """Change a tree and let `write` turn it into text. One time in four, change bytes of the text instead."""
    whole = contents(write(good).encode())
    changed = trees(good).map(lambda tree: write(tree).encode(errors="surrogatepass"))
    return st.sampled_from([whole, changed, changed, changed]).flatmap(lambda kind: kind)


def as_toml(tree: Any) -> str:
    """Return a table as TOML, with sections as inline tables. A root of another type becomes a line that is not
    TOML.
    """
    if not isinstance(tree, dict):
        return str(tree)
    return "".join(f"{json.dumps(key)} = {_toml(value)}\n" for key, value in tree.items() if value is not None)


def _toml(value: Any) -> str:
    depth, inner = 0, value
    while isinstance(inner, list) and len(inner) == 1:
        depth, inner = depth + 1, inner[0]
    if depth > 100:
        return "[" * depth + "]" * depth
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(k)} = {_toml(v)}" for k, v in value.items() if v is not None) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(_toml(item) for item in value if item is not None) + "]"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False) if "\0" not in value else '"\\u0000"'
    if isinstance(value, bool):
        return str(value).lower()
    return str(value)


def as_json(tree: Any) -> str:
    """Return a tree as JSON, with dates as text."""
    depth, inner = 0, tree
    while isinstance(inner, list) and len(inner) == 1:
        depth, inner = depth + 1, inner[0]
    if depth > 100:
        return "[" * depth + "]" * depth
    if isinstance(tree, dict):
        return "{" + ", ".join(f"{json.dumps(k)}: {as_json(v)}" for k, v in tree.items()) + "}"
    if isinstance(tree, list):
        return "[" + ", ".join(as_json(item) for item in tree) + "]"
    return json.dumps(tree, default=str)
