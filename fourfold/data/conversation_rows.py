"""Rows of conversations in the forms that other programs write, as one form: messages, or a prompt and its completion.

No key of a row is dropped silently: it is used, known to be harmless, named with --ignore-key, or refused.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fourfold.parsing import parse_json

HARMLESS = (
    *("id", "uuid", "idx", "index", "source", "dataset", "split", "category", "task", "language", "license"),
    *("metadata", "model", "score", "url", "timestamp"),
)
"""Keys that describe where a row is from; so do all that end with "_id"."""

_CALLS = "function_call"
_SPEAKERS = {"human": "user", "gpt": "assistant", _CALLS: "assistant", "observation": "tool"}
"""Roles by their names in ShareGPT's rows, with LLaMA-Factory's names for tools."""
_ROLES = ("system", "user", "assistant", "tool")
_OPTIONS = ("tools", "chat_template_kwargs")
_FORMS = "messages, conversations, prompt and completion, or instruction and output"
_PAIRS = "prompt, chosen and rejected as texts, or chosen and rejected as lists of messages"


@dataclass(frozen=True)
class Conversation:
    """Messages that a chat template renders."""

    messages: Sequence[Mapping[str, Any]]
    prompt: int = 0
    """Messages at the beginning of which nothing is trained."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Variables of the template, such as tools."""


@dataclass(frozen=True)
class Completion:
    """A prompt, and the text that continues it."""

    prompt: str
    text: str


def is_harmless(key: str, ignored: Collection[str]) -> bool:
    """Return whether a key of a row or message may stay unused."""
    return key in HARMLESS or key.endswith("_id") or key in ignored


def read_row(row: Mapping[str, Any], ignored: Collection[str] = ()) -> list[Conversation | Completion]:
    """Return the conversation of a row of --format sft. Raises ValueError for a row of another form, or an unused key.

    A row has `messages` (OpenAI), `conversations` (ShareGPT), `prompt` and `completion` as texts or as lists of
    messages (TRL), or `instruction` and `output` (Alpaca).
    """
    row = {key: value for key, value in row.items() if key not in ignored and value is not None}
    prompt, completion = row.get("prompt"), row.get("completion")
    if "messages" in row:
        found = _conversation(row, row["messages"], used=["messages"])
    elif "conversations" in row:
        found = _conversation(row, row["conversations"], used=["conversations", "system"])
    elif isinstance(prompt, list) and isinstance(completion, list):
        found = _conversation(row, [*prompt, *completion], len(prompt), used=["prompt", "completion"])
    elif isinstance(prompt, str) and isinstance(completion, str):
        _check_keys(row, ["prompt", "completion"])
        return [Completion(prompt, completion)]
    elif isinstance(row.get("instruction"), str) and isinstance(row.get("output"), str):
        if not isinstance(more := row.get("input", ""), str):
            raise ValueError(f"input is a {type(more).__name__}, not text")
        asked = "\n".join(filter(None, [row["instruction"], more]))
        turns = [{"role": "user", "content": asked}, {"role": "assistant", "content": row["output"]}]
        found = _conversation(row, turns, used=["instruction", "input", "output", "text", "system"])
    else:
        raise ValueError(f"a row has {_FORMS}; this one has {_listed(row)}")
    return [found]


def read_pair(row: Mapping[str, Any], ignored: Collection[str] = ()) -> list[Conversation | Completion]:
    """Return the chosen and the rejected conversation of a row of --format preferences. Raises as ``read_row``."""
    row = {key: value for key, value in row.items() if key not in ignored and value is not None}
    prompt, answers = row.get("prompt"), [row.get("chosen"), row.get("rejected")]
    used = ["prompt", "chosen", "rejected"]
    if isinstance(prompt, str) and all(isinstance(answer, str) for answer in answers):
        _check_keys(row, used)
        return [Completion(prompt, str(answer)) for answer in answers]
    lists = [answer for answer in answers if isinstance(answer, list)]
    if len(lists) < 2 or not isinstance(prompt or [], list):
        raise ValueError(f"a row has {_PAIRS}; this one has {_listed(row)}")
    lists = [[*(prompt or []), *answer] for answer in lists]
    asked = len(prompt) if prompt else _shared_messages(*lists)
    return [_conversation(row, messages, asked, used=used) for messages in lists]


