"""Check the path from [data] to micro-batches: a run refuses data that does not fit the model before its first step."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tiny_corpus import make_corpus

from fourfold.config.run import RunConfig
from fourfold.data.dataset import Windows
from fourfold.data.indexed import IndexedWriter
from fourfold.data.prepare import prepare
from fourfold.data.tokenizer import train_bpe
from fourfold.errors import UserError
from fourfold.parallel.grid.grid import Axis
from fourfold.run_file.load import make_run
from fourfold.training.corpora import Corpora, micro_batches, open_corpora

CPU = torch.device("cpu")
NO_CP = Axis("cp", 1, 0, cast("dist.ProcessGroup", None))


def make(data: dict[str, Any], **sections: Any) -> RunConfig:
    training = {"global_batch_size": 8, "micro_batch_size": 2, "seq_length": 32, "train_steps": 4}
    table = {"model": {"preset": "llama-tiny"}, "data": data, **sections}
    return make_run({**table, "training": {**training, **sections.get("training", {})}})


def opened(run: RunConfig, rank: int = 0, size: int = 1) -> Corpora:
    """Open the corpora as rank ``rank`` of ``size`` processes that split the batch. Only a built-in corpus needs a
    process group."""
    return open_corpora(run, Axis("dp_z", size, rank, cast("dist.ProcessGroup", None)))


def refusal(run: RunConfig) -> str:
    with pytest.raises(UserError) as error:
        opened(run)
    assert "\n" not in str(error.value)
    return str(error.value)


def own(prefix: str, **more: Any) -> dict[str, Any]:
    return {"train": [{"path": prefix}], **more}


def damaged(prefix: str, folder: Path, change: Callable[[bytearray], object], suffix: str = ".idx") -> str:
    """Return a copy of the corpus, and change one of its files."""
    for ending in (".bin", ".idx", ".json"):
        content = bytearray(Path(prefix + ending).read_bytes())
        if ending == suffix:
            change(content)
        (folder / f"copy{ending}").write_bytes(content)
    return str(folder / "copy")


def test_the_micro_batches_of_all_ranks_are_the_global_batch(prefix: str) -> None:
    run = make(own(prefix))
    alone = opened(run).train
    assert len(alone.step(0)) == 4
    for step in (0, 3):
        whole = torch.cat([batch.tokens for batch in micro_batches(alone.step(step), run, NO_CP, CPU)])
        parts = [micro_batches(opened(run, rank, 2).train.step(step), run, NO_CP, CPU) for rank in range(2)]
        shared = torch.cat([part[m].tokens for m in range(2) for part in parts])
        assert torch.equal(whole, shared)
    assert not torch.equal(whole, torch.cat([b.tokens for b in micro_batches(alone.step(0), run, NO_CP, CPU)]))


def test_labels_are_the_next_tokens_and_end_with_a_document(prefix: str) -> None:
    run = make(own(prefix))
    for batch in micro_batches(opened(run).train.step(0), run, NO_CP, CPU):
        kept = batch.labels[:, :-1] != -100
        assert torch.equal(batch.labels[:, :-1][kept], batch.tokens[:, 1:][kept])
        ends = batch.tokens == 256
        assert (batch.labels[ends] == -100).all()
        assert kept.float().mean() > 0.9
        assert batch.positions is None
        assert batch.document_ends is None


def test_document_ends_are_given_if_attention_uses_them(prefix: str) -> None:
    run = make(own(prefix, mask_documents=True), training={"global_batch_size": 64, "micro_batch_size": 64})
    (batch,) = micro_batches(opened(run).train.step(0), run, NO_CP, CPU)
    assert batch.positions is not None
    assert batch.document_ends is not None
    row, place = (batch.tokens[:, :-1] == 256).nonzero()[0].tolist()
    assert place + 1 in batch.document_ends[row]
    assert batch.positions[row, place + 1] == 0


def test_seed_decides_the_order_of_training_but_not_of_validation(prefix: str) -> None:
    def first(seed: int, part: str) -> list[int]:
        run = make(
            own(prefix, validation=[{"path": f"{prefix}-validation"}]),
            training={"seed": seed},
            validation={"interval": 1},
        )
        return getattr(opened(run), part).step(0)[0].tokens.tolist()

    assert first(0, "train") == first(0, "train") != first(1, "train")
    assert first(0, "validation") == first(1, "validation") != first(0, "train")
    # This is the largest seed that a run file may have.
    first(2**63 - 1, "train")


def test_tokenizer_is_the_corpus_own(prefix: str) -> None:
    corpora = opened(make(own(prefix)))
    assert corpora.tokenizer is not None
    assert corpora.tokenizer.decode([104, 105, 256]) == "hi"
    assert corpora.validation is None
    same = opened(make(own(prefix, tokenizer="bytes"))).tokenizer
    assert same is not None
    assert same.fingerprint == "bytes"


def test_vocabulary_larger_than_the_models(prefix: str) -> None:
    sentence = refusal(make(own(prefix), model={"preset": "llama-tiny", "vocab_size": 256}))
    assert f"the corpus {prefix} was made with a vocabulary of 257, but model.vocab_size = 256" in sentence
    assert "set model.vocab_size = 257" in sentence
    opened(make(own(prefix), model={"preset": "llama-tiny", "vocab_size": 300}))


def test_a_model_of_the_hub_is_asked_for_its_tokenizer_alone_and_only_if_the_vocabulary_is_larger(
    prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise every process would download the weights, which could take hours."""
    asked = []

    def download(name: str, allow_patterns: list[str], ignore_patterns: str) -> str:
        asked.append(allow_patterns)
        return str(tmp_path)

    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 256, **sizes}))
    monkeypatch.setattr(pytest.importorskip("huggingface_hub"), "snapshot_download", download)
    fits, small = (make(own(prefix), model={"from_hf": "some/model", "vocab_size": size}) for size in (257, 256))
    asked.clear()
    opened(fits)
    assert asked == []
    refusal(small)
    assert asked == [["tokenizer.json"]]


