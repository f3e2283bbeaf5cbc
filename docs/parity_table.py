"""Run parity on many grids, random run files, and faulty programs, and write the figures to docs/parity.md.

Run: python docs/parity_table.py PART... The parts are grids, precisions, random-runs, faults, and new-faults (only the
faults that the page does not have yet). The script prints each row when it is done.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import sys
import tempfile
from collections.abc import Callable, Iterable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent
PAGE = HERE / "parity.md"
TESTS = HERE.parent / "tests"
sys.path[:0] = [str(TESTS), str(TESTS / "verification")]

from low_precision import LIMIT as PRECISION_LIMIT  # noqa: E402
from low_precision import PrecisionError, precision_error  # noqa: E402
from mutants import Mutant  # noqa: E402 (the tests' folder is on the path from here on)
from mutants_of_dtypes import DTYPES  # noqa: E402
from mutants_of_experts import EXPERTS  # noqa: E402
from mutants_of_families import FAMILIES  # noqa: E402
from mutants_of_gpt_oss import GPT_OSS_FAULTS  # noqa: E402
from mutants_of_latents import LATENTS  # noqa: E402
from mutants_of_layers import LAYERS  # noqa: E402
from mutants_of_linear_attention import LINEAR_ATTENTION  # noqa: E402
from mutants_of_multi_token import MULTI_TOKEN  # noqa: E402
from mutants_of_optimizers import OPTIMIZERS  # noqa: E402
from mutants_of_parallelism import PARALLELISM  # noqa: E402
from mutants_of_preferences import PREFERENCES  # noqa: E402
from mutants_of_runs import RUNS  # noqa: E402
from mutants_of_steps import STEPS  # noqa: E402
from mutation import mutated  # noqa: E402
from pool import Pool  # noqa: E402
from published_faults import PUBLISHED  # noqa: E402
from random_runs import random_table, run_of  # noqa: E402
from tiny_runs import tiny_run  # noqa: E402
from tuned_products import parity_on_cpu  # noqa: E402

from fourfold.config.run import AXES, ParallelConfig, RunConfig  # noqa: E402
from fourfold.run_file.load import load_run  # noqa: E402
from fourfold.verification.not_compared import Against  # noqa: E402
from fourfold.verification.parity_report import LIMIT, ParityReport  # noqa: E402

RUN_FILE = HERE.parent / "examples" / "parity.toml"
RANDOM_RUNS = 300
QUANTITIES = {
    "loss": "loss",
    "validation": "validation",
    "audit": "audit",
    "gradients": "gradients",
    "grad_norm": "gradient norm",
    "weights": "weights",
    "resumed": "resumed",
}
MODELS = {
    "Llama": {"model.preset": "llama-tiny", "model.num_hidden_layers": 4},
    "GPT": {"model.preset": "gpt-tiny", "model.vocab_size": 301, "model.num_hidden_layers": 4},
}
"""The models. Llama has grouped-query attention (8 query heads and 4 key-value heads), RMSNorm, SwiGLU, untied
embeddings, and a vocabulary of 257. GPT has LayerNorm, learned positions, biases, tied embeddings, 4 heads, and a
vocabulary of 301."""

GRIDS: list[dict[str, int | str]] = [
    {"x": 2},
    {"y": 2},
    {"z": 2},
    {"dp": 2},
    {"x": 4},
    {"y": 4},
    {"z": 4},
    {"x": 2, "y": 2},
    {"x": 2, "z": 2},
    {"y": 2, "z": 2, "recompute": "full"},
    {"z": 2, "dp": 2, "zero": 1},
    {"z": 2, "dp": 2, "zero": 2},
    {"x": 2, "dp": 2, "zero": 3},
    {"x": 4, "y": 2},
    {"x": 2, "y": 2, "z": 2, "recompute": "selective"},
    {"cp": 2},
    {"cp": 4},
    {"pp": 2},
    {"pp": 4},
    {"pp": 2, "schedule": "Interleaved1F1B"},
    {"pp": 2, "schedule": "ZBVZeroBubble"},
    {"pp": 2, "dp": 2, "zero": 1},
    {"pp": 2, "x": 2, "z": 2},
    {"pp": 2, "cp": 2, "y": 2},
    {"x": 2, "y": 2, "z": 2, "dp": 2},
]
PRECISIONS: dict[str, dict[str, Any]] = {
    "bf16": {"training.precision": "bf16"},
    "bf16, bf16 weights": {"training.precision": "bf16", "training.master_weights": "bf16"},
    "fp16": {"training.precision": "fp16"},
    "float8 tensorwise": {"training.precision": "bf16", "training.float8": "tensorwise"},
}
PRECISION_GRIDS: list[dict[str, int | str]] = [
    {"x": 2},
    {"y": 2},
    {"z": 2},
    {"dp": 2},
    {"cp": 2},
    {"pp": 2},
    {"x": 2, "y": 2},
]
SIXTEENS = {**MODELS["Llama"], "model.num_key_value_heads": 8, "model.intermediate_size": 192}
"""Sizes of a Llama that can train in float8. On every rank, float8 needs sizes that are multiples of 16."""


FAULTS = [
    *LAYERS,
    *PARALLELISM,
    *STEPS,
    *EXPERTS,
    *OPTIMIZERS,
    *FAMILIES,
    *GPT_OSS_FAULTS,
    *LATENTS,
    *LINEAR_ATTENTION,
    *MULTI_TOKEN,
    *PREFERENCES,
    *RUNS,
    *DTYPES,
]
PUBLISHED_HEADER = ("published in", "fault in fourfold", "grid", "batch that exposes it", "detected in")
FAULTS_HEADER = ("fault", "file", "grid", "detected in")


def main() -> None:
    parts: dict[str, Callable[[Pool, Path], bool]] = {
        "grids": measure_grids,
        "precisions": measure_precisions,
        "random-runs": measure_random_runs,
        "faults": measure_faults,
        "new-faults": partial(measure_faults, only_new=True),
    }
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="+", choices=parts, metavar="PART")
    chosen = parser.parse_args().parts
    with closing(Pool()) as pool, tempfile.TemporaryDirectory() as folder:
        passed = [parts[part](pool, Path(folder)) for part in chosen]
    sys.exit(not all(passed))


def measure_grids(pool: Pool, folder: Path) -> bool:
    rows = list(grid_rows(pool, folder))
    software = f"torch {torch.__version__} (gloo) and Python {platform.python_version()}"
    machine = f"{software}, on a CPU with {os.cpu_count()} cores"
    put_table(("grid", *QUANTITIES.values()), rows)
    put(r"torch \S+ \(gloo\) and Python \S+, on a CPU with \d+ cores", machine)
    return all(float(ratio) <= LIMIT for row in rows for ratio in row[1:])


def measure_precisions(pool: Pool, folder: Path) -> bool:
    rows = list(precision_rows(pool, folder))
    put_table(("precision", "one process", *map(name_of, PRECISION_GRIDS)), rows)
    return all(float(ratio) <= PRECISION_LIMIT for row in rows for ratio in row[2:])


def measure_random_runs(pool: Pool, folder: Path) -> bool:
    alarms = random_runs(pool, folder)
    score = f"{alarms} false alarms in {RANDOM_RUNS} random run files."
    print(score)
    put(r"\d+ false alarms in \d+ random run files\.", score)
    return alarms == 0


def measure_faults(pool: Pool, folder: Path, only_new: bool = False) -> bool:
    known = {row[0]: row for row in rows_below(FAULTS_HEADER)} if only_new else {}
    rows = [known.get(fault.fault) or mutant_row(fault, pool, folder) for fault in FAULTS]
    caught = sum(row[-1] != SURVIVED for row in rows)
    score = f"{caught} of {len(rows)} faults caught."
    print(score)
    put_table(FAULTS_HEADER, rows)
    put_table(PUBLISHED_HEADER, published_rows(rows))
    put(r"\d+ of \d+ faults caught\.", score)
    return caught == len(rows)


def put_table(header: Iterable[str], rows: list[list[str]]) -> None:
    """Replace the rows of the page's table with this header."""
    lines = table(header, [])
    old = "".join(f"\n{re.escape(line)}" for line in lines) + r"(\n\|.*)*"
    put(old, "\n" + "\n".join(table(header, rows)))


