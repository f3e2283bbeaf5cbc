"""Run all tests and benchmarks that need a GPU, within a time budget. The most valuable parts run first.

    python -m benchmarks.gpu OUT [--seconds 480] [--only NAME ...] [--wheels FOLDER]
    python -m benchmarks.gpu OUT --device cpu --tiny

A part is a benchmark, or the tests. OUT/gpu.json has the figures of all parts. The program replaces this file
atomically whenever a part has new figures, so no figure is lost if the program or a part is killed. OUT/gpu.log has the
output of the parts. If you run the program again with the same OUT, the figures of parts that do not run again stay in
the file. --wheels installs packages on a machine without network. docs/gpu.md describes how to use this program. Needs
torch ≥ 2.11.

The exit code is 1 if a part ended with an error or was killed by a signal, or if the program itself was stopped. A part
that ran out of time does not count as failed. So a slow machine gives fewer figures, but the same exit code.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.machinery
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.options import add_tiny, write_figures
from fourfold.processes import end_with_starter

ROOT = Path(__file__).parents[1]
BUDGET = 480.0
"""Default time budget for all parts together, in seconds. With this budget, a job that also has to start a machine can
end within ten minutes."""
LEAST = 10.0
"""A part is not started if less than this many seconds are left for it."""
END_SECONDS = 5.0
"""Number of seconds between the SIGTERM that asks a part to end, and the SIGKILL."""
POLL = 0.2
OUT_OF_TIME = ("not begun", "not done")
"""A part ran out of time if its result begins with one of these words."""
clock = time.monotonic


@dataclass(frozen=True)
class Part:
    """A program to run. ``words`` are its arguments. In these arguments, the path of a file replaces ``{json}``, and
    the program writes its figures to this file. If ``prints`` is True, the program prints the figures instead."""

    words: list[str]
    seconds: float
    """Time limit of the part in seconds, with the default budget. A larger budget raises the limit by the same
    factor."""
    prints: bool = False


class Stopped(BaseException):
    """Raised on SIGTERM or Ctrl-C. The program then saves the figures that it already has, and ends."""


def main() -> int:
    arguments = _arguments()
    begin, out = clock(), arguments.out
    out.mkdir(parents=True, exist_ok=True)
    record = _earlier(out / "gpu.json")
    save = partial(write_figures, out / "gpu.json", record)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _stop)
    with tempfile.TemporaryDirectory(prefix="fourfold-gpu-", ignore_cleanup_errors=True) as name:
        work = Path(name)
        try:
            environment = _environment(arguments, work, record, save)
            where = {"device": _device(arguments), "torch": version("torch")}
            asked = chosen(arguments, environment)
            for name, part in asked.items():
                left = begin + arguments.seconds - END_SECONDS - clock()
                limit = min(left, part.seconds * max(1.0, arguments.seconds / BUDGET))
                before = record["parts"].pop(name, {})
                outcome = record["parts"][name] = {"result": "not begun: no time was left", "seconds": 0.0, **where}
                if "figures" in before:
                    outcome["earlier"] = {key: value for key, value in before.items() if key != "earlier"}
                if left >= LEAST:
                    print(f"{begin_of_line(begin)} {name} … ", end="", flush=True)
                    _run(name, part, limit, outcome, save, work, out, environment)
                    print(f"{outcome['result']} in {outcome['seconds']:.0f} s", flush=True)
                save()
        except Stopped:
            save()
            print(f"stopped; the figures so far are in {out / 'gpu.json'}", flush=True)
            return 1
    print(f"{begin_of_line(begin)} all figures are in {out / 'gpu.json'}")
    results = {name: record["parts"][name]["result"] for name in ("wheels", *asked) if name in record["parts"]}
    late = [name for name, result in results.items() if result.startswith(OUT_OF_TIME)]
    if late:
        print(f"no time was left for all of {', '.join(late)}; run them again with --only {' '.join(late)}")
    failed = [name for name, result in results.items() if name not in late and result != "done"]
    if failed:
        print(f"failed: {', '.join(failed)}; the end of each is in {out / 'gpu.log'}")
    return 1 if failed else 0


def begin_of_line(begin: float) -> str:
    return f"{clock() - begin:4.0f} s"


def chosen(arguments: argparse.Namespace, environment: dict[str, str]) -> dict[str, Part]:
    """Return the parts that the user has named with --only, in the order of these names. Without --only, return all
    parts."""
    every = parts(arguments, environment)
    unknown = [name for name in arguments.only or [] if name not in every]
    if unknown:
        raise SystemExit(f"benchmarks.gpu has no part {', '.join(unknown)}; there are {', '.join(every)}")
    return {name: every[name] for name in arguments.only or every}


def parts(arguments: argparse.Namespace, environment: dict[str, str]) -> dict[str, Part]:
    """Return all parts by name. They run in this order, so the most valuable parts come first."""
    gpu, machine = arguments.device == "cuda", str(arguments.out / "machine.toml")
    options = ["--device", arguments.device, *(["--tiny"] if arguments.tiny else []), "--json", "{json}"]

    def benchmark(name: str, seconds: float, *more: str) -> Part:
        return Part(["-m", f"benchmarks.{name}", *options, *more], seconds)

    half = ("--dtype", "bf16") if gpu else ("--kernels", "torch")
    rounds = () if gpu else ("--no-compile", "--rounds", "1")
    found = {
        "suite": Part(suite(gpu, arguments.tests, environment), 180),
        "loki": benchmark("loki_decode", 50, *half),
        "loki_batch": benchmark("loki_decode", 30, *half, "--batch", "8", "--contexts", "32768"),
        "grouped": benchmark("grouped", 25),
        "calibrate": Part(["-m", "fourfold", "machine", "calibrate", "--out", machine, "--json"], 45, prints=True),
        "train_gpu": benchmark("train_gpu", 170, *(("--sequence", "4096", "--layers", "6") if gpu else ()), *rounds),
        "mixture_step": benchmark("mixture_step", 60),
        "one_step": benchmark("one_step", 90),
        "measured_plan": benchmark("measured_plan", 90),
        "loki_default": benchmark("loki_decode", 25, *half, "--k", "0", "--contexts", "32768,131072"),
        "kernels": benchmark("kernels", 40),
        "doctor": Part(["-m", "fourfold", "machine", "doctor", "--json"], 30, prints=True),
        "train_gpu_long": benchmark("train_gpu", 170, "--sequence", "8192", "--layers", "4"),
        "products": benchmark("products", 300),
    }
    if (arguments.out / "machine.toml").exists() or (gpu and "calibrate" in (arguments.only or found)):
        found["measured_plan"] = replace(
            found["measured_plan"], words=[*found["measured_plan"].words, "--machine", machine]
        )
    # On a CPU, leave out benchmarks that need a GPU or take minutes, and allow the other benchmarks more time.
    if not gpu:
        cpu = (name for name in found if name not in ("calibrate", "train_gpu_long", "loki_batch", "loki_default"))
        found = {name: replace(found[name], seconds=2 * found[name].seconds) for name in cpu}
    gpus = _gpus() if gpu else 0
    if gpus > 1:
        found["pipeline_bubble"] = benchmark("pipeline_bubble", 120, "--pp", str(gpus), "--steps", "3")
    return found


def suite(gpu: bool, tests: str | None, environment: dict[str, str]) -> list[str]:
    """Return the command that runs pytest on the files with tests for a GPU. Five processes share the GPU, because a
    single test uses only a small part of it."""
    files = ["tests/gpu"]
    if gpu:
        every = sorted((ROOT / "tests").rglob("test_*.py"))
        marked = [path for path in every if "mark.gpu" in path.read_text(encoding="utf-8")]
        files += [str(path.relative_to(ROOT)) for path in marked if path.parent.name != "gpu"]
    several = importlib.machinery.PathFinder.find_spec(
        "xdist", [*environment["PYTHONPATH"].split(os.pathsep), *sys.path]
    )
    spread = ["-n", "5", "--dist", "worksteal"] if gpu and several else []
    words = ["-m", "pytest", *files, "-m", "gpu" if gpu else "not slow and not gpu", "-p", "no:cacheprovider"]
    return [*words, *spread, *(["-k", tests] if tests else []), "--results", "{json}"]


def _run(
    name: str,
    part: Part,
    limit: float,
    outcome: dict[str, Any],
    save: Callable[[], None],
    work: Path,
    out: Path,
    environment: dict[str, str],
) -> None:
    """Run a part, and put its result into ``outcome``, the part's entry in the record. Also put figures into
    ``outcome`` as soon as the part has written them, so that they are kept if the part is killed later."""
    begin, figures = clock(), work / f"{name}.json"
    words = [word.replace("{json}", str(figures)) for word in part.words]
    outcome["result"] = "cut off with the whole program"
    save()
    with (out / "gpu.log").open("a", encoding="utf-8") as log, contextlib.ExitStack() as files:
        log.write(f"\n=== {name}: python {' '.join(part.words)}\n")
        log.flush()
        output = files.enter_context(figures.open("w")) if part.prints else log
        process = subprocess.Popen(
            [sys.executable, *words], stdout=output, stderr=log, cwd=ROOT, env=environment, start_new_session=True,
            preexec_fn=end_with_starter,  # If this program is killed, end the child too, so that it frees the GPU.
        )  # fmt: skip
        try:
            seen = 0
            while process.poll() is None and clock() - begin < limit:
                time.sleep(POLL)
                seen = _take_figures(figures, seen, outcome, clock() - begin, save)
            late = process.poll() is None
            if late:
                _end(process)
            code = process.returncode
            ended = f"exit code {code}" if code > 0 else f"killed by signal {-code}"
            outcome["result"] = f"not done in {limit:.0f} s" if late else "done" if code == 0 else ended
        except Stopped:
            _end(process)
            outcome["result"] = "stopped"
            raise
        finally:
            _take_figures(figures, -1, outcome, clock() - begin, lambda: None)


def _take_figures(file: Path, seen: int, outcome: dict[str, Any], seconds: float, save: Callable[[], None]) -> int:
    """If a part has written new figures to its file, put them into the record. Return the time of the file's last
    change."""
    outcome["seconds"] = seconds
    changed = file.stat().st_mtime_ns if file.exists() else 0
    if changed != seen:
        found = read_figures(file)
        if found is not None:
            outcome["figures"] = found
            save()
    return changed


def read_figures(file: Path) -> Any:
    """Read JSON, or JSON lines whose last line may be cut off. Return None if there is nothing to read."""
    text = file.read_text(encoding="utf-8", errors="replace") if file.exists() else ""
    with contextlib.suppress(ValueError):
        return json.loads(text)
    lines = []
    for line in text.splitlines():
        with contextlib.suppress(ValueError):
            lines.append(json.loads(line))
    return lines or None


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a part and the processes that the part has started."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END_SECONDS)
    process.wait()


def _stop(number: int, frame: object) -> None:
    raise Stopped


def _earlier(file: Path) -> dict[str, Any]:
    """Return the record of an earlier run into the same folder, or an empty record."""
    found = read_figures(file)
    return found if isinstance(found, dict) and isinstance(found.get("parts"), dict) else {"parts": {}}


def _environment(
    arguments: argparse.Namespace, work: Path, record: dict[str, Any], save: Callable[[], None]
) -> dict[str, str]:
    """Install the packages of --wheels, and return the environment variables for all parts. In PYTHONPATH, the
    installed packages come before the machine's own packages."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    if arguments.wheels is not None:
        site, wheels = work / "site", sorted(map(str, arguments.wheels.glob("*.whl")))
        words = ["-m", "pip", "install", "--no-index", "--no-deps", "--no-compile", "--no-cache-dir", "--target"]
        done = subprocess.run([sys.executable, *words, str(site), *wheels], capture_output=True, text=True, check=False)
        result = "done" if done.returncode == 0 else f"exit code {done.returncode}"
        record["parts"]["wheels"] = {
            "result": result,
            "figures": {"wheels": len(wheels), "errors": done.stderr[-2000:]},
        }
        save()
        paths.insert(0, str(site))
    quiet = {"PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    return {**os.environ, **quiet, "PYTHONPATH": os.pathsep.join(paths)}


def _device(arguments: argparse.Namespace) -> str:
    if arguments.device != "cuda":
        return "cpu"
    import torch

    return str(torch.cuda.get_device_name())


def _gpus() -> int:
    import torch

    return torch.cuda.device_count()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("out", type=Path, metavar="OUT", help="folder for the results")
    parser.add_argument("--seconds", type=float, default=BUDGET, help=f"of all parts together; default: {BUDGET:.0f}")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these parts, in this order")
    parser.add_argument("--tests", metavar="WORDS", help="the tests of the suite to run, as pytest -k takes them")
    parser.add_argument("--wheels", type=Path, metavar="FOLDER", help="install these wheels for the parts first")
    parser.add_argument("--device", default="cuda", choices=["cpu", "cuda"])
    add_tiny(parser)
    arguments = parser.parse_args()
    arguments.out = arguments.out.absolute()
    if arguments.device == "cuda" and not _gpus():
        parser.error("torch sees no GPU here; --device cpu --tiny tries the script itself")
    if arguments.wheels is not None and not list(arguments.wheels.glob("*.whl")):
        parser.error(f"--wheels {arguments.wheels} has no .whl file")
    return arguments


if __name__ == "__main__":
    raise SystemExit(main())
