"""The audit of a Hugging Face model, and its refusals."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from command_line import Cli
from tiny_corpus import line, make_corpus
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers

from fourfold.data.canaries import Canaries, ledger_path
from fourfold.data.prepare import prepare
from fourfold.data.tokenizer import HFTokenizer
from fourfold.data.transformers_tokenizer import TransformersTokenizer
from fourfold.huggingface.import_model import import_huggingface
from fourfold.jobs import audit
from fourfold.memorization.audit_request import AuditRequest
from fourfold.memorization.documents import read_documents, with_others_before
from fourfold.memorization.scored_model import find_model, find_tokenizer
from fourfold.memorization.scorers import HuggingFaceScorer
from fourfold.memorization.scores import AttackSampling


@pytest.fixture(scope="module")
def hugging_face(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """Return a tiny Llama of the transformers library that has learned some of a few texts, and the texts."""
    transformers = pytest.importorskip("transformers")
    from fourfold.data.tokenizer import train_bpe

    folder = tmp_path_factory.mktemp("hugging_face")
    make_corpus(folder, "text", documents=100)
    texts = [json.loads(row)["text"] for row in (folder / "text.jsonl").read_text().splitlines()[:16]]
    train_bpe(texts, 270, folder / "tokenizer.json")
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=270, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
            max_position_embeddings=256,
        )
    )  # fmt: skip
    rows = [tokenizer(text)["input_ids"][:60] for text in texts[:8]]
    batch = torch.tensor([row for row in rows if len(row) == 60])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(120):
        model(batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder, texts


def test_hugging_face_model(hugging_face: tuple[Path, list[str]], tmp_path: Path, cli: Cli) -> None:
    folder, texts = hugging_face
    documents = tmp_path / "documents.jsonl"
    documents.write_text("".join(line(text=text, count=int(n < 8)) for n, text in enumerate(texts)))
    code, output, errors = cli(
        "audit", "--model", folder, "--documents", documents, "--suffix", 10, "--prefix", 20, "--generate", 8,
        "--beams", 3, "--json",
    )  # fmt: skip
    assert code == 0, errors
    record = json.loads(output)
    assert [row["edits"] for row in record["near_verbatim"]["tolerances"]] == [0, 1, 2]
    assert record["generation"]["agrees_with_one_pass"] == 1
    assert record["token_agreement"]["mean"] > record["control"]["token_agreement"]["mean"]


def test_an_imported_model_has_the_scores_of_its_folder(tmp_path: Path) -> None:
    """The model's tokenizer puts a beginning-of-text token before a text, and the model was trained with that token."""
    transformers = pytest.importorskip("transformers")
    folder, documents = tmp_path / "model", tmp_path / "documents.jsonl"
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(special_tokens=["<s>", "</s>"], initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(["hello"], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    fast.save_pretrained(folder)
    small_model(folder, vocab_size=len(fast), bos_token_id=0, eos_token_id=1)
    documents.write_text("".join(line(text=f"the {n} quick brown foxes and {n * n} lazy dogs") for n in range(3)))
    import_huggingface(str(folder), tmp_path / "imported")
    request = AuditRequest(model=str(tmp_path / "imported"), documents=documents)
    with patch.object(HFTokenizer, "__init__", autospec=True, side_effect=HFTokenizer.__init__) as opened:
        usual = find_tokenizer(request, find_model(request.model, request))
    assert opened.call_count == 1
    assert isinstance(usual, HFTokenizer) and usual.begins_documents
    assert usual.fingerprint == HFTokenizer(folder, bos="auto").fingerprint
    of_folder, imported = (
        audit(AuditRequest(model=str(tmp_path / name), documents=documents, suffix=8, prefix=8))
        for name in ("model", "imported")
    )
    assert imported["loss"]["mean"] == pytest.approx(of_folder["loss"]["mean"], rel=1e-5)
    assert imported["median_log10_p"] == pytest.approx(of_folder["median_log10_p"], rel=1e-5)


def test_canaries_of_a_hugging_face_tokenizer(hugging_face: tuple[Path, list[str]], tmp_path: Path, cli: Cli) -> None:
    """The audit recognizes the ledger by the tokenizer.json, and accepts unusual line separators in texts. The audit
    refuses --set."""
    folder, texts = hugging_face
    (tmp_path / "text.jsonl").write_text("".join(line(text=f"{text}\u2028{text}") for text in texts))
    options = {"workers": 1, "canaries": Canaries(4, (0, 2), length=30)}
    prepare([tmp_path / "text.jsonl"], tmp_path / "c", tokenizer=folder, **options)
    prepare([tmp_path / "text.jsonl"], tmp_path / "bytes", tokenizer="bytes", **options)
    audit = ("audit", "--model", folder, "--suffix", 10, "--prefix", 10, "--json")
    code, output, errors = cli(*audit, "--documents", ledger_path(tmp_path / "c"))
    assert code == 0, errors
    assert list(json.loads(output)["by_count"]) == ["0", "2"]
    for more, message in (
        (("--documents", ledger_path(tmp_path / "bytes")), "another tokenizer than the model's"),
        (("--documents", ledger_path(tmp_path / "c"), "--set", "parallel.z=2"), "--set is for checkpoints"),
    ):
        code, output, errors = cli(*audit, *more)
        assert (code, output) == (2, "")
        assert message in errors


def test_canaries_of_a_corpus_whose_documents_end_with_another_token(
    hugging_face: tuple[Path, list[str]], tmp_path: Path, cli: Cli
) -> None:
    """The end token does not change the ids of the text. A tokenizer with other ids is refused. The user can name the
    ledger's tokenizer."""
    transformers = pytest.importorskip("transformers")
    folder, texts = hugging_face
    (tmp_path / "text.jsonl").write_text("".join(line(text=f"{text} {text}") for text in texts))
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"pad_token": "<pad>", "eos_token": "<|endoftext|>"})
    shutil.copytree(folder, tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    assert "<pad>" in (tmp_path / "model" / "tokenizer.json").read_text()
    for name, eos in (("own", None), ("other", "<pad>")):
        canaries = Canaries(4, (0, 2), length=30)
        prepare([tmp_path / "text.jsonl"], tmp_path / name, tokenizer=tmp_path / "model", eos_token=eos, workers=1,
                canaries=canaries)  # fmt: skip
    sizes = ("--suffix", 10, "--prefix", 10, "--json")
    records = []
    opened = TransformersTokenizer(str(tmp_path / "model"))
    for name, end in (("own", "<|endoftext|>"), ("other", "<pad>")):
        ledger = ledger_path(tmp_path / name)
        code, output, errors = cli("audit", "--model", tmp_path / "model", "--documents", ledger, *sizes)
        assert code == 0, errors
        records.append(json.loads(output))
        documents = read_documents(ledger, opened, vocab_size=opened.vocab_size, shortest=20)
        ends = {int(tokens[6]) for tokens in with_others_before(documents, 7)}
        assert ends == {tokenizer.convert_tokens_to_ids(end)}
    assert records[0] == records[1]
    code, output, errors = cli("audit", "--model", folder, "--documents", ledger_path(tmp_path / "other"), *sizes)
    assert (code, output) == (2, "") and "name that tokenizer with --tokenizer" in errors
    named = ("--tokenizer", tmp_path / "model")
    assert cli("audit", "--model", folder, "--documents", ledger_path(tmp_path / "other"), *named, *sizes)[0] == 0


def test_a_model_that_is_not_a_number_does_not_pass(
    hugging_face: tuple[Path, list[str]], tmp_path: Path, cli: Cli
) -> None:
    transformers = pytest.importorskip("transformers")
    folder, texts = hugging_face
    model = transformers.LlamaForCausalLM.from_pretrained(folder)
    model.model.norm.weight.data.fill_(float("nan"))
    shutil.copytree(folder, tmp_path / "broken")
    model.save_pretrained(tmp_path / "broken")
    (tmp_path / "documents.jsonl").write_text("".join(line(text=text) for text in texts))
    arguments = ("--documents", tmp_path / "documents.jsonl", "--suffix", 10, "--prefix", 10, "--max-exact-match", 0.01)
    code, output, errors = cli("audit", "--model", tmp_path / "broken", *arguments, "--json")
    assert (code, output) == (2, "")
    assert "probabilities are not numbers" in errors


def test_pickles_and_missing_tokenizers_of_hugging_face_are_refused(
    hugging_face: tuple[Path, list[str]], tmp_path: Path, cli: Cli
) -> None:
    transformers = pytest.importorskip("transformers")
    folder, texts = hugging_face
    (tmp_path / "documents.jsonl").write_text("".join(line(text=text) for text in texts))
    pickled, bare = tmp_path / "pickled", tmp_path / "bare"
    shutil.copytree(folder, pickled, ignore=shutil.ignore_patterns("*.safetensors"))
    torch.save(transformers.LlamaForCausalLM.from_pretrained(folder).state_dict(), pickled / "pytorch_model.bin")
    sizes = {"vocab_size": 270, "n_embd": 16, "n_layer": 1, "n_head": 2, "bos_token_id": 0, "eos_token_id": 0}
    transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).save_pretrained(bare)
    for model, message in ((pickled, "safetensors"), (bare, "name one with --tokenizer")):
        arguments = ("--documents", tmp_path / "documents.jsonl", "--suffix", 10, "--prefix", 10, "--json")
        code, output, errors = cli("audit", "--model", model, *arguments)
        assert (code, output) == (2, "")
        assert message in errors