def test_another_tokenizer(prefix: str, tmp_path: Path) -> None:
    train_bpe(["a few words"], 300, tmp_path / "tokenizer.json")
    other = str(tmp_path / "tokenizer.json")
    assert "is not the tokenizer that made" in refusal(make(own(prefix, tokenizer=other)))
    assert "does not exist" in refusal(make(own(prefix, tokenizer=str(tmp_path / "none.json"))))
    with_it = make_corpus(tmp_path, "other", tokenizer=other)
    wide = {"preset": "llama-tiny", "vocab_size": 400}
    mixed = {"train": [{"path": prefix}, {"path": with_it}]}
    assert "made with different tokenizers" in refusal(make(mixed, model=wide))
    across = own(prefix, validation=[{"path": with_it}])
    for interval in (0, 1):
        assert "made with different tokenizers" in refusal(make(across, model=wide, validation={"interval": interval}))


def test_a_corpus_whose_tokenizer_changed(tmp_path: Path) -> None:
    train_bpe(["a few words"], 300, tmp_path / "tokenizer.json")
    prefix = make_corpus(tmp_path, tokenizer=str(tmp_path / "tokenizer.json"))
    wide = {"preset": "llama-tiny", "vocab_size": 400}
    opened(make(own(prefix), model=wide))
    train_bpe(["quite other words and letters"], 290, f"{prefix}-tokenizer.json")
    assert "is not the tokenizer that made" in refusal(make(own(prefix), model=wide))


def test_a_smaller_tokenizer_without_the_end_of_the_corpus(tmp_path: Path) -> None:
    for name, size in (("large", 300), ("small", 257)):
        train_bpe(["a few words"], size, tmp_path / f"{name}.json")
    content = json.loads((tmp_path / "large.json").read_text())
    last = max(content["model"]["vocab"].values()) + 1
    content["added_tokens"].append({**content["added_tokens"][0], "id": last, "content": "<end>"})
    (tmp_path / "large.json").write_text(json.dumps(content))
    (tmp_path / "a.txt").write_text("a few words")
    prefix = str(tmp_path / "c")
    prepare([tmp_path / "a.txt"], prefix, tokenizer=tmp_path / "large.json", eos_token="<end>")
    run = make(own(prefix, tokenizer=str(tmp_path / "small.json")), model={"preset": "llama-tiny", "vocab_size": 400})
    assert "is not the tokenizer that made" in refusal(run)


@pytest.mark.parametrize("suffix", [".idx", ".bin"])
def test_missing_file(prefix: str, tmp_path: Path, suffix: str) -> None:
    copy = damaged(prefix, tmp_path, lambda content: None)
    Path(copy + suffix).unlink()
    assert f"{copy}{suffix} does not exist" in refusal(make(own(copy)))


def test_missing_corpus(tmp_path: Path) -> None:
    assert f"{tmp_path}/none.idx does not exist; `fourfold prepare" in refusal(make(own(f"{tmp_path}/none")))


@pytest.mark.parametrize(
    ("change", "suffix", "message"),
    [
        (lambda content: content.clear(), ".idx", "has 0 bytes"),
        (lambda content: content.__setitem__(slice(0, 4), b"XXXX"), ".idx", "starts with"),
        (lambda content: content.__delitem__(slice(-8, None)), ".idx", "it is truncated or damaged"),
        (lambda content: content.__setitem__(slice(34, 38), b"\xff\xff\xff\xff"), ".idx", "negative length"),
        (lambda content: content.__setitem__(slice(17, 18), b"\x09"), ".idx", "unknown token type 9"),
        (lambda content: content.__delitem__(slice(-100, None)), ".bin", ".idx expects"),
        (lambda content: content.extend(b"ab"), ".bin", ".idx expects"),
        (lambda content: content.clear(), ".json", ".json is not JSON"),
        (lambda content: content.__setitem__(slice(None), b'{"vocab_size": 3}'), ".json", "is not the manifest"),
    ],
)
def test_damaged_corpus(
    prefix: str, tmp_path: Path, change: Callable[[bytearray], object], suffix: str, message: str
) -> None:
    assert message in refusal(make(own(damaged(prefix, tmp_path, change, suffix))))


