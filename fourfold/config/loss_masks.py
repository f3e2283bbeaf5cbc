"""The sections of the run file that choose which tokens the loss leaves out."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from fourfold.config.strict import Strict

Strategy = Literal["none", "hash", "hash-table", "static", "random"]


class GoldfishConfig(Strict):
    """The goldfish loss: about 1 in k tokens is never trained on, so the model learns no long passage verbatim.

    Validation is never masked. See [memorization.md](memorization.md) for how to choose k and h.
    """

    strategy: Strategy = "none"
    """How to choose the masked tokens. `none` masks no token. With `hash`, the mask depends on the h preceding tokens,
    so every copy of a passage has the same mask. `hash-table` reproduces the published code bit for bit. `static` masks
    every k-th token of a sequence. `random` masks different tokens in every copy and every pass. It gives no
    protection, and is meant only for comparisons."""
    k: int = Field(4, ge=2)
    """One token in k is left out. A smaller k protects more and trains on fewer tokens."""
    h: int = Field(13, ge=1, le=2**20)
    """Number of preceding tokens that determine whether a token is masked (hash, hash-table)."""
    start_step: int = Field(0, ge=0)
    """First optimizer step that uses the mask."""
    include_target: bool = True
    """For `hash-table`: whether the h tokens include the target, as in the published code. With false, the h tokens
    precede the target."""
    seed: int = Field(0, ge=0, lt=2**63)
    """Selects the mask (hash, random)."""
    exempt: list[int] = Field([])
    """Token ids that are never left out, in addition to the tokenizer's special tokens."""

    @property
    def preceding(self) -> int:
        """Return the number of tokens before a target that determine whether it is masked."""
        return self.h - 1 if self.strategy == "hash-table" and self.include_target else self.h


class MasksConfig(Strict):
    """Masks on the loss. A token is trained on if every mask keeps it. The first token of a document is never trained
    on, because no token of the document precedes it."""

    goldfish: GoldfishConfig = GoldfishConfig()
    """The goldfish loss against memorization, described below."""
    functions: list[str] = Field([])
    """Your own masks as 'module:function'. Each function gets sequences and returns true for every token to keep."""
