"""The section [data] of the run file."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator, model_validator

from fourfold.config.strict import PathText, Strict


class Corpus(Strict):
    """One tokenized corpus of a mixture."""

    path: PathText = Field(examples=["data/corpus"], description="Prefix of an indexed corpus: PATH.bin and PATH.idx.")
    weight: float = Field(1.0, gt=0, description="Share of the samples, relative to the other corpora.")


class DataConfig(Strict):
    """The data to train on. Give `train`, or `source`: built-in text, or a dataset that is streamed."""

    format: Literal["text", "sft", "preferences"] = Field(
        "text",
        description="sft: conversations made by `fourfold prepare --format sft`; whole ones share a sequence without "
        "seeing each other (mask_documents), and only answers are trained. preferences: pairs of answers made by "
        "`fourfold prepare --format preferences`, for [dpo].",
    )

    train: list[Corpus] = Field(
        [],
        examples=[[{"path": "data/corpus"}]],
        description="Corpora made by `fourfold prepare`, or any Megatron .bin/.idx pair.",
    )
    validation: list[Corpus] = Field(
        [], examples=[[{"path": "data/corpus"}]], description="Corpora of the validation loss."
    )
    source: str | None = Field(
        None,
        examples=["python-stdlib"],
        description="'python-stdlib': the standard library's own sources, tokenized on first use into `cache_dir`; or "
        "'hf:NAME', 'hf:NAME:SPLIT', 'hf:NAME:CONFIG:SPLIT': a dataset that is "
        "[streamed](data.md#streaming) and tokenized meanwhile.",
    )
    tokenizer: PathText | None = Field(
        None,
        examples=["bytes"],
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
            raise ValueError("must be 'python-stdlib' or have the form 'hf:NAME'")
        return source

    @model_validator(mode="after")
    def _one_source(self) -> DataConfig:
        if bool(self.train) == (self.source is not None):
            given = "both" if self.train else "neither"
            raise ValueError(
                f"give either data.train (corpora) or data.source (built-in text, or hf:NAME): the run has {given}; "
                "data.source = 'python-stdlib' alone works"
            )
        if self.is_streamed and self.tokenizer is None:
            raise ValueError(
                f"source = '{self.source}' needs data.tokenizer, a path of a tokenizer.json; tokenizer = 'bytes' works"
            )
        if self.tokenizer == "bytes" and (self.eos_token or self.bos_token):
            key = "eos_token" if self.eos_token else "bos_token"
            raise ValueError(
                f"{key} = {getattr(self, key)!r} needs a tokenizer.json, and data.tokenizer is 'bytes'; leave {key} out"
            )
        for key in ("text_key", "eos_token", "bos_token", "streams", "shuffle_buffer", "read_ahead", "read_timeout"):
            if not self.is_streamed and getattr(self, key) != DataConfig.model_fields[key].default:
                raise ValueError(
                    f"{key} = {getattr(self, key)!r} is only for a streamed data.source = 'hf:NAME'; leave {key} out"
                )
        return self

    @model_validator(mode="after")
    def _conversations_are_apart(self) -> DataConfig:
        if self.format == "sft":
            if self.source is not None:
                raise ValueError(
                    f"source = {self.source!r} is text, and format = 'sft' needs data.train; format = 'text' works"
                )
            if "mask_documents" in self.model_fields_set and not self.mask_documents:
                raise ValueError(
                    "mask_documents = false lets conversations see each other, which format = 'sft' packs into one "
                    "sequence; mask_documents = true works"
                )
            self.mask_documents = True
        if self.format == "preferences":
            if self.source is not None or len(self.train) > 1 or len(self.validation) > 1:
                raise ValueError(
                    f"format = 'preferences' needs one corpus in data.train, and it has {len(self.train)}, and at most "
                    f"one in data.validation, and it has {len(self.validation)}; train = [{{ path = 'PAIRS' }}] works"
                )
            if self.mask_documents:
                raise ValueError(
                    "mask_documents = true is for several documents in a sequence, and format = 'preferences' has one "
                    "answer in each; mask_documents = false works"
                )
        return self
