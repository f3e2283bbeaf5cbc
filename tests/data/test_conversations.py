"""Conversations: which tokens are trained, how they are packed, and what is refused."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
from command_line import Cli
from tiny_chat import CHATML, LLAMA3, MARKED, MISTRAL, TALK, make_chat_tokenizer, talks, write_rows

from fourfold.data.atomic_files import locked
from fourfold.data.chat import ChatTemplate
from fourfold.data.conversations import PackedConversations, pack
from fourfold.data.dataset import NO_DOCUMENT
from fourfold.data.masks import IGNORE_INDEX, answers_only, document_boundary, labels_of
from fourfold.data.prepare import PrepareSummary
from fourfold.data.prepare_conversations import prepare_conversations
from fourfold.data.run_data import build_dataset
from fourfold.errors import UserError

ANSWERS = {
    "chatml": (CHATML, ["Paris, naïvely.<|im_end|>", "Madrid<|im_end|>"]),
    "llama 3": (LLAMA3, ["Paris, naïvely.<|eot_id|>", "Madrid<|eot_id|>"]),
    "mistral": (MISTRAL, [" Paris, naïvely.</s>", " Madrid</s>"]),
    "marked": (MARKED, ["Paris, naïvely.<|im_end|>", "Madrid<|im_end|>"]),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_exactly_the_answer_tokens_are_trained(name: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    template, answers = ANSWERS[name]
    folder = make_chat_tokenizer(tmp_path, template)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ids, trained = ChatTemplate(folder).encode(TALK)
    assert ids.tolist() == tokenizer.apply_chat_template(TALK, tokenize=True, return_dict=True)["input_ids"]
    runs = [list(run) for key, run in itertools.groupby(range(len(ids)), key=lambda i: bool(trained[i])) if key]
    assert [tokenizer.decode(ids[run]) for run in runs] == answers
    # The tokens before an answer must be the prompt that generation would see.
    for number, run in zip((1, 3), runs, strict=True):
        prompt = tokenizer.apply_chat_template(
            TALK[:number], tokenize=True, return_dict=True, add_generation_prompt=True
        )["input_ids"]
        assert ids[: run[0]].tolist() == prompt


def test_a_template_that_rewrites_history_is_refused_unless_it_marks_answers(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    earlier = "m['role'] == 'assistant' and not loop.last"
    rewriting = CHATML.replace("{{ m['content'] }}", f"{{{{ m['content'] | upper if {earlier} else m['content'] }}}}")
    template = ChatTemplate(make_chat_tokenizer(tmp_path, rewriting))
    with pytest.raises(ValueError, match=r"message 2 differently when more messages follow.* qwen3_training\.jinja"):
        template.encode(TALK)
    template.encode(TALK[:2])


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"messages": TALK[:1]}, "line 2: no message is the assistant's"),
        ({"messages": "hello"}, "line 2: messages is not a list"),
        (
            {"messages": [{"role": "user"}, TALK[1]]},
            "line 2: message 1 needs content that is text or a list of text parts",
        ),
        (
            {"text": "hello"},
            "line 2: a row needs messages, conversations, prompt and completion, or instruction and output; this row",
        ),
        (
            {"messages": [{"role": "system", "content": "x"}, *TALK]},
            "refuses the conversation: only user and assistant",
        ),
    ],
)
def test_bad_rows_are_named(row: dict, says: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    folder = make_chat_tokenizer(tmp_path / "tokenizer", MISTRAL)
    rows = write_rows(tmp_path / "rows.jsonl", [{"messages": TALK}, row])
    with pytest.raises(UserError) as raised:
        prepare_conversations([rows], tmp_path / "out", tokenizer=folder)
    assert says in str(raised.value) and "rows.jsonl, line 2" in str(raised.value)
    assert not (tmp_path / "out.json").exists()


def completions(tmp_path: Path, lengths: list[tuple[int, int]], **options: float) -> str:
    """Make a corpus of bytes from prompts and completions of these lengths."""
    rows = [
        {"prompt": chr(97 + i % 26) * asked, "completion": chr(65 + i % 26) * answered}
        for i, (asked, answered) in enumerate(lengths)
    ]
    prepare_conversations([write_rows(tmp_path / "rows.jsonl", rows)], tmp_path / "c", tokenizer="bytes", **options)
    return str(tmp_path / "c")


def test_prompts_are_masked_and_whole_conversations_share_a_window(tmp_path: Path) -> None:
    lengths = [(3, 4), (1, 2), (5, 1), (2, 8), (30, 4), (2, 30)]
    samples = PackedConversations(completions(tmp_path, lengths), 16, seed=0, look_back=3)
    windows = samples.read(np.arange(len(samples)))
    labels = labels_of(windows, [document_boundary, answers_only])
    seen: list[str] = []
    for row in range(len(samples)):
        for document in np.unique(windows.documents[row]):
            here = windows.documents[row] == document
            text = bytes(t if t < 256 else ord("|") for t in windows.tokens[row][here]).decode()
            kept = labels[row][here[1:]]
            if set(text) == {"|"} and (kept == IGNORE_INDEX).all():
                continue  # this document is padding
            seen.append(text)
            trained = kept[kept != IGNORE_INDEX]
            assert bytes(t if t < 256 else ord("|") for t in trained).decode() == text.lstrip("abcdefghij")
    expected = ["a" * 3 + "A" * 4, "bBB", "cccccC", "ddDDDDDDDD", "ff" + "F" * 15]
    assert sorted(seen) == sorted(text + "|" * (len(text) < 17) for text in expected)
    assert (windows.stream_documents[:, :3] == NO_DOCUMENT).all()
    assert samples.statistics.cut == 1 and samples.statistics.left_out == 1


def test_packing_fills_windows_and_loses_nothing() -> None:
    lengths = np.random.default_rng(0).integers(1, 400, size=3000)
    bins = pack(lengths, 512)
    assert sorted(np.concatenate(bins).tolist()) == list(range(3000))
    assert max(lengths[each].sum() for each in bins) <= 512
    assert len(bins) <= 1.01 * np.ceil(lengths.sum() / 512) + 1


def test_every_epoch_has_every_conversation_once_in_another_order(tmp_path: Path) -> None:
    dataset = build_dataset([(completions(tmp_path, [(1 + i % 4, 1 + i % 5) for i in range(60)]), 1.0)], 24, seed=1)
    (samples,) = dataset.sources
    epochs = [samples.read(np.arange(len(samples)) + epoch * len(samples)).tokens for epoch in range(2)]
    assert not np.array_equal(*epochs)
    assert sorted(map(tuple, epochs[0])) == sorted(map(tuple, epochs[1]))


def test_validation_rows_are_held_out(tmp_path: Path) -> None:
    prefix = completions(tmp_path, [(2, 3)] * 200, validation_fraction=0.2)
    train, held_out = (PackedConversations(p, 64, 0).corpus.documents for p in (prefix, f"{prefix}-validation"))
    assert train + held_out == 200 and 20 < held_out < 60


def test_a_corpus_without_answers_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no conversation of .*c\.bin has an answer within training\.seq_length = 4"):
        PackedConversations(completions(tmp_path, [(9, 3)]), 4, 0)


def test_templated_conversations_become_training_samples(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    folder = make_chat_tokenizer(tmp_path / "tokenizer", CHATML)
    summary = prepare_conversations(
        [write_rows(tmp_path / "rows.jsonl", talks(40))], tmp_path / "c", tokenizer=folder / "tokenizer.json"
    )
    assert summary.train.documents == 40 and 0 < summary.train.trained_tokens < summary.train.tokens
    samples = build_dataset([(tmp_path / "c", 1.0)], 256, 0)
    windows = samples.read(np.arange(4))
    assert windows.answers is not None and 0.1 < windows.answers.mean() < 0.9


def test_the_manifest_counts_the_bytes_of_the_text(tmp_path: Path) -> None:
    summary = rows_of(tmp_path, [{"prompt": "what? ü", "completion": "that"}, {"prompt": "a", "completion": "b"}])
    assert summary.train.bytes == len("what? üthatab".encode())
    assert not (tmp_path / "c.parts").exists()
    folder = make_chat_tokenizer(tmp_path / "chat", CHATML)
    talked = prepare_conversations(
        [write_rows(tmp_path / "t.jsonl", [{"messages": TALK}])], tmp_path / "t", tokenizer=folder
    )
    assert talked.train.bytes == sum(len(message["content"].encode()) for message in TALK)


def rows_of(tmp_path: Path, rows: list) -> PrepareSummary:
    return prepare_conversations([write_rows(tmp_path / "r.jsonl", rows)], tmp_path / "c", tokenizer="bytes")


def test_two_preparations_of_one_corpus_are_refused(tmp_path: Path) -> None:
    (tmp_path / "c.parts").mkdir()
    with locked(tmp_path / "c.parts" / "lock", wait=False), pytest.raises(UserError, match="locked by another process"):
        rows_of(tmp_path, [{"prompt": "a", "completion": "b"}])


def test_a_failed_preparation_keeps_the_earlier_corpus(tmp_path: Path) -> None:
    good = {"prompt": "a", "completion": "b"}
    rows_of(tmp_path, [good] * 3)
    before = {path.name: path.read_bytes() for path in tmp_path.glob("c*")}
    with pytest.raises(UserError, match=r"r\.jsonl"):
        rows_of(tmp_path, [good, {"prompt": "a", "completion": 3}])
    assert {path.name: path.read_bytes() for path in tmp_path.glob("c*")} == before


def test_bytes_have_no_chat_template(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="'bytes' has no chat template"):
        rows_of(tmp_path, [{"messages": TALK}])


def test_an_error_without_a_message_is_shown_by_its_type(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers")

    def fail(*arguments: object, **options: object) -> None:
        raise ValueError

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", fail)
    with pytest.raises(UserError, match=r"cannot load the tokenizer of .* \(ValueError\)"):
        ChatTemplate(tmp_path)


@pytest.mark.parametrize("option", [["--text-key", "body"], ["--force"]], ids=str)
def test_options_of_text_are_refused(cli: Cli, tmp_path: Path, option: list[str]) -> None:
    rows = write_rows(tmp_path / "r.jsonl", [{"prompt": "a", "completion": "b"}])
    code, _, err = cli("prepare", rows, "--out", tmp_path / "c", "--format", "sft", "--tokenizer", "bytes", *option)
    assert code == 2 and f"does not take {option[0]}" in err
