"""Commands on Hugging Face models: training, export, refusals, and warnings."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from command_line import Cli, one_sentence
from tiny_corpus import make_corpus, run_file
from tiny_huggingface import make_model

from fourfold.data.tokenizer import train_bpe
from fourfold.run_file.load import load_run

SLOW = ("ministral", "seed_oss", "starcoder2", "vaultgemma", "glm", "glm4", "ernie4_5", "helium")


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("qwen2 tied", "qwen2"),
        ("qwen2_moe", "qwen2_moe"),
        *(pytest.param(kind, kind, marks=pytest.mark.slow) for kind in SLOW),
    ],
)
def test_a_hugging_face_model_is_trained_and_exported(cli: Cli, name: str, kind: str, tmp_path: Path) -> None:
    """transformers opens the exported model, computes the same as the checkpoint, and generates text with it."""
    transformers = pytest.importorskip("transformers")
    from fourfold.checkpoints.saved_weights import SavedWeights
    from fourfold.models.transformer import Transformer

    folder = make_model(tmp_path / "hf", name, torch.bfloat16, vocab_size=257)
    changes = {"model__from_hf": str(folder), "model__preset": None, "optimizer__lr": 1e-3}
    path = run_file(tmp_path, make_corpus(tmp_path), **changes)
    assert cli("train", path)[0] == 0
    run = load_run(path)
    checkpoint = tmp_path / "runs" / run.name / "checkpoints" / "step_8"

    code, output, _ = cli(
        "checkpoint", "export-hf", tmp_path / "runs" / run.name, tmp_path / "out", "--dtype", "fp32", "--json"
    )
    record = json.loads(output)
    ours, saved = Transformer(run.model), SavedWeights(checkpoint)
    ours.load_state_dict({name: saved.read(name) for name, _ in ours.named_parameters()}, strict=False)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert (code, record["model_type"], record["parameters"]) == (0, kind, theirs.num_parameters())
    tokens = torch.randint(257, (2, 30), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = ours(tokens)
        torch.testing.assert_close(theirs(tokens).logits, expected, rtol=1e-5, atol=1e-5 * expected.abs().max().item())
        untrained = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        assert (untrained(tokens).logits - expected).abs().max() > 0.1
        longer = theirs.generate(tokens[:1], max_new_tokens=1, do_sample=False, pad_token_id=0)
    assert longer[0, -1] == expected[0, -1].argmax()
    code, output, _ = cli(
        "generate", "--model", tmp_path / "runs" / run.name, "--prompt", "a", "--max-new-tokens", "3", "--json"
    )
    assert code == 0 and json.loads(output)

    code, output, _ = cli("checkpoint", "export-hf", checkpoint, tmp_path / "as-it-came")
    assert code == 0
    assert output.startswith(f"{tmp_path / 'as-it-came'}: {kind}, ")
    config = json.loads((tmp_path / "as-it-came" / "config.json").read_text())
    source = json.loads((folder / "config.json").read_text())
    # The corpus has another end-of-document token than the imported model, so the exported file lists both.
    assert config == {**source, "eos_token_id": [256, source["eos_token_id"]]}
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "as-it-came")
    assert back.dtype == torch.bfloat16

    assert "exists" in one_sentence(cli("checkpoint", "export-hf", checkpoint, tmp_path / "out"))
    assert "neither a checkpoint" in one_sentence(cli("checkpoint", "export-hf", tmp_path, tmp_path / "none"))
    assert "no folder" in one_sentence(cli("checkpoint", "import-hf", tmp_path / "nowhere", tmp_path / "none"))
    assert "gpt2" in one_sentence(cli("checkpoint", "export-hf", checkpoint, tmp_path / "none", "--model-type", "gpt2"))
    assert not (tmp_path / "none").exists()


def test_an_export_without_a_tokenizer_warns(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    prefix = os.path.relpath(make_corpus(tmp_path), tmp_path)
    assert cli("train", run_file(tmp_path, prefix, training__train_steps=1))[0] == 0
    code, _, errors = cli("checkpoint", "export-hf", tmp_path / "runs" / "run", tmp_path / "here")
    assert (code, errors) == (0, "")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    code, _, errors = cli("checkpoint", "export-hf", tmp_path / "runs" / "run", tmp_path / "there")
    assert code == 0
    assert "there has no tokenizer" in errors and errors.endswith("or give --tokenizer PATH\n")


def test_a_corpus_of_another_tokenizer_is_refused(cli: Cli, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    folder = make_model(tmp_path / "hf", "llama", vocab_size=300)
    train_bpe(["some text to train on"], 280, folder / "tokenizer.json")
    path = run_file(tmp_path, make_corpus(tmp_path), model__from_hf=str(folder), model__preset=None)
    assert f"--tokenizer {folder / 'tokenizer.json'}" in one_sentence(cli("train", path))
