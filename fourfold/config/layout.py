"""Checks a run's layout, and determines how it divides the attention."""

from __future__ import annotations

from typing import Literal

from fourfold.config.legality import RULES, Sizes
from fourfold.config.run import RunConfig
from fourfold.errors import UserError

AttentionSplit = Literal["heads", "batch", "sequence"]
ContextMethod = Literal["ring", "ulysses"]

CHUNK_LOGITS = {"cpu": 1 << 20, "cuda": 1 << 27}
"""Logits that one rank makes at once: as many as fit a CPU's cache; enough rows for a GPU's matrix units."""


def check_layout(run: RunConfig) -> None:
    """Raise ``UserError`` when the model, the batch or the sequence cannot be divided over the grid."""
    sizes = Sizes.of(run)
    for rule in RULES:
        if rule.broken(sizes):
            raise UserError(rule.sentence(run, sizes))


def attention_split(run: RunConfig) -> AttentionSplit:
    """The dimension along which the y ranks share the attention: heads where they divide, else batch, else queries."""
    sizes = Sizes.of(run)
    return "heads" if sizes.whole_heads else "sequence" if sizes.splits_queries else "batch"


def context_method(run: RunConfig) -> ContextMethod:
    """The way in which the ranks of cp attend; auto: "ulysses" where the heads divide."""
    if run.parallel.cp_method != "auto":
        return run.parallel.cp_method
    return "ring" if Sizes.of(run).uneven_heads else "ulysses"
