"""A mistyped command line is refused in one sentence that says what works."""

from __future__ import annotations

import inspect
import os
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from command_line import Cli, one_sentence
from tiny_corpus import run_file
from typer.main import get_command

from fourfold.cli.app import PANELS, app


def commands(group: Any, words: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield every command with the words that call it."""
    for name, command in group.commands.items():
        yield from commands(command, (*words, name)) if hasattr(command, "commands") else [((*words, name), command)]


def wrong_values(kind: object, limits: Any) -> Iterator[str]:
    """Yield values that an option's type refuses, regardless of the command's other words."""
    yield ""
    kinds = {kind, *typing.get_args(kind)}
    if kinds & {int, float}:
        yield from ("many", str(10**30)) if int in kinds else ("many",)
        yield from [] if limits.min is None else [str(limits.min - 1)]
        yield from [] if limits.max is None else [str(limits.max + 1)]
    if any(typing.get_origin(each) is typing.Literal for each in kinds):
        yield "zzz"


def test_every_option_of_every_command_refuses_a_wrong_value_in_one_sentence(cli: Cli) -> None:
    """The error names the option, the wrong value, and a value that works. An empty value, as from an unset shell
    variable, is also wrong."""
    refused = 0
    for words, command in commands(get_command(app)):
        hints = typing.get_type_hints(inspect.unwrap(command.callback), include_extras=True)
        for parameter in command.params:
            option = max(parameter.opts, key=len)
            if (
                not option.startswith("--")
                or option in ("--help", "--prompt")
                or bool in typing.get_args(hints[parameter.name])
            ):
                continue
            kind, limits = typing.get_args(hints[parameter.name])
            for value in wrong_values(kind, limits):
                sentence = one_sentence(cli(*words, option, value))
                assert option in sentence and (value or "''") in sentence and len(sentence) < 400, (words, sentence)
                assert any(hint in sentence for hint in ("must be", "give a value")), (words, sentence)
                refused += 1
    assert refused > 150


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("plan --model= --gpus 8", "the value of --model is empty ('')"),
        ("plan --model gpt2 --gpus 2 --machine a-100", "--machine a-100 is unknown; did you mean '"),
        ("plan --model gpt3 --gpus 2", "--model 'gpt3' is not a preset; did you mean 'gpt2'?"),
        ("plan --model gpt2 --gpus 2 --write no/such/file", "--write: cannot write no/such/file: No such"),
        ("machine calibrate --out no/x.toml", "--out no/x.toml: there is no folder no, or it is read-only; choose"),
        (
            "machine calibrate --out x.toml --machine no.toml",
            "--machine no.toml cannot be read: No such file",
        ),
        ("evaluate --model . --text no.txt", "--text no.txt is not a file; give a text file in UTF-8"),
        (
            "plan validate no.csv",
            "no.csv cannot be read: No such file or directory; give a CSV file",
        ),
        ("loki evaluate --model x --basis . --text t", "--basis: the basis . is a folder; give the file that"),
        ("plan --model gpt2 --gpus 2 --report no/such/file", "--report: cannot write no/such/file: No such"),
        ("plan --model gpt2", "--gpus is missing; give the number of GPUs to plan for, such as --gpus 8"),
        ("plan --model gpt2 --gpus 2 --limit x=3", "--limit x=3: no layout of 2 GPUs is within these limits; leave"),
        ("plan --model gpt2 --gpus 2 --limit ep=2", "--limit ep=2: ep needs a model with experts; leave ep out"),
        ("plan validate --calibrate-on no.csv", "--calibrate-on: no.csv cannot be read: No such file"),
        (
            "audit --model x --documents y --max-exact-match 2",
            "--max-exact-match 2.0 must be a share from 0 to 1, such",
        ),
        (
            "audit --model x --documents y --temperature 0",
            "--temperature 0.0 must be finite and at least 1e-06, such as 1",
        ),
        (
            "generate --model x --prompt a --temperature -1",
            "--temperature -1.0 must be finite and at least 1e-06, such",
        ),
        (
            "generate --model no --prompt a",
            "--model: there is no folder no; give a model's folder, or its id on the Hub",
        ),
        (
            "generate --model x --prompt-file no.txt",
            "--prompt-file no.txt cannot be read: No such file or directory; give a text file, or --prompt",
        ),
        ("generate --model x", "give either --prompt or --prompt-file, such as --prompt Once"),
        (
            "loki evaluate --model x --basis no --text t",
            "--basis: cannot read no: No such file or directory: no; give a file that exists and is readable",
        ),
        (
            "machine calibrate --out x.toml --from no.csv",
            "--from: no.csv cannot be read: No such file or directory; give",
        ),
        ("machine calibrate --out x.toml --from no", "--from: no does not exist; give the metrics.jsonl of a run"),
        ("loki evaluate --model x --basis no --text t --loki k=a", "loki: k = 'a': must be an integer ≥ 1, such as 1"),
        ("loki evaluate --model x --basis no --text t --loki kk=1", "loki: there is no key kk; use k"),
        (
            "loki evaluate --model x --basis no",
            "--text and --tasks are missing; give one of them, such as --text held_out.txt",
        ),
        (
            "loki calibrate --model x --text t --out no/x",
            "--out no/x: there is no folder no, or it is read-only; choose",
        ),
        ("prepare t --out c --format sft", "--format sft needs --tokenizer DIR, the model's folder"),
        ("prepare t --out c --format sft --workers 2", "--format sft does not take --workers; leave --workers out"),
        ("prepare t --out c --format sft --repeats 0,2", "--format sft does not take --repeats; leave --repeats out"),
        (
            "prepare t --out c --tokenizer zz --chat-template u",
            "--format text does not take --chat-template; leave --chat-template out",
        ),
        ("prepare t --out c --tokenizer zz", "--tokenizer: the tokenizer zz does not exist; give the path of a"),
        (
            "tune run.toml --time 1:00",
            "--nodes, --time, --sbatch, and --setup need --slurm SITE, such as --slurm generic",
        ),
        ("machine calibrate --machine laptop --out mine", "--out mine must end in .toml, such as mine.toml"),
        (
            "checkpoint verify no",
            "no is not a checkpoint (a folder with state.json) and contains no checkpoint; give a run's folder",
        ),
        ("train no.toml", "the run file no.toml cannot be read: No such file or directory; give a TOML file"),
        ("plan --model gpt2 --gpus 2 --set parallel.x=2", "--set parallel.x=2 changes a run file, but --model gpt2 is"),
        (
            "plan --model ./Qwen3 --gpus 2",
            "--model ./Qwen3 does not exist; give the folder of a config.json, or a preset",
        ),
        ("plan --model gpt2 --gpus 2 --tokens nan", "--tokens nan must be a number above 0, such as 2e12"),
        ("report runs/a --out page.html", "--out page.html is for the page of several runs"),
    ],
)
def test_a_refusal_names_the_option(cli: Cli, line: str, sentence: str) -> None:
    assert f"fourfold: {sentence}" in one_sentence(cli(*line.split()))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("plan --modle gpt2", "no option --modle for `plan`; did you mean --model?"),
        ("train run.toml --sett a.b=1", "no option --sett for `train`; did you mean --set?"),
        ("launch slurm run.toml --sit x", "no option --sit for `launch slurm`; did you mean --site?"),
        ("--bogus", "no option --bogus; `fourfold --help` lists all options"),
        ("trian run.toml", "no command 'trian'; did you mean 'train'?"),
        ("frobnicate", "no command 'frobnicate'; choose from plan, trace, tune"),
        ("launch slrum run.toml", "no command 'slrum' for `launch`; did you mean 'slurm'?"),
        ("plan valdate rows.csv", "no command 'valdate' for `plan`; did you mean 'validate'?"),
        ("train", "RUN.toml is missing for `train`; for example fourfold train --model llama-12m"),
        ("launch slurm run.toml", "--site is missing for `launch slurm`; for example fourfold launch slurm"),
        ("plan --model gpt2 --top 0", "--top 0: must be greater than or equal to 1"),
        ("plan --model gpt2 --gpus many", "--gpus many: must be a whole number, such as 8"),
        ("plan validate --leave-out rows", "--leave-out rows: must be one of 'source', 'machine'"),
        ("train run.toml more", "(more) for `train`; `fourfold train --help` shows what it takes"),
        ("train run.toml --set", "option '--set' requires an argument"),
    ],
)
def test_a_mistyped_command_line_is_refused_in_one_sentence(cli: Cli, line: str, message: str) -> None:
    assert message in one_sentence(cli(*line.split()))


@pytest.mark.parametrize(
    ("line", "option"),
    [
        ("train {}", "the run file"),
        ("plan --model gpt2 --gpus 2 --machine {}.toml", "--machine"),
        ("plan validate {}", ""),
        ("generate --model . --prompt-file {}", "--prompt-file"),
        ("launch slurm run.toml --site {}.toml --nodes 1", "--site"),
    ],
)
def test_a_named_pipe_as_a_file_is_refused_instead_of_waited_for(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, option: str
) -> None:
    monkeypatch.chdir(tmp_path)
    run_file(tmp_path, "corpus", training__device="cpu")
    for name in ("pipe", "pipe.toml"):
        os.mkfifo(name)
    sentence = one_sentence(cli(*line.format("pipe").split()))
    assert (
        f"{option} pipe".lstrip() in sentence and "cannot be read: it is not a file, but a folder, a named" in sentence
    )


def test_the_output_of_a_launch_is_named_by_its_option(cli: Cli, tmp_path: Path) -> None:
    path, script = run_file(tmp_path, "corpus", checkpoint__interval=1), tmp_path / "no" / "job.sh"
    sentence = one_sentence(cli("launch", "slurm", path, "--site", "generic", "--nodes", 1, "--output", script))
    assert f"--output: cannot write {script}: No such file or directory; make its folder first" in sentence


def test_every_command_refuses_an_unknown_option_alike(cli: Cli) -> None:
    for name in (name for commands in PANELS.values() for name in commands):
        assert "no option --nonsense" in one_sentence(cli(name, "--nonsense")) or name in ("launch", "loki")


def test_without_arguments_a_group_prints_its_help(cli: Cli) -> None:
    code, output, _ = cli("launch")
    assert code == 2 and "slurm" in output
