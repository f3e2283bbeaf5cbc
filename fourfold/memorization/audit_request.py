"""Describe an audit: its model, its documents, and its options."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fourfold.errors import UserError
from fourfold.inference.generate import check_sampling
from fourfold.memorization.scored_model import ScoringRequest


@dataclass(frozen=True, kw_only=True)
class AuditRequest(ScoringRequest):
    """A request to audit a model on documents."""

    documents: Path
    """A .jsonl file with the documents to audit. The key "count" says how often the model was trained on a document.
    Documents with a count of 0 are controls. All other documents are members: the model was trained on them."""
    control: Path | None = None
    """A .jsonl file with more documents, which the model was not trained on."""
    reference: str | None = None
    """A second model. One of the membership attacks compares its losses with the losses of the audited model."""
    run: Path | None = None
    """A run file with a goldfish mask. The audit computes which tokens of the documents this mask drops (it replays the
    mask). Default: the mask that the model was trained with, if the audit can replay it."""
    suffix: int = 50
    """Number of tokens at the end of a document that the model must reproduce."""
    prefix: int = 50
    """Number of tokens that a document must have before the suffix. Shorter documents are refused."""
    offset: int = 0
    """Number of tokens from unrelated documents to put before each document."""
    generate: int = 0
    """Number of members that the model continues token by token. The model also continues this many controls."""
    beams: int = 0
    """Beam width of the search for near-verbatim continuations of the documents that ``generate`` selects. 0 means no
    search."""
    text_key: str = "text"
    """Key of the text in each line."""

    def check(self) -> None:
        """Check the sizes and the sampling options.

        Raises:
            UserError: A size or a sampling option is out of range.
        """
        positive, counts = ("suffix", "prefix", "micro_batch_size"), ("generate", "beams", "offset")
        for name, least in [*((name, 1) for name in positive), *((name, 0) for name in counts)]:
            if not least <= getattr(self, name) < 2**31:
                option = f"--{name.replace('_', '-')} {getattr(self, name)}"
                raise UserError(f"{option} must be from {least} to {2**31 - 1:,}, such as {least}")
        if self.beams and not self.generate:
            raise UserError(
                f"--beams {self.beams} searches from the documents that --generate selects; add --generate, such as "
                "--generate 100"
            )
        check_sampling(self.sampling.temperature, self.sampling.top_k, self.sampling.top_p)
