"""Read rows of conversations in the common formats, and return messages or a prompt with its completion.

No part of a row is dropped silently. A row with an unused key is refused, unless the key only describes the row, has an
empty value, or is named with --ignore-key.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fourfold.parsing import parse_json

HARMLESS = (
    *("id", "uuid", "idx", "index", "source", "dataset", "split", "category", "task", "language", "license"),
    *("metadata", "model", "score", "url", "timestamp"),
)
"""Keys that only describe a row, such as its origin or its license. Keys that end in "_id" are harmless too."""

_CALLS = "function_call"
_SPEAKERS = {"human": "user", "gpt": "assistant", _CALLS: "assistant", "observation": "tool"}
"""Maps the names of speakers in ShareGPT rows to roles. LLaMA-Factory introduced the names function_call and
observation."""
_ROLES = ("system", "user", "assistant", "tool")
_OPTIONS = ("tools", "chat_template_kwargs")
_FORMS = "messages, conversations, prompt and completion, or instruction and output"
_PAIRS = "prompt, chosen and rejected as texts, or chosen and rejected as lists of messages"


@dataclass(frozen=True)
class Conversation:
    """A conversation for a chat template to render."""

    messages: Sequence[Mapping[str, Any]]
    prompt: int = 0
    """Number of messages at the start that are not trained."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Variables of the chat template and their values, such as tools."""


@dataclass(frozen=True)
class Completion:
    """A prompt and the text that completes it."""

    prompt: str
    text: str


def is_harmless(key: str, ignored: Collection[str]) -> bool:
    """Return whether a key of a row or message may remain unused."""
    return key in HARMLESS or key.endswith("_id") or key in ignored


def read_row(row: Mapping[str, Any], ignored: Collection[str] = ()) -> list[Conversation | Completion]:
    """Read one row of an input of `fourfold prepare --format sft`.

    A row has one of these forms:
        - `messages` (OpenAI)
        - `conversations` (ShareGPT)
        - `prompt` and `completion`, as texts or as lists of messages (TRL)
        - `instruction` and `output`, with an optional `input` (Alpaca)

    Args:
        row: The row's keys and values.
        ignored: Keys to drop.

    Returns:
        A list with one conversation or one completion.

    Raises:
        ValueError: The row has another form, or a key would not be used.
    """
    row = {key: value for key, value in row.items() if key not in ignored and value is not None}
    prompt, completion = row.get("prompt"), row.get("completion")
    if "messages" in row:
        found = _make_conversation(row, row["messages"], used=["messages"])
    elif "conversations" in row:
        found = _make_conversation(row, row["conversations"], used=["conversations", "system"])
    elif isinstance(prompt, list) and isinstance(completion, list):
        found = _make_conversation(row, [*prompt, *completion], len(prompt), used=["prompt", "completion"])
    elif isinstance(prompt, str) and isinstance(completion, str):
        _check_keys(row, ["prompt", "completion"])
        return [Completion(prompt, completion)]
    elif isinstance(row.get("instruction"), str) and isinstance(row.get("output"), str):
        if not isinstance(more := row.get("input", ""), str):
            raise ValueError(f"input is a {type(more).__name__}, not text")
        asked = "\n".join(filter(None, [row["instruction"], more]))
        turns = [{"role": "user", "content": asked}, {"role": "assistant", "content": row["output"]}]
        found = _make_conversation(row, turns, used=["instruction", "input", "output", "text", "system"])
    else:
        raise ValueError(f"a row needs {_FORMS}; this row has {_list_keys(row)}")
    return [found]


