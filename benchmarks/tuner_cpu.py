"""Compare the tuner's choice with measurements of every layout, for a small model on 8 processes of this CPU.

    python -m benchmarks.tuner_cpu FOLDER [--rounds 3] [--trials 8] [--json results.json]

The benchmark has four parts. Each part keeps its results in FOLDER, so you can run the same command again after an
interruption:

1. `fourfold machine calibrate`.
2. Measure every layout once. Then measure the faster layouts again in more rounds, each in a different order. The time
   of a layout is the median of its rounds.
3. Run `fourfold tune` with a limited number of trials. Each trial is a separate run.
4. Run the tuner, Optuna's TPE, and random choices again, without training: the result of each trial comes from the
   times of part 2.

The tuner's choice is judged by the times of part 2, not by the tuner's own trials.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.options import add_tiny
from benchmarks.optuna_samplers import Method, Sampled
from benchmarks.ranks import run_on_ranks
from fourfold.config.run import RunConfig
from fourfold.data.prepare import prepare
from fourfold.parallel.grid.grid import Grid
from fourfold.planning.search.plan import describe_layout
from fourfold.training.job import Job
from fourfold.tuning.candidates import Candidates
from fourfold.tuning.propose import propose
from fourfold.tuning.start_search import search_for
from fourfold.tuning.trial_result import Trial, TrialResult
from fourfold.tuning.tuner import Search, Settings, best_of
from fourfold.verification.batches import random_micro_batches

MODEL = {"preset": "llama-tiny", "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4,
         "num_attention_heads": 8, "num_key_value_heads": 4}  # fmt: skip
SPACE = ("cp=1", "zero=0", "recompute=none", "schedule=1F1B", "micro_batch_size=1,2", "batch_parts=1")
"""The options that define the search space. The space has 68 legal layouts for 8 processes: every grid of x, y, z, dp,
and pp, with one or two sequences per micro-batch."""
TINY_SPACE = ("recompute=none", "micro_batch_size=1,2,4", "batch_parts=1")
BATCH, SEQUENCE = 16, 64
AT_ONCE = 12
"""Number of layouts that are measured before new processes are started."""
FAR = 2.5
"""After the first round, the benchmark drops layouts whose step took more than this many times as long as the fastest
layout's step."""
WARM_UP, STEPS = 1, 4
NEAR, SEEDS = 0.05, range(12)


def main() -> int:
    arguments = _arguments()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary if arguments.folder is None else arguments.folder)
        folder.mkdir(parents=True, exist_ok=True)
        record = _all_parts(folder, arguments)
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return 0


