"""fourfold generate and fourfold loki, as a user types them."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from command_line import Cli, Result
from tiny_corpus import WORDS, make_corpus, run_file
from tiny_huggingface import make_model

pytest.importorskip("transformers")

from fourfold.data.tokenizer import train_bpe


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("text") / "text.txt"
    generator = torch.Generator().manual_seed(0)
    file.write_text(" ".join(WORDS[i] for i in torch.randint(len(WORDS), (1500,), generator=generator)))
    return file


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, text: Path) -> Path:
    folder = make_model(
        tmp_path_factory.mktemp("models") / "llama", "llama gqa tied", vocab_size=300, max_position_embeddings=256
    )
    train_bpe([text.read_text()], 290, folder / "tokenizer.json")
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(about))
    return folder


@pytest.fixture(scope="module")
def basis(model: Path, text: Path) -> Path:
    from command_line import exit_code

    file = model.parent / "basis.safetensors"
    assert exit_code("loki", "calibrate", "--model", model, "--text", text, "--out", file, "--seq-len", 64) == 0
    return file


def refused(result: Result) -> str:
    code, output, errors = result
    assert (code, output) == (2, ""), errors
    assert errors.startswith("fourfold: ") and errors.count("\n") == 1, errors
    return errors


def test_calibrate(cli: Cli, model: Path, text: Path, tmp_path: Path) -> None:
    out = tmp_path / "basis.safetensors"
    arguments = ("loki", "calibrate", "--model", model, "--text", text, "--out", out, "--seq-len", 64)
    code, output, errors = cli(*arguments, "--tokens", 1000)
    assert (code, errors) == (0, "")
    assert "mean of all heads, post-rotary" in output
    assert f"Written: {out}" in output.replace("\n", "")
    assert "Use d_f =" in output and "Contexts longer than 64 tokens were not measured." in output.replace("\n", " ")
    record = json.loads(cli(*arguments, "--tokens", 1000, "--json")[1])
    assert (record["tokens"], record["gate"]["windows"]) == (
        12 * 64,
        2,
    )  # 2 of the 15 windows choose the settings, and 1 window chooses the kind of components
    assert list(record["ranks"]) == ["pre", "post", "scores"]
    assert all(1 <= rank <= 8 for heads in record["ranks"]["post"] for rank in heads)


def test_evaluate(cli: Cli, model: Path, text: Path, basis: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    arguments = ("loki", "evaluate", "--model", model, "--basis", basis, "--text", text, "--seq-len", 128)
    options = ("--windows", 3, "--loki", "d=2", "--loki", "k=24", "--loki", "skip_layers=0")
    code, output, errors = cli(*arguments, *options)
    assert (code, errors) == (0, "")
    assert "exact top-k" in output and "random basis" in output
    record = json.loads(cli(*arguments, *options, "--json")[1])
    assert (record["windows"], record["seq_length"], record["k"]) == (3, 128, 24)
    assert record["layers"][0]["loki"] is None
    assert record["all"]["oracle"]["recall"] > 0.999
    assert 0 < record["all"]["loki"]["recall"] < 0.999
    assert record["all"]["loki"]["mass"] <= record["all"]["oracle"]["mass"] + 1e-6
    finer = json.loads(cli(*arguments, *options, "--loki", "d=8", "--json")[1])
    assert finer["all"]["loki"]["recall"] > record["all"]["loki"]["recall"]
    assert finer["perplexity"]["dense"] != pytest.approx(finer["perplexity"]["oracle"], rel=1e-5)


def test_generate(cli: Cli, model: Path, basis: Path, tmp_path: Path) -> None:
    begin = ("generate", "--model", model, "--max-new-tokens", 20)
    code, output, errors = cli(*begin, "--prompt", "grid axis tile")
    assert (code, errors) == (0, "")
    assert output.startswith("grid axis tile")
    assert re.search(
        r"\n\n\d+ \+ \d+ tokens \(always the most likely token\): the first after "
        r"[\d.]+ s, then [\d.]+ tokens/s; cache 6\.50 KiB\n$",
        output,
    )
    record = json.loads(cli(*begin, "--prompt", "grid axis tile", "--json")[1])
    assert output.startswith("grid axis tile" + record["text"])
    assert record["cache_bytes"] == 2 * 2 * 2 * 8 * 4 * (record["prompt_tokens"] + record["new_tokens"] - 1)

    file = tmp_path / "prompt.txt"
    file.write_text("grid axis tile")
    loki = ("--basis", basis, "--loki", "min_seq=0")
    same = json.loads(cli(*begin, "--prompt-file", file, *loki, "--loki", "k_f=1.0", "--json")[1])
    assert same["text"] == record["text"]
    assert same["cache_bytes"] == (1 + 1 / 64) * record["cache_bytes"]  # a byte of codes for 2 × 8 fp32 numbers
    few = json.loads(cli(*begin, "--prompt-file", file, *loki, "--loki", "k=2", "--loki", "d=1", "--json")[1])
    assert few["text"] != record["text"]
    drawn = [cli(*begin, "--prompt", "grid", "--temperature", 1, "--seed", seed, "--json")[1] for seed in (1, 1, 2)]
    texts = [json.loads(each)["text"] for each in drawn]
    assert texts[0] == texts[1] != texts[2]


def test_generate_with_the_settings_of_the_calibration(
    cli: Cli, model: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fourfold.inference.loki import quality_gate

    monkeypatch.setattr(quality_gate, "GRID", ((0.5, 0.25),))
    basis = tmp_path / "basis.safetensors"
    calibrate = ("loki", "calibrate", "--model", model, "--text", text, "--out", basis, "--seq-len", 64)
    generate = ("generate", "--model", model, "--prompt", "grid axis tile", "--max-new-tokens", 8, "--basis", basis)
    assert cli(*calibrate, "--tolerance", 10)[0] == 0
    code, _, errors = cli(*generate)
    assert (code, errors) == (0, "note: calibration chose d_f = 0.5 and k_f = 0.25\n")
    assert cli(*generate, "--loki", "min_seq=0")[2] == "note: calibration chose d_f = 0.5 and k_f = 0.25\n"
    assert cli(*generate, "--loki", "k=5")[2] == "note: calibration chose d_f = 0.5\n"
    assert cli(*generate, "--loki", "d=4")[2] == "note: calibration chose k_f = 0.25\n"
    assert cli(*generate, "--loki", "k=5", "--loki", "d_f=0.5")[2] == ""
    code, output, _ = cli(*calibrate, "--tolerance", 0)
    assert code == 0 and "No settings pass" in output
    assert "all settings lost too much quality in the calibration; choose d_f and k_f yourself" in refused(
        cli(*generate)
    )
    assert cli(*generate, "--loki", "k_f=0.5")[0] == 0


@pytest.mark.slow
def test_only_the_text_is_printed(model: Path) -> None:
    """Use a new process, because importing transformers and its dependencies there could print warnings to standard
    error."""
    command = ("-m", "fourfold", "generate", "--model", model, "--prompt", "grid", "--max-new-tokens", "2")
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_generate_ignores_batch_settings_of_generation_config(cli: Cli, model: Path, tmp_path: Path) -> None:
    """Whatever generation_config.json says, the command prints one sequence, without beam search and with a growing
    cache."""
    copied = tmp_path / "copied"
    shutil.copytree(model, copied)
    (copied / "generation_config.json").write_text(json.dumps({"num_beams": 3, "cache_implementation": "static"}))
    texts = []
    for folder in (model, copied):
        code, output, errors = cli("generate", "--model", folder, "--max-new-tokens", 8, "--prompt", "grid", "--json")
        assert code == 0, errors
        record = json.loads(output)
        texts.append((record["text"], record["new_tokens"], record["cache_bytes"]))
    assert texts[0] == texts[1]


def test_generate_from_a_run_of_fourfold(cli: Cli, tmp_path: Path) -> None:
    """The run is exported temporarily, and the text consists of bytes, as in training."""
    path = run_file(tmp_path, make_corpus(tmp_path), training__train_steps=2, checkpoint__interval=2)
    assert cli("train", path)[0] == 0
    run = tmp_path / "runs" / "run"
    code, output, errors = cli("generate", "--model", run, "--prompt", "grid ", "--max-new-tokens", 5)
    assert (code, errors) == (0, "")
    assert output.startswith("grid ")
    text, basis = tmp_path / "text.txt", tmp_path / "basis.safetensors"
    text.write_text("gather reduce scatter " * 40)
    arguments = ("--model", run, "--text", text, "--seq-len", 64)
    assert cli("loki", "calibrate", *arguments, "--out", basis)[0] == 0
    assert cli("loki", "evaluate", *arguments, "--basis", basis, "--loki", "k=16")[0] == 0


def test_refusals(cli: Cli, model: Path, text: Path, basis: Path, tmp_path: Path) -> None:
    generate = ("generate", "--model", model, "--prompt", "grid")
    loki = (*generate, "--basis", basis)
    damaged = tmp_path / "damaged.safetensors"
    damaged.write_bytes(basis.read_bytes()[:100])
    other = make_model(tmp_path / "other", "llama gqa tied", vocab_size=300, max_position_embeddings=512)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (other / file).write_bytes((model / file).read_bytes())
    import transformers

    torch.manual_seed(7)
    transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(other)).save_pretrained(other)
    gpt2 = make_model(tmp_path / "gpt2", "gpt2")
    small = make_model(tmp_path / "small", "llama gqa tied", vocab_size=100)
    calibrate = ("loki", "calibrate", "--model", model, "--text", text, "--out", tmp_path / "x")
    evaluate = ("loki", "evaluate", "--model", model, "--basis", basis)
    for arguments, words in (
        ((*loki, "--loki", "k=0"), "k = '0': must be an integer ≥ 1, such as 1"),
        ((*loki, "--loki", "d=9"), "more than the 8 dims"),
        ((*loki, "--loki", "kf=0.5"), "there is no key kf; use k_f"),
        ((*loki, "--loki", "k"), "is not KEY=VALUE"),
        ((*loki, "--loki", "k=many"), "k = 'many': must be an integer ≥ 1, such as 1"),
        ((*generate, "--basis", damaged), "damaged"),
        ((*generate, "--basis", tmp_path / "none"), "cannot read"),
        (("generate", "--model", other, "--prompt", "a", "--basis", basis), "the basis belongs to"),
        (("generate", "--model", gpt2, "--tokenizer", "bytes", *loki[3:]), "'gpt2' are not supported"),
        ((*generate, "--prompt-file", text), "give either --prompt or --prompt-file"),
        ((*generate, "--max-new-tokens", 300), "256 positions"),
        ((*generate, "--temperature", -1), "--temperature -1.0 must be finite and at least 1e-06, such as 1"),
        ((*generate, "--temperature", "1e-320"), "must be finite and at least 1e-06, such as 1"),
        ((*generate, "--top-p", 2, "--temperature", 1), "at most 1"),
        (("generate", "--model", tmp_path / "none", "--prompt", "a"), "there is no folder"),
        (("generate", "--model", gpt2, "--prompt", "a"), "--tokenizer"),
        ((*calibrate, "--seq-len", 300), "--seq-len 256 works"),
        (("loki", "calibrate", "--model", model, "--text", tmp_path / "no", "--out", "x"), "--text"),
        (evaluate, "--text and --tasks are missing"),
        ((*generate, "--basis", tmp_path), "is a folder"),
        ((*generate, "--temperature", "nan"), "must be finite and at least 1e-06, such as 1"),
        ((*generate, "--seed", 2**64), "--seed"),
        ((*generate, "--top-k", 5), "--top-k 5 needs --temperature, such as"),
        ((*generate, "--device", "meta"), "neither cpu nor cuda"),
        (("generate", "--model", model, "--prompt", "a\udcff"), "is not UTF-8"),
        (("generate", "--model", small, "--tokenizer", "bytes", "--prompt", "\u00ff"), "the model knows 100 tokens"),
        ((*calibrate[:-1], tmp_path / "no" / "x"), "there is no folder"),
        ((*calibrate[:-1], tmp_path), "is a folder; add a file name"),
        ((*evaluate, "--text", text, "--seq-len", 64, "--loki", "k=64"), "nothing would be chosen"),
    ):  # fmt: skip
        assert words in refused(cli(*arguments)), arguments
    for arguments, choices in (((*generate, "--dtype", "int8"), ("auto", "fp32", "bf16", "fp16")),):
        code, output, errors = cli(*arguments)
        assert (code, output) == (2, "") and all(f"'{choice}'" in errors for choice in choices), errors


@pytest.mark.slow
def test_tasks_of_lm_eval(cli: Cli, model: Path, basis: Path, tmp_path: Path) -> None:
    """Run a small generation task. If Loki attends to all keys, its answers equal the answers with dense attention."""
    pytest.importorskip("lm_eval")
    if os.environ.get("HF_HUB_OFFLINE") != "1":
        pytest.skip("lm-eval asks the Hub about metrics, and waits where there is none: set HF_HUB_OFFLINE=1")
    rows = [{"question": "grid axis", "answer": "tile"}, {"question": "norm loss", "answer": "head"}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "words.yaml").write_text(
        "task: words\ndataset_path: json\ndataset_kwargs:\n  data_files:\n    test: "
        f"{tmp_path / 'rows.jsonl'}\ntest_split: test\noutput_type: generate_until\ndoc_to_text: '{{{{question}}}}'\n"
        "doc_to_target: '{{answer}}'\ngeneration_kwargs:\n  until: ['zz']\n  max_gen_toks: 8\n"
        "metric_list:\n  - metric: exact_match\n    aggregation: mean\n    higher_is_better: true\n"
    )
    arguments = ("loki", "evaluate", "--model", model, "--basis", basis, "--tasks", "words", "--include-path", tmp_path)
    code, output, errors = cli(*arguments, "--loki", "k_f=1.0", "--json")
    assert code == 0, errors
    record = json.loads(output.strip().splitlines()[-1])["tasks"]["words"]
    assert code == 0
    assert record["full"]["exact_match"] == record["loki"]["exact_match"]
    code, output, errors = cli(*arguments[:-4], "--tasks", "no_such_task")
    assert (code, "no_such_task: lm-eval has no such task" in errors) == (2, True)
