"""``fourfold train --model … --data …``: what it chooses, and that its run file repeats the run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command_line import Cli, one_sentence
from tiny_chat import CHATML, make_chat_tokenizer, talks, write_rows
from tiny_corpus import WORDS, line

from fourfold.config.presets import PRESETS
from fourfold.data.indexed import IndexedDataset
from fourfold.data.manifest import read_manifest
from fourfold.errors import UserError
from fourfold.run_file.load import load_run
from fourfold.tuning import run_for_data as module
from fourfold.tuning.run_for_data import EPOCHS, LEAST_STEPS, TOKENS_PER_PARAMETER, run_for_data


@pytest.fixture
def text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Make a folder of 40 texts, work next to it, and return its name."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes").mkdir()
    for number in range(80):
        words = (WORDS[(number * 7 + place * place) % len(WORDS)] for place in range(200))
        (tmp_path / "notes" / f"{number}.txt").write_text(" ".join(words))
    return "notes"


def test_one_command_trains_on_a_folder_of_text(cli: Cli, text: str) -> None:
    command = ("train", "--model", "llama-tiny", "--data", text, "--steps", 3, "--set", "training.seq_length=16")
    code, output, errors = cli(*command)
    assert code == 0, errors
    folder = Path("runs/notes-llama-tiny")
    assert f"Report: {folder}/report.html" in output and (folder / "sample.txt").is_file()
    assert [json.loads(each)["step"] for each in (folder / "metrics.jsonl").read_text().splitlines()] == [1, 2, 3]
    # The printed run file and the one in the run's folder describe the same run.
    printed = output.partition("with all defaults):\n\n")[2].partition("\n\nRun\n")[0]
    Path("printed.toml").write_text(printed)
    assert 'preset = "llama-tiny"' in printed and "hidden_size" not in printed
    assert load_run("printed.toml") == load_run(folder / "run.toml")
    losses = (folder / "metrics.jsonl").read_text()
    assert cli("train", folder / "run.toml", "--set", "name=again")[0] == 0
    again = Path("runs/again/metrics.jsonl").read_text()
    assert [json.loads(each)["loss"] for each in again.splitlines()] == [
        json.loads(each)["loss"] for each in losses.splitlines()
    ]
    # The same command with more steps continues the run, and does not tokenize the text again.
    corpus = Path("corpora/notes-llama-tiny.bin").stat().st_mtime_ns
    assert cli(*command[:-3], 4, *command[-2:])[0] == 0
    assert (folder / "checkpoints" / "step_4").is_dir()
    assert Path("corpora/notes-llama-tiny.bin").stat().st_mtime_ns == corpus


def test_text_is_held_out_and_the_length_and_the_steps_follow_from_the_size_of_the_data(text: str) -> None:
    run, _ = run_for_data("llama-12m", text)
    corpus = run.data.train[0].path
    tokens = IndexedDataset(corpus).tokens
    batch = run.training.global_batch_size * run.training.seq_length
    assert tokens >= 8 * run.training.seq_length > tokens / 2 or run.training.seq_length == 256
    assert run.training.train_steps == max(LEAST_STEPS, -(-EPOCHS * tokens // batch))
    assert run.validation.interval and IndexedDataset(run.data.validation[0].path).documents < 8
    # A tokenizer for so little text is small, and the model's vocabulary is the tokenizer's.
    assert 257 < run.model.vocab_size == read_manifest(corpus).vocab_size <= 512 < PRESETS["llama-12m"]["vocab_size"]
    assert run.sample.prompt and run.sample.prompt.split()[0] in WORDS


def test_a_small_model_gets_at_most_so_many_tokens_per_parameter(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LEAST_STEPS", 1)
    monkeypatch.setattr(module, "EPOCHS", 10**6)
    run, _ = run_for_data("llama-tiny", text)
    trained = run.training.train_steps * run.training.global_batch_size * run.training.seq_length
    parameters = module.num_parameters(run.model)
    assert trained == pytest.approx(TOKENS_PER_PARAMETER * parameters, rel=0.01)


def test_the_grid_has_as_many_processes_as_the_user_asks_for(text: str) -> None:
    run, _ = run_for_data("llama-tiny", text, processes=3, steps=5)
    assert run.parallel.world_size == 3 and run.training.global_batch_size % 3 == 0
    assert run.training.train_steps == 5
    assert run_for_data("llama-tiny", text)[0].parallel.world_size == 1


def test_the_batch_is_a_multiple_of_the_processes_of_a_grid_that_overrides_choose(text: str) -> None:
    run, _ = run_for_data("llama-tiny", text, steps=5, overrides=["parallel.z=3", "parallel.dp=2"])
    assert run.parallel.world_size == 6 and run.training.global_batch_size == 18
    with pytest.raises(UserError, match=r"--set parallel\.z=-3"):
        run_for_data("llama-tiny", text, steps=5, overrides=["parallel.z=-3"])


def test_gpus_set_the_number_of_processes_the_precision_and_the_memory(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "local_gpus", lambda: (4, 80e9))
    run, _ = run_for_data("llama-tiny", text)
    assert run.parallel.world_size == 4 and run.training.precision == "bf16"
    on_cpu, _ = run_for_data("llama-tiny", text, overrides=["training.device=cpu"])
    assert on_cpu.parallel.world_size == 1 and on_cpu.training.precision == "fp32"
    monkeypatch.setattr(module, "local_gpus", lambda: (4, 1e9))
    with pytest.raises(UserError, match="no layout of 4 devices"):
        run_for_data("llama3-8b", text)


def test_overrides_replace_every_choice(text: str) -> None:
    overrides = ["name=mine", "parallel.x=2", "training.micro_batch_size=4", "optimizer.lr=0.5", "model.vocab_size=300"]
    run, printed = run_for_data("llama-tiny", text, overrides=overrides)
    assert (run.name, run.parallel.x, run.training.micro_batch_size, run.optimizer.lr) == ("mine", 2, 4, 0.5)
    assert read_manifest("corpora/mine").vocab_size <= run.model.vocab_size == 300
    assert "vocab_size = 300" in printed and "lr = 0.5" in printed
    run, _ = run_for_data("llama-tiny", text, processes=2, overrides=["training.micro_batch_size=2"])
    assert run.training.micro_batch_size == 2 and run.parallel.world_size == 2


def test_a_prepared_corpus_is_used_as_it_is(tmp_path: Path, prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run, _ = run_for_data("llama-tiny", prefix)
    assert [each.path for each in run.data.train] == [prefix]
    assert [each.path for each in run.data.validation] == [f"{prefix}-validation"]
    assert not Path("corpora").exists()


def test_other_data_with_the_same_name_do_not_replace_a_corpus(text: str) -> None:
    run, _ = run_for_data("llama-tiny", text)
    tokenizer = Path("corpora/notes-llama-tiny-tokenizer.json").read_bytes()
    assert run_for_data("llama-tiny", text)[0] == run
    Path(text, "0.txt").write_text("something else")
    with pytest.raises(UserError, match="was made from other data than notes; add --set name=NAME, or remove"):
        run_for_data("llama-tiny", text)
    assert Path("corpora/notes-llama-tiny-tokenizer.json").read_bytes() == tokenizer
    assert run_for_data("llama-tiny", text, overrides=["name=new"])[0].data.train[0].path == "corpora/new"


@pytest.mark.parametrize("documents", [1, 3, 25, 40])
def test_a_few_short_texts_are_enough(tmp_path: Path, documents: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("few.jsonl").write_text("".join(line(text=f"text {number} is short") for number in range(documents)))
    run, _ = run_for_data("llama-tiny", "few.jsonl")
    assert IndexedDataset(run.data.train[0].path).tokens > run.training.seq_length


def test_a_hugging_face_model_brings_its_tokenizer_and_learns_from_conversations(cli: Cli, text: str) -> None:
    pytest.importorskip("transformers")
    from tiny_huggingface import make_model

    make_model(Path("model"), "llama", vocab_size=320)
    make_chat_tokenizer(Path("model"), CHATML)
    run, printed = run_for_data("./model", text)
    assert 'from_hf = "./model"' in printed and "vocab_size" not in printed
    assert run.optimizer.lr == module.PRETRAINED_LR
    write_rows(Path("talks.jsonl"), talks(40))
    run, _ = run_for_data("./model", "talks.jsonl")
    assert run.data.format == "sft" and run.sample.prompt is None
    assert cli("train", "--model", "./model", "--data", "talks.jsonl", "--steps", 2)[0] == 0
    assert "give --model a Hugging Face model with a chat template" in one_sentence(
        cli("train", "--model", "llama-tiny", "--data", "talks.jsonl")
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--model llama-12m", "--data is missing for `train`"),
        ("--data notes", "--model is missing for `train`"),
        ("--model llama-12n --data notes", "model.preset = 'llama-12n' is not a preset; did you mean 'llama-12m'?"),
        ("--model no/such/folder --data notes", "there is no folder no/such/folder"),
        ("--model llama-tiny --data nothing", "--data: input nothing does not exist"),
        ("--model llama-tiny --data rows.jsonl", 'no key "text" among body'),
        (
            "--model llama-tiny --data notes --processes 3 --set parallel.x=2",
            "--processes 3 and --set parallel.… both choose the grid",
        ),
        ("--model llama-tiny --data notes --set training.bogus=1", "--set training.bogus=1: unknown key"),
        ("run.toml --data notes", "leave out --data or run.toml"),
        ("run.toml --steps 5", "leave out --steps or run.toml"),
    ],
)
def test_a_mistake_gets_one_sentence(cli: Cli, text: str, options: str, message: str) -> None:
    Path("rows.jsonl").write_text(line(body="a"))
    assert message in one_sentence(cli("train", *options.split()))


def test_a_launcher_needs_a_run_file(cli: Cli, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    assert "torchrun and srun need a run file" in one_sentence(cli("train", "--model", "llama-tiny", "--data", text))
