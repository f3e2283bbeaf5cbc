"""Measure how much time goldfish masks add to a training step, and how fast an audit is compared with a forward pass.

    python -m benchmarks.memorization [--rounds 9] [--json results.json]

The benchmark has one process, on a CPU or a GPU. The variants that it compares run in turn, and the shortest time of
each variant counts, so unrelated work on the machine matters little.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.one_gpu import device_of, process_group
from benchmarks.options import add_tiny
from fourfold.config.loss_masks import GoldfishConfig, Strategy
from fourfold.config.run import RunConfig
from fourfold.data.dataset import TokenWindows
from fourfold.data.goldfish import Goldfish
from fourfold.data.indexed import IndexedWriter
from fourfold.data.loader import Loader
from fourfold.data.masks import LossMask, document_boundary
from fourfold.memorization.scorers import GridScorer
from fourfold.memorization.scores import AttackSampling
from fourfold.parallel.grid.grid import Grid
from fourfold.run_file.load import make_run
from fourfold.training.corpora import micro_batches
from fourfold.training.job import Job

MODELS: dict[str, tuple[dict[str, Any], int, int]] = {
    "1M, vocabulary 2,048": (
        {
            "vocab_size": 2048,
            "hidden_size": 128,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "intermediate_size": 352,
            "tie_word_embeddings": True,
        },
        8,
        192,
    ),
    "llama-12m": ({"preset": "llama-12m"}, 8, 256),
}
"""By name: the model, the number of sequences in a batch, and the length of a sequence."""
TINY: dict[str, tuple[dict[str, Any], int, int]] = {"llama-tiny": ({"preset": "llama-tiny"}, 2, 64)}

HASHES: tuple[tuple[Strategy, int], ...] = (("hash", 13), ("hash", 50), ("hash-table", 13))


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--rounds", type=int, default=9)
    options.add_argument("--json", type=Path)
    add_tiny(options)
    given = options.parse_args()
    device = device_of("cuda" if torch.cuda.is_available() else "cpu")
    models, rounds = (TINY, 1) if given.tiny else (MODELS, given.rounds)
    with process_group(device):
        results = {name: measure(name, *model, device, rounds) for name, model in models.items()}
    if given.json is not None:
        given.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def measure(
    name: str, model: dict[str, Any], batch: int, length: int, device: torch.device, rounds: int
) -> dict[str, float]:
    training = {"global_batch_size": batch, "micro_batch_size": batch, "seq_length": length, "train_steps": 1000}
    run = make_run({"model": model, "data": {"source": "python-stdlib"}, "training": training})
    job = Job(run, Grid(run.parallel, device.type), device)
    job.initialize(0)
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        loaders = {"no mask": loader_of(run, Path(folder), None)}
        for strategy, h in HASHES:
            loaders[f"{strategy}, h {h}"] = loader_of(run, Path(folder), GoldfishConfig(strategy=strategy, h=h))
        batches = micro_batches(loaders["no mask"].step(0), run, job.grid.cp, device)
        step = least([lambda: wait(job.train_step(batches, 0).loss)], rounds)[0]
        print(f"{name}: a training step of {batch} × {length} tokens takes {step * 1e3:.1f} ms")
        seconds = least([partial(loader.step, 1) for loader in loaders.values()], 4 * rounds)
        for label, time_of in zip(loaders, seconds, strict=True):
            found[f"mask share, {label}"] = (time_of - seconds[0]) / step
            if label != "no mask":
                share = found[f"mask share, {label}"]
                print(f"  {label}: {(time_of - seconds[0]) * 1e3:.2f} ms more a batch, {share:.2%} of the step")
    documents = list(np.random.default_rng(0).integers(0, run.model.vocab_size, (batch, length + 1)))
    audited = GridScorer(job, AttackSampling())
    forward, score = least(
        [lambda: wait(torch.stack(job.outputs(batches)).sum()), lambda: audited.score(documents)], 2 * rounds
    )
    found["audit / forward"] = forward / score
    print(f"  forward with loss {forward * 1e3:.1f} ms, audit {score * 1e3:.1f} ms: {forward / score:.2f} of its speed")
    return found


def loader_of(run: RunConfig, folder: Path, goldfish: GoldfishConfig | None) -> Loader:
    prefix = folder / "corpus"
    if not prefix.with_suffix(".bin").is_file():
        tokens = np.random.default_rng(0).integers(0, run.model.vocab_size, 1_000_000)
        with IndexedWriter(prefix, run.model.vocab_size) as writer:
            writer.add_documents(tokens, np.full(2000, 500))
    mask = None if goldfish is None else Goldfish(goldfish)
    look_back = 0 if mask is None else mask.look_back
    training = run.training
    windows = TokenWindows(prefix, training.seq_length, 0, look_back)
    masks: list[LossMask] = [document_boundary] if mask is None else [document_boundary, mask]
    return Loader(windows, training.seq_length, training.global_batch_size, training.micro_batch_size, masks=masks)


def least(contenders: Sequence[Callable[[], Any]], rounds: int) -> list[float]:
    """Return the shortest time of each function. Every round runs all functions once, and the first round does not
    count."""
    best = [float("inf")] * len(contenders)
    for turn in range(rounds + 1):
        for number, contender in enumerate(contenders):
            began = time.perf_counter()
            contender()
            if turn:
                best[number] = min(best[number], time.perf_counter() - began)
    return best


def wait(value: torch.Tensor) -> float:
    """Wait until the device has computed the value, and return it."""
    return value.item()


if __name__ == "__main__":
    main()