def read_pair(row: Mapping[str, Any], ignored: Collection[str] = ()) -> list[Conversation | Completion]:
    """Read one row of an input of `fourfold prepare --format preferences`: a prompt, a chosen and a rejected answer.

    A row has one of these forms:
        - `prompt`, `chosen`, and `rejected` as texts
        - `chosen` and `rejected` as lists of messages, with an optional `prompt` as a list

    Args:
        row: The row's keys and values.
        ignored: Keys to drop.

    Returns:
        The prompt with the chosen answer, then the prompt with the rejected answer.

    Raises:
        ValueError: The row has another form, or a key would not be used.
    """
    row = {key: value for key, value in row.items() if key not in ignored and value is not None}
    prompt, answers = row.get("prompt"), [row.get("chosen"), row.get("rejected")]
    used = ["prompt", "chosen", "rejected"]
    if isinstance(prompt, str) and all(isinstance(answer, str) for answer in answers):
        _check_keys(row, used)
        return [Completion(prompt, str(answer)) for answer in answers]
    lists = [answer for answer in answers if isinstance(answer, list)]
    if len(lists) < 2 or not isinstance(prompt or [], list):
        raise ValueError(f"a row needs {_PAIRS}; this row has {_list_keys(row)}")
    lists = [[*(prompt or []), *answer] for answer in lists]
    # If the row has no prompt, the prompt consists of the messages that both conversations begin with. If one
    # conversation is the beginning of the other conversation, there is no prompt.
    differ = (number for number, (one, other) in enumerate(zip(*lists, strict=False)) if one != other)
    asked = len(prompt) if prompt else next(differ, 0)
    return [_make_conversation(row, messages, asked, used=used) for messages in lists]


def _make_conversation(row: Mapping[str, Any], messages: Any, prompt: int = 0, *, used: list[str]) -> Conversation:
    _check_keys(row, [*used, *_OPTIONS])
    tools, more = row.get("tools"), row.get("chat_template_kwargs") or {}
    if isinstance(tools, str) and tools:
        try:
            tools = parse_json(tools)
        except ValueError as error:
            raise ValueError(f"tools is text that is not JSON ({error})") from error
    if not isinstance(tools or [], list) or not isinstance(more, dict):
        raise ValueError("tools must be a list of functions, and chat_template_kwargs an object")
    if "tools" in more:
        raise ValueError("chat_template_kwargs has tools; move them to the row's own key, tools")
    if not isinstance(messages, list):
        raise ValueError("messages is not a list of messages")
    if tools and "conversations" in used:
        bare = [isinstance(tool, dict) and "name" in tool for tool in tools]
        tools = [{"type": "function", "function": t} if b else t for t, b in zip(tools, bare, strict=True)]
    messages = [_convert_message(number, message) for number, message in enumerate(messages, start=1)]
    if "system" in used and row.get("system"):
        messages.insert(0, {"role": "system", "content": row["system"]})
    return Conversation(messages, prompt, {"tools": tools, **more} if tools else more)


def _convert_message(number: int, message: Any) -> Any:
    """Convert a ShareGPT message, which has the keys from and value, to a message with role and content or tool_calls.
    Return any other message unchanged."""
    if not isinstance(message, dict) or "from" not in message or "role" in message:
        return message
    speaker = message["from"]
    role = _SPEAKERS.get(speaker, speaker) if isinstance(speaker, str) else None
    if role not in _ROLES:
        raise ValueError(
            f"message {number} is from {speaker!r}; rename it to one of {', '.join([*_SPEAKERS, *_ROLES])}"
        )
    if "content" in message:
        raise ValueError(f"message {number} has from and content; a message with from has its text in value")
    others = {key: value for key, value in message.items() if key not in ("from", "value")}
    if speaker == _CALLS:
        return {"role": role, "tool_calls": _parse_calls(number, message.get("value")), **others}
    return {"role": role, "content": message.get("value"), **others}


def _parse_calls(number: int, value: Any) -> list[dict[str, Any]]:
    """Return the tool calls in the value of a function_call message: one call, or a list of calls."""
    try:
        calls = parse_json(value) if isinstance(value, str) else value
    except ValueError:
        calls = None
    calls = calls if isinstance(calls, list) else [calls]
    if not calls or not all(isinstance(call, dict) and {"name", "arguments"} <= call.keys() for call in calls):
        raise ValueError(f"message {number} is from {_CALLS}, so its value must be JSON with a name and arguments")
    return [{"type": "function", "function": call} for call in calls]


def _check_keys(row: Mapping[str, Any], used: Collection[str]) -> None:
    unused = [key for key in row if key not in used and not is_harmless(key, ()) and row[key] not in ("", [], {})]
    if unused:
        keys, options = ", ".join(unused), " ".join(f"--ignore-key {name}" for name in unused)
        raise ValueError(f"the row has {keys}, which would not be used; remove it, or drop it with {options}")


def _list_keys(row: Mapping[str, Any]) -> str:
    return ", ".join(sorted(row)) or "nothing"
