"""The sections of the run file that say what else happens while a run trains, and when it ends."""

from __future__ import annotations

from pydantic import Field, model_validator

from fourfold.config.strict import PathText, Strict


class ValidationConfig(Strict):
    interval: int = Field(0, ge=0, description="Steps between validations; 0 never validates.")
    steps: int = Field(8, gt=0, description="Global batches of one validation.")


class AuditConfig(Strict):
    """Audits of canaries during training, written to memorization.jsonl; `fourfold audit` measures more."""

    interval: int = Field(0, ge=0, description="Steps between audits; 0 never audits. The last step is audited too.")
    documents: PathText | None = Field(None, description="Ledger of canaries, or any documents: a .jsonl file.")
    suffix: int = Field(50, ge=1, description="Tokens at the end of a document that must be repeated.")

    @model_validator(mode="after")
    def _documents_given(self) -> AuditConfig:
        if self.interval > 0 and self.documents is None:
            raise ValueError("interval is set, but documents names no file; name one, or set it to 0")
        return self


class SampleConfig(Strict):
    prompt: str | None = Field(None, description="Text to continue when training ends. Default: no sample.")
    max_new_tokens: int = Field(200, gt=0, description="Tokens of the sample, unless its document ends before.")
    temperature: float = Field(0.8, ge=0, description="0 takes the likeliest token.")
