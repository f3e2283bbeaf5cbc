"""Commands as a user types them: what they print, where they exit, and what they leave behind."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import Cli, files_in, one_sentence
from tiny_corpus import run_file

from fourfold import __version__
from fourfold.__main__ import main
from fourfold.data.tokenizer import train_bpe
from fourfold.run_file.load import load_run
from fourfold.training import loop
from fourfold.training.job import Job
from fourfold.training.outcome import Outcome
from fourfold.verification.parity_report import ParityReport

COMMANDS = (
    "train",
    "prepare",
    "parity",
    "trace",
    "report",
    "masks",
    "audit",
    "import-hf",
    "export-hf",
    "generate",
    "doctor",
    "launch",
)


def in_a_process(*arguments: object) -> subprocess.CompletedProcess[str]:
    code = "import sys; from fourfold.cli.app import main; sys.argv[0] = 'fourfold'; main()"
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def modules_after(*arguments: object) -> tuple[int, set[str]]:
    """The exit code, and what the command has imported."""
    code = (
        "import sys, json; sys.argv = json.loads(sys.argv[1])\n"
        "from fourfold.cli.app import main\n"
        "try: main()\n"
        "except SystemExit as leaving: code = leaving.code or 0\n"
        "else: code = 0\n"
        "print('\\n' + json.dumps([code, list(sys.modules)]))"
    )
    command = [sys.executable, "-c", code, json.dumps(["fourfold", *map(str, arguments)])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    exit_code, modules = json.loads(done.stdout.splitlines()[-1])
    return exit_code, set(modules)


def test_help(cli: Cli) -> None:
    code, output, errors = cli("--help")
    assert (code, errors) == (0, "")
    for command in COMMANDS:
        assert f" {command} " in output
        code, page, errors = cli(command, "--help")
        assert (code, errors) == (0, "")
        assert f"Usage: fourfold {command} " in page
        assert "--help" in page
    assert cli("--version") == (0, f"fourfold {__version__}\n", "")


@pytest.mark.parametrize(
    "arguments", [("trian",), ("train",), ("train", "a.toml", "--sett", "a=b"), ("parity", "--steps=0", "a")]
)
def test_wrong_usage(cli: Cli, arguments: tuple[str, ...]) -> None:
    code, output, errors = cli(*arguments)
    assert (code, output) == (2, "")
    assert "Usage: fourfold" in errors
    assert "Traceback" not in errors


@pytest.mark.parametrize("columns", [80, 100])
def test_help_fills_the_width(cli: Cli, monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    for command, words in (("train", "as set in [fault_tolerance]."), ("evaluate", "--set parallel.z=2.")):
        _, page, _ = cli(command, "--help")
        paragraph = page.partition("╭")[0].rstrip().split("\n \n")[-1].split("\n \n")[-1]
        lines = [line.strip() for line in paragraph.splitlines() if line.strip()]
        assert lines[-1].endswith(words.split(" ")[-1]) and words in " ".join(lines)
        prose = lines[lines.index(next(line for line in lines if line.startswith(("Starts", "For a text")))) :]
        assert min(map(len, prose[:-1])) > columns - 20
        assert max(map(len, page.splitlines())) <= columns


def test_ctrl_c_while_modules_are_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted:
        def find_spec(self, name: str, *_: object) -> None:
            if name == "fourfold.cli.app":
                raise KeyboardInterrupt

    import fourfold.cli

    monkeypatch.delitem(sys.modules, "fourfold.cli.app")
    monkeypatch.delattr(fourfold.cli, "app")
    monkeypatch.setattr(sys, "meta_path", [Interrupted(), *sys.meta_path])
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 130


def test_a_file_that_may_not_be_read(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "metrics.jsonl").write_text("{}\n")

    def refuse(path: Path, *_: object, **__: object) -> str:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "open", refuse)
    monkeypatch.setattr(Path, "read_text", refuse)
    errors = one_sentence(cli("report", tmp_path))
    assert f"cannot open {tmp_path / 'metrics.jsonl'}: Permission denied" in errors


def test_help_and_mistakes_do_not_wait_for_torch(tmp_path: Path, prefix: str) -> None:
    code, modules = modules_after("--help")
    assert code == 0
    assert not {"torch", "numpy", "tokenizers"} & modules
    wrong = run_file(tmp_path, prefix, training__bogus=1)
    for command in ("train", "parity", "trace"):
        code, modules = modules_after(command, wrong)
        assert (command, code, "torch" in modules) == (command, 2, False)


def test_what_local_workers_return_does_not_need_torch() -> None:
    """Their parent would import it only to read that."""
    code = f"import sys, {Outcome.__module__}, {ParityReport.__module__}; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_train(cli: Cli, tmp_path: Path, prefix: str) -> None:
    path = run_file(tmp_path, prefix, sample__prompt="the ", sample__max_new_tokens=5, metrics__log_interval=3)
    code, output, errors = cli("train", path, "--set", "training.train_steps=4", "--set", "name=other")
    assert (code, errors) == (0, "")
    run_dir = tmp_path / "runs" / "other"
    assert [line.split()[1] for line in output.splitlines() if line.startswith("step:")] == ["1/4", "3/4", "4/4"]
    assert f"Report: {run_dir / 'report.html'}" in output
    sample = (run_dir / "sample.txt").read_text()
    assert f"\nSample:\n{sample}\n" in output
    page = (run_dir / "report.html").read_text()
    assert "Learning rate" in page
    assert "step_4" in page
    assert load_run(run_dir / "run.toml").training.train_steps == 4
    assert sorted(path.name for path in run_dir.iterdir()) == [
        "attempts.jsonl",
        "checkpoints",
        "metrics.jsonl",
        "report.html",
        "run.toml",
        "sample.txt",
        "summary.json",
    ]
    # Once more: it is done. And the page can be made again.
    code, output, errors = cli("train", run_dir / "run.toml")
    assert (code, errors) == (0, "")
    (run_dir / "report.html").unlink()
    assert cli("report", run_dir) == (0, f"{run_dir / 'report.html'}\n", "")
    assert (run_dir / "report.html").is_file()


def test_train_stopped_by_a_signal(cli: Cli, tmp_path: Path, prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = run_file(tmp_path, prefix)

    def begin_step(step: int) -> None:
        if step == 1:
            os.kill(os.getpid(), signal.SIGUSR1)

    with monkeypatch.context() as patched:
        patched.setattr(loop, "begin_step", begin_step)
        code, output, errors = cli("train", path)
    assert (code, errors) == (3, "")
    assert "a signal or the time limit, after saving" in output
    assert (tmp_path / "runs" / "run" / "checkpoints" / "step_2" / "state.json").is_file()
    assert (tmp_path / "runs" / "run" / "report.html").is_file()
    assert cli("train", path)[0] == 0
    assert (tmp_path / "runs" / "run" / "checkpoints" / "step_8" / "state.json").is_file()


@pytest.mark.slow
def test_local_workers_stopped_by_sigterm_save_and_exit_with_3(tmp_path: Path, prefix: str) -> None:
    """As a scheduler does it, to the process that it knows."""
    path = run_file(
        tmp_path, prefix, parallel__x=2, training__train_steps=100_000, lr_scheduler__decay_style="constant"
    )
    code = "import sys; from fourfold.cli.app import main; sys.argv[0] = 'fourfold'; main()"
    process = subprocess.Popen(
        [sys.executable, "-c", code, "train", str(path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    metrics = tmp_path / "runs" / "run" / "metrics.jsonl"
    give_up = time.monotonic() + 120
    while not (metrics.is_file() and metrics.read_text().count("\n") >= 2):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < give_up, "it did not begin to train"
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    output, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (3, "")
    assert "a signal or the time limit, after saving" in output
    steps = metrics.read_text().count("\n")
    assert (tmp_path / "runs" / "run" / "checkpoints" / f"step_{steps}" / "state.json").is_file()


def test_trace_json(cli: Cli, tmp_path: Path) -> None:
    path = run_file(tmp_path, "/nowhere/corpus", parallel__x=2, parallel__z=2)  # it needs no data
    before = files_in(tmp_path)
    code, output, errors = cli("trace", path, "--json")
    assert (code, errors) == (0, "")
    assert output.count("\n") == 1
    record = json.loads(output)
    assert record["world_size"] == 4
    assert {"parameters", "gradients", "optimizer", "activations_peak"} <= set(record["memory"])
    assert {tuple(sorted(line)) for line in record["collectives"]} == {
        ("axis", "bytes", "count", "exposed_bytes", "op", "purpose")
    }
    assert {"x", "z"} <= {line["axis"] for line in record["collectives"]}
    assert files_in(tmp_path) == before


def test_trace_of_one_process_has_no_empty_table(cli: Cli, tmp_path: Path) -> None:
    code, output, errors = cli("trace", run_file(tmp_path, "/nowhere/corpus"))
    assert (code, errors) == (0, "")
    assert output.endswith("No collectives: one rank computes the whole optimizer step\n")


def test_trace_of_a_pipeline_shows_every_place_on_it(cli: Cli, tmp_path: Path) -> None:
    path = run_file(tmp_path, "/nowhere/corpus", parallel__pp=2, model__num_hidden_layers=4)
    code, output, _ = cli("trace", path, "--set", "parallel.schedule=Interleaved1F1B")
    assert code == 0
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in output.splitlines() if line.startswith("│")]
    assert [row[:2] for row in rows[:2]] == [["0", "0–0, 2–2"], ["1", "1–1, 3–3"]]
    assert "Collectives of the pipeline's first rank" in output


def test_parity_json(cli: Cli, tmp_path: Path) -> None:
    path = run_file(tmp_path, "/nowhere/corpus", optimizer__lr=3e-4)  # it makes its own data
    before = files_in(tmp_path)
    code, output, errors = cli("parity", path, "--json", "--steps", "1")
    assert (code, errors) == (0, "")
    assert output.count("\n") == 1
    record = json.loads(output)
    quantities = ["loss", "grad_norm", "gradients", "weights", "resumed"]
    assert list(record) == ["ok", "limit", *quantities, "replicas", "initial"]
    assert all(list(record[name]) == ["tensor", "grid", "one_process", "ratio"] for name in quantities)
    assert record["ok"] is True
    assert files_in(tmp_path) == before


def test_prepare(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some text\n" * 100)
    code, output, errors = cli(
        "prepare", tmp_path / "a.txt", "--out", tmp_path / "a", "--tokenizer", "bytes", "--workers=1"
    )
    assert (code, errors) == (0, "")
    assert "train: 1 document, 1,001 tokens, 1,000 bytes" in output
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.bin", "a.idx", "a.json", "a.txt"]


@pytest.mark.parametrize(
    ("content", "arguments", "message"),
    [
        (None, ("--tokenizer", "bytes"), "does not exist"),
        (b'{"text": "a"}\n{"txt": "b"}\n', ("--tokenizer", "bytes"), "line 2"),
        (b'{"text": "a"}\nnot json\n', ("--tokenizer", "bytes"), "line 2"),
        (b'{"text": 5}\n', ("--tokenizer", "bytes"), "line 1"),
        (b"", ("--tokenizer", "bytes"), "nothing to prepare"),
        (b'{"text": "a"}\n', (), "tokenizer"),
        (b'{"text": "a"}\n', ("--tokenizer", "none.json"), "none.json does not exist"),
        (b'{"text": "a"}\n', ("--train-tokenizer", "10"), "257 is the least that works"),
        (b'{"text": "a"}\n', ("--tokenizer", "bytes", "--validation-fraction", "1.5"), "1.5"),
        (b'{"text": "a"}\n', ("--tokenizer", "bytes", "--workers", "0"), "workers"),
    ],
)
def test_prepare_refuses(
    cli: Cli, tmp_path: Path, content: bytes | None, arguments: tuple[str, ...], message: str
) -> None:
    if content is not None:
        (tmp_path / "a.jsonl").write_bytes(content)
    assert message in one_sentence(cli("prepare", tmp_path / "a.jsonl", "--out", tmp_path / "out" / "a", *arguments))
    assert not list(tmp_path.glob("out/a.*[nx]"))  # no .bin, no .idx, no .json


def test_report_refuses(cli: Cli, tmp_path: Path) -> None:
    assert "does not exist" in one_sentence(cli("report", tmp_path / "none"))
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("command", ["train", "parity", "trace"])
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot read the run file"),
        ("[model\n", "is not valid TOML"),
        ("[model]\npreset = 'llama-tiny'\n", "'data' is missing"),
        ("[modle]\n", "unknown key 'modle'; did you mean 'model'?"),
    ],
)
def test_run_files_that_are_none(cli: Cli, tmp_path: Path, command: str, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / "run.toml").write_text(content)
    before = files_in(tmp_path)
    assert message in one_sentence(cli(command, tmp_path / "run.toml"))
    assert files_in(tmp_path) == before


def test_exit_code_of_a_run_that_differs(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parity that fails is 1, and says which quantity."""
    original = Job.clip
    monkeypatch.setattr(Job, "clip", lambda job: original(job) * 1.001)
    code, output, errors = cli("parity", run_file(tmp_path, "/nowhere"), "--json", "--steps", "1")
    assert (code, errors) == (1, "")
    record = json.loads(output)
    assert record["ok"] is False
    norm = record["grad_norm"]
    assert norm["ratio"] == pytest.approx(norm["grid"] / norm["one_process"])
    assert norm["ratio"] > 1000


