"""The section [masks] of the run file: which tokens the loss skips."""

from typing import Literal

from pydantic import Field

from fourfold.config.strict import Strict

Strategy = Literal["none", "hash", "hash-table", "static", "random"]


class GoldfishConfig(Strict):
    """The goldfish loss masks about one token in k: the loss does not include this token. This keeps the model from
    memorizing long passages word for word.

    Validation does not use this mask. [memorization.md](memorization.md) explains how to choose k and h.
    """

    strategy: Strategy = "none"
    """How to choose the masked tokens. `none` masks no token. `hash` looks at the h preceding tokens, so every copy
    of a passage has the same mask after its first h tokens. `hash-table` reproduces the published code bit for bit.
    `static` masks every k-th token of a sequence. `random` does not prevent memorization, because every copy has a
    different mask. Use `random` only for comparisons."""
    k: int = Field(4, ge=2)
    """On average, one token in k is masked. A smaller k protects better, but trains on fewer tokens."""
    h: int = Field(13, ge=1, le=2**20)
    """Number of tokens that determine whether a token is masked (hash, hash-table). With hash, these are the h tokens
    before the token. With hash-table, see include_target."""
    start_step: int = Field(0, ge=0)
    """First optimizer step that uses the goldfish mask."""
    include_target: bool = True
    """`hash-table` only. With true, the hash reads the token itself and the h - 1 tokens before it, as in the published
    code. With false, the hash reads the h tokens before the token."""
    seed: int = Field(0, ge=0, lt=2**63)
    """Seed of the mask (hash, random)."""
    exempt: list[int] = Field([])
    """Token ids that are never masked, in addition to the tokenizer's special tokens."""

    @property
    def preceding(self) -> int:
        """Return how many tokens before a token determine whether the token is masked (hash, hash-table)."""
        return self.h - 1 if self.strategy == "hash-table" and self.include_target else self.h


class MasksConfig(Strict):
    """Masks that leave tokens out of the loss. The loss includes a token only if every mask keeps it. The first token
    of a document is never in the loss, because the model has nothing to predict it from."""

    goldfish: GoldfishConfig = GoldfishConfig()
    """The goldfish loss against memorization, described below."""
    functions: list[str] = Field([])
    """Your own masks, each as 'module:function'. A function receives sequences, and returns true for every token that
    the loss includes ([data.md](data.md#masks))."""