def test_the_one_pass_is_what_hugging_face_generates(hugging_face: tuple[Path, list[str]]) -> None:
    """Compare the single pass with the library's own greedy search, on learned and unlearned documents."""
    transformers = pytest.importorskip("transformers")
    from fourfold.data.transformers_tokenizer import load_any_tokenizer
    from fourfold.memorization.scorers import HuggingFaceScorer
    from fourfold.memorization.scores import TokenScores

    folder, texts = hugging_face
    rows = [np.array(ids[:60]) for ids in load_any_tokenizer(str(folder)).encode_batch(texts)]
    model = HuggingFaceScorer(str(folder), torch.device("cpu"), AttackSampling(), 3)
    theirs = transformers.LlamaForCausalLM.from_pretrained(folder)
    exact = []
    for row, fields in zip(rows, model.score(rows), strict=True):
        prompt = torch.tensor(row[None, :-10])
        written = theirs.generate(prompt, max_new_tokens=10, do_sample=False, attention_mask=torch.ones_like(prompt))
        exact.append(bool(TokenScores.of(row, fields).agrees[-10:].all()))
        same = written[0, -10:].tolist() == row[-10:].tolist() and written.shape[1] == len(row)
        assert exact[-1] == same
    assert any(exact)
    assert not all(exact)


