"""Tokenizes a conversation by the chat template of a model, and marks the tokens of the assistant."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fourfold.data.tokenizer import Tokenizer
from fourfold.data.transformers_tokenizer import open_tokenizer
from fourfold.errors import UserError

Message = Mapping[str, Any]

_MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")


class ChatTemplate:
    """The tokenizer in a folder of transformers, with its chat template or another one.

    Tokens are those that transformers' `apply_chat_template` gives for the whole conversation. The assistant's text
    is the part that the template marks with {% generation %}. With a template without marks it is the text that each
    answer adds to the prompt before it, up to the end of the turn, without whitespace after that. A token is the
    assistant's if its first character is.

    Raises UserError without transformers, a tokenizer or a template.
    """

    def __init__(self, folder: str | Path, template: str | Path | None = None) -> None:
        if str(folder) == "bytes":
            raise UserError(
                "the tokenizer 'bytes' has no chat template, so messages cannot be rendered; give the folder of a "
                "model, or rows of prompt and completion"
            )
        self.folder = Path(folder) if Path(folder).is_dir() else Path(folder).parent
        self._tokenizer = open_tokenizer(str(self.folder))
        if template is not None:
            try:
                self._tokenizer.chat_template = Path(template).read_text(encoding="utf-8")
            except (OSError, ValueError) as error:
                raise UserError(f"the chat template {template} cannot be read: {error}") from error
        if not isinstance(self._tokenizer.chat_template, str):
            raise UserError(
                f"{self.folder} has no chat template (chat_template.jinja, or in tokenizer_config.json); give one with "
                "--chat-template"
            )
        self._special = tuple(self._tokenizer.all_special_tokens) + tuple(
            token.content for token in self._tokenizer.added_tokens_decoder.values() if token.special
        )

    @property
    def source(self) -> str:
        """The text of the template."""
        return str(self._tokenizer.chat_template)

    def encode(self, messages: Sequence[Message], prompt: int = 0) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Return the tokens, and whether each is trained. Raises ValueError for an invalid conversation.

        prompt: messages at the beginning of which nothing is trained, answers of the assistant included.
        """
        _check(messages)
        text = self._render(messages)
        encoding = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        begins = np.array([begin for begin, _ in encoding["offset_mapping"]], dtype=np.int64)
        if _MARKED.search(self.source):
            marked = self._applied(messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
            trained = np.array(marked["assistant_masks"], dtype=bool)
        else:
            trained = np.zeros(len(begins), dtype=bool)
            for begin, end in self._answers(messages, text):
                trained |= (begins >= begin) & (begins < end)
        if prompt:
            asked = self._render(messages[:prompt])
            if not text.startswith(asked):
                raise ValueError("the chat template writes the prompt otherwise where an answer follows it")
            trained &= begins >= len(asked)
        return np.array(encoding["input_ids"], dtype=np.int64), trained

    def _answers(self, messages: Sequence[Message], text: str) -> list[tuple[int, int]]:
        """Characters [begin, end) of every answer in the whole text."""
        found: list[tuple[int, int]] = []
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            prompt = self._render(messages[:number], add_generation_prompt=True)
            answered = self._render(messages[: number + 1])
            if not (answered.startswith(prompt) and text.startswith(answered)):
                raise ValueError(
                    f"the template renders message {number + 1} differently when others follow, so its tokens cannot "
                    "be identified; mark answers in the template with {% generation %} … {% endgeneration %}"
                )
            trimmed = answered.rstrip()
            end = len(trimmed) if trimmed.endswith(self._special) else len(answered)
            found.append((len(prompt), end))
        return found

    def _applied(self, messages: Sequence[Message], **options: Any) -> Any:
        """Render the messages as text, ids or a table of both, depending on the options."""
        return self._tokenizer.apply_chat_template([dict(message) for message in messages], **options)

    def _render(self, messages: Sequence[Message], add_generation_prompt: bool = False) -> str:
        try:
            return str(self._applied(messages, tokenize=False, add_generation_prompt=add_generation_prompt))
        except Exception as error:  # a template may raise any exception
            raise ValueError(f"the chat template refuses the conversation: {error}") from error


def encode_completion(
    prompt: str, completion: str, tokenizer: Tokenizer
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """A prompt and its completion, each tokenized by itself as at inference, and the end of the document."""
    asked, answered = tokenizer.encode_batch([prompt, completion])
    ids = [*asked, *answered, tokenizer.eod_id]
    return np.array(ids, dtype=np.int64), np.arange(len(ids)) >= len(asked)


def _check(messages: Sequence[Message]) -> None:
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise ValueError("messages is not a list of messages")
    for number, message in enumerate(messages, start=1):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str) or "content" not in message:
            raise ValueError(f"message {number} is not an object with role and content")
    if all(message["role"] != "assistant" for message in messages):
        raise ValueError("no message is the assistant's, so there is nothing to train")