def put(pattern: str, text: str) -> None:
    """Replace the text in the page that matches the pattern. The pattern must match exactly once."""
    page, places = re.subn(pattern, lambda _: text, PAGE.read_text(encoding="utf-8"))
    assert places == 1, f"{places} places in {PAGE} match {pattern}"
    PAGE.write_text(page, encoding="utf-8")


def rows_below(header: Iterable[str]) -> list[list[str]]:
    """Return the rows of the page's table with this header."""
    rows = PAGE.read_text(encoding="utf-8").partition("\n".join(table(header, [])) + "\n")[2].split("\n\n")[0]
    return [line.strip("| ").split(" | ") for line in rows.splitlines()]


def parity_body(rank: int, world_size: int, run: RunConfig, steps: int, against: Against) -> ParityReport | None:
    return parity_on_cpu(run, steps, against)


def mutant_body(rank: int, world_size: int, run: RunConfig, mutant: Mutant) -> ParityReport | None:
    with mutated(f"fourfold.{mutant.module}", mutant.old, mutant.new):
        return parity_on_cpu(run, 2, mutant.against)


def precision_body(rank: int, world_size: int, run: RunConfig) -> PrecisionError | None:
    return precision_error(run, torch.device("cpu"))


def grid_rows(pool: Pool, folder: Path) -> Iterable[list[str]]:
    """For every grid, yield the largest ratio of each quantity, over all models and both references (fourfold's decoder
    and the decoder in transformers)."""
    for grid in GRIDS:
        ratios = dict.fromkeys(QUANTITIES, 0.0)
        for sizes in MODELS.values():
            for against in ("plain", "transformers"):
                run = load_run(RUN_FILE, settings(overrides(sizes, grid), folder))
                report = pool.run(run.parallel.world_size, parity_body, run, 3, against)[0]
                ratios = {name: max(ratio, report.worst(name).ratio) for name, ratio in ratios.items()}
        yield printed([name_of(grid), *(f"{ratio:.1f}" for ratio in ratios.values())])


