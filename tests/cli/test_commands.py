"""Commands as a user types them: what they print, how they exit, and what they leave behind."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import Cli, files_in, one_sentence
from patience import PATIENCE
from tiny_corpus import run_file

from fourfold import __version__
from fourfold.__main__ import main
from fourfold.cli.app import PANELS
from fourfold.training.job import Job
from fourfold.training.outcome import Outcome
from fourfold.verification.parity_report import ParityReport

COMMANDS = (
    "train",
    "prepare",
    "parity",
    "trace",
    "report",
    "audit",
    "generate",
    "machine",
    "launch",
    "checkpoint",
)


def modules_after(*arguments: object) -> tuple[int, set[str]]:
    """Return the exit code of a command, and the modules that it has imported."""
    code = (
        "import sys, json; sys.argv = json.loads(sys.argv[1])\n"
        "from fourfold.cli.app import main\n"
        "try: main()\n"
        "except SystemExit as leaving: code = leaving.code or 0\n"
        "else: code = 0\n"
        "print('\\n' + json.dumps([code, list(sys.modules)]))"
    )
    command = [sys.executable, "-c", code, json.dumps(["fourfold", *map(str, arguments)])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
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


def test_a_command_of_a_group_is_not_a_command_of_its_own(cli: Cli) -> None:
    names = [name for commands in PANELS.values() for name in commands]
    assert len(names) == 14
    groups = {"machine": ["doctor", "tune-matmul"], "checkpoint": ["import-hf", "export-hf"], "audit": ["masks"]}
    for group, commands in groups.items():
        for name in commands:
            assert cli(group, name, "--help")[0] == 0 and cli(name, "--help")[0] == 2


@pytest.mark.parametrize("columns", [80, 100])
def test_help_fills_the_width(cli: Cli, monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    for command, words in (
        ("train", "as set in [fault_tolerance]."),
        ("evaluate", "--set parallel.z=2 scores on two processes."),
    ):
        _, page, _ = cli(command, "--help")
        lines = [line.strip() for line in page.partition("╭")[0].splitlines()]
        begin = next(number for number, line in enumerate(lines) if line.startswith(("Starts", "For a text")))
        end = next(number for number, line in enumerate(lines) if line.endswith(words.split(" ")[-1]))
        prose = [line for line in lines[begin : end + 1] if line]
        assert words in " ".join(prose)
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

    cli("report", tmp_path)  # Imports modules, which read their own files.
    # Patch ``open`` only while the command runs, because pytest opens files too.
    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", refuse)
        patch.setattr(Path, "read_text", refuse)
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
    """If the results needed torch, the parent process would have to import torch only to read them."""
    code = f"import sys, {Outcome.__module__}, {ParityReport.__module__}; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_trace_json(cli: Cli, tmp_path: Path) -> None:
    path = run_file(tmp_path, "/nowhere/corpus", parallel__x=2, parallel__z=2)  # trace reads no data
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
    path = run_file(tmp_path, "/nowhere/corpus", optimizer__lr=3e-4)  # parity makes its own data
    before = files_in(tmp_path)
    code, output, errors = cli("parity", path, "--json", "--steps", "1")
    assert (code, errors) == (0, "")
    assert output.count("\n") == 1
    record = json.loads(output)
    quantities = ["loss", "validation", "audit", "grad_norm", "gradients", "weights", "resumed"]
    assert list(record) == ["ok", "limit", *quantities, "replicas", "initial", "own_types", "not_compared"]
    assert all(list(record[name]) == ["tensor", "grid", "one_process", "ratio"] for name in quantities)
    assert record["ok"] is True
    assert files_in(tmp_path) == before


def test_parity_without_room_for_its_data_is_refused_on_every_process(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    path = run_file(tmp_path, "/nowhere/corpus", parallel__x=2, output_dir=str(tmp_path / "taken"))
    assert "cannot write" in one_sentence(cli("parity", path, "--steps", "1"))


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
        (b"", ("--tokenizer", "bytes"), "no document has text; give other inputs"),
        (b'{"text": "a"}\n', (), "tokenizer"),
        (b'{"text": "a"}\n', ("--tokenizer", "none.json"), "none.json does not exist"),
        (b'{"text": "a"}\n', ("--train-tokenizer", "10"), "it must be at least 257"),
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
    assert not list(tmp_path.glob("out/a.*[nx]"))  # there is no .bin, .idx, or .json file


def test_generate_refuses_loki_without_a_basis(cli: Cli) -> None:
    assert "--loki d=4 needs --basis" in one_sentence(
        cli("generate", "--model", "none", "--prompt", "a", "--loki", "d=4")
    )


def test_report_refuses(cli: Cli, tmp_path: Path) -> None:
    assert "does not exist" in one_sentence(cli("report", tmp_path / "none"))
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("command", ["train", "parity", "trace"])
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read: No such file"),
        ("[model\n", "is not valid TOML"),
        ("[model]\npreset = 'llama-tiny'\n", "'data' is missing"),
        ("[modle]\n", "unknown key 'modle'; did you mean 'model'?"),
    ],
)
def test_files_that_are_not_run_files_are_refused(
    cli: Cli, tmp_path: Path, command: str, content: str | None, message: str
) -> None:
    if content is not None:
        (tmp_path / "run.toml").write_text(content)
    before = files_in(tmp_path)
    assert message in one_sentence(cli(command, tmp_path / "run.toml"))
    assert files_in(tmp_path) == before


def test_exit_code_of_a_run_that_differs(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If parity fails, the exit code is 1, and the output names the quantity."""
    original = Job.clip
    monkeypatch.setattr(Job, "clip", lambda job: original(job) * 1.001)
    code, output, errors = cli("parity", run_file(tmp_path, "/nowhere"), "--json", "--steps", "1")
    assert (code, errors) == (1, "")
    record = json.loads(output)
    assert record["ok"] is False
    norm = record["grad_norm"]
    assert norm["ratio"] == pytest.approx(norm["grid"] / norm["one_process"])
    assert norm["ratio"] > 1000


@pytest.mark.parametrize(
    ("words", "closed"),
    [
        ("plan --model gpt2 --gpus 2", ">&-"),
        ("plan --model gpt2 --gpus 2", "1</dev/null"),
        ("plan --model gpt2 --gpus 0", "2>&-"),
        ("plan --model gpt2 --gpus 0", "2>/dev/full"),
        ("plan --model gpt2 --gpus 0", "2</dev/null"),
    ],
)
def test_closed_and_full_outputs_change_no_exit_code(words: str, closed: str) -> None:
    command = f"{sys.executable} -m fourfold {words} {closed}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert done.returncode == (2 if "--gpus 0" in words else 0), done.stderr
    assert done.stderr == "" and (done.stdout == "" or "--gpus 0" not in words)


def test_a_terminal_without_unicode_gets_question_marks(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "fourfold", "plan", "--model", "gpt2", "--gpus", "2"],
        capture_output=True,
        env=os.environ | {"PYTHONIOENCODING": "ascii"},
    )
    assert done.returncode == 0 and done.stderr == b"" and b"?" in done.stdout


def test_a_report_of_a_link_to_itself_is_refused(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    assert "loop does not exist" in one_sentence(cli("report", tmp_path / "loop"))
