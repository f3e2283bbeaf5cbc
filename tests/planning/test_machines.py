"""Machine files are complete, and every constant has a source."""

from __future__ import annotations

from importlib.resources import files

import pytest

from fourfold.errors import UserError
from fourfold.planning.calibration.machine_constants import shipped
from fourfold.planning.machines.constants import NAMES, PRIORS
from fourfold.planning.machines.machine import load_machine, parse_machine
from fourfold.planning.machines.names import machine_names

FOLDER = files("fourfold.planning.machines")
WANTED = {"perlmutter", "frontier", "alps", "dgx-a100", "dgx-h100", "h200", "b200", "gb200", "mi300x", "laptop"}


def test_the_wanted_machines_are_there() -> None:
    assert set(machine_names()) >= WANTED


@pytest.mark.parametrize("name", machine_names())
def test_a_machine_loads_and_every_constant_has_a_source(name: str) -> None:
    machine = load_machine(name)
    assert machine.name == name
    assert 0 < machine.achieved <= machine.peak
    assert machine.intra2 <= machine.intra8 or name == "frontier"
    previous_sourced = False
    for line in (FOLDER / f"{name}.toml").read_text(encoding="utf-8").splitlines():
        if " = " not in line or line.startswith(("#", "name")):
            continue
        # Bandwidths of larger groups have no source of their own. They follow the line for pairs, and share its source.
        assert "#" in line or (line.startswith("intra") and previous_sourced), line
        previous_sourced = True


def test_every_constant_has_a_prior_with_a_source() -> None:
    assert tuple(PRIORS) == NAMES
    assert all(prior.source and prior.median > 0 and prior.spread > 0 for prior in PRIORS.values())


def test_shipped_constants_are_there_for_every_level() -> None:
    calibration = shipped()
    assert "all" in calibration.offsets
    known = calibration.constants("dgx-a100")
    unknown = calibration.constants("a machine that nobody measured")
    assert 0.5 < known.matmul < 1.2 and 0.5 < unknown.matmul < 1.2
    assert known != unknown


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (("units = ", "unit = "), "unknown key 'device.unit'; choose from units, peak"),
        (("units = 132", ""), "device.units is missing"),
        (("[network]", "[networks]"), "network.node is missing"),
        (("units = 132", "units = 0"), "must be a number above 0"),
        (("[latency]", "[latency"), "is not valid TOML"),
        (("units = 132", "units = nan"), "must be a number above 0"),
        (("gpus_per_node = 8", "gpus_per_node = 2.5"), "must be a whole number"),
        (("peak = 989e12", "peak = 1e12"), "must be at most device.peak"),
        (("[network]", "[efficiency]\nmatmull = 1.0\n[network]"), "unknown key 'efficiency.matmull'"),
        (("[network]", "[efficiency]\nmatmul = -1.0\n[network]"), "must be a number above 0"),
        (("[network]", "[calibrated_range]\ngpus = [1]\n[network]"), "must be two numbers, such as"),
        (("[network]", "[calibrated_range]\ngpus = [5, 1]\n[network]"), "must be ascending, such as"),
        (("[network]", "[efficiency]\nmatmul = 1e-300\n[network]"), "must be from 1e-12"),
        (("units = 132", f"units = 1{'0' * 400}"), "units = 10+ must be"),
        (("[latency]", "[[latency]]"), "latency = .* must be a section"),
        (('name = "', 'efficiency = 3\nname = "'), "efficiency = 3 must be a section"),
        (('name = "', 'name = ["a"] # "'), "name = .* must be text"),
        (('name = "', 'name = "two\\n'), "name = .* must be text of one line"),
    ],
)
def test_a_wrong_machine_file_gets_one_sentence(change: tuple[str, str], sentence: str) -> None:
    text = (FOLDER / "dgx-h100.toml").read_text(encoding="utf-8").replace(*change)
    with pytest.raises(UserError, match=sentence):
        parse_machine(text, "mine.toml")


def test_an_unknown_machine_gets_the_nearest_name() -> None:
    with pytest.raises(UserError, match="did you mean 'frontier'"):
        load_machine("fronteir")