ROPES: dict[str, dict[str, Any]] = {
    "dynamic": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0},
    "longrope": {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "original_max_position_embeddings": 16,
        "short_factor": [1.0] * 4,
        "long_factor": [3.0] * 4,
    },
}


@pytest.mark.parametrize("kind", ROPES)
def test_a_score_does_not_depend_on_longer_documents(kind: str, tmp_path: Path) -> None:
    """The rotary frequencies of these types depend on the longest sequence of a batch. In one type, they also depend on
    earlier batches."""
    folder = small_model(tmp_path, max_position_embeddings=16, rope_parameters=ROPES[kind])
    lengths = (9, 20, 30, 12)
    documents = [np.random.default_rng(length).integers(201, size=length) for length in lengths]
    scorer = HuggingFaceScorer(str(folder), torch.device("cpu"), AttackSampling(), 4)
    scorer.score(documents[2:3])
    for document, together in zip(documents, scorer.score(documents), strict=True):
        alone = HuggingFaceScorer(str(folder), torch.device("cpu"), AttackSampling(), 4).score([document])[0]
        np.testing.assert_allclose(together[:, : len(document) - 1], alone, rtol=1e-4, atol=1e-4)


def test_a_model_that_attends_to_later_tokens_is_refused(tmp_path: Path, cli: Cli) -> None:
    """The model's loss would be small, because the model sees the tokens that it should predict."""
    folder = small_model(tmp_path / "encoder", is_causal=False)
    (tmp_path / "text.txt").write_text("some words " * 9)
    evaluate = ("evaluate", "--tokenizer", "bytes", "--text", tmp_path / "text.txt", "--context", 16, "--model")
    code, _, errors = cli(*evaluate, folder)
    assert code == 2 and "encoder is not causal" in errors and "is_causal = false" in errors
    assert cli(*evaluate, small_model(tmp_path / "decoder"))[0] == 0


def small_model(folder: Path, **keys: Any) -> Path:
    """Save a random Llama of 2 layers with 4 heads of 8 channels."""
    import transformers

    sizes = {"vocab_size": 257, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(**sizes | keys, num_attention_heads=4, initializer_range=0.3)
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder
