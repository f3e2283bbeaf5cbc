"""The score of a document does not depend on its batch, in audits, evaluation, validation, and samples."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from pool import Pool
from tiny_runs import LLAMA, MIXTURE, tiny_run

from fourfold.config.run import RunConfig
from fourfold.data.loader import MicroBatch, document_ends
from fourfold.memorization.scorers import GridScorer
from fourfold.memorization.scores import AttackSampling
from fourfold.models.initialize import initialize
from fourfold.models.transformer import IGNORE_INDEX, Transformer
from fourfold.parallel.attention.context import share_of_sequences
from fourfold.parallel.grid.grid import Grid
from fourfold.training.job import Job

CPU, VOCABULARY, LENGTH = torch.device("cpu"), 257, 32
CAPACITY = {"moe": {"capacity_factor": 0.5}}
MODELS = {"dense": (LLAMA, {}), "experts": (MIXTURE, CAPACITY)}


def documents_of_lengths(*lengths: int) -> list[NDArray[np.int64]]:
    return [np.random.default_rng(length).integers(VOCABULARY, size=length) for length in lengths]


DOCUMENTS = documents_of_lengths(9, 33, 14, 20)


def alone(run: RunConfig, tokens: NDArray[np.int64]) -> torch.Tensor:
    """Return the log-probability of each token but the first, by the plain decoder, which has no capacity."""
    model = Transformer(run.model)
    initialize(model, run.model, 0)
    with torch.no_grad():
        log_probs = model(torch.from_numpy(tokens[None, :-1])).log_softmax(-1)
    return log_probs[0].gather(1, torch.from_numpy(tokens[1:, None]))[:, 0]


def job_of(run: RunConfig) -> Job:
    job = Job(run, Grid(run.parallel, "cpu"), CPU)
    job.initialize(0)
    return job


def scores_body(rank: int, world_size: int, run: RunConfig, documents: list[Any]) -> list[NDArray[np.float32]] | None:
    return GridScorer(job_of(run), AttackSampling()).score(documents)


@pytest.mark.fast_cases(4)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(
    ("grid", "at_once"),
    [({}, 1), ({}, 4), ({"pp": 2}, 2), ({"x": 2, "y": 2}, 2), ({"cp": 2}, 4), ({"z": 2, "dp": 2}, 1)],
    ids=str,
)
def test_a_score_does_not_depend_on_other_documents(pool: Pool, model: str, grid: dict[str, int], at_once: int) -> None:
    """Audits and evaluation use this scorer. Sequences are padded to the longest of a micro-batch, or to more."""
    keys, sections = MODELS[model]
    run = tiny_run(keys, grid, training={"micro_batch_size": at_once}, **sections)
    together = pool.run(run.parallel.world_size, scores_body, run, DOCUMENTS)[0]
    for document, fields in zip(DOCUMENTS, together, strict=True):
        torch.testing.assert_close(torch.from_numpy(fields[0, : len(document) - 1]), alone(run, document))


def packed(rows: list[list[NDArray[np.int64]]]) -> MicroBatch[NDArray[Any]]:
    """Return sequences of several documents each, with padding at their ends, as the loader makes them."""
    tokens, numbers = np.full((len(rows), LENGTH), VOCABULARY - 1), np.full((len(rows), LENGTH), -1)
    labels, positions = np.full_like(tokens, IGNORE_INDEX), np.zeros_like(tokens)
    for row, documents in enumerate(rows):
        place = 0
        for number, document in enumerate(documents):
            here = slice(place, place + len(document) - 1)
            tokens[row, here], labels[row, here] = document[:-1], document[1:]
            numbers[row, here], positions[row, here] = number, np.arange(len(document) - 1)
            place = here.stop
    return MicroBatch(tokens, labels, positions, document_ends(numbers), is_data=numbers >= 0)


def validation_body(rank: int, world_size: int, run: RunConfig, batches: list[MicroBatch[NDArray[Any]]]) -> list[float]:
    job = job_of(run)
    if not run.model.num_experts:
        batches = [replace(batch, is_data=None) for batch in batches]
    mine = [share_of_sequences(batch.map(torch.from_numpy), job.grid.cp) for batch in batches]
    return [(job.evaluate([batch]) * job.count_kept([batch])).item() for batch in mine]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("grid", [{}, {"pp": 2}], ids=str)
def test_validation_is_the_sum_of_its_documents(pool: Pool, model: str, grid: dict[str, int]) -> None:
    keys, sections = MODELS[model]
    run = tiny_run(keys, grid, data={"source": "python-stdlib", "mask_documents": True}, **sections)
    short, _, middle, long = DOCUMENTS
    both, others = packed([[short, long], [middle]]), packed([[long], [short, middle]])
    expected = [-sum(alone(run, each).sum().item() for each in (short, middle, long))] * 2
    for found in pool.run(run.parallel.world_size, validation_body, run, [both, others]):
        assert found == pytest.approx(expected, rel=1e-5)


def sample_body(rank: int, world_size: int, run: RunConfig, tokens: NDArray[np.int64]) -> torch.Tensor:
    padded = np.concatenate([tokens, np.zeros(LENGTH - len(tokens), dtype=np.int64)])
    return job_of(run).next_token_logits(torch.from_numpy(padded)[None], len(tokens) - 1)


@pytest.mark.parametrize("model", MODELS)
def test_a_sample_does_not_depend_on_its_padding(pool: Pool, model: str) -> None:
    keys, sections = MODELS[model]
    run = tiny_run(keys, {}, **sections)
    (document,) = documents_of_lengths(12)
    (logits_V,) = pool.run(1, sample_body, run, document[:-1])
    assert logits_V.log_softmax(-1)[document[-1]].item() == pytest.approx(alone(run, document)[-1].item(), rel=1e-5)


def test_training_drops_rows_after_a_validation(pool: Pool) -> None:
    run = tiny_run(MIXTURE, {}, **CAPACITY)
    assert pool.run(1, dropped_body, run)[0] > 0.1


def dropped_body(rank: int, world_size: int, run: RunConfig) -> float:
    job, batch = job_of(run), packed([[document] for document in DOCUMENTS]).map(torch.from_numpy)
    job.evaluate([batch])
    job.train_step([batch], 0)
    assert job.expert_load is not None
    return job.expert_load.figures()["dropped_share"]