def test_corpus_shorter_than_a_sequence(prefix: str, tmp_path: Path) -> None:
    tokens = json.loads(Path(f"{prefix}.json").read_text())["tokens"]
    longest = {"training": {"seq_length": tokens - 1}}
    opened(make(own(prefix), **longest))
    sentence = refusal(make(own(prefix), training={"seq_length": tokens}))
    assert f"fewer than the {tokens + 1} of one window" in sentence
    assert f"seq_length {tokens - 1} is the longest that works" in sentence


def test_validation_needs_a_corpus(prefix: str) -> None:
    assert "data.validation names no corpus" in refusal(make(own(prefix), validation={"interval": 2}))


def foreign(folder: Path, tokens: list[int], vocab_size: int = 100_000) -> str:
    """Return a corpus that another program wrote, without a manifest."""
    with IndexedWriter(folder / "foreign", vocab_size) as writer:
        writer.add_document(np.array(tokens))
    return str(folder / "foreign")


@pytest.mark.parametrize(
    ("place", "token", "said"),
    [(5, 257, "has token 257"), (5, -3, "has token -3"), (32, 99_999, "has token 99999"), (0, 256, None)],
)
def test_tokens_that_the_model_does_not_know(tmp_path: Path, place: int, token: int, said: str | None) -> None:
    """The run is refused even if such a token is only a label, like the last token of a window."""
    tokens = list(range(33))
    tokens[place] = token
    sizes = {"global_batch_size": 1, "micro_batch_size": 1}
    run = make(own(foreign(tmp_path, tokens)), training=sizes)
    batches = opened(run).train.step(0)
    if said is None:
        assert micro_batches(batches, run, NO_CP, CPU)[0].tokens[0, place] == token
        return
    with pytest.raises(UserError, match=rf"the corpus {said}, but model\.vocab_size = 257"):
        micro_batches(batches, run, NO_CP, CPU)


def test_a_sample_needs_a_tokenizer(tmp_path: Path) -> None:
    """The run is refused at its start, not when training has ended."""
    prefix = foreign(tmp_path, list(range(200)))
    asked = {"sample": {"prompt": "a"}}
    assert opened(make(own(prefix))).tokenizer is None
    sentence = refusal(make(own(prefix), **asked))
    assert sentence.startswith("sample.prompt needs a tokenizer")
    assert "set data.tokenizer" in sentence
    assert opened(make(own(prefix, tokenizer="bytes"), **asked)).tokenizer is not None
    narrow = {"preset": "llama-tiny", "vocab_size": 200}
    sentence = refusal(make(own(prefix, tokenizer="bytes"), model=narrow, **asked))
    assert "data.tokenizer = 'bytes' has a vocabulary of 257, but model.vocab_size = 200" in sentence


def test_goldfish_masks_training_and_not_validation(prefix: str) -> None:
    """Compare with the same run without a mask, in training and in validation."""
    data = own(prefix, validation=[{"path": f"{prefix}-validation"}])
    plain = opened(make(data, validation={"interval": 2}))
    masked = opened(make(data, validation={"interval": 2}, masks={"goldfish": {"strategy": "hash", "h": 4}}))
    for step in range(3):
        labels, before = (np.concatenate([b.labels for b in c.train.step(step)]) for c in (masked, plain))
        dropped = (labels == -100) & (before != -100)
        assert ((labels == before) | dropped).all()
        assert 0.1 < dropped.mean() < 0.4
        assert not (dropped & (before == 256)).any()  # the end of a document is always trained
        for one, other in zip(masked.train.step(step), plain.train.step(step), strict=True):
            assert (one.tokens == other.tokens).all()  # the model reads masked tokens as inputs
        labels, before = (np.concatenate([b.labels for b in c.validation.step(step)]) for c in (masked, plain))
        assert (labels == before).all()
    statistics = masked.preview().statistics
    assert statistics.k == 4
    assert 0.15 < statistics.drop_rate < 0.3
    assert plain.preview().statistics is None


def only_spaces(windows: Windows) -> np.ndarray:
    return windows.tokens[:, 1:] == ord(" ")


def test_masks_of_the_user_mask_validation_too(prefix: str) -> None:
    data = own(prefix, validation=[{"path": f"{prefix}-validation"}])
    both = opened(make(data, validation={"interval": 2}, masks={"functions": [f"{__name__}:only_spaces"]}))
    for loader in (both.train, both.validation):
        labels = np.concatenate([batch.labels for batch in loader.step(0)])
        assert set(labels[labels != -100].tolist()) == {ord(" ")}


def test_a_mask_that_leaves_nothing_to_train(prefix: str) -> None:
    run = make(own(prefix), masks={"goldfish": {"strategy": "hash-table", "h": 32}})
    assert "masks.goldfish.h = 32 is not below training.seq_length = 32" in refusal(run)
