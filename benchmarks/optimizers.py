"""Compare AdamW, Muon, and Lion: the validation losses after the same number of tokens, and the step times.

    python -m benchmarks.optimizers [--set training.train_steps=100 ...] [--json results.json]

Each optimizer trains with several learning rates, on one process. The initial weights, the samples, and the
learning-rate schedule are the same in all runs. The script prints a Markdown table with a row per learning rate and a
column per optimizer. Lion's learning rate is a tenth of the rate in the table's first column. Below the table, the
script prints each optimizer's median step time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks.one_gpu import device_of, process_group
from benchmarks.options import add_tiny
from fourfold.config.optimizer_rules import UpdateRule
from fourfold.config.run import AXES, RunConfig
from fourfold.parallel.grid.grid import Grid
from fourfold.run_file.load import load_run
from fourfold.training.corpora import micro_batches, open_corpora
from fourfold.training.job import Job

RATES = (5e-4, 1e-3, 2e-3, 4e-3, 8e-3)
RATIOS: dict[UpdateRule, float] = {"adamw": 1.0, "muon": 1.0, "lion": 0.1}
"""For each optimizer, the factor that turns a rate of ``RATES`` into the optimizer's learning rate."""
TINY = [
    "model.preset=gpt-tiny", "model.vocab_size=257", "data.tokenizer=bytes", "training.seq_length=32",
    "training.train_steps=2", "validation.steps=1",
]  # fmt: skip


class Result(NamedTuple):
    """The validation loss of a run in nats per token, and its median step time in seconds."""

    loss: float
    seconds: float


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--run", type=Path, default=Path("examples/demo.toml"))
    options.add_argument("--set", nargs="*", default=[], metavar="SECTION.KEY=VALUE")
    options.add_argument("--rates", nargs="*", type=float, default=list(RATES))
    options.add_argument("--json", type=Path)
    add_tiny(options)
    given = options.parse_args()
    device = device_of("cuda" if torch.cuda.is_available() else "cpu")
    alone = [f"parallel.{axis}=1" for axis in AXES]
    run = load_run(given.run, [*alone, *given.set, *(TINY if given.tiny else [])])
    rates = given.rates[:1] if given.tiny else given.rates
    print("| lr | " + " | ".join(RATIOS) + " |\n" + "|---" * (1 + len(RATIOS)) + "|")
    results: dict[str, dict[UpdateRule, Result]] = {}
    for rate in rates:
        with process_group(device):
            found = {name: trained(run, name, ratio * rate, device) for name, ratio in RATIOS.items()}
        results[f"{rate:g}"] = found
        print(f"| {rate:g} | " + " | ".join(f"{result.loss:.3f}" for result in found.values()) + " |", flush=True)
    for name in RATIOS:
        seconds = statistics.median(found[name].seconds for found in results.values())
        print(f"{name}: {seconds * 1e3:.1f} ms a step")
    if given.json is not None:
        given.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def trained(run: RunConfig, name: UpdateRule, rate: float, device: torch.device) -> Result:
    """Train the run with this optimizer and this learning rate, and return its result."""
    optimizer = run.optimizer.model_copy(update={"name": name, "lr": rate})
    job = Job(run.model_copy(update={"optimizer": optimizer}), Grid(run.parallel, device.type), device)
    job.initialize(run.training.seed)
    corpora, seconds = open_corpora(run, job.grid.batch), []
    for step in range(run.training.train_steps):
        batches = micro_batches(corpora.train.step(step), run, job.grid.cp, device)
        began = time.perf_counter()
        job.train_step(batches, step).loss.item()
        seconds.append(time.perf_counter() - began)
    assert corpora.validation is not None, "the run file has a [validation]"
    held_out = [batch for step in range(run.validation.steps) for batch in corpora.validation.step(step)]
    loss = job.evaluate(micro_batches(held_out, run, job.grid.cp, device)).item()
    return Result(loss, statistics.median(seconds))


if __name__ == "__main__":
    main()
