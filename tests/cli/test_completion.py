"""Completion of the command line in a shell, and the order of its help."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import Cli

from fourfold.cli.app import PANELS
from fourfold.cli.options import KNOBS, SITES
from fourfold.config.presets import PRESETS
from fourfold.huggingface.architectures.families import FAMILIES
from fourfold.inference.loki import LokiConfig
from fourfold.launch.job_scripts.slurm_site import site_names
from fourfold.planning.machines.names import machine_names
from fourfold.planning.search.limits import CHOICES


def offered(cli: Cli, monkeypatch: pytest.MonkeyPatch, *words: str) -> list[str]:
    """Return the completions that bash would offer for the last of these words."""
    with monkeypatch.context() as patch:
        patch.setenv("_FOURFOLD_COMPLETE", "complete_bash")
        patch.setenv("COMP_WORDS", " ".join(("fourfold", *words)))
        patch.setenv("COMP_CWORD", str(len(words)))
        code, output, errors = cli()
    assert (code, errors) == (0, "")
    return output.split()


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("tr", ["trace", "train"]),
        ("loki c", ["calibrate"]),
        ("plan va", ["validate"]),
        ("plan --prec", ["--precision"]),
        ("plan scaling --we", ["--weak"]),
        ("train --pro", ["--processes", "--profile"]),
        ("parity --against p", ["plain"]),
    ],
)
def test_words_are_offered(cli: Cli, monkeypatch: pytest.MonkeyPatch, line: str, words: list[str]) -> None:
    assert offered(cli, monkeypatch, *line.split()) == words


def test_everything_is_offered_if_nothing_is_typed(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    assert offered(cli, monkeypatch, "") == [name for commands in PANELS.values() for name in commands]


def test_a_real_shell_completes_after_the_installation(tmp_path: Path) -> None:
    program = tmp_path / "bin" / "fourfold"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m fourfold "$@"\n')
    program.chmod(0o755)
    script = (
        "fourfold --install-completion; source ~/.bashrc\n"
        "COMP_WORDS=(fourfold parity --against p); COMP_CWORD=3\n"
        '$(complete -p fourfold | sed "s/.* -F \\(\\S*\\) .*/\\1/") fourfold; echo "offered: ${COMPREPLY[*]}"\n'
    )
    environment = os.environ | {"HOME": str(tmp_path), "PATH": f"{program.parent}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert "offered: plain\n" in done.stdout, done.stdout + done.stderr
    assert f"source '{tmp_path}/.bash_completions/fourfold.sh'" in (tmp_path / ".bashrc").read_text()


def completions(cli: Cli, monkeypatch: pytest.MonkeyPatch, shell: str, line: str) -> str:
    """Return fourfold's answer to a shell that asks for the completions of a line."""
    with monkeypatch.context() as patch:
        patch.setenv("_FOURFOLD_COMPLETE", f"complete_{shell}")
        patch.setenv("COMP_WORDS", line)
        patch.setenv("COMP_CWORD", str(len(line.split()) - 1))
        patch.setenv("_TYPER_COMPLETE_ARGS", line)
        patch.setenv("_TYPER_COMPLETE_FISH_ACTION", "get-args")
        code, output, errors = cli()
    assert (code, errors) == (0, "")
    return output.rstrip("\n")


@pytest.mark.parametrize(
    ("shell", "commands", "reference"),
    [
        ("bash", r"trace\ntrain", "plain"),
        ("zsh", r"""_arguments '\*: :\(\("trace":"[^"]+"\n"train":"[^"]+"\)\)'""", """_arguments '*: :(("plain"))'"""),
        ("fish", r"trace\t\S.*\ntrain\t\S.*", "plain"),
    ],
)
def test_each_shell_gets_completions_in_its_own_format(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, shell: str, commands: str, reference: str
) -> None:
    found = completions(cli, monkeypatch, shell, "fourfold tr")
    assert re.fullmatch(commands, found), found
    assert completions(cli, monkeypatch, shell, "fourfold parity --against p") == reference


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shells_can_read_their_scripts(cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, shell: str) -> None:
    """zsh must also be able to read the completions, because it evaluates them, and help texts have quotes and
    brackets."""
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    with monkeypatch.context() as patch:
        patch.setenv("_FOURFOLD_COMPLETE", f"source_{shell}")
        scripts = [cli()[1]]
    assert f"complete_{shell}" in scripts[0] and "fourfold" in scripts[0]
    if shell == "zsh":
        names = [name for commands in PANELS.values() for name in commands]
        scripts += [
            completions(cli, monkeypatch, shell, f"fourfold {words}") for words in ("", *(f"{n} --" for n in names))
        ]
    for script in scripts:
        (tmp_path / "script").write_text(script)
        done = subprocess.run([shell, "-n", tmp_path / "script"], capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, ""), script


def test_help_groups_the_commands_in_the_order_of_a_project(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    _, page, _ = cli("--help")
    titles = [line.split()[1] for line in page.splitlines() if line.startswith("╭")]
    assert titles == ["Options", "Plan", "Prepare", "Train", "Inspect", "Use"]
    rows = [line.split()[1] for line in page[page.index("╭─ Plan") :].splitlines() if line.startswith("│ ")]
    named = [name for commands in PANELS.values() for name in commands]
    assert [word for word in rows if word in named] == named


@pytest.mark.parametrize(
    ("command", "choices"),
    [
        ("trace", machine_names()),
        ("machine calibrate", machine_names()),
        ("tune", [*machine_names(), *site_names(), *(value for values in CHOICES.values() for value in values)]),
        ("plan scaling", [*PRESETS, *machine_names()]),
        ("launch slurm", site_names()),
        ("checkpoint export-hf", list(FAMILIES)),
        ("generate", list(LokiConfig.model_fields)),
        ("evaluate", ["lm-eval ls tasks"]),
    ],
)
def test_help_names_the_choices(cli: Cli, monkeypatch: pytest.MonkeyPatch, command: str, choices: list[str]) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    _, page, _ = cli(*command.split(), "--help")
    text = " ".join(page.replace("│", " ").split())
    assert [choice for choice in choices if choice not in text] == []


def test_lists_in_the_help_are_complete() -> None:
    assert sorted(SITES.split(", ")[:-1]) == site_names()
    for name, values in CHOICES.items():
        said = KNOBS.partition(f"{name}: ")[2].partition(". ")[0].replace("and, searched only if named, ", "")
        assert sorted(said.rstrip(".").split(", ")) == sorted(values), name
