"""Open tokenizers of the transformers library, with the interface of fourfold's own tokenizers."""

import itertools
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from fourfold.data.tokenizer import ByteTokenizer, HFTokenizer, Tokenizer
from fourfold.errors import UserError, first_line
from fourfold.extras import import_extra
from fourfold.untrusted_files import check_model_folder

FOREIGN_ERRORS = (OSError, ValueError, ImportError, RuntimeError, AttributeError, LookupError, TypeError)
"""Exceptions that transformers raises if it cannot load a tokenizer or a model."""

REMOTE_CODE = "trust_remote_code"
"""Argument that lets transformers run code that comes with a model. If a model needs such code, the error message of
transformers names this argument."""


class TransformersTokenizer:
    """The transformers tokenizer of a model, with the interface of fourfold's own tokenizers.

    Args:
        name: The model's folder or Hub id.
        special_tokens: Whether `encode_batch` adds the special tokens that the tokenizer adds by default.

    Raises:
        UserError: The tokenizer cannot be opened.
    """

    def __init__(self, name: str, special_tokens: bool = True) -> None:
        self.tokenizer = open_tokenizer(name)
        self.vocab_size = len(self.tokenizer)
        self.special_ids = tuple(sorted(self.tokenizer.all_special_ids))
        self.eod_id: int | None = self.tokenizer.eos_token_id
        self.bos_id: int | None = self.tokenizer.bos_token_id
        self._special_tokens = special_tokens
        self._name = name

    @cached_property
    def file(self) -> HFTokenizer | None:
        """Return the tokenizer.json of the folder or Hub id, opened in the same way as `fourfold prepare` opens it.

        Returns None if there is no such file, or if it cannot be opened.
        """
        from transformers.utils.hub import cached_file

        try:
            file = cached_file(self._name, "tokenizer.json")
            return None if file is None else HFTokenizer(file)
        except (OSError, UserError):  # The tokenizer has another format.
            return None

    @property
    def fingerprint(self) -> str | None:
        """Return the fingerprint of `file`, or None if `file` is None."""
        return None if self.file is None else self.file.fingerprint

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of each text."""
        ids: list[list[int]] = self.tokenizer(list(texts), add_special_tokens=self._special_tokens)["input_ids"]
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of these ids without special tokens."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True))

    def chat_prompt(self, turns: Sequence[str]) -> str:
        """Render a chat with the chat template, up to the point where the model's next answer begins. Later calls of
        ``encode_batch`` add no special tokens, because the chat template writes them.

        Args:
            turns: The messages, in order. The user's messages and the model's answers alternate. The first and the last
                message are the user's.

        Raises:
            UserError: The template refuses the messages.
        """
        self._special_tokens = False
        roles = itertools.cycle(["user", "assistant"])
        talk = [{"role": role, "content": turn} for role, turn in zip(roles, turns, strict=False)]
        try:
            return str(self.tokenizer.apply_chat_template(talk, tokenize=False, add_generation_prompt=True))
        except Exception as error:  # A template may raise any exception.
            raise UserError(f"the chat template of {self._name} refuses the message: {first_line(error)}") from error


AnyTokenizer = Tokenizer | TransformersTokenizer


def has_ids_of(tokenizer: AnyTokenizer, fingerprint: str) -> bool:
    """Return whether the tokenizer may have made a corpus whose manifest has this fingerprint.

    The corpus may end its documents with any token, so all tokens are tried as the end token. The answer is also True
    if the tokenizer has no tokenizer.json, because it then has no fingerprint to compare.
    """
    ours = tokenizer.file if isinstance(tokenizer, TransformersTokenizer) else tokenizer
    if isinstance(ours, HFTokenizer):
        return ours.eod_of(fingerprint) is not None
    return ours is None or ours.fingerprint == fingerprint


def eod_of(tokenizer: AnyTokenizer, fingerprint: str | None) -> int | None:
    """Return the id that ends documents in a corpus whose manifest has this fingerprint.

    Without a fingerprint, or if another tokenizer made the corpus, return the id that `fourfold prepare` uses by
    default. Returns None if the tokenizer has no such token.
    """
    ours = tokenizer.file if isinstance(tokenizer, TransformersTokenizer) else tokenizer
    made_with = ours.eod_of(fingerprint) if isinstance(ours, HFTokenizer) and fingerprint is not None else None
    return (ours or tokenizer).eod_id if made_with is None else made_with


NO_CORPORA = (
    "the corpora of the run file were not found, and their paths are relative to the folder where training started"
)


def load_any_tokenizer(name: str | None) -> AnyTokenizer:
    """Open the tokenizer "bytes", or the tokenizer of a model's folder or Hub id.

    Raises:
        UserError: `name` is None, or the tokenizer cannot be opened.
    """
    if name is None:
        raise UserError(f"the model has no tokenizer: {NO_CORPORA}; start there, or name a tokenizer with --tokenizer")
    return ByteTokenizer() if name == "bytes" else TransformersTokenizer(name)


def open_tokenizer(name: str) -> Any:
    """Open the transformers tokenizer of a folder or a Hub id.

    Raises:
        UserError: transformers is not installed, the folder has an unsafe link, there is no usable tokenizer, or the
            tokenizer needs code that comes with the model.
    """
    if Path(name).is_dir():
        check_model_folder(Path(name))
    transformers = import_transformers()
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except FOREIGN_ERRORS as error:
        raise UserError(_no_tokenizer(name, needs_its_code(error) or first_line(error))) from error
    # If there are no tokenizer files, transformers makes an empty tokenizer from the model type. Refuse it.
    if len(tokenizer) <= len(tokenizer.all_special_ids):
        raise UserError(_no_tokenizer(name, "it has no vocabulary"))
    return tokenizer


def needs_its_code(error: Exception) -> str | None:
    """If transformers raised this error because the model needs its own code, return a sentence that says so.
    Otherwise return None."""
    if REMOTE_CODE not in str(error):
        return None
    return "it needs its own Python code, but fourfold never runs such code; use a model that transformers has built in"


def import_transformers() -> Any:
    """Import the transformers library and turn off its progress bars. Raise UserError if it is not installed."""
    transformers = import_extra("transformers", "huggingface", "Hugging Face models and chat templates need")
    transformers.utils.logging.disable_progress_bar()
    return transformers


def _no_tokenizer(name: str, reason: str) -> str:
    return f"cannot load the tokenizer of {name} ({reason}); name one with --tokenizer: a folder, or bytes"