def break_index(folder: Path, prefix: str) -> str:
    for ending in (".bin", ".idx", ".json"):
        (folder / f"broken{ending}").write_bytes(Path(prefix + ending).read_bytes())
    os.truncate(folder / "broken.idx", 100)
    return str(folder / "broken")


def other_tokenizer(folder: Path, prefix: str) -> str:
    train_bpe(["a few words"], 300, folder / "tokenizer.json")
    return str(folder / "tokenizer.json")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"training__bogus": 1}, "unknown key 'training.bogus'"),
        ({"training__max_steps": 1}, "here it is called training.train_steps"),
        ({"optimizer__lr": float("nan")}, "optimizer.lr = nan"),
        ({"optimizer__lr": "1e-3"}, "optimizer.lr = '1e-3'"),
        ({"training__global_batch_size": 5}, "training.global_batch_size = 5 is not a multiple of"),
        ({"parallel__x": 3}, "cannot be split over x = 3"),
        ({"parallel__pp": 4}, "makes 4 stages, and the model has 2 layers"),
        ({"model__preset": "gpt-6t"}, "is not a preset"),
        ({"name": "../../etc"}, "name = '../../etc'"),
        ({"data__train": [{"path": "/nowhere/corpus"}]}, "/nowhere/corpus.idx does not exist"),
        ({"data__train": lambda folder, prefix: [{"path": break_index(folder, prefix)}]}, "broken.idx has 100 bytes"),
        ({"data__tokenizer": other_tokenizer}, "is not the tokenizer that made"),
        ({"data__tokenizer": "/nowhere/tokenizer.json"}, "/nowhere/tokenizer.json does not exist"),
        ({"model__vocab_size": 200}, "set model.vocab_size = 257"),
        ({"training__seq_length": 100_000}, "of one window of seq_length 100000"),
        ({"checkpoint__resume": "/nowhere"}, "there is no checkpoint"),
        ({"training__device": "cuda"}, "needs a GPU"),
    ],
)
def test_train_refuses_and_writes_nothing(
    cli: Cli, tmp_path: Path, prefix: str, changes: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    values = {key: value(tmp_path, prefix) if callable(value) else value for key, value in changes.items()}
    path = run_file(tmp_path, prefix, **values)
    before = files_in(tmp_path)
    assert message in one_sentence(cli("train", path))
    assert files_in(tmp_path) == before
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("override", ["parallel.x", "optimizer.lr=fast", "training.lr=1", "name.deep=2"])
def test_wrong_override(cli: Cli, tmp_path: Path, prefix: str, override: str) -> None:
    section = override.partition("=")[0].rpartition(".")[2]
    assert section in one_sentence(cli("train", run_file(tmp_path, prefix), "--set", override))
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_refusal_of_local_workers(tmp_path: Path, prefix: str) -> None:
    """What only the workers find out is one sentence of the parent, though both say it, whatever torch logs."""
    done = in_a_process("train", run_file(tmp_path, prefix, model__vocab_size=200, parallel__z=2))
    assert "set model.vocab_size = 257" in one_sentence((done.returncode, done.stdout, done.stderr))
    assert not (tmp_path / "runs").exists()


def test_a_loss_that_is_not_a_number(cli: Cli, tmp_path: Path, prefix: str) -> None:
    path = run_file(tmp_path, prefix, optimizer__lr=1e30, lr_scheduler__warmup_steps=0)
    code, _, errors = cli("train", path)
    assert code == 2
    assert errors.startswith("fourfold: the ")
    assert "lower optimizer.lr" in errors
    assert errors.count("\n") == 1
    assert not list((tmp_path / "runs").glob("**/*.safetensors"))
