"""Measure how long commands take to start, and which parts of the start take how long.

    python -m benchmarks.startup [--grid x=2,z=2] [--rounds 3]

First, the benchmark prints how long each part of the start of a tiny training job takes on rank 0. Then it prints two
numbers for ``fourfold --help`` and for ``fourfold generate``: the wall-clock seconds until the first output, and the
CPU seconds that all processes of the command use until they end. All figures are medians over the rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.options import add_tiny

JOB = [sys.executable, "-c", "from benchmarks.startup import command; command()"]
FOURFOLD = [sys.executable, "-m", "fourfold"]

PARTS = "parts.json"
RUN_FILE = """
output_dir = "runs"
[model]
preset = "llama-tiny"
[data]
train = [{{path = "corpus"}}]
[parallel]
{grid}
[training]
global_batch_size = 8
seq_length = 32
train_steps = 2
device = "cpu"
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--grid", default="x=2,z=2", help="Keys of [parallel], for at least two processes.")
    parser.add_argument("--rounds", type=int, default=3)
    add_tiny(parser)
    arguments = parser.parse_args()
    if arguments.tiny:
        arguments.grid, arguments.rounds = "x=2", 1
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare_run(folder, arguments.grid)
        if not arguments.tiny:
            # Run a job that does not count. It compiles Python modules, and brings files into the page cache.
            measure(JOB, folder)
        parts = [parts_of_a_job(folder) for _ in range(arguments.rounds)]
        print(f"start of a job of {arguments.grid}, in seconds; load {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores")
        for part in parts[0]:
            print(f"  {part:<30} {statistics.median(found[part] for found in parts):6.2f}")
        print(f"  {'together':<30} {statistics.median(sum(found.values()) for found in parts):6.2f}")
        print("whole commands: seconds to the first output, and of CPU to the end")
        commands = {"fourfold --help": ["--help"]}
        if not arguments.tiny:
            measure([*FOURFOLD, "train", "run.toml"], folder)
            # With --json, the command prints nothing before the token is generated.
            one_token = ["--prompt", "grid", "--max-new-tokens", "1", "--json"]
            commands["fourfold generate"] = ["generate", "--model", "runs/run", *one_token]
        for title, options in commands.items():
            found = [measure([*FOURFOLD, *options], folder) for _ in range(arguments.rounds)]
            wall, cpu = (statistics.median(seconds) for seconds in zip(*found, strict=True))
            print(f"  {title:<30} {wall:6.2f} {cpu:6.2f}")


def measure(command: Sequence[str], folder: Path) -> tuple[float, float]:
    """Run a command in a folder. Return the seconds until its first output, and the CPU seconds of all its
    processes."""
    cpu, begin = _cpu_of_children(), time.perf_counter()
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([os.getcwd(), os.environ.get("PYTHONPATH", "")])}
    with subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.read(1)
        first = time.perf_counter() - begin
        process.stdout.read()
    assert process.returncode == 0, f"{command} left with {process.returncode}"
    return first, _cpu_of_children() - cpu


def _cpu_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def parts_of_a_job(folder: Path) -> dict[str, float]:
    """Start a new job, and return how many seconds each part of its start takes."""
    measure(JOB, folder)
    parts: dict[str, float] = json.loads((folder / PARTS).read_text())
    return parts


def prepare_run(folder: Path, grid: str) -> None:
    """Write a run file, and its corpus of a few thousand bytes."""
    from fourfold.data.prepare import prepare

    text = folder / "text.txt"
    text.write_text("the grid gathers tiles of tokens along an axis, and scatters sums\n" * 200)
    prepare([text], folder / "corpus", tokenizer="bytes", workers=1)
    (folder / "run.toml").write_text(RUN_FILE.format(grid=grid.replace(",", "\n")))


def command() -> None:
    """Start the job of this folder in the same way as ``fourfold train`` does. Write the seconds of each part to a
    file."""
    from fourfold.cli import app
    from fourfold.launch.job_processes import run_on_grid
    from fourfold.processes import time_of_start
    from fourfold.run_file.load import load_run

    assert app.app.registered_commands, "the command line imports every command"
    run = load_run(Path("run.toml"), [f"output_dir={tempfile.mkdtemp(dir='.')}"])
    function, arguments = "benchmarks.startup_job:measured", [run, time.time()]
    parts = run_on_grid(function, arguments, run.parallel.world_size, "cpu", started=time_of_start())
    Path(PARTS).write_text(json.dumps(parts))


if __name__ == "__main__":
    main()
