"""The section [data] of the run file."""

from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from fourfold.config.strict import PathText, Strict


class Corpus(Strict):
    """A tokenized corpus. If `train` or `validation` lists several corpora, each sample comes from one of them."""

    path: PathText = Field(examples=["data/corpus"])
    """Path of the corpus without extension. The corpus has the files PATH.bin and PATH.idx."""
    weight: float = Field(1.0, gt=0)
    """Weight of this corpus. Its share of the samples is its weight divided by the sum of all weights."""


class DataConfig(Strict):
    """The data to train on. Give either `train` (prepared corpora) or `source` (built-in text or a streamed dataset).
    If a key's description begins with *hf:*, the key is only for streamed datasets."""

    format: Literal["text", "sft", "preferences"] = "text"
    """`text` is plain text. `sft` is conversations from `fourfold prepare --format sft`. Only their answers are
    trained. `preferences` is pairs of a better and a worse answer from `fourfold prepare --format preferences`, and
    needs [dpo](#dpo)."""

    train: list[Corpus] = Field([], examples=[[{"path": "data/corpus"}]])
    """Corpora to train on: from `fourfold prepare`, or any .bin and .idx files of Megatron-LM."""
    validation: list[Corpus] = Field([], examples=[[{"path": "data/corpus"}]])
    """Corpora for the validation loss."""
    source: str | None = Field(None, examples=["python-stdlib"])
    """'python-stdlib' is the source code of Python's standard library. The first run tokenizes it into `cache_dir`.
    'hf:NAME', 'hf:NAME:SPLIT', or 'hf:NAME:CONFIG:SPLIT' is a dataset that is [streamed](data.md#streaming) and
    tokenized during training."""
    tokenizer: PathText | None = Field(None, examples=["bytes"])
    """'bytes', or the path of a tokenizer.json. Required if source is 'hf:…'. Default: the tokenizer that the corpus
    was prepared with. For source = 'python-stdlib', the default is a new byte-pair tokenizer with model.vocab_size
    tokens."""
    cache_dir: PathText = "data"
    """Folder for the tokenized corpus of source = 'python-stdlib'."""
    mask_documents: bool = False
    """Do not let attention cross document boundaries inside a sequence, and restart positions at each document. Always
    on with format = 'sft'."""

    text_key: str = "text"
    """hf: name of the column that holds the text."""
    eos_token: str | None = None
    """hf: the special token that ends every document. Default: the tokenizer's end-of-text token."""
    bos_token: str | None = None
    """hf: the special token that begins every document. 'auto' uses the tokenizer's beginning-of-text token. Default:
    no token."""
    streams: int = Field(1, ge=1)
    """hf: number of streams to divide the dataset's files into. A process reads only the streams that its samples come
    from. The number must divide global_batch_size, and must not exceed the number of files."""
    shuffle_buffer: int = Field(0, ge=0)
    """hf: each stream shuffles this many documents at a time, in memory. 0 keeps the dataset's order."""
    read_ahead: int = Field(2, ge=1)
    """hf: largest number of global batches to read and tokenize ahead."""
    read_timeout: float = Field(300.0, gt=0)
    """hf: end the run if no new text arrives for this many seconds."""

    @property
    def is_streamed(self) -> bool:
        """Return whether ``source`` is a dataset that is streamed during training."""
        return self.source is not None and self.source.startswith("hf:")

    @field_validator("source")
    @classmethod
    def _known_source(cls, source: str | None) -> str | None:
        if source not in (None, "python-stdlib") and not source.startswith("hf:"):
            raise ValueError("must be 'python-stdlib' or have the form 'hf:NAME'")
        return source

    @model_validator(mode="after")
    def _one_source(self) -> Self:
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
    def _conversations_are_apart(self) -> Self:
        if self.format == "sft":
            if self.source is not None:
                raise ValueError(
                    f"source = {self.source!r} is text, and format = 'sft' needs data.train; format = 'text' works"
                )
            if "mask_documents" in self.model_fields_set and not self.mask_documents:
                raise ValueError(
                    "mask_documents = false lets the conversations in a sequence see each other, and format = 'sft' "
                    "keeps them apart; mask_documents = true works"
                )
            self.mask_documents = True
        if self.format == "preferences":
            if self.source is not None or len(self.train) > 1 or len(self.validation) > 1:
                raise ValueError(
                    f"format = 'preferences' needs one corpus in data.train, which has {len(self.train)}, and at most "
                    f"one in data.validation, which has {len(self.validation)}; train = [{{ path = 'PAIRS' }}] works"
                )
            if self.mask_documents:
                raise ValueError(
                    "mask_documents = true is for several documents in a sequence, and format = 'preferences' has one "
                    "answer in each; mask_documents = false works"
                )
        return self
