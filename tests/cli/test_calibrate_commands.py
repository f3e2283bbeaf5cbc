"""fourfold plan validate and fourfold calibrate as a user types them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command_line import Cli
from planner_rows import HEADER, row_text
from tiny_corpus import make_corpus, run_file

from fourfold.planning.machines.machine import load_machine


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")


def measured_rows(path: Path, first: int, count: int) -> Path:
    lines = [
        row_text(row_id=str(first + i), tp=2 ** (i % 4), micro_batch=1 + (i // 4) % 2, step_seconds=1 + 0.1 * i)
        for i in range(count)
    ]  # fmt: skip
    path.write_text("\n".join([HEADER, *lines]), encoding="utf-8")
    return path


def test_validate_prints_what_scripts_rely_on(cli: Cli, tmp_path: Path) -> None:
    rows, others = measured_rows(tmp_path / "a.csv", 0, 9), measured_rows(tmp_path / "b.csv", 100, 8)
    mixture = row_text(row_id="m", experts=4, experts_per_token=2, expert_ffn_hidden=512, step_seconds=1)
    others.write_text(f"{others.read_text(encoding='utf-8')}\n{mixture}\n", encoding="utf-8")
    code, out, _ = cli("plan", "validate", rows, "--calibrate-on", others, "--json")
    record = json.loads(out)
    assert code == 0 and record["rows"] == 9 and record["skipped"] == {}
    assert set(record) >= {"median_abs_error", "mean_abs_error", "by_source", "sweeps", "machine_file_only"}
    assert (
        record["by_source"]["T"]["mean_abs_error"]
        == record["mean_abs_error"]
        < record["machine_file_only"]["mean_abs_error"]
    )
    assert set(record["sweeps"]) >= {"regret_mean", "spearman_median"}
    assert record["constants"] == "fitted to 8 rows", "no constant is fitted to mixtures"
    code, out, _ = cli("plan", "validate", rows, "--rows")
    assert code == 0 and "mean" in out and "predicted s" in out
    assert "mean regret" in out and "predicted to fit" in out and "regret mean 0" not in out


def test_the_rows_that_come_with_fourfold_are_validated(cli: Cli) -> None:
    code, out, _ = cli("plan", "validate", "--json")
    record = json.loads(out)
    assert code == 0 and record["constants"] == "shipped with fourfold, fitted to these rows"
    assert record["rows"] > 700 and record["mean_abs_error"] < 0.07 and record["memory"]["fit_recall"] > 0.97


def test_rows_to_validate_are_held_out_of_the_fit(cli: Cli, tmp_path: Path) -> None:
    rows = measured_rows(tmp_path / "a.csv", 0, 9)
    code, _, error = cli("plan", "validate", rows, "--calibrate-on", rows)
    assert code == 2 and "all rows in the given files are also rows to validate" in error
    code, _, error = cli("plan", "validate", tmp_path / "none.csv")
    assert code == 2 and "cannot be read" in error


def test_calibrate_measures_this_machine(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fourfold.tuning import microbenchmark

    monkeypatch.setattr(microbenchmark, "SECONDS_PER_POINT", 0.02)
    target = tmp_path / "mine.toml"
    code, out, _ = cli("machine", "calibrate", "--out", target, "--processes", 1, "--json")
    record = json.loads(out)
    assert code == 0
    machine = load_machine(str(target))
    assert machine.achieved == pytest.approx(max(max(kinds.values()) for kinds in record["matmuls"].values()), rel=1e-4)
    assert set(next(iter(record["matmuls"].values()))) == {"NN", "NT", "TN"}
    assert machine.memory_bandwidth > 0 and machine.launch > 0
    code, out, _ = cli("plan", "--model", "gpt2", "--machine", target, "--gpus", 1, "--global-batch", 4, "--precision",
                       "fp32", "--json")  # fmt: skip
    assert code == 0 and json.loads(out)["best"]["step_seconds"] > 0


def test_calibrate_on_a_table(cli: Cli, tmp_path: Path) -> None:
    target = tmp_path / "mine.toml"
    rows = measured_rows(tmp_path / "a.csv", 0, 9)
    code, out, _ = cli("machine", "calibrate", "--out", target, "--from", rows, "--machine", "dgx-a100", "--json")
    assert code == 0 and json.loads(out)["rows"] == 9
    assert dict(load_machine(str(target)).efficiency)["matmul"] > 0
    code, _, error = cli("machine", "calibrate", "--out", tmp_path / "mine", "--from", tmp_path / "a.csv")
    assert code == 2 and "must end in .toml" in error
    (tmp_path / "steps.jsonl").touch()
    (tmp_path / "run").mkdir()
    missing = "has no run.toml in its folder"
    for path, sentence in (("none", "none does not exist"), ("steps.jsonl", missing), ("run", missing)):
        code, _, error = cli("machine", "calibrate", "--out", target, "--from", tmp_path / path)
        assert code == 2 and sentence in error


def test_training_shows_what_was_predicted_once_its_machine_is_calibrated(cli: Cli, tmp_path: Path) -> None:
    path = run_file(tmp_path, make_corpus(tmp_path), training__train_steps=12)
    machine = tmp_path / "mine.toml"
    steps = ("--set", f"metrics.machine={machine}")

    code, out, _ = cli("train", path, "--set", "metrics.machine=laptop", "--set", "name=first")
    first = tmp_path / "runs" / "first"
    assert code == 0 and "predicted" not in out and not (first / "prediction.json").exists()

    assert (
        cli("machine", "calibrate", "--from", first / "metrics.jsonl", "--machine", "laptop", "--out", machine)[0] == 0
    )
    code, out, _ = cli("train", path, *steps, "--set", "name=second")
    assert code == 0 and "Predicted and measured" in out and "seconds per step" in out
    record = json.loads((tmp_path / "runs" / "second" / "prediction.json").read_text())
    assert record["machine"] == "mine" and record["steps"] == 10 and record["measured_memory_bytes"] is None
    lines = (tmp_path / "runs" / "second" / "metrics.jsonl").read_text().splitlines()
    seconds = sorted(json.loads(line)["step_seconds"] for line in lines[3:10])
    assert record["measured_step_seconds"] == pytest.approx(seconds[3])
    assert record["predicted_step_seconds"] > 0

    code, out, errors = cli("train", path, "--set", "metrics.machine=lapptop", "--set", "name=third")
    assert code == 2 and "did you mean 'laptop'?" in errors and not (tmp_path / "runs" / "third").exists()
