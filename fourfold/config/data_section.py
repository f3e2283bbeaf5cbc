"""The section [data] of the run file."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator, model_validator

from fourfold.config.strict import PathText, Strict


class Corpus(Strict):
    """One tokenized corpus of a mixture."""

    path: PathText = Field(description="Prefix of an indexed corpus: PATH.bin and PATH.idx.")
    weight: float = Field(1.0, gt=0, description="Share of the samples, relative to the other corpora.")


class DataConfig(Strict):
    """The data to train on. Give `train`, or `source`: built-in text, or a dataset that is streamed."""

    format: Literal["text", "sft", "preferences"] = Field(
        "text",
        description="sft: conversations made by `fourfold prepare --format sft`; whole ones share a sequence without "
        "seeing each other (mask_documents), and only answers are trained. preferences: pairs of answers made by "
        "`fourfold prepare --format preferences`, for [dpo].",
    )

    train: list[Corpus] = Field([], description="Corpora made by `fourfold prepare`, or any Megatron .bin/.idx pair.")
    validation: list[Corpus] = Field([], description="Corpora of the validation loss.")
    source: str | None = Field(
        None,
        description="'python-stdlib': the standard library's own sources, tokenized on first use into `cache_dir`; or "
        "'hf:NAME', 'hf:NAME:SPLIT', 'hf:NAME:CONFIG:SPLIT': a dataset that is "
        "[streamed](data.md#streaming) and tokenized meanwhile.",
    )
    tokenizer: PathText | None = Field(
        None,
        description="'bytes', or the path of a tokenizer.json. Default: the corpus's own; with 'python-stdlib', a "
        "byte-pair tokenizer of model.vocab_size trained on it.",
    )
    cache_dir: PathText = Field("data", description="Folder for the tokenized built-in source.")
    mask_documents: bool = Field(
        False, description="Attention stays inside a document of the packed sequence, and positions restart there."
    )

    text_key: str = Field("text", description="hf: the column that holds the text.")
    eos_token: str | None = Field(
        None, description="hf: the special token that ends every document. Default: the tokenizer's own."
    )
    bos_token: str | None = Field(
        None, description="hf: the special token that begins every document, or 'auto' for the tokenizer's own."
    )
    streams: int = Field(
        1,
        ge=1,
        description="hf: streams into which the dataset's files are divided. A process reads only those of its own "
        "samples; a divisor of global_batch_size, and at most the number of files.",
    )
    shuffle_buffer: int = Field(
        0,
        ge=0,
        description="hf: documents of a stream that are shuffled together, block after block; they are held in memory. "
        "0: the order of the dataset.",
    )
    read_ahead: int = Field(2, ge=1, description="hf: global batches that are read and tokenized ahead, at most.")
    read_timeout: float = Field(300.0, gt=0, description="hf: seconds without any text after which the run ends.")

    @property
    def is_streamed(self) -> bool:
        """True where `source` is a dataset that is read while the run trains."""
        return self.source is not None and self.source.startswith("hf:")

    @field_validator("source")
    @classmethod
    def _known_source(cls, source: str | None) -> str | None:
        if source not in (None, "python-stdlib") and not source.startswith("hf:"):
            raise ValueError(f"data.source = '{source}' is neither 'python-stdlib' nor of the form 'hf:NAME'")
        return source

    @model_validator(mode="after")
    def _one_source(self) -> DataConfig:
        if bool(self.train) == (self.source is not None):
            raise ValueError("give either data.train (corpora) or data.source (built-in text, or hf:NAME)")
        if self.is_streamed and self.tokenizer is None:
            raise ValueError(f"source = '{self.source}' needs data.tokenizer: 'bytes', or a tokenizer.json")
        if self.tokenizer == "bytes" and (self.eos_token or self.bos_token):
            raise ValueError("data.eos_token and data.bos_token need a tokenizer.json, and data.tokenizer is 'bytes'")
        for key in ("text_key", "eos_token", "bos_token", "streams", "shuffle_buffer", "read_ahead", "read_timeout"):
            if not self.is_streamed and getattr(self, key) != DataConfig.model_fields[key].default:
                raise ValueError(f"{key} is of a streamed source = 'hf:NAME'; remove it")
        return self

    @model_validator(mode="after")
    def _conversations_are_apart(self) -> DataConfig:
        if self.format == "sft":
            if self.source is not None:
                raise ValueError("data.source is text; format = 'sft' needs data.train")
            if "mask_documents" in self.model_fields_set and not self.mask_documents:
                raise ValueError(
                    "format = 'sft' packs conversations into one sequence, which must not see each other; leave "
                    "mask_documents out"
                )
            self.mask_documents = True
        if self.format == "preferences":
            if self.source is not None or len(self.train) > 1 or len(self.validation) > 1:
                raise ValueError(
                    "format = 'preferences' needs one corpus in data.train, and at most one to validate on"
                )
            if self.mask_documents:
                raise ValueError("format = 'preferences' has one answer in a sequence; leave mask_documents out")
        return self
