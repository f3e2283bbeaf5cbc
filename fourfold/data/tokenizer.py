"""Tokenizers: plain bytes, or any Hugging Face tokenizer.json."""

import hashlib
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import decoders, models, pre_tokenizers, trainers

from fourfold.data.atomic_files import write_whole
from fourfold.errors import UserError
from fourfold.parsing import parse_json
from fourfold.untrusted_files import check_model_folder

END_OF_TEXT = "<|endoftext|>"
OWN = "auto"
"""Value of `bos_token` that selects the tokenizer's own beginning-of-text token."""
_USUAL_NAMES = (
    *(END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "[SEP]"),
    *("<｜end▁of▁sentence｜>", "[EOS]", "<EOS_TOKEN>", "<seed:eos>"),
)
OTHER_FORMATS = (
    "; `AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)` of transformers converts the formats of "
    "sentencepiece, tiktoken, and older models"
)
_SMALLEST_BPE = 257  # The 256 bytes and the end-of-document token.


class NoSuchToken(UserError):
    """The tokenizer lacks a token that the corpus has. This means that another tokenizer made the corpus."""


class Tokenizer(Protocol):
    """The interface of a tokenizer."""

    vocab_size: int
    """Largest id plus one."""
    eod_id: int
    """Id that ends a document."""
    bos_id: int | None
    """Id that begins a text. None if the tokenizer has no such token."""
    begins_documents: bool
    """Whether documents in a corpus begin with `bos_id`."""
    special_ids: tuple[int, ...]
    """Ids of the special tokens, in ascending order."""
    fingerprint: str
    """A digest of everything that determines the ids. Tokenizers with equal fingerprints give a text the same ids."""

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of each text, without special tokens."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of these ids, without special tokens."""
        ...


class ByteTokenizer:
    """A tokenizer whose ids 0 to 255 are the text's UTF-8 bytes. Id 256 marks the end of a document."""

    vocab_size: int = 257
    eod_id: int = 256
    bos_id: int | None = None
    begins_documents: bool = False
    special_ids: tuple[int, ...] = (256,)
    fingerprint: str = "bytes"

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the UTF-8 bytes of each text."""
        return [list(text.encode()) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of these bytes. Ids above 255 are dropped, and an incomplete character becomes U+FFFD."""
        return bytes(i for i in ids if i < 256).decode(errors="replace")


