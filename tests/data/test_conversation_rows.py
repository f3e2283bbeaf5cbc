"""Every key of a conversation row is used in the corpus or refused by name."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from tiny_chat import CHATML, MARKED, MISTRAL, make_chat_tokenizer, write_rows

from fourfold.data.chat import ChatTemplate
from fourfold.data.indexed import IndexedDataset
from fourfold.data.prepare_conversations import RowReader, prepare_conversations
from fourfold.data.tokenizer import load_tokenizer
from fourfold.errors import UserError

CALLS = CHATML.replace(
    "{{ m['content'] }}",
    "{{ m['content'] }}{% for call in m.tool_calls or [] %}"
    "<call>{{ call.function.arguments | tojson }}</call>{% endfor %}",
)
TOOLS = "{% if tools %}<tools>{{ tools | tojson }}</tools>{% endif %}" + CALLS
TOOL = {"type": "function", "function": {"name": "jump", "parameters": {}}}
ASK, WRONG, GOOD = (
    {"role": role, "content": text}
    for role, text in zip(("user", *["assistant"] * 2), ("fox?", "no", "yes"), strict=True)
)
PART = [{"type": "text", "text": "fo"}, {"type": "text", "text": "x?"}]
PARTS = CHATML.replace("{{ m['content'] }}", "{% for part in m['content'] %}{{ part.text }}{% endfor %}")
BOTH = CHATML.replace(
    "{{ m['content'] }}",
    "{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}[{{ p.text }}]{% endfor %}{% endif %}",
)


def said(*messages: dict) -> str:
    return "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages)


def calling(arguments: object, **more: object) -> dict:
    return {
        "role": "assistant",
        "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}],
        **more,
    }


def rendered(tmp_path: Path, template: str, row: dict, **options: object) -> tuple[str, str]:
    """Return the text of a row, and the part of it that is trained."""
    transformers = pytest.importorskip("transformers")
    folder = make_chat_tokenizer(tmp_path / "tokenizer", template)
    prepare_conversations([write_rows(tmp_path / "rows.jsonl", [row])], tmp_path / "c", tokenizer=folder, **options)
    ids, flags = (IndexedDataset(tmp_path / name) for name in ("c", "c-trained"))
    tokens, trained = (each.read(0, each.tokens).astype(int) for each in (ids, flags))
    decode = transformers.AutoTokenizer.from_pretrained(folder).decode
    return decode(tokens), decode(tokens[trained == 1])


SHAREGPT = [{"from": "human", "value": "fox?"}, {"from": "gpt", "value": "yes"}]
THINKS = CHATML + "{% if enable_thinking is defined %}<thinking:{{ enable_thinking }}>{% endif %}"
ROWS = {
    "tools": (
        TOOLS,
        {"messages": [ASK, GOOD], "tools": [TOOL]},
        f"<tools>[{json.dumps(TOOL)}]</tools>{said(ASK, GOOD)}",
        "yes<|im_end|>",
    ),
    "tools as JSON": (
        TOOLS,
        {"messages": [ASK, GOOD], "tools": json.dumps([TOOL])},
        f"<tools>[{json.dumps(TOOL)}]</tools>{said(ASK, GOOD)}",
        "yes<|im_end|>",
    ),
    "no tools": (
        CHATML,
        {"messages": [ASK, GOOD], "tools": [], "chat_template_kwargs": None, "id": 3, "prompt_id": "x"},
        said(ASK, GOOD),
        "yes<|im_end|>",
    ),
    "weight": (
        CHATML,
        {"messages": [ASK, {**WRONG, "weight": 0}, ASK, {**GOOD, "weight": 1}]},
        said(ASK, WRONG, ASK, GOOD),
        "yes<|im_end|>",
    ),
    "weight, marked": (
        MARKED,
        {"messages": [ASK, {**WRONG, "weight": 0}, ASK, GOOD]},
        said(ASK, WRONG, ASK, GOOD).replace(">\n<", "><").rstrip(),
        "yes<|im_end|>",
    ),
    "parts as text": (CHATML, {"messages": [{**ASK, "content": PART}, GOOD]}, said(ASK, GOOD), "yes<|im_end|>"),
    "parts": (PARTS, {"messages": [{**ASK, "content": PART}, GOOD]}, said(ASK, GOOD), "yes<|im_end|>"),
    "text as parts": (PARTS, {"messages": [ASK, GOOD]}, said(ASK, GOOD), "yes<|im_end|>"),
    "parts as parts": (
        BOTH,
        {"messages": [{**ASK, "content": PART}, GOOD]},
        said({**ASK, "content": "[fo][x?]"}, GOOD),
        "yes<|im_end|>",
    ),
    "kwargs": (
        THINKS,
        {"messages": [ASK, GOOD], "chat_template_kwargs": {"enable_thinking": False}},
        said(ASK, GOOD) + "<thinking:False>",
        "yes<|im_end|>",
    ),
    "arguments": (
        CALLS,
        {"messages": [ASK, calling('{"x": "ü"}', content=None)]},
        said(ASK, {"role": "assistant", "content": '<call>{"x": "ü"}</call>'}),
        '<call>{"x": "ü"}</call><|im_end|>',
    ),
    "arguments as text": (
        CALLS.replace(" | tojson", ""),
        {"messages": [ASK, calling({"x": "ü"})]},
        said(ASK, {"role": "assistant", "content": '<call>{"x": "ü"}</call>'}),
        '<call>{"x": "ü"}</call><|im_end|>',
    ),
    "tool answers": (
        CALLS,
        {"messages": [ASK, {"role": "tool", "name": "f", "tool_call_id": "1", "content": "3"}, GOOD]},
        said(ASK, {"role": "tool", "content": "3"}, GOOD),
        "yes<|im_end|>",
    ),
    "ShareGPT": (
        CHATML,
        {"conversations": SHAREGPT, "system": "Be."},
        said({"role": "system", "content": "Be."}, ASK, GOOD),
        "yes<|im_end|>",
    ),
    "ShareGPT with tools": (
        TOOLS,
        {
            "conversations": [
                SHAREGPT[0],
                {"from": "function_call", "value": '{"name": "jump", "arguments": {"x": 1}}'},
                {"from": "observation", "value": "3"},
                {"from": "function_call", "value": json.dumps([{"name": "jump", "arguments": {}}] * 2)},
                {"from": "tool", "value": "4"},
                SHAREGPT[1],
            ],
            "tools": json.dumps([TOOL["function"]]),
        },
        f"<tools>[{json.dumps(TOOL)}]</tools>"
        + said(
            ASK,
            {"role": "assistant", "content": '<call>{"x": 1}</call>'},
            {"role": "tool", "content": "3"},
            {"role": "assistant", "content": "<call>{}</call>" * 2},
            {"role": "tool", "content": "4"},
            GOOD,
        ),
        '<call>{"x": 1}</call><|im_end|><call>{}</call><call>{}</call><|im_end|>yes<|im_end|>',
    ),
    "Alpaca": (
        CHATML,
        {"instruction": "Which?", "input": "fox?", "output": "yes", "text": "…"},
        said({**ASK, "content": "Which?\nfox?"}, GOOD),
        "yes<|im_end|>",
    ),
    "Alpaca without input": (
        CHATML,
        {"instruction": "fox?", "input": "", "output": "yes"},
        said(ASK, GOOD),
        "yes<|im_end|>",
    ),
    "prompt and completion of messages": (
        CHATML,
        {"prompt": [ASK, WRONG, ASK], "completion": [GOOD]},
        said(ASK, WRONG, ASK, GOOD),
        "yes<|im_end|>",
    ),
    "the assistant begins": (
        CHATML,
        {"messages": [WRONG, ASK, GOOD]},
        said(WRONG, ASK, GOOD),
        "no<|im_end|>yes<|im_end|>",
    ),
    "the assistant begins without a header": (
        MISTRAL,
        {"messages": [WRONG, ASK, GOOD]},
        "<s> no</s>[INST] fox? [/INST] yes</s>",
        "no</s> yes</s>",
    ),
}


@pytest.mark.parametrize("name", ROWS)
def test_every_key_of_a_row_is_used(name: str, tmp_path: Path) -> None:
    template, row, text, trained = ROWS[name]
    assert rendered(tmp_path, template, row) == (text, trained)


REFUSED = {
    "tools": (
        CHATML,
        {"tools": [TOOL]},
        {},
        "the row has tools, but the chat template does not use it; .* --ignore-key tools",
    ),
    "kwargs": (
        CHATML,
        {"chat_template_kwargs": {"enable_thinking": True}},
        {},
        "the chat template has no variable enable_thinking",
    ),
    "row": (CHATML, {"train_on": "all"}, {}, "the row has train_on, which would not be used; .* --ignore-key train_on"),
    "prompt": (CHATML, {"prompt": "fox?"}, {}, "the row has prompt, which would not be used"),
    "weight": (CHATML, {}, {"weight": 0.5}, "message 2 has weight 0.5; only answers can have a weight, 0"),
    "message": (
        CHATML,
        {},
        {"reasoning_content": "hm"},
        "message 2 has reasoning_content, which the chat template does not use",
    ),
    "name": (CALLS, {}, {"name": "Eve"}, "message 2 has name, which the chat template does not use"),
    "calls": (
        CHATML,
        {},
        {"tool_calls": [TOOL]},
        "message 2 has tool_calls, which the chat template does not use; give --chat-template a file that uses",
    ),
    "arguments": (
        CALLS,
        {},
        {"tool_calls": [{"function": {"name": "f", "arguments": "{x"}}]},
        "message 2 has a tool call whose arguments are not",
    ),
    "image": (
        CHATML,
        {},
        {"content": [{"type": "image_url", "image_url": "x"}]},
        "message 2 has a part of type image_url",
    ),
    "object": (CHATML, {}, {"content": {"text": "x"}}, "message 2 needs content that is text"),
    "speaker": (
        CHATML,
        {"messages": [{"from": "bing", "value": "x"}]},
        {},
        "message 1 is from 'bing'; rename it to one of human",
    ),
    "speakers": (
        CHATML,
        {"messages": [{"from": ["a"], "value": "x"}]},
        {},
        r"message 1 is from \['a'\]; rename it to one of hum",
    ),
    "call": (
        CALLS,
        {"messages": [{"from": "function_call", "value": "f(1)"}]},
        {},
        "message 1 is from function_call, so",
    ),
    "calls of no name": (CALLS, {"messages": [{"from": "function_call", "value": [{}]}]}, {}, "message 1 is from func"),
    "tools twice": (
        TOOLS,
        {"chat_template_kwargs": {"tools": [TOOL]}},
        {},
        "chat_template_kwargs has tools; move them",
    ),
    **{
        f"{name} as a variable": (
            f"{CHATML}{{# {name} #}}",
            {"chat_template_kwargs": {name: True}},
            {},
            f"chat_template_kwargs has {name}, which is not a variable of the template; remove {name}",
        )
        for name in ("tokenize", "add_generation_prompt", "chat_template", "return_dict", "messages", "self")
    },
    "number of calls": (CALLS, {}, {"tool_calls": 5}, "message 2 has tool_calls that are not a list"),
    "half a character": (CHATML, {}, {"content": "\ud83d"}, "the text has a lone surrogate"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_key_that_would_be_dropped_is_refused(name: str, tmp_path: Path) -> None:
    template, of_row, of_answer, says = REFUSED[name]
    row = {"messages": [ASK, {**GOOD, **of_answer}], **of_row}
    with pytest.raises(UserError, match=f"rows.jsonl, line 1: {says}"):
        rendered(tmp_path, template, row)
    if "--ignore-key" in says:
        assert (
            rendered(tmp_path, template, row, ignored_keys=[name if name == "tools" else "train_on"])[1]
            == "yes<|im_end|>"
        )


CALL = calling({"x": 1}, content="", weight=1)
WHOLE = {
    "messages": [{"role": "system", "content": "Be."}, ASK, CALL, {"role": "tool", "name": "f", "content": PART}, GOOD],
    "tools": [TOOL],
    "chat_template_kwargs": {"custom_tools": 1},
    "id": 1,
}
FORMS = {
    "messages": WHOLE,
    "conversations": {"conversations": SHAREGPT, "system": "Be."},
    "instruction": {"instruction": "Which?", "input": "fox?", "output": "yes", "text": "…", "system": "Be."},
    "completion": {"prompt": [ASK], "completion": [GOOD]},
    "text": {"prompt": "fox?", "completion": "yes"},
    "pair": {"prompt": [ASK], "chosen": [GOOD], "rejected": [WRONG]},
    "pair without prompt": {"chosen": [ASK, GOOD], "rejected": [ASK, WRONG]},
    "pair of texts": {"prompt": "fox?", "chosen": "yes", "rejected": "no"},
}
WRONG_VALUES = [None, 5, "", "\ud800", [], {}, [5], {"a": 5}]


def variants(value: object) -> Iterator[object]:
    """Yield the value with each of its parts, at any depth, replaced by a value of another type or renamed."""
    yield from WRONG_VALUES
    if isinstance(value, dict):
        for key, part in value.items():
            others = {name: each for name, each in value.items() if name != key}
            yield from ({**others, key: each} for each in variants(part))
            yield from ({**others, name: part} for name in ("", "from", "tokenize"))
    elif isinstance(value, list):
        for number, part in enumerate(value):
            yield from ([*value[:number], each, *value[number + 1 :]] for each in variants(part))


def test_a_value_of_a_wrong_type_is_used_or_refused(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    folder = make_chat_tokenizer(tmp_path / "tokenizer", TOOLS + "{# custom_tools #}")
    found = Counter[str]()
    for name, row in FORMS.items():
        kind = "preferences" if "pair" in name else "sft"
        reader = RowReader(folder, load_tokenizer(folder), None, kind, ())
        for variant in variants(row):
            path = write_rows(tmp_path / "rows.jsonl", [variant])
            try:
                found["text"] += len(list(reader.read(str(path))))
            except UserError as error:
                assert f"{path}, line 1: " in str(error)
                found["refused"] += 1
    assert found["text"] > 100 and found["refused"] > 500, found


def test_pairs_follow_the_rules_of_rows(tmp_path: Path) -> None:
    row = {"prompt": [ASK], "chosen": [GOOD], "rejected": [WRONG], "tools": [TOOL], "score_chosen": 1.0}
    with pytest.raises(UserError, match="the row has score_chosen, which would not be used"):
        rendered(tmp_path, TOOLS, row, format="preferences")
    tools = f"<tools>[{json.dumps(TOOL)}]</tools>"
    text, trained = rendered(tmp_path, TOOLS, row, format="preferences", ignored_keys=["score_chosen"])
    assert text == tools + said(ASK, GOOD) + tools + said(ASK, WRONG) and trained == "yes<|im_end|>no<|im_end|>"


def test_the_default_of_several_templates_is_taken(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    folder = make_chat_tokenizer(tmp_path / "tokenizer", CHATML)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    for templates, refused in (
        ({"default": CHATML, "tool_use": TOOLS}, False),
        ({"rag": CHATML, "tool_use": TOOLS}, True),
    ):
        tokenizer.chat_template = templates
        tokenizer.save_pretrained(tmp_path / "named")
        if refused:
            with pytest.raises(UserError, match=r"several chat templates \(rag, tool_use\), but none is named default"):
                ChatTemplate(tmp_path / "named")
        else:
            template = ChatTemplate(tmp_path / "named")
            assert tokenizer.decode(template.encode([ASK, GOOD])[0]) == said(ASK, GOOD)
            with_tools = template.encode([ASK, GOOD], options={"tools": [TOOL]})[0]
            assert tokenizer.decode(with_tools).startswith("<tools>")
        shutil.rmtree(tmp_path / "named")
