"""Tokenizers: bytes, or any Hugging Face tokenizer.json, trained here or elsewhere."""

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol

from tokenizers import Tokenizer as RustTokenizer
from tokenizers import decoders, models, pre_tokenizers, trainers

from fourfold.data.files import write_whole
from fourfold.errors import UserError
from fourfold.parsing import parse_json

END_OF_TEXT = "<|endoftext|>"
_END_OF_DOCUMENT_NAMES = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "[SEP]")
_SMALLEST_BPE = 257  # 256 bytes and the end of a document


class Tokenizer(Protocol):
    """The interface of a tokenizer."""

    vocab_size: int
    """One more than the largest id."""
    eod_id: int
    """The id that ends a document."""
    bos_id: int | None
    """The id that begins a text, where the model has one."""
    special_ids: tuple[int, ...]
    """The ids that are not text, ascending."""
    fingerprint: str
    """Equal for two tokenizers exactly when they give the same ids."""

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text, without any special token added."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of these ids, without special tokens."""
        ...


class ByteTokenizer:
    """The 256 bytes of UTF-8 as ids 0 to 255, and 256 to end a document. Needs no file."""

    vocab_size: int = 257
    eod_id: int = 256
    bos_id: int | None = None
    special_ids: tuple[int, ...] = (256,)
    fingerprint: str = "bytes"

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The UTF-8 bytes of each text."""
        return [list(text.encode()) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of these bytes; ids above 255 are left out, an incomplete character becomes U+FFFD."""
        return bytes(i for i in ids if i < 256).decode(errors="replace")


class HFTokenizer:
    """A tokenizer.json of the Hugging Face library.

    `path`: the file, or a folder that holds a tokenizer.json; `eod`: the token that ends a document, by default
    the first that exists of <|endoftext|>, <|end_of_text|>, </s>, <eos>, [SEP].

    The name of a special token inside a text is encoded as plain characters: a document that mentions <|endoftext|>
    must not end there. Truncation and padding of the file are switched off.

    Raises UserError if the file is missing or not a tokenizer, or has no token that ends a document.
    """

    def __init__(self, path: str | Path, eod: str | None = None) -> None:
        self.path = Path(path)
        if self.path.is_dir():
            self.path = self.path / "tokenizer.json"
        if not self.path.is_file():
            raise UserError(f'tokenizer {self.path} does not exist; give the path of a tokenizer.json, or "bytes"')
        content = self.path.read_bytes()
        try:
            self._tokenizer = RustTokenizer.from_buffer(content)
        except Exception as error:  # the library raises nothing narrower
            raise UserError(f"{self.path} is not a tokenizer.json of the tokenizers library: {error}") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True
        self.vocab_size = max(self._tokenizer.get_vocab().values(), default=-1) + 1
        self.eod_id = self._find_eod(eod)
        self.bos_id = self._find_bos()
        added = self._tokenizer.get_added_tokens_decoder()
        self.special_ids = tuple(sorted({self.eod_id} | {i for i, token in added.items() if token.special}))
        self.fingerprint = hashlib.sha256(content + f"\neod {self.eod_id}".encode()).hexdigest()

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text; uses all cores unless TOKENIZERS_PARALLELISM=false."""
        return [encoding.ids for encoding in self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of these ids, special tokens left out."""
        return self._tokenizer.decode(list(ids))

    def _find_bos(self) -> int | None:
        """Find it in the tokenizer_config.json that a model has beside its tokenizer.json."""
        config = self.path.with_name("tokenizer_config.json")
        if self.path.name != "tokenizer.json" or not config.is_file():
            return None
        try:
            token = parse_json(config.read_text(encoding="utf-8")).get("bos_token")
        except (OSError, ValueError, AttributeError) as error:
            raise UserError(f"{config} cannot be read: {error}") from error
        name = token.get("content") if isinstance(token, dict) else token
        return self._tokenizer.token_to_id(name) if isinstance(name, str) else None

    def _find_eod(self, eod: str | None) -> int:
        names = _END_OF_DOCUMENT_NAMES if eod is None else (eod,)
        for name in names:
            token = self._tokenizer.token_to_id(name)
            if token is not None:
                return token
        raise UserError(f"{self.path} has no token that ends a document; add one of {', '.join(names)}")


def train_bpe(texts: Iterable[str], vocab_size: int, path: str | Path) -> HFTokenizer:
    """Train a byte-level BPE tokenizer with GPT-2's word splitting, save it as `path`, and return it.

    `vocab_size` counts the 256 bytes and <|endoftext|> (id 0) too; a small corpus may give fewer.
    Raises UserError below 257.
    """
    if vocab_size < _SMALLEST_BPE:
        raise UserError(
            f"a byte-level BPE vocabulary of {vocab_size} is too small; {_SMALLEST_BPE} is the least that works"
        )
    tokenizer = RustTokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    write_whole(Path(path), tokenizer.to_str(pretty=True).encode())
    return HFTokenizer(path)


def load_tokenizer(name: str | Path) -> Tokenizer:
    """Open "bytes", or the tokenizer.json at a path or in a folder."""
    return ByteTokenizer() if str(name) == "bytes" else HFTokenizer(name)
