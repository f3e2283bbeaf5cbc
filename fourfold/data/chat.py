"""Tokenize a conversation with a model's chat template, and mark the assistant's tokens, which are trained."""

import inspect
import json
import re
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fourfold.data.conversation_rows import is_harmless
from fourfold.data.tokenizer import check_encodable
from fourfold.data.transformers_tokenizer import open_tokenizer
from fourfold.errors import UserError
from fourfold.parsing import parse_json
from fourfold.untrusted_files import read_text_file

Message = Mapping[str, Any]

_MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")
_PROBE = "probe"
_ALWAYS_USED = ("role", "content")


class ChatTemplate:
    """Tokenizes conversations with a transformers tokenizer and a chat template: the tokenizer's own, or your file.

    The tokens are the same as transformers' `apply_chat_template` returns for the whole conversation.

    A template can mark the assistant's text with {% generation %}. If a template has no such marks, this class finds
    each answer by rendering the messages twice: without the answer and with the answer. The text that the second
    rendering adds is the answer, up to and including the token that ends the answer. A token belongs to the answer if
    the token's first character does.

    Keys of a message:
        - `weight`: 0 leaves an answer out of training.
        - Any other key that the template does not use is an error. Exceptions: keys with an empty value, the `name` of
          a tool's message, keys that only describe the message (`is_harmless`), and keys in `ignored`.

    Args:
        folder: Folder of a model, or a file in it.
        template: File of the chat template. None uses the tokenizer's own template.
        ignored: Keys of messages to drop.

    Raises:
        UserError: transformers is not installed, the folder is "bytes" or has no tokenizer or no template, or the
            template file cannot be read.
    """

    def __init__(self, folder: str | Path, template: str | Path | None = None, ignored: Collection[str] = ()) -> None:
        if str(folder) == "bytes":
            raise UserError(
                "the tokenizer 'bytes' has no chat template, so it cannot render messages; give the folder of a "
                "model, or rows with prompt and completion"
            )
        self.folder = Path(folder) if Path(folder).is_dir() else Path(folder).parent
        self.ignored = ignored
        self._tokenizer = open_tokenizer(str(self.folder))
        if template is not None:
            self._tokenizer.chat_template = read_text_file(
                Path(template), "--chat-template", "give a file with a Jinja template"
            )
        found = self._tokenizer.chat_template
        if isinstance(found, dict) and "default" not in found:
            raise UserError(
                f"{self.folder} has several chat templates ({', '.join(sorted(found))}), but none is named default; "
                "give one with --chat-template"
            )
        if found is None:
            raise UserError(
                f"{self.folder} has no chat template (chat_template.jinja, or in tokenizer_config.json); give one with "
                "--chat-template"
            )
        self._special = tuple(self._tokenizer.all_special_tokens) + tuple(
            token.content for token in self._tokenizer.added_tokens_decoder.values() if token.special
        )

    @property
    def _taken(self) -> set[str]:
        """Return the names of variables that a row cannot set, because transformers or fourfold sets them."""
        parameters = inspect.signature(self._tokenizer.apply_chat_template).parameters
        return {"self", "messages", *parameters} - {"tools", "documents"}

    @property
    def source(self) -> str:
        """Return the text of the template. If there are several templates, join their texts."""
        found = self._tokenizer.chat_template
        return "".join(found.values()) if isinstance(found, dict) else str(found)

    def encode(
        self, messages: Sequence[Message], prompt: int = 0, options: Mapping[str, Any] | None = None
    ) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Tokenize a conversation.

        Args:
            messages: The conversation.
            prompt: Number of messages at the start that are not trained, even if they are answers of the assistant.
            options: Variables of the template, such as tools.

        Returns:
            The token ids [tokens], and whether each token is trained [tokens].

        Raises:
            ValueError: A message or an option is invalid, the template refuses the conversation or does not use all of
                it, or the answers cannot be found in the rendered text.
        """
        options = options or {}
        if taken := options.keys() & self._taken:
            name = min(taken)
            raise ValueError(f"chat_template_kwargs has {name}, which is not a variable of the template; remove {name}")
        template = str(self._tokenizer.get_chat_template(None, options.get("tools")))
        weights = _read_weights(messages)
        messages = [self._prepare_message(number, message) for number, message in enumerate(messages, start=1)]
        text = check_encodable(self._render(messages, options))
        self._check_used(messages, options, text, template)
        encoding = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        begins = np.array([begin for begin, _ in encoding["offset_mapping"]], dtype=np.int64)
        if _MARKED.search(template):
            marked = self._apply_template(messages, options, tokenize=True, return_assistant_tokens_mask=True)
            trained = _unmark_untrained(np.array(marked["assistant_masks"], dtype=bool), weights)
        else:
            trained = np.zeros(len(begins), dtype=bool)
            for begin, end in self._find_answers(messages, options, text, weights):
                trained |= (begins >= begin) & (begins < end)
        if prompt:
            asked = self._render(messages[:prompt], options)
            if not text.startswith(asked):
                raise ValueError("the chat template renders the prompt differently when an answer follows it")
            trained &= begins >= len(asked)
        return np.array(encoding["input_ids"], dtype=np.int64), trained

    def _find_answers(
        self, messages: Sequence[Message], options: Mapping[str, Any], text: str, weights: Sequence[int | None]
    ) -> list[tuple[int, int]]:
        """Return the character range [begin, end) of every answer in the text, except answers with weight 0. Raise
        ValueError if an answer cannot be found."""
        found: list[tuple[int, int]] = []
        tail = self._find_tail(options)
        for number, weight in enumerate(weights):
            if not weight:
                continue
            answered = self._render(messages[: number + 1], options).removesuffix(tail)
            if number == 0:  # transformers cannot render zero messages.
                prompt = answered[: _find_first_answer(answered, self._header, messages[0].get("content"))]
            else:
                prompt = self._render(messages[:number], options, add_generation_prompt=True).removesuffix(tail)
            if not (answered.startswith(prompt) and text.startswith(answered)):
                when = "when more messages follow" if answered.startswith(prompt) else "with add_generation_prompt"
                raise ValueError(
                    f"the template renders message {number + 1} differently {when}, so its tokens cannot be "
                    "identified; give --chat-template a file that marks answers with {% generation %} … "
                    "{% endgeneration %}, such as qwen3_training.jinja for Qwen 3 (TRL has such files for many models: "
                    "https://github.com/huggingface/trl/tree/main/trl/chat_templates)"
                )
            trimmed = answered.rstrip()
            end = len(trimmed) if trimmed.endswith(self._special) else len(answered)
            found.append((len(prompt), end))
        return found

    def _check_used(self, messages: Sequence[Message], options: Mapping[str, Any], text: str, template: str) -> None:
        """Raise ValueError if the template does not use the row's tools, a variable that the row sets, or a key of a
        message."""
        remedy = "remove it, or drop it with --ignore-key"
        for key in options:
            if key == "tools" and self._try_to_render(messages, {**options, key: None}) == text:
                raise ValueError(f"the row has tools, but the chat template does not use it; {remedy} tools")
            if not re.search(rf"\b{re.escape(key)}\b", template):
                raise ValueError(f"the chat template has no variable {key}; {remedy} chat_template_kwargs")
        given = (key for message in messages for key, value in message.items() if value not in ("", [], {}))
        for key in dict.fromkeys(given):
            if key in _ALWAYS_USED or is_harmless(key, self.ignored):
                continue
            where = [number for number, message in enumerate(messages, start=1) if key in message]
            if key == "name" and all(messages[number - 1]["role"] == "tool" for number in where):
                # A template may ignore the name of a tool's message, just as it may ignore the message's tool_call_id.
                continue
            without = [{name: value for name, value in message.items() if name != key} for message in messages]
            if self._try_to_render(without, options) == text:
                remedy = f"{remedy} {key}" if key != "tool_calls" else "give --chat-template a file that uses them"
                raise ValueError(f"message {where[0]} has {key}, which the chat template does not use; {remedy}")

    def _prepare_message(self, number: int, message: Message) -> dict[str, Any]:
        """Return a message as the template expects it: without nulls, `weight`, and ignored keys, and with its content
        as text or as parts."""
        kept = {key: value for key, value in message.items() if value is not None and key not in self.ignored}
        kept.pop("weight", None)
        content = kept.get("content")
        if isinstance(content, list):
            texts = [_read_part(number, part) for part in content]
            kept["content"] = [_part(text) for text in texts] if self._takes_parts else "".join(texts)
        elif isinstance(content, str) and not self._takes_text:
            kept["content"] = [_part(content)]
        elif not isinstance(content, str) and not (content is None and kept.get("tool_calls")):
            raise ValueError(f"message {number} needs content that is text or a list of text parts")
        if calls := kept.get("tool_calls"):
            if not isinstance(calls, list):
                raise ValueError(f"message {number} has tool_calls that are not a list")
            kept["tool_calls"] = [self._prepare_call(number, call) for call in calls]
        return kept

    def _prepare_call(self, number: int, call: Any) -> Any:
        """Return a tool call with its arguments as an object, or as JSON text if the template prints the arguments
        unchanged."""
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict):
            raise ValueError(f"message {number} has a tool call that is not an object with a function")
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            try:
                arguments = parse_json(arguments or "{}")
            except ValueError as error:
                raise ValueError(f"message {number} has a tool call whose arguments are not JSON ({error})") from error
        if not self._takes_objects and arguments is not None:
            arguments = json.dumps(arguments, ensure_ascii=False)
        function = {**function, "arguments": arguments}
        return {**call, "function": function} if "function" in call else function

    @cached_property
    def _takes_text(self) -> bool:
        """Return whether the template accepts a message's content as plain text, not only as a list of parts."""
        return not self._takes_parts or _PROBE in (self._try_to_render([_user(_PROBE)]) or "")

    @cached_property
    def _takes_parts(self) -> bool:
        """Return whether the template iterates over a list of content parts. Some templates print the list itself
        instead, in Python's or JSON's notation."""
        text = self._try_to_render([_user([_part(_PROBE)])]) or ""
        return _PROBE in text and "[{" not in text

    @cached_property
    def _takes_objects(self) -> bool:
        """Return whether the template expects the arguments of a tool call as an object, not as JSON text."""
        objects, texts = (
            self._try_to_render([_user(_PROBE), _calling(each)]) for each in ({_PROBE: 1}, json.dumps({_PROBE: 1}))
        )
        return texts is None if objects is None else f"{{'{_PROBE}'" not in objects

    @cached_property
    def _header(self) -> str:
        """Return the text that the template writes before an answer."""
        asked = self._try_to_render([_user(_PROBE)]) or ""
        return (self._try_to_render([_user(_PROBE)], add_generation_prompt=True) or "").removeprefix(asked)

    def _find_tail(self, options: Mapping[str, Any]) -> str:
        """Return the text that the template, given these options, appends to every conversation."""
        if not options:
            return ""
        plain, full = self._try_to_render([_user(_PROBE)]), self._try_to_render([_user(_PROBE)], options)
        return full.removeprefix(plain) if plain and full and full.startswith(plain) else ""

    def _apply_template(self, messages: Sequence[Message], options: Mapping[str, Any], **more: Any) -> Any:
        """Render the messages as text, or with `tokenize=True` as a dictionary of token ids and masks."""
        return self._tokenizer.apply_chat_template([dict(message) for message in messages], **options, **more)

    def _render(
        self, messages: Sequence[Message], options: Mapping[str, Any], add_generation_prompt: bool = False
    ) -> str:
        try:
            return str(
                self._apply_template(messages, options, tokenize=False, add_generation_prompt=add_generation_prompt)
            )
        except Exception as error:  # A template may raise any exception.
            raise ValueError(f"the chat template refuses the conversation: {error}") from error

    def _try_to_render(
        self, messages: Sequence[Message], options: Mapping[str, Any] | None = None, add_generation_prompt: bool = False
    ) -> str | None:
        """Render the messages. Return None if the template refuses them."""
        try:
            return self._render(messages, options or {}, add_generation_prompt)
        except ValueError:
            return None


