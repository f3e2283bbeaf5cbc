"""Train a small model, compare Loki with other sparse-attention methods on it, and write a page with the results.

    python -m benchmarks.sparse_attention [--out runs/sparse-attention] [--lengths 1024,4096,8192,16384] [--contexts 8]
        [--page docs/loki-rivals.md]

The folder --out keeps the model, so a second run does not train it again. ``--stories FILE`` adds a table of
perplexities to the page. ``python -m benchmarks.sparse_attention.text`` prints this table.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.sparse_attention.decoding import Decoder, inverse_frequencies
from benchmarks.sparse_attention.evaluate import LONGEST_TAIL, Answered, evaluate
from benchmarks.sparse_attention.page import write_page
from benchmarks.sparse_attention.settings import DEFAULTS, METHODS, Setup, loki_with_defaults, rival
from benchmarks.sparse_attention.table import Results
from benchmarks.sparse_attention.tasks import TASKS
from benchmarks.sparse_attention.train import calibration_windows, trained_model
from benchmarks.sparse_attention.tune import tuned
from fourfold.huggingface.transformers_models import load_model
from fourfold.inference.loki import calibrate

BUDGETS = (0.05, 0.1, 0.25)
SEED = 2
CALIBRATION_LENGTH = 1024
BATCH_TOKENS = 1 << 15
"""Largest number of tokens in a batch of prompts."""


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--out", type=Path, default=Path("runs/sparse-attention"))
    options.add_argument("--lengths", default="1024,4096,8192,16384", help="Lengths of the contexts, in tokens.")
    options.add_argument("--contexts", type=int, default=8, help="Number of contexts for each task and length.")
    options.add_argument("--questions", type=int, default=2, help="Largest number of questions about a context.")
    options.add_argument("--stories", type=Path, help="A file with the output of benchmarks.sparse_attention.text.")
    options.add_argument("--page", type=Path, help="Write the page to this file.")
    given = options.parse_args()
    lengths = [int(length) for length in given.lengths.split(",")]
    model = load_model(trained_model(given.out))
    setup = Setup(calibrate(model, calibration_windows(CALIBRATION_LENGTH)), inverse_frequencies(model))
    decoder = Decoder(model, max(lengths) + LONGEST_TAIL)
    setup = tuned(decoder, setup, BUDGETS, lengths)
    answered = list(measured(decoder, setup, lengths, given.contexts, given.questions))
    save(given.out / "results.json", setup, answered)
    stories = "Not measured." if given.stories is None else given.stories.read_text(encoding="utf-8")
    text = write_page(Results(answered), setup, lengths, BUDGETS, stories)
    print(text)
    if given.page is not None:
        given.page.write_text(text, encoding="utf-8")


def measured(
    decoder: Decoder, setup: Setup, lengths: list[int], contexts: int, questions: int
) -> Iterator[tuple[float, Answered]]:
    """Run all methods with all budgets, and yield each result with its budget. A budget is a share of the bytes that
    dense attention reads. Dense attention and Loki with its defaults have the budget 1."""
    for length in lengths:
        made = {f"{budget} {name}": rival(name, budget, length, setup) for name in METHODS for budget in BUDGETS}
        made["1.0 dense"] = rival("dense", 1.0, length, setup)
        made[f"1.0 {DEFAULTS}"] = loki_with_defaults(setup)
        rivals = {name: each for name, each in made.items() if each is not None}
        batch = max(1, min(contexts, BATCH_TOKENS // length))
        found = evaluate(
            decoder, TASKS, length, rivals, contexts=contexts, questions=questions, batch=batch, seed=SEED
        )  # fmt: skip
        for each in found:
            budget, _, method = each.method.partition(" ")
            yield float(budget), Answered(**{**asdict(each), "method": method})


def save(path: Path, setup: Setup, answered: list[tuple[float, Answered]]) -> None:
    """Write all results and the chosen settings as JSON."""
    record: dict[str, Any] = {
        "torch": torch.__version__,
        "best": setup.basis.best,
        "recall": setup.basis.recall,
        "dims": [[name, budget, value] for (name, budget), value in setup.dims.items()],
        "thresholds": [[*key, value] for key, value in setup.thresholds.items()],
        "answered": [{"budget": budget, **asdict(each)} for budget, each in answered],
    }
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