def _conversation(row: Mapping[str, Any], messages: Any, prompt: int = 0, *, used: list[str]) -> Conversation:
    _check_keys(row, [*used, *_OPTIONS])
    tools, more = row.get("tools"), row.get("chat_template_kwargs") or {}
    if isinstance(tools, str) and tools:
        try:
            tools = parse_json(tools)
        except ValueError as error:
            raise ValueError(f"tools is text that is not JSON ({error})") from error
    if not isinstance(tools or [], list) or not isinstance(more, dict):
        raise ValueError("tools is a list of functions, and chat_template_kwargs an object")
    if "tools" in more:
        raise ValueError("chat_template_kwargs has tools; write them as tools of the row")
    if not isinstance(messages, list):
        raise ValueError("messages is not a list of messages")
    if tools and "conversations" in used:
        bare = [isinstance(tool, dict) and "name" in tool for tool in tools]
        tools = [{"type": "function", "function": t} if b else t for t, b in zip(tools, bare, strict=True)]
    messages = [_message(number, message) for number, message in enumerate(messages, start=1)]
    if "system" in used and row.get("system"):
        messages.insert(0, {"role": "system", "content": row["system"]})
    return Conversation(messages, prompt, {"tools": tools, **more} if tools else more)


def _message(number: int, message: Any) -> Any:
    """A message of ShareGPT, from and value, as role and content, or as tool calls."""
    if not isinstance(message, dict) or "from" not in message or "role" in message:
        return message
    speaker = message["from"]
    role = _SPEAKERS.get(speaker, speaker) if isinstance(speaker, str) else None
    if role not in _ROLES:
        raise ValueError(
            f"message {number} is from {speaker!r}; rename it: {', '.join([*_SPEAKERS, *_ROLES])} are read"
        )
    if "content" in message:
        raise ValueError(f"message {number} has from and content; the text of from is in value")
    others = {key: value for key, value in message.items() if key not in ("from", "value")}
    if speaker == _CALLS:
        return {"role": role, "tool_calls": _calls(number, message.get("value")), **others}
    return {"role": role, "content": message.get("value"), **others}


def _calls(number: int, value: Any) -> list[dict[str, Any]]:
    """Return the tool calls in the value of a message from function_call: one, or several in a list."""
    try:
        calls = parse_json(value) if isinstance(value, str) else value
    except ValueError:
        calls = None
    calls = calls if isinstance(calls, list) else [calls]
    if not calls or not all(isinstance(call, dict) and {"name", "arguments"} <= call.keys() for call in calls):
        raise ValueError(f"message {number} is from {_CALLS}, so its value is JSON with a name and arguments")
    return [{"type": "function", "function": call} for call in calls]


def _check_keys(row: Mapping[str, Any], used: Collection[str]) -> None:
    unused = [key for key in row if key not in used and not is_harmless(key, ()) and row[key] not in ("", [], {})]
    if unused:
        key = ", ".join(unused)
        raise ValueError(
            f"the row has {key}, which would not be used; remove it, or drop it with "
            + " ".join(f"--ignore-key {name}" for name in unused)
        )


def _shared_messages(chosen: list[Any], rejected: list[Any]) -> int:
    """Messages with which both answers begin; without a prompt of its own they are the prompt."""
    pairs = enumerate(zip(chosen, rejected, strict=False))
    return next((number for number, (one, other) in pairs if one != other), 0)


def _listed(row: Mapping[str, Any]) -> str:
    return ", ".join(sorted(row)) or "nothing"
