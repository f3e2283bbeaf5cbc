"""Tokenizers: bytes, a trained BPE, and any settings that a tokenizer.json contains."""

import json
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers

from fourfold.data.canaries import Canaries
from fourfold.data.indexed import IndexedDataset
from fourfold.data.manifest import corpus_tokenizer
from fourfold.data.prepare import prepare
from fourfold.data.prepare_conversations import prepare_conversations
from fourfold.data.run_data import check_one_tokenizer
from fourfold.data.stream import Position, cut_into_windows
from fourfold.data.tokenizer import ByteTokenizer, HFTokenizer, NoSuchToken, load_tokenizer, train_bpe
from fourfold.errors import UserError
from fourfold.huggingface.tokenizer_file import write_tokenizer as write_exported

DEEPSEEK_END = "<｜end▁of▁sentence｜>"
TEXT = "def größe(n):\n\treturn n * 2  # 二 🙂\n"


def test_bytes_round_trip() -> None:
    tokenizer = load_tokenizer("bytes")
    assert isinstance(tokenizer, ByteTokenizer)
    [ids] = tokenizer.encode_batch([TEXT])
    assert ids == list(TEXT.encode())
    assert tokenizer.decode([*ids, tokenizer.eod_id, 300]) == TEXT
    assert tokenizer.decode(ids[:7]) == "def gr�"  # the ids end in the middle of the ö
    assert tokenizer.eod_id == tokenizer.vocab_size - 1 == 256


def test_train_and_reload(tmp_path: Path) -> None:
    trained = train_bpe([TEXT * 20], 270, tmp_path / "tokenizer.json")
    for reloaded in (load_tokenizer(tmp_path / "tokenizer.json"), load_tokenizer(str(tmp_path))):
        assert (reloaded.fingerprint, reloaded.vocab_size, reloaded.eod_id) == (trained.fingerprint, 270, 0)
    ids = trained.encode_batch([TEXT, "ÿ nie gesehen"])
    assert len(ids[0]) < len(TEXT.encode())
    assert [trained.decode([*each, trained.eod_id]) for each in ids] == [TEXT, "ÿ nie gesehen"]
    assert train_bpe([TEXT * 20], 270, tmp_path / "again.json").fingerprint == trained.fingerprint


def test_the_name_of_a_special_token_inside_text_stays_text(tmp_path: Path) -> None:
    tokenizer = train_bpe([TEXT], 260, tmp_path / "t.json")
    [ids] = tokenizer.encode_batch(["a<|endoftext|>b"])
    assert tokenizer.eod_id not in ids
    assert tokenizer.decode(ids) == "a<|endoftext|>b"


