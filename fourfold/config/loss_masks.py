"""The sections of the run file that say which tokens the loss leaves out."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from fourfold.config.strict import Strict

Strategy = Literal["none", "hash", "hash-table", "static", "random"]


class GoldfishConfig(Strict):
    """The goldfish loss: about 1 in k tokens is never trained on, so that no long passage is learned verbatim.

    Validation is never masked. See [memorization.md](memorization.md) for how to choose k and h.
    """

    strategy: Strategy = Field(
        "none",
        description="hash: by the h tokens before, so that every copy of a passage has the same mask; hash-table: the "
        "bits of the published code; static: every k-th token of a sequence; random: a new mask at every reading, "
        "which protects nothing (for comparison).",
    )
    k: int = Field(4, ge=2, description="One token in k is left out.")
    h: int = Field(
        13, ge=1, le=2**20, description="Preceding tokens that decide whether a token is masked (hash, hash-table)."
    )
    start_step: int = Field(0, ge=0, description="The first optimizer step that is masked.")
    include_target: bool = Field(
        True, description="hash-table: the h tokens end with the target, as published; false: they precede it."
    )
    seed: int = Field(0, ge=0, lt=2**63, description="Selects the mask (hash, random).")
    exempt: list[int] = Field(
        [], description="Token ids that are never left out, besides the tokenizer's special tokens."
    )

    @property
    def preceding(self) -> int:
        """Tokens before a target that decide whether it is masked."""
        return self.h - 1 if self.strategy == "hash-table" and self.include_target else self.h


class ResponsesConfig(Strict):
    """Fine-tuning on responses: only the tokens between the markers, and the closing marker, are trained on.

    A response lasts until the closing marker or the end of its document. One whose opening marker is before the
    sequence is left out.
    """

    start: str | list[int] | None = Field(
        None, description="Opens a response: text, or token ids. Default: no such mask."
    )
    end: str | list[int] | None = Field(None, description="Closes it: text, or token ids. Default: the document's end.")

    @model_validator(mode="after")
    def _markers(self) -> ResponsesConfig:
        if self.start is None and self.end is not None:
            raise ValueError(
                f"end = {self.end!r} closes a response that no masks.responses.start opens; give both, or leave end out"
            )
        for name, marker in (("start", self.start), ("end", self.end)):
            if marker is not None and len(marker) == 0:
                raise ValueError(
                    f"{name} = {marker!r} is empty; give the text or the token ids of the marker, "
                    f"such as {name} = '<|im_{name}|>'"
                )
        return self


class MasksConfig(Strict):
    """A token is trained on where every mask keeps it; the first token of a document never is."""

    goldfish: GoldfishConfig = Field(GoldfishConfig(), description="Against memorization; below.")
    responses: ResponsesConfig = Field(ResponsesConfig(), description="For fine-tuning on responses; below.")
    functions: list[str] = Field(
        [], description="Masks of your own, as 'module:function', from sequences to true where a token is kept."
    )
