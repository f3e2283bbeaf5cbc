"""Test the choice among measured layouts, the file with the choices, and the command `fourfold machine tune-matmul`."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from command_line import Cli
from tiny_corpus import make_corpus, run_file
from torch import Tensor

from benchmarks.products import layer_ratios
from fourfold.config.layout import MatmulSizes
from fourfold.errors import UserError
from fourfold.matmul_tuning import matmul_times
from fourfold.matmul_tuning.matmul_table import (
    PRODUCTS,
    Gain,
    MatmulTable,
    TunedLayer,
    key_of,
    machine_of,
    read_table,
    table_file,
    write_table,
)
from fourfold.matmul_tuning.matmul_times import LEAST_GAIN, tune_layer
from fourfold.parallel.tensor.matmul_layouts import Copies, LaidOutMatmuls, LayerLayout

CPU = torch.device("cpu")
SIZES = MatmulSizes(64, 64, 64)
MILLISECONDS = {"output": 2.0, "input_gradient": 2.0, "weight_gradient": 2.0}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield tmp_path / "cache"
    torch.set_num_threads(threads)


def slow_products(monkeypatch: pytest.MonkeyPatch, milliseconds: dict[tuple[str, bool, Copies], float]) -> None:
    """Make every matmul take 2 ms of a simulated clock. ``milliseconds`` names exceptions by matmul, weight order, and
    copies."""
    seconds = 0.0
    clock = SimpleNamespace(thread_time=lambda: seconds)
    monkeypatch.setattr(matmul_times, "time", clock)

    for product in MILLISECONDS:
        original = getattr(LaidOutMatmuls, product)

        def slow(self: LaidOutMatmuls, *operands: Tensor, product: str = product, original=original) -> Tensor:  # type: ignore[no-untyped-def]
            way = getattr(self.layout, product)
            nonlocal seconds
            seconds += milliseconds.get((product, self.layout.turned, way), 2.0) / 1000
            out: Tensor = original(self, *operands)
            return out

        monkeypatch.setattr(LaidOutMatmuls, product, slow)


def test_a_layout_that_is_not_faster_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    slow_products(monkeypatch, {})
    tuned = tune_layer(SIZES, torch.float32, CPU)
    assert tuned.layout == LayerLayout()
    assert {gain.gain for gain in tuned.gains.values()} == {1.0}


def test_a_copy_that_saves_time_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    left = Copies(left="turned and padded")
    slow_products(monkeypatch, {("weight_gradient", False, left): 1.0})
    tuned = tune_layer(SIZES, torch.float32, CPU)
    assert tuned.layout == LayerLayout(weight_gradient=left)
    assert 1.6 < tuned.gains["weight_gradient"].gain < 2.4
    assert tuned.gains["weight_gradient"].low >= LEAST_GAIN
    assert 1.1 < tuned.gain < 1.3


@pytest.mark.parametrize(("output", "turned"), [(2.2, True), (3.0, False)])
def test_a_weight_is_transposed_if_the_layer_gets_faster(
    monkeypatch: pytest.MonkeyPatch, output: float, turned: bool
) -> None:
    """With a transposed weight, input gradients take half the time, but outputs take longer. The rule counts outputs
    twice, because recompute may run them twice."""
    copies = (
        Copies(right="turned"),
        Copies(right="padded"),
        Copies(left="padded"),
        Copies(right="turned and padded"),
    )
    times = {("output", True, way): 4.0 for way in copies} | {("output", True, Copies()): output}
    slow_products(monkeypatch, times | {("input_gradient", True, Copies()): 1.0})
    assert tune_layer(SIZES, torch.float32, CPU).layout == LayerLayout(turned=turned)


def test_layouts_are_compared_in_new_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    turned = Copies(right="turned")
    slow_products(monkeypatch, {("output", False, turned): 1.0})
    ratios = sorted(layer_ratios(LayerLayout(output=turned), SIZES, torch.float32, CPU))
    assert 1.1 < ratios[len(ratios) // 2] < 1.3


TABLE = MatmulTable(
    machine=machine_of(CPU),
    layers={
        key_of(SIZES, torch.bfloat16): TunedLayer(
            layout=LayerLayout(turned=True, output=Copies(right="padded")),
            gains=dict.fromkeys(PRODUCTS, Gain(seconds=0.5, gain=1.5, low=1.25, high=1.75)),
            other_order=0.75,
        )
    },
)


def test_the_table_is_kept_in_the_cache_directory(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write_table(TABLE)
    assert file.parent == cache / "fourfold"
    assert [path.name for path in file.parent.iterdir()] == [file.name]
    assert read_table(TABLE.machine) == TABLE
    assert read_table("another machine").layers == {}
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/someone")
    assert table_file("any").parent == Path("/home/someone/.cache/fourfold")


def test_a_damaged_table_gets_one_sentence(cache: Path) -> None:
    file = write_table(TABLE)
    whole = file.read_text()
    for text in ("", whole[: len(whole) // 2], whole.replace("padded", "folded"), whole.replace('"seconds": 0.5', ""),
                 whole.replace('"weight_gradient"', '"another"')):  # fmt: skip
        file.write_text(text)
        with pytest.raises(UserError, match="damaged: it is not a table of tuned matmuls; remove it"):
            read_table(TABLE.machine)
    file.write_text(whole.replace(TABLE.machine, "another"))
    with pytest.raises(UserError, match="belongs to another machine"):
        read_table(TABLE.machine)


def test_the_threads_of_a_rank_are_part_of_the_machine() -> None:
    one = machine_of(CPU)
    torch.set_num_threads(2)
    assert one != machine_of(CPU)


def test_the_command_measures_once(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    run = run_file(tmp_path, make_corpus(tmp_path))
    code, out, err = cli("machine", "tune-matmul", run, "--json")
    record = json.loads(out)
    assert code == 0, err
    assert Path(record["file"]).is_file()
    assert {name for layer in record["layers"] for name in layer["layers"]} >= {"q_proj", "o_proj", "down_proj"}
    assert json.loads(cli("machine", "tune-matmul", run, "--json")[1]) == record, "read from the table"
    monkeypatch.setenv("COLUMNS", "200")
    code, out, _ = cli("machine", "tune-matmul", run)
    assert code == 0 and "input gradient" in " ".join(out.split()) and record["machine"][:9] in out


@pytest.mark.slow
def test_a_run_measures_what_the_table_lacks(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    run = run_file(tmp_path, make_corpus(tmp_path))
    settings = ("--set", "training.train_steps=1", "--set", "training.device='cpu'")
    code, _, err = cli("train", run, *settings, "--set", "training.tuned_products='cached'", "--set", "name='first'")
    assert code == 0 and "are not in this machine's table" in err
    assert not table_file(machine_of(CPU)).exists()
    code, _, err = cli("train", run, *settings, "--set", "training.tuned_products='measured'", "--set", "name='second'")
    assert code == 0 and table_file(machine_of(CPU)).exists(), err
    code, _, err = cli("train", run, *settings, "--set", "training.tuned_products='cached'", "--set", "name='third'")
    assert code == 0 and "table" not in err
    assert os.environ["OMP_NUM_THREADS"] == "1"