def precision_rows(pool: Pool, folder: Path) -> Iterable[list[str]]:
    """For each low precision, yield a row: the error of one process, and then the errors of grids as multiples of this
    error."""
    for name, precision in PRECISIONS.items():
        row = [name]
        one: PrecisionError | None = None
        for grid in ({}, *PRECISION_GRIDS):
            run = load_run(RUN_FILE, settings(overrides({**SIXTEENS, **precision}, grid), folder))
            error = pool.run(run.parallel.world_size, precision_body, run)[0]
            one = one or error
            row.append(f"{error.gradients:.1e}" if error is one else f"{error.gradients / one.gradients:.2f}")
        yield printed(row)


def random_runs(pool: Pool, folder: Path) -> int:
    """Run parity on random run files. Return the number of run files for which parity fails (false alarms)."""
    alarms = 0
    for seed in range(RANDOM_RUNS):
        run = run_of(random_table(seed), folder)
        report = pool.run(run.parallel.world_size, parity_body, run, 2, "plain")[0]
        if not report.ok:
            alarms += 1
            print(f"random run {seed}: {report.record()}", flush=True)
    return alarms


SURVIVED = "not caught"


def mutant_row(mutant: Mutant, pool: Pool, folder: Path) -> list[str]:
    """Plant a fault, and return its row with the comparison that shows the fault most clearly."""
    run = tiny_run(mutant.model, mutant.grid, output_dir=str(folder), **mutant.sections)
    report = pool.run(run.parallel.world_size, mutant_body, run, mutant)[0]
    worst = {QUANTITIES.get(name, name): report.worst(name) for name in report.deviations}
    quantity, found = max(worst.items(), key=lambda item: item[1].ratio)
    figure = f"{quantity}, {place(found.tensor)}: {number(found.ratio)}"
    if found.ratio <= report.limit:
        own_types = max(report.own_types, key=lambda each: each.ratio, default=None)
        figure = f"initial weights: {report.initial:.0f}"
        if report.replicas:
            figure = f"replicas: {report.replicas:.0e} apart"
        elif own_types is not None and own_types.ratio > report.own_types_limit:
            figure = f"own types, {own_types.tensor}: {own_types.ratio:.1f}"
        figure = SURVIVED if report.ok else figure
    grid = ParallelConfig(**mutant.grid).describe()
    return printed([mutant.fault, f"`{mutant.module.partition(':')[0].replace('.', '/')}.py`", grid, figure])


def place(tensor: str) -> str:
    """Return the name of a tensor. If the trainer has stopped, ``tensor`` is the trainer's message. Then leave out the
    advice after the semicolon, because it may contain the path of a temporary folder."""
    return tensor.partition(";")[0]


def number(ratio: float) -> str:
    """Return a ratio with all its digits, or a ratio above 10¹² with an exponent."""
    return f"{ratio:,.0f}" if ratio < 1e12 else f"{ratio:.1e}"


def published_rows(faults: list[list[str]]) -> list[list[str]]:
    """Return a row for each published bug whose fault has been measured, with the comparison that detected it."""
    known = {row[0]: row for row in faults}
    return [
        [where, fault, known[fault][2], batch, known[fault][3]]
        for where, (fault, batch) in PUBLISHED.items()
        if fault in known
    ]


def settings(keys: dict[str, Any], folder: Path) -> list[str]:
    """Return overrides of the run file as ``key=value``, as on the command line."""
    return [f"{key}={value}" for key, value in {**keys, "output_dir": folder}.items()]


def overrides(sizes: dict[str, Any], grid: dict[str, int | str]) -> dict[str, Any]:
    """Return the keys of the run file for a model and a grid."""
    axes = {f"parallel.{key}": value for key, value in {"x": 1, "y": 1, **grid}.items() if key != "recompute"}
    return {**sizes, **axes, "activation_checkpoint.mode": grid.get("recompute", "none")}


def name_of(grid: dict[str, int | str]) -> str:
    axes = " × ".join(f"{axis} {grid[axis]}" for axis in AXES if axis in grid)
    schedule = f", {grid['schedule']}" if "schedule" in grid else ""
    zero = f", zero {grid['zero']}" if "zero" in grid else ""
    recompute = f", {grid['recompute']} recompute" if "recompute" in grid else ""
    return axes + schedule + zero + recompute


def printed(row: list[str]) -> list[str]:
    print(" | ".join(row), flush=True)
    return row


def table(header: Iterable[str], rows: Iterable[list[str]]) -> list[str]:
    """Return the lines of a Markdown table."""
    columns = list(header)
    return [f"| {' | '.join(row)} |" for row in (columns, ["---"] * len(columns), *rows)]


if __name__ == "__main__":
    main()
