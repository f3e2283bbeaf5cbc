"""A mistyped command line is refused in one sentence that says what works."""

from __future__ import annotations

import pytest
from command_line import Cli, one_sentence

from fourfold.cli.app import PANELS


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("plan --modle gpt2", "no option --modle for `plan`; did you mean --model?"),
        ("train run.toml --sett a.b=1", "no option --sett for `train`; did you mean --set?"),
        ("launch slurm run.toml --sit x", "no option --sit for `launch slurm`; did you mean --site?"),
        ("--bogus", "no option --bogus; `fourfold --help` lists them"),
        ("trian run.toml", "no command 'trian'; did you mean 'train'?"),
        ("frobnicate", "no command 'frobnicate'; there are plan, trace, tune"),
        ("launch slrum run.toml", "no command 'slrum' for `launch`; did you mean 'slurm'?"),
        ("plan valdate rows.csv", "no command 'valdate' for `plan`; did you mean 'validate'?"),
        ("train", "RUN.toml is missing for `train`; `fourfold train --help` describes it"),
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


def test_every_command_refuses_an_unknown_option_alike(cli: Cli) -> None:
    for name in (name for commands in PANELS.values() for name in commands):
        assert "no option --nonsense" in one_sentence(cli(name, "--nonsense")) or name in ("launch", "loki")


def test_without_arguments_a_group_prints_its_help(cli: Cli) -> None:
    code, output, _ = cli("launch")
    assert code == 2 and "slurm" in output
