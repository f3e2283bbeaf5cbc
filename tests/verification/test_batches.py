"""Parity's random samples give every legal run something to compare in every step."""

from __future__ import annotations

from pathlib import Path

import pytest
from random_runs import random_table, run_of

from fourfold.data.loader import Loader
from fourfold.verification.batches import RandomSamples


@pytest.mark.parametrize("first", range(0, 60, 10))
def test_every_step_of_a_random_run_has_labels_that_count(first: int) -> None:
    for seed in range(first, first + 10):
        run = run_of(random_table(seed), Path("unused"))
        samples, training = RandomSamples(run), run.training
        sizes = (training.seq_length, training.global_batch_size, training.micro_batch_size)
        loader = Loader(samples, *sizes, 0, 1, samples.masks)
        for step in range(4):
            kept = [batch.labels >= 0 for batch in loader.step(step) if batch.labels is not None]
            assert sum(part.sum() for part in kept) > 0, (seed, step)
