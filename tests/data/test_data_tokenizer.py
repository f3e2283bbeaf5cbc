"""Tokenizers: bytes, a trained BPE, and what a tokenizer.json may bring along."""

import json
from pathlib import Path

import pytest

from fourfold.data.tokenizer import ByteTokenizer, HFTokenizer, load_tokenizer, train_bpe
from fourfold.errors import UserError

TEXT = "def größe(n):\n\treturn n * 2  # 二 🙂\n"


def test_bytes_round_trip() -> None:
    tokenizer = load_tokenizer("bytes")
    assert isinstance(tokenizer, ByteTokenizer)
    [ids] = tokenizer.encode_batch([TEXT])
    assert ids == list(TEXT.encode())
    assert tokenizer.decode([*ids, tokenizer.eod_id, 300]) == TEXT
    assert tokenizer.decode(ids[:7]) == "def gr�"  # half of the ö
    assert tokenizer.eod_id == tokenizer.vocab_size - 1 == 256


def test_train_and_reload(tmp_path: Path) -> None:
    trained = train_bpe([TEXT * 20], 270, tmp_path / "tokenizer.json")
    for reloaded in (load_tokenizer(tmp_path / "tokenizer.json"), load_tokenizer(str(tmp_path))):
        assert (reloaded.fingerprint, reloaded.vocab_size, reloaded.eod_id) == (trained.fingerprint, 270, 0)
    ids = trained.encode_batch([TEXT, "ÿ nie gesehen"])
    assert len(ids[0]) < len(TEXT.encode())
    assert [trained.decode([*each, trained.eod_id]) for each in ids] == [TEXT, "ÿ nie gesehen"]
    assert train_bpe([TEXT * 20], 270, tmp_path / "again.json").fingerprint == trained.fingerprint


def test_name_of_a_special_token_in_a_text_is_text(tmp_path: Path) -> None:
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


def test_end_of_document(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    train_bpe([TEXT], 260, path)
    path.write_text(path.read_text().replace("<|endoftext|>", "<stop>"))
    with pytest.raises(UserError, match=r"t\.json has no token that ends a document"):
        HFTokenizer(path)
    assert HFTokenizer(path, eod="<stop>").eod_id == 0


def test_refusals(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="257 is the least"):
        train_bpe([TEXT], 256, tmp_path / "t.json")
    with pytest.raises(UserError, match="does not exist"):
        load_tokenizer(tmp_path / "none.json")
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(UserError, match=r"bad\.json is not a tokenizer"):
        load_tokenizer(tmp_path / "bad.json")
