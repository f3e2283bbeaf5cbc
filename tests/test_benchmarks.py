"""Run every benchmark in its tiny form on a CPU. The tests do not check the numbers."""

from __future__ import annotations

import importlib
import json
import signal
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
from patience import PATIENCE, wait_until

from benchmarks import gpu

HELPERS = {
    "accelerators",
    "cache_traffic",
    "cluster_order",
    "cluster_overlap",
    "cluster_runs",
    "gpu",
    "host_waits",
    "limits",
    "one_gpu",
    "options",
    "optuna_samplers",
    "peers",
    "pipeline_times",
    "ranks",
    "startup_job",
    "stopwatch",
    "titan",
}
BENCHMARKS = sorted({path.stem for path in Path(__file__).parents[1].glob("benchmarks/*.py")} - HELPERS)
ARGUMENTS = {
    "train_gpu": ["--device", "cpu", "--no-compile"],
    "train_cpu": ["--only", "b"],
    "loki_decode": ["--kernels", "torch"],  # compiling the other kernels takes seconds
}
SLOW = {
    "kernels",
    "measured_plan",
    "mixture_step",
    "moe_cpu",
    "one_step",
    "pipeline_bubble",
    "products",
    "scale",
    "startup",
    "train_cpu",
    "tuner_cpu",
    "tuner_replay",
    "watchdog_cost",
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in BENCHMARKS]
)
def test_the_tiny_form_runs(name: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("optuna" if name.startswith("tuner") else "transformers")
    monkeypatch.setattr(sys, "argv", [name, "--tiny", *ARGUMENTS.get(name, [])])
    # Some benchmarks set this variable. monkeypatch restores it after the test.
    monkeypatch.setenv("PYTHONWARNINGS", "ignore")
    assert not importlib.import_module(f"benchmarks.{name}").main()
    output = capfd.readouterr().out
    assert output.strip() and "nan" not in output


def gpu_record(out: Path, monkeypatch: pytest.MonkeyPatch, *options: str) -> tuple[int, dict[str, Any]]:
    monkeypatch.setattr(sys, "argv", ["gpu", str(out), "--device", "cpu", "--tiny", *options])
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        code = gpu.main()
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return code, json.loads((out / "gpu.json").read_text())


def results(record: dict[str, Any]) -> dict[str, tuple[str, Any]]:
    return {name: (part["result"], part.get("figures")) for name, part in record["parts"].items()}


@pytest.mark.slow
def test_one_command_answers_what_needs_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    code, record = gpu_record(tmp_path, monkeypatch, "--seconds", str(PATIENCE))
    assert list(record["parts"])[:4] == ["suite", "loki", "grouped", "train_gpu"]
    assert set(record["parts"]) > {"mixture_step", "one_step", "measured_plan", "kernels", "doctor", "products"}
    assert {part["result"] for part in record["parts"].values()} == {"done"}, record
    assert all(part["figures"] for part in record["parts"].values())
    assert {test["outcome"] for test in record["parts"]["suite"]["figures"]} == {"passed"}
    assert code == 0


HANG = "import time; time.sleep(10**6)"
ROWS_AND_HANG = f"import sys; print('[1, 2]', file=open(sys.argv[1], 'w'), flush=True); {HANG}"
"""A program that stands for a benchmark: it writes the figures of its first row to a file, and then hangs."""


def program(source: str, seconds: float = 100.0, prints: bool = False) -> gpu.Part:
    return gpu.Part(["-c", source, "{json}"], seconds, prints)


class Clock:
    """A clock that advances by some seconds whenever it is read."""

    def __init__(self, seconds: float) -> None:
        self.now, self.seconds = 0.0, seconds

    def __call__(self) -> float:
        self.now += self.seconds
        return self.now


def test_a_part_that_fails_or_hangs_does_not_stop_later_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A hanging part ends at its time limit. A part does not begin after the budget is spent. The file keeps the
    figures of both runs. The exit code is 1 only if a part fails.
    """
    programs = {
        "good": program("print('[1]')", prints=True),
        "bad": program("raise SystemExit(3)"),
        "killed": program("import os; print('[3]', flush=True); os.kill(os.getpid(), 9)", prints=True),
        "hangs": program(HANG),
        "late": program("print('[4]')", prints=True),
    }
    monkeypatch.setattr(gpu, "parts", lambda *_: programs)
    code, record = gpu_record(tmp_path, monkeypatch, "--only", "good", "bad", "killed")
    assert code == 1
    first = {"good": ("done", [1]), "bad": ("exit code 3", None), "killed": ("killed by signal 9", [3])}
    assert results(record) == first
    assert "failed: bad, killed; " in capsys.readouterr().out
    monkeypatch.setattr(gpu, "clock", Clock(7.0))
    code, record = gpu_record(tmp_path, monkeypatch, "--only", "hangs", "late", "--seconds", "110")
    assert code == 0, "no part failed in this run"
    assert "run them again with --only hangs late\n" in capsys.readouterr().out
    late = {"hangs": ("not done in 98 s", None), "late": ("not begun: no time was left", None)}
    assert results(record) == first | late
    monkeypatch.undo()
    monkeypatch.setattr(gpu, "parts", lambda *_: programs | {"good": program("raise SystemExit(1)")})
    _, record = gpu_record(tmp_path, monkeypatch, "--only", "good")
    assert record["parts"]["good"]["earlier"]["figures"] == [1], "a part that fails the second time keeps its figures"
    with pytest.raises(SystemExit, match=r"no part such; there are good, bad, killed, hangs, late"):
        gpu_record(tmp_path, monkeypatch, "--only", "such")


def test_the_suite_on_a_gpu_names_files_and_the_tests_that_were_asked_for() -> None:
    words = gpu.suite(True, None, {"PYTHONPATH": ""})
    assert all(isinstance(word, str) for word in words) and "-k" not in words
    files = [word for word in words if word.endswith(".py")]
    assert files and all((gpu.ROOT / file).is_file() for file in files)
    asked = gpu.suite(True, "replayed or wide", {"PYTHONPATH": ""})
    assert asked[asked.index("-k") + 1] == "replayed or wide"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=["SIGTERM", "SIGKILL"])
def test_a_kill_leaves_the_figures(number: signal.Signals, tmp_path: Path) -> None:
    """After a kill, the file has the figures of the finished parts, and the figures that the running part had written.
    The running part ends too."""
    source = (
        "import sys; from benchmarks import gpu\n"
        "rows = sys.argv.pop()\n"
        "def program(source, prints): return gpu.Part(['-c', source, '{json}'], 10**6, prints)\n"
        "gpu.parts = lambda *_: {'good': program('print([7])', True), 'rows': program(rows, False)}\n"
        "raise SystemExit(gpu.main())"
    )
    pid = tmp_path / "pid"
    rows = f"import os; open({str(pid)!r}, 'w').write(str(os.getpid())); {ROWS_AND_HANG}"
    options = [str(tmp_path), "--device", "cpu", "--tiny", "--seconds", "1e6"]
    process = subprocess.Popen([sys.executable, "-c", source, *options, rows], text=True)
    try:
        file = tmp_path / "gpu.json"

        def record() -> dict[str, Any]:
            return json.loads(file.read_text())["parts"] if file.exists() else {}

        wait_until(lambda: "figures" in record().get("rows", {}), process)
        process.send_signal(number)
        process.wait(PATIENCE)
    finally:
        process.kill()
    assert (record()["good"]["result"], record()["good"]["figures"]) == ("done", [7])
    cut_off = "stopped" if number == signal.SIGTERM else "cut off with the whole program"
    assert (record()["rows"]["result"], record()["rows"]["figures"]) == (cut_off, [1, 2])
    if number == signal.SIGTERM or sys.platform.startswith("linux"):
        wait_until(lambda: not is_alive(int(pid.read_text())))


def is_alive(pid: int) -> bool:
    """Return whether a process is alive. A zombie is not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_wheels_come_before_the_machines_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wheel for this machine's Python is installed without network, and only the benchmark's parts can import it."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    with zipfile.ZipFile(wheels / "brought-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("brought.py", "VALUE = 11\n")
        wheel.writestr("brought-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: brought\nVersion: 1.0\n")
        wheel.writestr("brought-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr("brought-1.0.dist-info/RECORD", "")
    monkeypatch.setattr(gpu, "parts", lambda *_: {"uses": program("import brought; print(brought.VALUE)", prints=True)})
    code, record = gpu_record(tmp_path / "out", monkeypatch, "--wheels", str(wheels))
    assert record["parts"]["wheels"]["result"] == "done", record
    assert record["parts"]["uses"]["figures"] == 11 and code == 0


def test_a_contender_that_fails_is_a_row_with_its_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The remaining contenders are still measured, and the file has the table."""
    pytest.importorskip("transformers")
    train_gpu = importlib.import_module("benchmarks.train_gpu")
    monkeypatch.setattr(train_gpu, "hugging_face", failing)
    options = ["--device", "cpu", "--tiny", "--no-compile", "--rounds", "1", "--json", str(tmp_path / "rows.json")]
    monkeypatch.setattr(sys, "argv", ["train_gpu", *options])
    assert train_gpu.main() == 0
    rows = {row["contender"]: row for row in json.loads((tmp_path / "rows.json").read_text())["rows"]}
    assert rows["Hugging Face"]["error"] == "RuntimeError: out of memory"
    assert rows["fourfold"]["error"] is None and rows["fourfold"]["tokens_per_second"] > 0
    assert rows["fourfold"]["times_hugging_face"] is None


def test_loki_is_timed_with_its_default_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    loki_decode = importlib.import_module("benchmarks.loki_decode")
    output = ["--json", str(tmp_path / "rows.json")]
    monkeypatch.setattr(sys, "argv", ["loki_decode", "--tiny", "--kernels", "torch", *output, "--k", "0"])
    assert loki_decode.main() == 0
    (row,) = json.loads((tmp_path / "rows.json").read_text())["rows"]
    # By default, Loki reads at least 256 keys and values (here all), 8 bytes of codes per key, and the last 32 values
    # once more for the sum of values.
    read = 256 * 8 / 4 + 2 * 256 * 128 + 32 * 128
    assert row["share_of_dense_bytes"] == pytest.approx(read / (2 * 256 * 128), rel=0.05)


def failing(*arguments: Any, **options: Any) -> Any:
    raise RuntimeError("out of memory")
