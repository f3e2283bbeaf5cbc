"""`prepare` reads datasets named hf:…, which are local folders of Parquet files in these tests."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tiny_hub import make_dataset, texts_of

from fourfold.data.hub import HubDataset
from fourfold.data.indexed import IndexedDataset
from fourfold.data.prepare import prepare
from fourfold.errors import UserError

pytest.importorskip("datasets")


@pytest.fixture
def dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    return make_dataset(tmp_path / "tales")


def test_a_dataset_gives_the_same_corpus_as_its_files(dataset: str, tmp_path: Path) -> None:
    first = prepare([dataset], tmp_path / "hub", tokenizer="bytes", workers=1)
    assert not first.reused
    corpus = IndexedDataset(tmp_path / "hub")
    expected = "".join(text + "\0" for text in texts_of(dataset)).encode()
    assert (np.where(corpus.read(0, corpus.tokens) == 256, 0, corpus.read(0, corpus.tokens)).tobytes()[::2]) == expected
    assert prepare([dataset], tmp_path / "hub", tokenizer="bytes", workers=1).reused
    held_out = prepare([f"{dataset}:validation"], tmp_path / "other", tokenizer="bytes", workers=1)
    assert held_out.train.documents == 4


def test_malformed_dataset_names_are_refused() -> None:
    assert HubDataset.parse("hf:a/b") == HubDataset("a/b", None, "train")
    assert HubDataset.parse("hf:a/b:test") == HubDataset("a/b", None, "test")
    assert HubDataset.parse("hf:a/b:en:test") == HubDataset("a/b", "en", "test")
    assert str(HubDataset.parse("hf:a/b:en:test")) == "hf:a/b:en:test"
    for wrong in ("hf:", "hf:a::b", "hf:a:b:c:d", "a/b"):
        with pytest.raises(UserError, match="must have the form"):
            HubDataset.parse(wrong)
    with pytest.raises(UserError, match="name one split"):
        HubDataset.parse("hf:a/b:train[:10%]")


def test_an_unreadable_dataset_is_reported_in_one_sentence(dataset: str, tmp_path: Path) -> None:
    for name, said in {
        f"hf:{tmp_path}/none": "cannot be loaded",
        f"{dataset}:test": "cannot be loaded: ValueError: Unknown split",
    }.items():
        with pytest.raises(UserError, match=said) as error:
            prepare([name], tmp_path / "out", tokenizer="bytes")
        assert "\n" not in str(error.value)
    with pytest.raises(UserError, match='no column "story" among number, text; choose one with --text-key'):
        prepare([dataset], tmp_path / "out", tokenizer="bytes", text_key="story", workers=1)
