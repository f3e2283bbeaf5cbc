"""The fit finds the constants that the data was made with, keeps the prior if there is no data, and is robust to
outliers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from planner_rows import HEADER, row_text

from fourfold.config.model import ModelConfig
from fourfold.config.presets import PRESETS
from fourfold.errors import UserError
from fourfold.planning.array_fields import stack
from fourfold.planning.calibration.fit import Calibration, fit, from_table, to_toml
from fourfold.planning.calibration.machine_constants import constants_for, outside_calibrated_range
from fourfold.planning.calibration.machine_fit import fit_machine
from fourfold.planning.calibration.measured_run import compare_run
from fourfold.planning.calibration.rows import read_rows
from fourfold.planning.calibration.score import fit_rows, predict_rows
from fourfold.planning.cost.block_time import block_time
from fourfold.planning.cost.memory import CATEGORIES, stage_memory
from fourfold.planning.cost.step import step_seconds
from fourfold.planning.machines.constants import NAMES, moved, prior_constants
from fourfold.planning.machines.machine import load_machine, parse_machine
from fourfold.planning.machines.write import machine_toml, measured_machine
from fourfold.planning.run_workload import workload_of, workload_of_model
from fourfold.planning.workload import Workload
from fourfold.run_file.dump import to_toml as run_toml


def cases() -> Workload:
    """Return models from small to large, on one to many nodes."""
    base = workload_of_model(ModelConfig(**PRESETS["gpt-5b"])).but(seq_length=2048.0)
    rows = [
        {"hidden_size": h, "intermediate_size": 4 * h, "gate_up": 4 * h, "queries": h, "keys": h,
         "x": x, "z": z, "dp": dp, "micro_batch_size": mb, "global_batch_size": mb * z * dp * 4}
        for h in (512.0, 2048.0, 8192.0)
        for x, z, dp in ((1.0, 1.0, 8.0), (8.0, 1.0, 8.0), (2.0, 16.0, 4.0))
        for mb in (1.0, 4.0)
    ]  # fmt: skip
    return base.but(**{key: np.array([row[key] for row in rows]) for key in rows[0]})


def fitted(seconds: np.ndarray, work: Workload) -> Calibration:
    machine = stack([load_machine("dgx-a100")] * len(seconds))
    return fit(work, machine, seconds, ["dgx-a100"] * len(seconds), ["p"] * len(seconds))


def truth(work: Workload) -> np.ndarray:
    logs = np.array([{"matmul": -0.15, "launch": 0.6, "inter": -0.4}.get(name, 0.0) for name in NAMES])
    return step_seconds(work, load_machine("dgx-a100"), moved(prior_constants(), logs))


def test_the_fit_predicts_what_made_the_data() -> None:
    work = cases()
    seconds = truth(work)
    constants = fitted(seconds, work).constants("dgx-a100", "p")
    error = step_seconds(work, load_machine("dgx-a100"), constants) / seconds - 1
    before = step_seconds(work, load_machine("dgx-a100"), prior_constants()) / seconds - 1
    assert np.abs(error).mean() < 0.01 < 0.08 < np.abs(before).mean()


def test_an_outlier_does_not_decide() -> None:
    work = cases()
    seconds = truth(work)
    wrong = seconds.copy()
    wrong[4] *= 5
    constants = fitted(wrong, work).constants("dgx-a100", "p")
    error = np.delete(step_seconds(work, load_machine("dgx-a100"), constants) / seconds - 1, 4)
    assert np.abs(error).mean() < 0.02


def test_a_constant_without_rows_stays_at_the_prior() -> None:
    work = cases().take(np.array([0])).but(x=1.0, z=1.0, dp=1.0, global_batch_size=4.0)
    calibration = fitted(truth(work) * np.ones(1), work)
    constants = calibration.constants("dgx-a100", "p")
    assert constants.inter == pytest.approx(prior_constants().inter)
    assert calibration.constants("another", "q").matmul != constants.matmul


def test_a_calibration_is_written_and_read() -> None:
    import tomllib

    work = cases()
    calibration = fitted(truth(work), work)
    again = from_table(tomllib.loads(to_toml(calibration))["constants"])
    for key, logs in calibration.offsets.items():
        assert again.offsets[key] == pytest.approx(logs, abs=1e-3)


def table_of(path: Path, count: int, slower: float) -> Path:
    """Write rows whose measured seconds are the predictions times ``slower``."""
    texts = [
        row_text(row_id=str(i), tp=2 ** (i % 4), hidden=1024 * (1 + i % 3), heads=16, ffn_hidden=4096 * (1 + i % 3),
                 global_batch=64, step_seconds=1)
        for i in range(count)
    ]  # fmt: skip
    path.write_text("\n".join([HEADER, *texts]), encoding="utf-8")
    rows, _ = read_rows([path])
    seconds = [s.seconds * slower for s in predict_rows(rows, Calibration())]
    texts = [text.removesuffix(",1") + f",{value}" for text, value in zip(texts, seconds, strict=True)]
    path.write_text("\n".join([HEADER, *texts]), encoding="utf-8")
    return path


def test_a_table_calibrates_a_machine(tmp_path: Path) -> None:
    table = table_of(tmp_path / "t.csv", 24, 1.3)
    result = fit_machine([table], load_machine("dgx-a100"), "mine")
    assert result.rows == 24
    assert result.before["mean_abs_error"] > 0.2 > 0.03 > result.held_out["mean_abs_error"]
    machine = parse_machine(machine_toml(result.machine, "mine", load_machine("dgx-a100")), "mine.toml")
    rows, _ = read_rows([table])
    error = [float(step_seconds(r.work, machine, constants_for(machine))) / r.seconds - 1 for r in rows]
    assert np.abs(error).mean() < 0.03
    work = rows[0].work.but(hidden_size=99999.0)
    assert any("hidden" in text for text in outside_calibrated_range(machine, work))
    assert not outside_calibrated_range(machine, rows[0].work)


def test_a_run_calibrates_a_machine(tmp_path: Path) -> None:
    from tiny_runs import tiny_run

    run = tiny_run()
    (tmp_path / "run.toml").write_text(run_toml(run), encoding="utf-8")
    metrics = tmp_path / "metrics.jsonl"
    lines = [f'{{"step": {i}, "step_seconds": {9 if i < 3 else 0.5}, "peak_memory_bytes": 1000}}' for i in range(9)]
    metrics.write_text("\n".join(lines), encoding="utf-8")
    result = fit_machine([metrics], load_machine("laptop"), "mine")
    assert result.rows == 1
    compared = compare_run(run, result.machine, [9.0] * 3 + [0.5] * 7, 1000)
    assert compared.measured_step_seconds == 0.5
    assert compared.predicted_step_seconds == pytest.approx(0.5, rel=0.5)
    work = workload_of(run)
    held = sum(stage_memory(work, result.machine, 0)[name] for name in CATEGORIES if name != "reserve")
    assert compared.predicted_memory_bytes == pytest.approx(float(held), abs=1)
    assert compared.memory_error == pytest.approx(compared.predicted_memory_bytes / 1000 - 1)
    for broken in ("[1]", '{"step_seconds": 0}', '{"step_seconds": "x"}', '{"step_seconds": NaN}'):
        metrics.write_text("\n".join([*lines, broken]), encoding="utf-8")
        with pytest.raises(UserError, match=r"record 10(: step_seconds = .* must be a number| is not an object)"):
            fit_machine([metrics], load_machine("laptop"), "mine")
    for broken, sentence in ((b'{"peak_memory_bytes": "12"}', "peak_memory_bytes = 12 must be"), (b"\xff", "not text")):
        metrics.write_bytes("\n".join([*lines, ""]).encode() + broken)
        with pytest.raises(UserError, match=sentence):
            fit_machine([metrics], load_machine("laptop"), "mine")
    metrics.write_text("{}\n", encoding="utf-8")
    with pytest.raises(UserError, match="no step"):
        fit_machine([metrics], load_machine("laptop"), "mine")


def test_each_layout_of_the_operands_has_the_rate_that_was_measured() -> None:
    base = load_machine("dgx-h100")
    rates = {
        "2048x4096x4096": {"NN": 60e13, "NT": 72e13, "TN": 36e13},
        "2048x8192x4096": {"NN": 54e13, "NT": 70e13, "TN": 30e13},
    }
    record = {
        "matmuls": rates, "device": "cpu", "units": 132, "fp32_matmul": 6e13, "attention": 4e14, "memory": 8e10,
        "memory_bandwidth": 3e12, "launch": 1e-5, "gpus_per_node": 8, "nodes": 1, "ranks": 1, "all_reduce": {},
    }  # fmt: skip
    machine = measured_machine(record, base, "mine")
    assert (machine.achieved, machine.nn, machine.nt, machine.tn) == (72e13, 60 / 72, 1.0, 0.5)
    assert machine.achieved_fp32 == machine.achieved  # on a CPU, every matmul ran in float32
    on_gpu = measured_machine(record | {"device": "H100"}, base, "mine")
    assert on_gpu.nn * on_gpu.achieved_fp32 == pytest.approx(6e13)
    text = machine_toml(machine, "mine", base)
    assert parse_machine(text, "mine.toml").tn == pytest.approx(0.5)
    with pytest.raises(UserError, match=r"layouts\.tn = 5\.0 must be a fraction"):
        parse_machine(text.replace("tn = 0.5", "tn = 5.0"), "mine.toml")
    work = workload_of_model(ModelConfig(**PRESETS["llama3-8b"])).but(seq_length=8192, global_batch_size=1)
    constants = constants_for(machine)
    times = [block_time(work, replace(machine, tn=share), constants) for share in (1.0, 0.5)]
    assert times[1].weight_gradients == pytest.approx(2 * times[0].weight_gradients)
    assert times[1].forward == times[0].forward
    assert times[1].backward - times[0].backward == pytest.approx(times[0].weight_gradients)


def test_a_name_is_quoted_and_rows_of_another_machine_are_refused(tmp_path: Path) -> None:
    laptop = load_machine("laptop")
    assert parse_machine(machine_toml(replace(laptop, name='a"b'), "mine", laptop), "mine.toml").name == 'a"b'
    table = tmp_path / "t.csv"
    table.write_text("\n".join([HEADER, row_text()]), encoding="utf-8")
    with pytest.raises(UserError, match="the rows are from dgx-a100, but --machine is laptop"):
        fit_machine([table], laptop, "mine")
    own = replace(load_machine("dgx-a100"), name="our cluster")
    assert fit_machine([table], own, "mine").machine.peak == own.peak


def test_no_constant_is_fitted_to_mixtures(tmp_path: Path) -> None:
    dense = [row_text(row_id=f"d{i}", micro_batch=1 + i, step_seconds=1 + 0.1 * i) for i in range(3)]
    mixture = row_text(row_id="m", experts=4, experts_per_token=2, expert_ffn_hidden=512, seq_len=64, step_seconds=50)
    tables = []
    for number, rows in enumerate((dense, [*dense, mixture], [mixture])):
        tables.append(tmp_path / f"{number}.csv")
        tables[-1].write_text("\n".join([HEADER, *rows, ""]), encoding="utf-8")
    own = replace(load_machine("dgx-a100"), name="our cluster")
    without, with_mixture = (fit_machine([table], own, "mine") for table in tables[:2])
    assert with_mixture.rows == 3 and with_mixture.skipped == {"no constant is fitted to mixtures of experts": ["m"]}
    assert with_mixture.machine == without.machine and with_mixture.held_out == without.held_out
    with pytest.raises(UserError, match="no row of a dense model with a step time: no constant is fitted to mixtures"):
        fit_machine([tables[2]], own, "mine")


def test_nothing_to_calibrate_on_gets_one_sentence(tmp_path: Path) -> None:
    empty = tmp_path / "t.csv"
    empty.write_text(HEADER + "\n", encoding="utf-8")
    with pytest.raises(UserError, match="no row of a dense model with a step time"):
        fit_machine([empty], load_machine("laptop"), "mine")
    with pytest.raises(UserError, match="no row to calibrate on has a dense model and a step time"):
        fit_rows([])