def _read_weights(messages: Sequence[Message]) -> list[int | None]:
    """Return one value per message: 1 for a trained answer, 0 for an answer with weight 0, None for other messages."""
    if not messages:
        raise ValueError("messages is not a list of messages")
    found: list[int | None] = []
    for number, message in enumerate(messages, start=1):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ValueError(f"message {number} is not an object with role and content")
        is_answer, weight = message["role"] == "assistant", message.get("weight")
        if weight not in ((None, 0, 1) if is_answer else (None, 0)):
            raise ValueError(
                f"message {number} has weight {weight!r}; only answers can have a weight, 0 (not trained) or 1"
            )
        found.append((1 if weight is None else int(weight)) if is_answer else None)
    if all(weight is None for weight in found):
        raise ValueError("no message is the assistant's, so there is nothing to train")
    return found


def _unmark_untrained(marked: NDArray[np.bool_], weights: Sequence[int | None]) -> NDArray[np.bool_]:
    """Return `marked`, the flags of the answers' tokens, with False for the tokens of answers with weight 0."""
    answers = [weight for weight in weights if weight is not None]
    if all(answers):
        return marked
    edges = np.flatnonzero(np.diff(marked, prepend=False, append=False)).reshape(-1, 2)
    if len(edges) != len(answers):
        raise ValueError(
            f"the chat template marks {len(edges)} parts in {len(answers)} answers, so an answer of weight 0 cannot be "
            "identified; remove it from the row"
        )
    for weight, (begin, end) in zip(answers, edges.tolist(), strict=True):
        marked[begin:end] &= bool(weight)
    return marked


def _find_first_answer(text: str, header: str, content: Any) -> int:
    """Return the position where the answer begins in the text of a conversation whose first message is an answer."""
    sought = header or (content if isinstance(content, str) else "").strip()
    at = text.find(sought) if sought else -1
    if at < 0:
        raise ValueError(
            "the first message is the assistant's, and the chat template does not show where it begins; begin with a "
            "user message, or mark answers in the template with {% generation %} … {% endgeneration %}"
        )
    return at + len(header)


def _read_part(number: int, part: Any) -> str:
    """Return the text of one part of a message's content."""
    if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        raise ValueError(f"message {number} has a part of type {kind}; only parts of type text can be trained")
    if unused := [key for key, value in part.items() if key not in ("type", "text") and value is not None]:
        raise ValueError(f"message {number} has a part with {unused[0]}, which would not be used; remove it")
    return str(part["text"])


def _part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def _user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def _calling(arguments: Any) -> dict[str, Any]:
    call = {"id": "123456789", "type": "function", "function": {"name": _PROBE, "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}
