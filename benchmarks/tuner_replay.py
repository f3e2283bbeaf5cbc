"""Count how many trials the tuner needs on published sweeps, until it is within 3 % of the best layout.

    python -m benchmarks.tuner_replay ROWS.csv [ROWS.csv …] [--json results.json]

A sweep is a set of measured rows (published step times) that differ only in layout. docs/measured-rows.md lists the
columns of rows. No training runs: the result of each trial comes from the sweep. The planner's constants are fitted to
all rows outside the sweep. For a second figure ("machine out"), they are fitted only to rows of other machines.

The tuner is compared with Optuna's TPE and with random choices without repeats. If TPE or a random choice proposes an
illegal layout, this does not count as a trial. Each search runs on two spaces: on the measured layouts, and on all
legal layouts with the sweep's values of tp, pp, micro-batch size, and ZeRO. In the second space, a layout that was not
measured counts as a crashed trial.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.options import add_tiny
from benchmarks.optuna_samplers import Method, Sampled
from fourfold.config.model import ModelConfig
from fourfold.config.presets import with_preset
from fourfold.planning.array_fields import stack
from fourfold.planning.calibration.fit import Calibration
from fourfold.planning.calibration.rows import Row, read_rows
from fourfold.planning.calibration.score import fit_rows
from fourfold.planning.machines.constants import Constants, prior_constants
from fourfold.planning.machines.machine import Machine, load_machine
from fourfold.planning.program_flags import OTHER_PROGRAM
from fourfold.planning.run_workload import model_shape
from fourfold.planning.workload import Workload
from fourfold.tuning.candidates import Candidates, candidates_of
from fourfold.tuning.propose import propose
from fourfold.tuning.trial_result import Trial, TrialResult

SOURCES = ("V2", "S11", "S12")
"""Sources (papers and reports) that have sweeps over tp, pp, dp, and the micro-batch size. Only their sweeps are
replayed."""
LEAST_LAYOUTS = 4
NEAR = 0.03
SEEDS = range(12)
SPACES, METHODS = ("measured", "whole"), ("tuner", "machine out", "tpe", "random")
GOALS: dict[str, dict[str, float]] = {
    "tuner": {"median trials": 3, "failures": 0.10},
    "machine out": {"median trials": 4},
}


@dataclass(frozen=True)
class Sweep:
    """The measured layouts of one model on one number of GPUs."""

    name: str
    machine: Machine
    source: str
    measured: dict[tuple[int, int, int, int], float | None]
    """Step times in seconds by (tp, pp, micro-batch size, ZeRO stage). None means that the run ran out of memory."""
    base: Workload
    key: tuple[str, ...]


@dataclass(frozen=True)
class Played:
    """The result of one search.

    ``to_goal`` is the number of trials until the search found a layout within 3 % of the best, or None if it found no
    such layout. ``failed_to_goal`` of these trials failed. The whole search ran ``trials`` trials, and ``failed`` of
    them failed. ``gap`` is how much slower the search's fastest layout is than the best layout, as a fraction.
    """

    to_goal: int | None
    failed_to_goal: int
    trials: int
    failed: int
    gap: float


def main() -> int:
    arguments = _arguments()
    rows = [] if arguments.tiny else read_rows(arguments.rows)[0]
    sweeps = [synthetic_sweep()] if arguments.tiny else sweeps_of(rows)
    record: dict[str, Any] = {"sweeps": [], "goals": {}}
    for space in SPACES:
        print(f"\n{space} space: trials to within {NEAR:.0%} of the best, and the share of them that failed")
        print(f"{'sweep':34}{'layouts':>8}{'measured':>9}{'tuner':>12}{'machine out':>13}{'TPE':>13}{'random':>13}")
        for sweep in sweeps:
            record["sweeps"].append(_row(sweep, space, rows, 2 if arguments.tiny else len(SEEDS)))
    verdicts(record)
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return 0


def sweeps_of(rows: Sequence[Row]) -> list[Sweep]:
    """Return the sweeps of ``SOURCES`` with enough layouts. If a sweep has several rows for a layout, the last row
    counts."""
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        if row.source in SOURCES:
            groups.setdefault(row.sweep, []).append(row)
    found = []
    for key, group in groups.items():
        measured = {key_of(row.work): row.seconds for row in group}
        if sum(seconds is not None for seconds in measured.values()) >= LEAST_LAYOUTS:
            first = group[0]
            model = key[1].partition(" prototype")[0] or f"{key[2]} × {key[3]}"
            name = f"{first.source} {model}, {int(first.work.layout.gpus)} GPUs"
            found.append(Sweep(name, first.machine, first.source, measured, first.work, key))
    return found


def key_of(work: Workload) -> tuple[int, int, int, int]:
    layout = work.layout
    return int(layout.x), int(layout.pp), int(layout.micro_batch_size), int(layout.zero)


def candidates_in(sweep: Sweep, space: str, constants: Constants) -> Candidates:
    """Return the layouts that a search may try: the measured layouts of the sweep, or all legal layouts with the
    sweep's values of tp, pp, micro-batch size, and ZeRO."""
    base, layouts = sweep.base, list(sweep.measured)
    gpus = int(base.layout.gpus)
    if space == "whole":
        values = [sorted({layout[knob] for layout in layouts}) for knob in range(4)]
        layers = int(base.model.num_hidden_layers)
        even = all(layers % layout[1] == 0 for layout in layouts)
        layouts = [
            (tp, pp, micro_batch, zero)
            for tp, pp, micro_batch, zero in itertools.product(*values)
            if gpus % (tp * pp) == 0
            and int(base.step.global_batch_size) % (gpus // (tp * pp) * micro_batch) == 0
            and (layers % pp == 0 or not even)
        ]
    works = [
        base.but(x=tp, pp=pp, dp=gpus // (tp * pp), micro_batch_size=micro_batch, zero=zero)
        for tp, pp, micro_batch, zero in layouts
    ]
    return candidates_of(stack(works), sweep.machine, constants)


def play(sweep: Sweep, candidates: Candidates, method: Method, seed: int) -> Played:
    """Run one search. The tuner ("planner") searches until it decides to end. The other methods search until they have
    found the best layout."""
    keys = [key_of(candidates.point(index)) for index in range(candidates.count)]
    best = min(seconds for seconds in sweep.measured.values() if seconds is not None)
    ledger = Sampled(candidates, method, seed) if method != "planner" else None
    trials: list[Trial] = []
    to_goal, failed_to_goal, fastest = None, 0, float("inf")
    while fastest > best or ledger is None:
        number = -1
        if ledger is None:
            index = propose(candidates, trials).index
            if index is None:
                break
        else:
            drawn = ledger.draw(seed)
            if drawn is None:
                break
            number, index = drawn
        result = _result(sweep, keys[index])
        if ledger is not None:
            ledger.end(number, result)
        trials.append(Trial(index, result))
        if result.seconds is not None:
            fastest = min(fastest, result.seconds)
        if to_goal is None:
            failed_to_goal += result.seconds is None
            to_goal = len(trials) if fastest <= (1 + NEAR) * best else None
    failed = sum(trial.result.seconds is None for trial in trials)
    return Played(to_goal, failed_to_goal, len(trials), failed, fastest / best - 1)


def _result(sweep: Sweep, key: tuple[int, int, int, int]) -> TrialResult:
    if key not in sweep.measured:
        return TrialResult("crashed", reason="nobody measured it")
    seconds = sweep.measured[key]
    return TrialResult("out of memory") if seconds is None else TrialResult("done", seconds)


def _row(sweep: Sweep, space: str, rows: Sequence[Row], seeds: int) -> dict[str, Any]:
    """Replay one sweep with all methods. Print a row of the table, and return the results."""
    name = sweep.machine.name
    others = [row for row in rows if row.seconds is not None and row.dense_half and row.sweep != sweep.key]
    elsewhere = [row for row in others if row.machine.name != name]
    constants = (fit_rows(others) if others else Calibration()).constants(name, sweep.source)
    strange = (fit_rows(elsewhere) if elsewhere else Calibration()).constants()
    candidates = candidates_in(sweep, space, constants)
    record: dict[str, Any] = {"sweep": sweep.name, "space": space, "layouts": candidates.count,
                              "measured": len(sweep.measured)}  # fmt: skip
    record["tuner"] = [asdict(play(sweep, candidates, "planner", 0))]
    record["machine out"] = [asdict(play(sweep, candidates_in(sweep, space, strange), "planner", 0))]
    for method in ("tpe", "random"):
        record[method] = [asdict(play(sweep, candidates, method, seed)) for seed in range(seeds)]
    cells = "".join(f"{_cell(record[m]):>{w}}" for m, w in (("tuner", 12), ("machine out", 13), ("tpe", 13),
                                                            ("random", 13)))  # fmt: skip
    print(f"{sweep.name:34}{candidates.count:8}{len(sweep.measured):9}{cells}", flush=True)
    return record


def _cell(played: Sequence[dict[str, Any]]) -> str:
    """Return the text of a table cell: the median number of trials to the goal, and the fraction of these trials that
    failed. Searches that did not reach the goal are left out."""
    reached = [each["to_goal"] for each in played if each["to_goal"] is not None]
    if not reached:
        return f"never ({played[0]['trials']})"
    tried = sum(reached)
    failed = sum(each["failed_to_goal"] for each in played if each["to_goal"] is not None)
    return f"{statistics.median(reached):g} ({failed / tried:.0%})"


def verdicts(record: dict[str, Any]) -> None:
    """Print for each space and method the median number of trials and the fraction of failures over all sweeps, and
    whether they meet the goals."""
    for space in SPACES:
        played = [sweep for sweep in record["sweeps"] if sweep["space"] == space]
        print(f"\n{space} space, over all sweeps:")
        for method in METHODS:
            each = [one for sweep in played for one in sweep[method]]
            trials = [one["to_goal"] if one["to_goal"] is not None else math.inf for one in each]
            until = [one["to_goal"] or one["trials"] for one in each]
            found = {"median trials": statistics.median(trials),
                     "failures": sum(one["failed_to_goal"] for one in each) / sum(until)}  # fmt: skip
            record["goals"][f"{space}, {method}"] = found
            print(f"  {method:12} " + ", ".join(_verdict(method, name, value) for name, value in found.items()))


def _verdict(method: str, name: str, value: float) -> str:
    goal = GOALS.get(method, {}).get(name)
    met = "" if goal is None else f" (goal ≤ {goal:g}: {'met' if value <= goal else 'MISSED'})"
    return f"{name} {value:.3g}{met}"


def synthetic_sweep() -> Sweep:
    """Return an artificial sweep for tests. Its step times are predictions with changed constants, plus a little
    noise."""
    machine = load_machine("dgx-a100")
    shape = model_shape(ModelConfig.model_validate(with_preset({"preset": "gpt-5b"})))
    base = Workload(shape, program=OTHER_PROGRAM).but(seq_length=2048, global_batch_size=256, dp=32, recompute=2)
    grids = [(tp, pp, mb) for tp in (1, 2, 4, 8) for pp in (1, 2, 4) for mb in (1, 2, 4)]
    works = [base.but(x=tp, pp=pp, dp=32 // (tp * pp), micro_batch_size=mb) for tp, pp, mb in grids]
    truth = candidates_of(stack(works), machine, replace(prior_constants(), intra=0.5, inter=0.9, matmul=0.8))
    noise = np.random.default_rng(0).normal(0, 0.03, truth.count)
    fits = truth.needed < machine.memory
    seconds = [float(s) if f else None for s, f in zip(truth.seconds * np.exp(noise), fits, strict=True)]
    measured = {key_of(work): s for work, s in zip(works, seconds, strict=True)}
    return Sweep("synthetic, 32 GPUs", machine, "T", measured, base, ("T",))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("rows", nargs="*", type=Path, metavar="ROWS.csv", help="tables of measured rows")
    parser.add_argument("--json", metavar="FILE", help="also write the results to this file")
    add_tiny(parser)
    arguments = parser.parse_args()
    if not arguments.rows and not arguments.tiny:
        parser.error("give tables of measured rows")
    return arguments


if __name__ == "__main__":
    raise SystemExit(main())