class HFTokenizer:
    """A tokenizer.json of the Hugging Face tokenizers library.

    The end-of-document token is `eod` if it is given. Otherwise it is the first of these that exists:
        1. `eos_token` in tokenizer_config.json
        2. the first special token among `eos_token_id` in generation_config.json, then in config.json
        3. the first special token with a usual name, such as <|endoftext|> or </s>

    The end-of-document token is always special, and it is also the padding token. Encoding a text never yields a
    special token: if the text contains the name of one, such as <|endoftext|>, the name is encoded as plain characters.
    The file's truncation and padding are switched off.

    Args:
        path: The file, or a folder with a tokenizer.json.
        eod: Token that ends a document, or its id.
        bos: Token that begins a document, its id, or "auto" for the `bos_token` of tokenizer_config.json (default:
            none).

    Raises:
        UserError: The file is missing, is not a tokenizer, or lacks a token. Or a config file next to it cannot be
            read, or the folder has an unsafe link.
        NoSuchToken: The tokenizer has no token with the id `eod` or `bos`.
    """

    def __init__(self, path: str | Path, eod: str | int | None = None, bos: str | int | None = None) -> None:
        self.path = Path(path)
        if self.path.is_dir():
            check_model_folder(self.path)
            self.path = self.path / "tokenizer.json"
        if not self.path.is_file():
            raise UserError(
                f'the tokenizer {self.path} does not exist; give the path of a tokenizer.json, or "bytes"'
                f"{OTHER_FORMATS}"
            )
        content = self.path.read_bytes()
        try:
            self._tokenizer = RustTokenizer.from_buffer(content)
        except Exception as error:  # The tokenizers library raises plain Exceptions, so catch them all.
            raise UserError(
                f"{self.path} is not a tokenizer.json of the tokenizers library: {error}{OTHER_FORMATS}"
            ) from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True
        self.vocab_size = max(self._tokenizer.get_vocab().values(), default=-1) + 1
        self.eod_id = self._find_eod() if eod is None else self._find_special(eod, "eos_token")
        own_bos = self._find_named("bos_token")
        self.begins_documents = bos is not None
        self.bos_id = own_bos if bos in (None, OWN) else self._find_special(bos, "bos_token")
        if self.begins_documents and self.bos_id is None:
            raise UserError(f"bos_token {OWN}: {self.path.parent} has no bos_token; name one of {self._specials()}")
        self.usually_begins = own_bos is not None and self._tokenizer.encode("").ids[:1] == [own_bos]
        self.special_ids = tuple(sorted({self.eod_id, *self._special_names()}))
        self._digest = hashlib.sha256(content)
        self.fingerprint = self._fingerprint(self.eod_id, self.bos_id if self.begins_documents else None)

    def as_usual(self) -> Self:
        """From now on, begin documents with the beginning-of-text token only if the tokenizer's file adds this token by
        default. Return this tokenizer."""
        self.begins_documents = self.usually_begins
        self.fingerprint = self._fingerprint(self.eod_id, self.bos_id if self.begins_documents else None)
        return self

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of each text, without special tokens. This uses all cores, unless the environment variable
        TOKENIZERS_PARALLELISM is false."""
        return [encoding.ids for encoding in self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of these ids, without special tokens."""
        return self._tokenizer.decode(list(ids))

    @lru_cache(maxsize=8)  # noqa: B019 (a job opens few tokenizers)
    def eod_of(self, fingerprint: str) -> int | None:
        """Return the id that ends documents in a corpus whose manifest has this fingerprint.

        The fingerprint depends on this id. So try every id, with and without this tokenizer's beginning-of-text token.
        Returns None if no fingerprint matches, because another tokenizer made the corpus.
        """
        ends = ((end, bos) for bos in {None, self.bos_id} for end in (self.eod_id, *range(self.vocab_size)))
        return next((end for end, bos in ends if self._fingerprint(end, bos) == fingerprint), None)

    def _fingerprint(self, eod: int, bos: int | None) -> str:
        digest = self._digest.copy()
        digest.update(f"\neod {eod}".encode() + (b"" if bos is None else f"\nbos {bos}".encode()))
        return digest.hexdigest()

    def _special_names(self) -> dict[int, str]:
        added = self._tokenizer.get_added_tokens_decoder()
        return {number: token.content for number, token in added.items() if token.special}

    def _specials(self) -> str:
        """Return the names of the special tokens, for a message."""
        names = list(self._special_names().values())
        return ", ".join(names[:10]) + (f" and {len(names) - 10} more" if len(names) > 10 else "") or "none"

    def _find_special(self, wanted: str | int | None, option: str) -> int:
        if isinstance(wanted, int):
            name = self._tokenizer.id_to_token(wanted) if 0 <= wanted < self.vocab_size else None
            if name is None:
                raise NoSuchToken(
                    f"{self.path} has no token {wanted}, the {option} of a corpus, so it is another tokenizer"
                )
            self._tokenizer.add_special_tokens([name])
            return wanted
        found = [number for number, name in self._special_names().items() if name == wanted]
        if not found:
            raise UserError(
                f"{option} {wanted} is not a special token of {self.path}; its special tokens are {self._specials()}"
            )
        return found[0]

    def _read_config(self, name: str) -> dict[str, Any]:
        """Return the JSON object in a file next to tokenizer.json. Return {} if there is no such file, or if the
        tokenizer's file has another name."""
        file = self.path.with_name(name)
        if self.path.name != "tokenizer.json" or not file.is_file():
            return {}
        try:
            content = parse_json(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise UserError(f"{file} cannot be read: {error}") from error
        if not isinstance(content, dict):
            raise UserError(f"{file} cannot be read: it is not a JSON object")
        return content

    def _find_named(self, key: str) -> int | None:
        """Return the id of the token that tokenizer_config.json names under `key`, or None. Mark the token as special,
        as transformers does."""
        token = self._read_config("tokenizer_config.json").get(key)
        name = token.get("content") if isinstance(token, dict) else token
        number = self._tokenizer.token_to_id(name) if isinstance(name, str) else None
        if number is not None:
            self._tokenizer.add_special_tokens([name])
        return number

    def _find_eod(self) -> int:
        if (named := self._find_named("eos_token")) is not None:
            return named
        special = self._special_names()
        for file in ("generation_config.json", "config.json"):
            ids = self._read_config(file).get("eos_token_id")
            for number in ids if isinstance(ids, list) else [ids]:
                if number in special:
                    return int(number)
        usual = [number for name in _USUAL_NAMES for number, each in special.items() if each == name]
        if not usual:
            raise UserError(
                f"{self.path} has no end-of-document token; name one of its special tokens ({self._specials()}) "
                "with --eos-token, or as eos_token in tokenizer_config.json"
            )
        return usual[0]


def as_document(ids: Sequence[int], tokenizer: Tokenizer) -> list[int]:
    """Return the ids of a text as a document of a corpus.

    An end-of-document token is added at the end, and a beginning-of-text token at the start if the tokenizer's
    documents begin with one.
    """
    return [*begin_of(tokenizer), *ids, tokenizer.eod_id]


def begin_of(tokenizer: Tokenizer) -> list[int]:
    """Return the ids that come before a document's text: the beginning-of-text token, or nothing."""
    return [tokenizer.bos_id] if tokenizer.begins_documents and tokenizer.bos_id is not None else []


def encode_completion(
    prompt: str, completion: str, tokenizer: Tokenizer
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Turn a prompt and its completion into one document. The two texts are tokenized separately, because at inference
    the prompt is tokenized alone.

    Returns:
        The token ids [tokens], and whether each token is trained [tokens]. The completion and the end-of-document token
        are trained.

    Raises:
        ValueError: The prompt or the completion has a lone surrogate.
    """
    asked, answered = tokenizer.encode_batch([check_encodable(prompt), check_encodable(completion)])
    ids = as_document([*asked, *answered], tokenizer)
    return np.array(ids, dtype=np.int64), np.arange(len(ids)) >= len(begin_of(tokenizer)) + len(asked)


def check_encodable(text: str) -> str:
    """Return the text unchanged. Raise ValueError if the text has a lone surrogate, which UTF-8 cannot encode. A JSON
    escape such as \\ud800 yields a lone surrogate."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("the text has a lone surrogate (half of a UTF-16 pair), which no tokenizer accepts") from None
    return text


def train_bpe(texts: Iterable[str], vocab_size: int, path: str | Path) -> HFTokenizer:
    """Train a byte-level BPE tokenizer with GPT-2's word splitting, and save it.

    Args:
        texts: The text to train on.
        vocab_size: Number of tokens, including the 256 bytes and <|endoftext|> (id 0). A small corpus may yield fewer
            tokens.
        path: Path of the tokenizer.json.

    Raises:
        UserError: `vocab_size` is below 257.
    """
    if vocab_size < _SMALLEST_BPE:
        raise UserError(
            f"a byte-level BPE vocabulary of {vocab_size} is too small; it must be at least {_SMALLEST_BPE}"
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


def load_tokenizer(name: str | Path, eod: str | int | None = None, bos: str | int | None = None) -> Tokenizer:
    """Open the built-in tokenizer "bytes", or a tokenizer.json.

    Args:
        name: "bytes", or the path of a tokenizer.json or its folder.
        eod: Token that ends a document, or its id (default: see `HFTokenizer`).
        bos: Token that begins a document, its id, or "auto" (default: none). See `HFTokenizer`.

    Raises:
        UserError: The tokenizer cannot be opened or lacks a token, or `eod` or `bos` names a token of "bytes".
    """
    if str(name) != "bytes":
        return HFTokenizer(name, eod, bos)
    if isinstance(eod, str) or bos is not None:
        raise UserError(
            "--eos-token and --bos-token name tokens of a tokenizer.json; 'bytes' has only its own end token"
        )
    return ByteTokenizer()
