"""Describe how each family's files name and store the decoder's parameters. The tables are in ``file_formats.toml``."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import reduce
from importlib.resources import files
from typing import Any

Table = dict[str, tuple[str, ...]]
"""Maps the name of each Hugging Face tensor to the names of the decoder's parameters that it joins."""


@dataclass(frozen=True)
class Format:
    """The format of a family's files. A field that selects tensors or parameters has parts of their names."""

    table: Table
    prefix: str = "model."
    """A prefix that the names in files lack if the model was saved without its head."""
    transposed: tuple[str, ...] = ()
    """Tensors that are stored as [in, out]. The decoder's parameters are [out, in]."""
    by_head: Mapping[str, str] = field(default_factory=dict)
    """Tensors that interleave the rows of the decoder's parameters head by head. Each maps to the key of [model] that
    has the number of heads."""
    by_row: tuple[str, ...] = ()
    """Tensors that interleave the rows of the decoder's parameters one by one."""
    stacked: tuple[str, ...] = ()
    """Tensors that stack all experts along the first dim, as the decoder's parameters do."""
    convolutions: tuple[str, ...] = ()
    """Tensors that have a dim of size 1 after the first dim. The decoder's parameters are matrices."""
    rotated_in_pairs: tuple[str, ...] = ()
    """Parameters whose rows are in another order in these files. In files, rotary embeddings rotate rows 2i and 2i + 1
    of a head as a pair. In the decoder, they rotate rows i and i + rotary_dim / 2."""
    layers_beyond: str | None = None
    """Key of config.json with the number of extra layers that predict tokens after the next token. fourfold does not
    import these layers. None if the family has no such key."""

    ignored: tuple[str, ...] = ()
    """Name prefixes of modules that predict tokens after the next token. fourfold does not import these modules."""

    def names_beyond(self, last: int, config: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the name prefixes of tensors that are not imported, such as the tensors of extra layers. The first
        extra layer has the index ``last``, the number of imported layers."""
        count = config.get(self.layers_beyond) if self.layers_beyond is not None else 0
        layers = range(last, last + count) if isinstance(count, int) else ()
        return self.ignored + tuple(f"model.layers.{n}." for n in layers)


_FILE = tomllib.loads((files("fourfold.huggingface") / "file_formats.toml").read_text(encoding="utf-8"))


def _table(name: str) -> Table:
    """Build a table, as the beginning of ``file_formats.toml`` describes."""
    entry, rename = _FILE["tables"][name], _FILE["tables"][name].get("rename", {})
    rows: Table = {}
    for other in entry.get("like", ()):
        rows |= _table(other)
    rows = {
        reduce(lambda theirs, part: theirs.replace(*part), rename.items(), theirs): ours
        for theirs, ours in rows.items()
        if not any(part in theirs for part in entry.get("without", ()))
    }
    for other in entry.get("with", ()):
        rows |= _table(other)
    rows |= {theirs: _names(ours) for theirs, ours in entry.get("tensors", {}).items()}
    return rows | {
        f"{theirs}.{kind}": _names(ours, f".{kind}")
        for theirs, ours in entry.get("modules", {}).items()
        for kind in ("weight", "bias")
    }


def _names(ours: str | list[str], ending: str = "") -> tuple[str, ...]:
    return tuple(name + ending for name in ([ours] if isinstance(ours, str) else ours))


def _formats(entries: Mapping[str, dict[str, Any]]) -> dict[str, Format]:
    """Return the format of each family, by the family's name."""
    formats: dict[str, Format] = {}
    for name, entry in entries.items():
        keys: dict[str, Any] = {k: tuple(each) if isinstance(each, list) else each for k, each in entry.items()}
        families, table = keys.pop("families", (name,)), _table(keys.pop("table", name))
        formats |= dict.fromkeys(families, Format(table, **keys))
    return formats


FORMATS = _formats(_FILE["formats"])
WITH_STACKED_EXPERTS = _formats(_FILE["formats_with_stacked_experts"])
"""Formats of files that stack the experts, in families whose files can also have one matrix per expert."""

BUFFERS = (".attn.bias", ".attn.masked_bias", ".attention.bias", ".attention.masked_bias", ".rotary_emb.inv_freq")
"""Endings of the names of tensors that are buffers, not weights. Only older files have such tensors."""

HEAD = "lm_head.weight"

VOCABULARY = ("embed_tokens.weight", HEAD)
"""Parameters with one row per token of the vocabulary. The decoder's parameters may have padding rows at the end. The
Hugging Face tensors have no padding rows."""
