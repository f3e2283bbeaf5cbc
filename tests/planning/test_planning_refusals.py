"""Refusals of the planner name the option or key, its value, and a value that works."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from fourfold.errors import UserError
from fourfold.planning.calibration.measured_run import row_of_run
from fourfold.planning.machines.machine import load_machine, parse_machine
from fourfold.planning.machines.names import FOLDER
from fourfold.planning.plan_record import plan_request
from fourfold.planning.request import request_from_options
from fourfold.planning.scaling import sizes_of
from fourfold.planning.search.limits import parse_limits

GPT2 = request_from_options(model="gpt2", gpus=8)
LAPTOP = (FOLDER / "laptop.toml").read_text()


def changed(key: str, value: str) -> Callable[[], object]:
    """Parse the laptop's machine file with another value of a key."""
    lines = [f"{key} = {value}" if line.startswith(f"{key} ") else line for line in LAPTOP.splitlines()]
    assert f"{key} = {value}" in lines
    return lambda: parse_machine("\n".join(lines), "mine.toml")


REFUSALS: list[tuple[Callable[[], object], str, str, str]] = [
    (lambda: load_machine("dgx-h10"), "--machine", "dgx-h10", "did you mean 'dgx-h100'"),
    (lambda: load_machine("no.toml", "metrics.machine ="), "metrics.machine", "no.toml", "cannot be read"),
    (changed("gpus_per_node", "1.5"), "node.gpus_per_node", "1.5", "a whole number, such as 8"),
    (changed("peak", "-1"), "device.peak", "-1", "above 0, such as 1"),
    (changed("peak", "1e30"), "device.peak", "1e+30", "from 1e-12 to 1e+24, such as 1"),
    (changed("achieved", "1e20"), "device.achieved", "1e+20", "device.achieved = 5e+10 works"),
    (lambda: parse_machine("device = 3", "mine.toml"), "device", "3", "must be a section, [device]"),
    (lambda: parse_machine("calibrated_range.seq = 3", "m.toml"), "calibrated_range.seq", "3", "such as [1, 8]"),
    (lambda: parse_machine("calibrated_range.seq = [8, 1]", "m.toml"), "calibrated_range.seq", "[8, 1]", "[1, 8]"),
    (lambda: parse_limits(["x=a"]), "--limit", "x=a", "write it as x<=8"),
    (lambda: parse_limits(["zero=9"], "--space"), "--space", "zero=9", "takes one of 0, 1, 2, 3"),
    (lambda: parse_limits(["x=4", "x<=2"]), "--limit", "x=4", "leave a limit out"),
    (lambda: sizes_of("8-16"), "--gpus", "8-16", "write it as 512:32768"),
    (lambda: sizes_of("8:99999999"), "--gpus", "8:99999999", "such as 512:32768"),
    (lambda: request_from_options(model="gpt2", gpus=0), "--gpus", "0", "must be from 1 to "),
    (lambda: request_from_options(model="gpt2", gpus=8, seq=4096), "--seq", "4096", "--seq 1024 works"),
    (lambda: request_from_options(model="gpt2", gpus=8, precision="fp9"), "--precision", "fp9", "choose from bf16, "),
    (lambda: request_from_options(model="gpt2", gpus=8, optimizer="sgd"), "--optimizer", "sgd", "choose from adamw"),
    (lambda: plan_request(GPT2, "laptop", [], 1, -1.0, False), "--tokens", "-1", "such as 2e12"),
    (
        lambda: row_of_run(Path("no.jsonl"), load_machine("laptop")),
        "no.jsonl",
        "does not exist",
        "metrics.jsonl of a run",
    ),
]


def test_a_machine_file_that_changes_is_read_again(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    for name in ("first", "second"):
        file.write_text(
            f'name = "{name}"\n' + "\n".join(line for line in LAPTOP.splitlines() if not line.startswith("name "))
        )
        assert load_machine(str(file)).name == name


@pytest.mark.parametrize(("refused", "key", "value", "remedy"), REFUSALS)
def test_a_refusal_names_the_key_its_value_and_a_remedy(
    refused: Callable[[], object], key: str, value: str, remedy: str
) -> None:
    with pytest.raises(UserError) as error:
        refused()
    sentence = str(error.value)
    assert key in sentence and value in sentence and remedy in sentence, sentence
    assert len(sentence) < 500 and "\n" not in sentence