def _all_parts(folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    ranks, space = (1, TINY_SPACE) if arguments.tiny else (8, SPACE)
    rounds, trials, steps = (1, 2, 2) if arguments.tiny else (arguments.rounds, arguments.trials, 12)
    machine = "laptop" if arguments.tiny else str(calibrated(folder, ranks))
    settings = Settings(trials=trials, steps=steps)
    search, _ = search_for(
        run_file(folder, ranks),
        nproc=ranks,
        machine_name=machine,
        space=space,
        folder=folder / "tune",
        settings=settings,
        report=_say,
    )
    candidates = search.subject.candidates
    _say(f"{candidates.count} layouts of {ranks} processes; load of the machine {os.getloadavg()[0]:.1f}")
    table = measured(folder, search, ranks, rounds)
    best = min(table, key=lambda index: table[index])
    end = search.run()
    chosen = best_of(candidates, search.ledger.trials())
    assert chosen is not None, "some trial worked"
    gap = table[chosen] / table[best] - 1
    done = search.ledger.trials()
    _say(f"fastest of all: {describe_layout(candidates.point(best))}, {table[best]:.4g} s a step")
    verdict = f"goal ≤ {NEAR:.0%}: {'met' if gap <= NEAR else 'MISSED'}"
    choice = f"{describe_layout(candidates.point(chosen))}, {table[chosen]:.4g} s"
    _say(f"the tuner's choice after {len(done)} trials: {choice}: {gap:+.1%} ({verdict}); it ended because {end.why}")
    spread = [statistics.stdev(each) / statistics.median(each) for each in rounds_of(folder).values() if len(each) > 1]
    if spread:
        _say(f"a layout's rounds differ by {statistics.median(spread):.1%} (median of their standard deviations)")
    played = {method: [play(candidates, table, method, seed) for seed in (SEEDS if method != "planner" else (0,))]
              for method in ("planner", "tpe", "random")}  # fmt: skip
    for method, counts in played.items():
        _say(f"played from the table, {method}: {statistics.median(counts):g} trials to within {NEAR:.0%}")
    return {"layouts": candidates.count, "best": table[best], "chosen": table[chosen], "gap": gap,
            "trials": len(done), "played": played, "seconds": list(table.values())}  # fmt: skip


def run_file(folder: Path, ranks: int) -> Path:
    """Write the run file that the tuner starts from, and its corpus of random words."""
    corpus = folder / "corpus"
    if not corpus.with_suffix(".idx").is_file():
        draw = random.Random(0)
        words = ["grid", "axis", "tile", "shard", "gather", "reduce", "scatter", "token", "layer", "head"]
        texts = (" ".join(draw.choices(words, k=40)) for _ in range(400))
        lines = folder / "corpus.jsonl"
        lines.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
        prepare([lines], corpus, tokenizer="bytes", workers=1)
    path = folder / "run.toml"
    model = "\n".join(f"{key} = {json.dumps(value)}" for key, value in MODEL.items())
    path.write_text(
        f"[model]\n{model}\n[data]\ntrain = [{{ path = {json.dumps(str(corpus))} }}]\n[parallel]\ndp = {ranks}\n"
        f'[training]\nglobal_batch_size = {BATCH}\nseq_length = {SEQUENCE}\ntrain_steps = 100\ndevice = "cpu"\n',
        encoding="utf-8",
    )
    return path


def calibrated(folder: Path, ranks: int) -> Path:
    """Run ``fourfold machine calibrate`` with as many processes as a trial has, and return the machine file that it
    writes."""
    path = folder / "machine.toml"
    if not path.is_file():
        command = [sys.executable, "-m", "fourfold", "machine", "calibrate"]
        command += ["--out", str(path), "--processes", str(ranks)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return path


def measured(folder: Path, search: Search, ranks: int, rounds: int) -> dict[int, float]:
    """Measure every layout, and return its median seconds over the rounds. After the first round, layouts that are much
    slower than the fastest layout are left out."""
    count = search.subject.candidates.count
    for number in range(rounds):
        so_far = rounds_of(folder)
        least = min((each[0] for each in so_far.values()), default=math.inf)
        order = random.Random(number).sample(range(count), count)
        left = [
            index
            for index in order
            if len(each := so_far.get(index, [])) <= number and (number == 0 or each[0] <= FAR * least)
        ]
        for begin in range(0, len(left), AT_ONCE):
            some = left[begin : begin + AT_ONCE]
            runs = [search.subject.run(index) for index in some]
            started = time.monotonic()
            with tempfile.TemporaryDirectory() as meeting_points:
                seconds = run_on_ranks(ranks, 1, measure_layouts, runs, meeting_points)
            with (folder / "measured.jsonl").open("a", encoding="utf-8") as file:
                for index, value in zip(some, seconds, strict=True):
                    layout = describe_layout(search.subject.candidates.point(index))
                    file.write(json.dumps({"index": index, "layout": layout, "seconds": value}) + "\n")
            _say(f"round {number + 1} of {rounds}: {begin + len(some)} of {len(left)} layouts, "
                 f"{time.monotonic() - started:.0f} s")  # fmt: skip
    return {index: statistics.median(each) for index, each in rounds_of(folder).items()}


def rounds_of(folder: Path) -> dict[int, list[float]]:
    """Return the recorded seconds of each layout. A layout has one value for each round that measured it."""
    found: dict[int, list[float]] = {}
    path = folder / "measured.jsonl"
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
        entry = json.loads(line)
        found.setdefault(entry["index"], []).append(entry["seconds"])
    return found


def measure_layouts(runs: Sequence[RunConfig], meeting_points: str) -> list[float]:
    """Return the median step time of each run. Every rank must call this. Each run gets a new default process group."""
    rank, world = dist.get_rank(), dist.get_world_size()
    found = []
    for number, run in enumerate(runs):
        dist.destroy_process_group()
        dist.init_process_group("gloo", init_method=f"file://{meeting_points}/{number}", rank=rank, world_size=world)
        found.append(statistics.median(_steps_of(run)))
    return found


def _steps_of(run: RunConfig) -> Iterator[float]:
    device = torch.device("cpu")
    job = Job(run, Grid(run.parallel, device.type), device)
    job.initialize(run.training.seed)
    for step in range(WARM_UP + STEPS):
        batches = random_micro_batches(run, step, job.grid, device)
        dist.barrier()
        begin = time.perf_counter()
        job.train_step(batches, step)
        dist.barrier()
        if step >= WARM_UP:
            yield time.perf_counter() - begin


def play(candidates: Candidates, table: dict[int, float], method: Method, seed: int) -> int:
    """Run a search that takes the results of its trials from the table of measured times. Return how many trials it
    needs to find a layout that is at most ``NEAR`` slower than the fastest layout."""
    ledger = Sampled(candidates, method, seed) if method != "planner" else None
    trials: list[Trial] = []
    while True:
        drawn = (-1, propose(candidates, trials).index) if ledger is None else ledger.draw(seed)
        if drawn is None or drawn[1] is None:
            # The search ended before it found such a layout. Count as if the next trial had found it.
            return len(trials) + 1
        number, index = drawn
        assert index is not None
        trials.append(Trial(index, TrialResult("done", table[index])))
        if ledger is not None:
            ledger.end(number, trials[-1].result)
        if table[index] <= (1 + NEAR) * min(table.values()):
            return len(trials)


def _say(line: str) -> None:
    print(line, flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", nargs="?", metavar="FOLDER", help="folder for the results (not needed with --tiny)")
    parser.add_argument("--rounds", type=int, default=3, help="number of measurements of every layout")
    parser.add_argument("--trials", type=int, default=8, help="number of trials of the tuner")
    parser.add_argument("--json", metavar="FILE", help="also write the results to this file")
    add_tiny(parser)
    arguments = parser.parse_args()
    if arguments.folder is None and not arguments.tiny:
        parser.error("give a folder")
    return arguments


if __name__ == "__main__":
    raise SystemExit(main())
