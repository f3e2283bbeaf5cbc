"""``fourfold generate --chat`` answers a message in the format of the model's chat template."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from command_line import Cli, one_sentence
from tiny_chat import CHATML, LLAMA3, make_chat_tokenizer

from fourfold.data.transformers_tokenizer import TransformersTokenizer

pytest.importorskip("transformers")

MESSAGE = "What is the capital of France?"


@pytest.mark.parametrize("template", [CHATML, LLAMA3], ids=["chatml", "llama3"])
def test_the_prompt_has_the_tokens_of_the_chat_template(cli: Cli, tmp_path: Path, template: str) -> None:
    import transformers
    from tiny_huggingface import make_model

    folder = make_chat_tokenizer(make_model(tmp_path / "model", "llama", vocab_size=320), template)
    ids = transformers.AutoTokenizer.from_pretrained(folder).apply_chat_template(
        [{"role": "user", "content": MESSAGE}], add_generation_prompt=True, return_dict=False
    )
    begin = ("generate", "--model", folder, "--prompt", MESSAGE, "--max-new-tokens", 4)
    code, output, errors = cli(*begin, "--chat", "--json")
    assert code == 0, errors
    answer = json.loads(output)
    assert answer["prompt_tokens"] == len(ids)
    assert json.loads(cli(*begin, "--json")[1])["prompt_tokens"] < len(ids)
    (folder / "chat_template.jinja").write_text("{{ raise_exception('no\\nmessages') }}")
    refusal = one_sentence(cli(*begin, "--chat"))
    assert f"the chat template of {folder} refuses the message: no" in refusal
    (folder / "chat_template.jinja").write_text("{{ messages[0].content + 1 }}")
    assert "refuses the message: can only concatenate str" in one_sentence(cli(*begin, "--chat"))
    (folder / "chat_template.jinja").unlink()
    assert "--chat needs a chat template" in one_sentence(cli(*begin, "--chat"))


def test_a_chat_keeps_its_earlier_turns(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tiny_huggingface import make_model

    folder = make_chat_tokenizer(make_model(tmp_path / "model", "llama", vocab_size=320), CHATML)
    begin = ("generate", "--model", folder, "--chat", "--max-new-tokens", 4)
    talks: list[list[str]] = []
    render = TransformersTokenizer.chat_prompt

    def watch(tokenizer: TransformersTokenizer, turns: list[str]) -> str:
        talks.append([*turns])
        return render(tokenizer, turns)

    monkeypatch.setattr(TransformersTokenizer, "chat_prompt", watch)
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{MESSAGE}\nAnd of Spain?\n"))
    code, output, errors = cli(*begin)
    assert code == 0, errors
    answer = talks[1][1]
    assert talks == [[MESSAGE], [MESSAGE, answer, "And of Spain?"]] and answer
    # The output has the answers but not the prompts, which hold the marks of the template.
    assert output.startswith(f"> {answer}\n\n> ") and "im_start" not in output
    single = cli(*begin, "--prompt", MESSAGE)[1]
    assert answer in single and "im_start" in single
    for option in ("--json", "--basis=b.safetensors"):
        assert "add --prompt TEXT to --chat" in one_sentence(cli(*begin, option))
    assert "give either --prompt or --prompt-file" in one_sentence(cli(*begin[:3]))