def test_truncation_and_padding_of_the_file_are_ignored(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    train_bpe([TEXT], 260, path)
    content = json.loads(path.read_text())
    content["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    path.write_text(json.dumps(content))
    tokenizer = HFTokenizer(path)
    assert tokenizer.decode(tokenizer.encode_batch([TEXT])[0]) == TEXT


def write_tokenizer(folder: Path, special: list[str], plain: list[str], **files: dict) -> Path:
    """Write a tokenizer.json with these special and ordinary tokens to a folder, and JSON files next to it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=280, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    tokenizer.add_tokens(plain)
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


ENDS = {
    "gemma": (["<bos>", "<eos>"], ["<b>", "</s>"], {"tokenizer_config": {"eos_token": "<eos>"}}, "<eos>"),
    "deepseek": (
        [DEEPSEEK_END],
        ["</s>"],
        {"tokenizer_config": {"eos_token": {"content": DEEPSEEK_END}}},
        DEEPSEEK_END,
    ),
    "a name before usual ones": (
        *(["<|endoftext|>", "<|im_end|>"], [], {"tokenizer_config": {"eos_token": "<|im_end|>"}}, "<|im_end|>"),
    ),
    "the tokenizer before the model": (
        *(
            ["<a>", "<b>"],
            [],
            {"tokenizer_config": {"eos_token": "<b>"}, "generation_config": {"eos_token_id": 0}},
            "<b>",
        ),
    ),
    "a name makes it special": (["<a>"], ["<end>"], {"tokenizer_config": {"eos_token": "<end>"}}, "<end>"),
    "generation": (
        ["<a>", "<b>"],
        [],
        {"generation_config": {"eos_token_id": 1}, "config": {"eos_token_id": 0}},
        "<b>",
    ),
    "the first special one": (["<a>", "<b>"], ["</s>"], {"generation_config": {"eos_token_id": [270, 1, 0]}}, "<b>"),
    "config": (["<a>", "<b>"], [], {"config": {"eos_token_id": 1}, "tokenizer_config": {"bos_token": "<a>"}}, "<b>"),
    "usual": (["<a>", "<eos>"], ["</s>"], {"tokenizer_config": {"eos_token": None}}, "<eos>"),
}


@pytest.mark.parametrize("case", ENDS)
def test_the_models_own_special_token_ends_documents(case: str, tmp_path: Path) -> None:
    special, plain, files, end = ENDS[case]
    tokenizer = HFTokenizer(write_tokenizer(tmp_path, special, plain, **files))
    assert Tokenizer.from_file(str(tmp_path / "tokenizer.json")).id_to_token(tokenizer.eod_id) == end
    [ids] = tokenizer.encode_batch([f"a{end}b"])
    assert tokenizer.eod_id not in ids and tokenizer.eod_id in tokenizer.special_ids


def test_the_corpus_keeps_the_named_end_of_document_token(tmp_path: Path) -> None:
    folder = write_tokenizer(
        tmp_path / "t", ["<bos>", "<eos>", "<pad>"], ["</s>"], tokenizer_config={"eos_token": "<eos>"}
    )
    (tmp_path / "a.txt").write_text(TEXT)
    with pytest.raises(
        UserError, match=r"eos_token </s> is not a special token of .*; its special tokens are <bos>, <eos>, <pad>"
    ):
        prepare([tmp_path / "a.txt"], tmp_path / "c", tokenizer=folder, eos_token="</s>")
    prepare([tmp_path / "a.txt"], tmp_path / "c", tokenizer=folder, eos_token="<pad>")
    corpus = IndexedDataset(tmp_path / "c")
    assert corpus_tokenizer(tmp_path / "c").eod_id == corpus.read(corpus.tokens - 1, 1)[0] == 2
    for options in ({"tokenizer": "bytes"}, {"train_tokenizer_vocab": 300}):
        with pytest.raises(UserError, match="--eos-token and --bos-token"):
            prepare([tmp_path / "a.txt"], tmp_path / "d", eos_token="<pad>", **options)


def test_documents_begin_with_a_bos_token_only_on_request(tmp_path: Path) -> None:
    config = {"eos_token": "<eos>", "bos_token": "<bos>"}
    folder = write_tokenizer(tmp_path / "t", ["<bos>", "<eos>"], [], tokenizer_config=config)
    whole = Tokenizer.from_file(str(folder / "tokenizer.json"))
    whole.post_processor = processors.TemplateProcessing(single=["<bos>", "$A"], special_tokens=[("<bos>", 0)])
    whole.save(str(folder / "tokenizer.json"))
    (tmp_path / "a.txt").write_text(TEXT)

    def tokens(name: str) -> list[int]:
        corpus = IndexedDataset(tmp_path / name)
        return corpus.read(0, corpus.tokens).tolist()

    plain = prepare([tmp_path / "a.txt"], tmp_path / "plain", tokenizer=folder)
    assert ["--bos-token auto adds it" in note for note in plain.notes] == [True]
    for bos in ("auto", "<bos>"):
        begun = prepare([tmp_path / "a.txt"], tmp_path / bos, tokenizer=folder, bos_token=bos)
        assert tokens(bos) == [0, *tokens("plain")] and begun.notes == ()
        made_with = corpus_tokenizer(tmp_path / bos)
        assert (made_with.begins_documents, made_with.bos_id, made_with.eod_id) == (True, 0, 1)
    endless = SimpleNamespace(read=lambda place: ((number, TEXT) for number in count()))
    window = next(cut_into_windows(endless, load_tokenizer(folder, bos="auto"), Position(), 2 * len(tokens("auto")), 0))
    assert window.tokens.tolist() == [*tokens("auto"), *tokens("auto"), 0]
    with pytest.raises(UserError, match="made with different tokenizers"):
        check_one_tokenizer([tmp_path / "plain", tmp_path / "auto"])
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": "größe", "completion": "def"}) + "\n")
    prepare_conversations([rows], tmp_path / "sft", tokenizer=folder, bos_token="auto")
    flags = IndexedDataset(tmp_path / "sft-trained")
    asked, answered = HFTokenizer(folder).encode_batch(["größe", "def"])
    assert tokens("sft") == [0, *asked, *answered, 1]
    assert flags.read(0, flags.tokens).tolist() == [0] * (1 + len(asked)) + [1] * (len(answered) + 1)
    with pytest.raises(UserError, match="--canaries cannot be combined"):
        prepare([rows], tmp_path / "x", tokenizer=folder, bos_token="auto", canaries=Canaries(1, (0,)))


def test_an_exported_tokenizer_begins_texts_as_the_corpus_does(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    folder = write_tokenizer(tmp_path / "t", ["<bos>", "<eos>"], [], tokenizer_config={"bos_token": "<bos>"})
    model = SimpleNamespace(vocab_size=1000)
    for bos, begin in ((None, []), ("<bos>", [0])):
        out = tmp_path / f"out {bos}"
        out.mkdir()
        about = write_exported(out, HFTokenizer(folder, bos=bos), model)
        assert about == {"bos_token_id": begin[0] if begin else None, "eos_token_id": 1}
        [ids] = HFTokenizer(folder).encode_batch([TEXT])
        assert transformers.AutoTokenizer.from_pretrained(out)(TEXT)["input_ids"] == [*begin, *ids]


@pytest.mark.parametrize(("key", "option"), [("eod_id", "eos_token"), ("bos_id", "bos_token")])
@pytest.mark.parametrize("number", [400, 1 << 70, -1])
def test_a_tokenizer_that_lacks_the_corpus_tokens_is_recognized_as_another(
    tmp_path: Path, key: str, option: str, number: int
) -> None:
    folder = write_tokenizer(tmp_path / "t", ["<bos>", "<eos>"], [])
    (tmp_path / "a.txt").write_text(TEXT)
    prepare([tmp_path / "a.txt"], tmp_path / "c", tokenizer=folder, bos_token="<bos>")
    with pytest.raises(NoSuchToken, match=f"has no token {number}, the {option} of a corpus"):
        load_tokenizer(folder, **{key[:3]: number})
    about = json.loads((tmp_path / "c.json").read_text())
    (tmp_path / "c.json").write_text(json.dumps({**about, key: number}))
    with pytest.raises(UserError, match=r"c-tokenizer\.json is not the tokenizer that made"):
        corpus_tokenizer(tmp_path / "c")


def test_refusals(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="must be at least 257"):
        train_bpe([TEXT], 256, tmp_path / "t.json")
    with pytest.raises(UserError, match="does not exist"):
        load_tokenizer(tmp_path / "none.json")
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(UserError, match=r"bad\.json is not a tokenizer"):
        load_tokenizer(tmp_path / "bad.json")
