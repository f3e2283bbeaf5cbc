"""Make a small transformers tokenizer with a chat template, and conversations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fourfold.data.tokenizer import train_bpe

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m['role'] }}<|end_header_id|>\n\n"
    "{{ m['content'] | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}[INST] {{ m['content'] }} [/INST]"
    "{% elif m['role'] == 'assistant' %} {{ m['content'] }}{{ eos_token }}"
    "{% else %}{{ raise_exception('only user and assistant') }}{% endif %}{% endfor %}"
)
MARKED = CHATML.replace(
    "{{ m['content'] }}<|im_end|>\n",
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ m['content'] }}<|im_end|>{% endif %}\n",
)
"""A template that renders the same text as ChatML, and also marks the text to train."""

SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]

TALK: list[dict[str, str]] = [
    {"role": "user", "content": "What is the capital of France?"},
    {"role": "assistant", "content": "Paris, naïvely."},
    {"role": "user", "content": "And of Spain?\nSay only the name."},
    {"role": "assistant", "content": "Madrid"},
]


def make_chat_tokenizer(folder: Path, template: str) -> Path:
    """Write the tokenizer to a folder that transformers can load."""
    import transformers

    folder.mkdir(parents=True, exist_ok=True)
    train_bpe(
        ["What is the capital of France? Paris. Say only the name, user and assistant."] * 20, 300, folder / "t.json"
    )
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "t.json"), bos_token="<s>", eos_token="</s>", additional_special_tokens=SPECIAL[2:]
    )
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    (folder / "t.json").unlink()
    return folder


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def talks(count: int) -> list[dict[str, Any]]:
    """Return conversations that differ in their length and in their share of answers."""
    rows = []
    for number in range(count):
        turns = [
            {"role": role, "content": f"{word} {number} " * (1 + (number * step) % 5)}
            for _ in range(1 + number % 3)
            for role, word, step in (("user", "ask", 3), ("assistant", "say", 2))
        ]
        rows.append({"messages": turns})
    return rows
