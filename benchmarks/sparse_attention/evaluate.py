"""Score sparse-attention methods on tasks. All methods answer the same questions, after the same dense pass over the
prompt."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from benchmarks.sparse_attention.decoding import Decoder, stacked
from benchmarks.sparse_attention.rivals.interface import Rival
from benchmarks.sparse_attention.tasks import (
    EQUALS,
    HAYSTACK_TASKS,
    Document,
    Turns,
    haystack,
    tail_of,
    word_list,
)

LONGEST_TAIL = 64
"""Largest number of tokens that a question and its answers have together."""


@dataclass(frozen=True)
class Answered:
    """The result of one method for one question."""

    task: str
    length: int
    context: int
    """Index of the context. Results with the same context are not independent."""
    question: int
    method: str
    right: float
    """Share of the answers that are right. For each answer, the model gets the right earlier answers as input."""
    share: float
    """The bytes that the method read, as a share of the bytes that dense attention reads."""


def documents(task: str, length: int, count: int, seed: int) -> list[Document]:
    """Return documents with contexts that the model has not seen in training. All tasks of ``HAYSTACK_TASKS`` have the
    same contexts.

    Args:
        task: One of ``TASKS``.
        length: Number of tokens of a context.
        count: Number of contexts.
        seed: Seed of the contexts.
    """
    if task in HAYSTACK_TASKS:
        return [haystack(length, np.random.default_rng([seed, length, number])) for number in range(count)]
    return [word_list(length, np.random.default_rng([seed, length, number]), task) for number in range(count)]


def evaluate(
    decoder: Decoder,
    tasks: Sequence[str],
    length: int,
    rivals: Mapping[str, Rival],
    *,
    contexts: int,
    questions: int,
    batch: int,
    seed: int,
) -> Iterator[Answered]:
    """Yield the result of every method for every question.

    Args:
        decoder: The model.
        tasks: Names of the tasks. Tasks with the same contexts share one pass over the prompt.
        length: Number of tokens of a context.
        rivals: The methods, by name.
        contexts: Number of contexts for each task.
        questions: Largest number of questions about a context for each task.
        batch: Number of contexts that are processed together.
        seed: Seed of the contexts.
    """
    shared = [
        [task for task in tasks if task in HAYSTACK_TASKS],
        *([task] for task in tasks if task not in HAYSTACK_TASKS),
    ]
    for group in filter(None, shared):
        made = documents(group[0], length, contexts, seed)
        for first in range(0, contexts, batch):
            part = made[first : first + batch]
            decoder.prefill(stacked([document.context.tolist() for document in part]))
            for task in group:
                count = min(questions, *(len(document.questions[task]) for document in part))
                for number in range(count):
                    asked = [document.questions[task][number] for document in part]
                    for method, right, share in answer(decoder, asked, rivals):
                        for row, of_row in enumerate(right):
                            yield Answered(task, length, first + row, number, method, of_row, share)


def answer(
    decoder: Decoder, asked: Sequence[Turns], rivals: Mapping[str, Rival]
) -> Iterator[tuple[str, list[float], float]]:
    """Let all methods answer one question per row of the batch. For each method, yield its name, the share of right
    answers in each row, and the bytes that it read, as a share of the bytes that dense attention reads.

    The tokens of the question before its first EQUALS are added to the prompt. From this EQUALS on, the method decodes
    every token. As input, it gets the right answers instead of its own.
    """
    tails = [tail_of(turns) for turns in asked]
    begin = tails[0].index(EQUALS)
    fed = stacked([tail[begin:-1] for tail in tails])
    expected = stacked([tail[begin + 1 :] for tail in tails])
    with decoder.returning():
        decoder.extend(stacked([tail[:begin] for tail in tails]))
        for method, rival in rivals.items():
            predicted = decoder.decode(rival, fed).argmax(-1)
            is_answer = fed == EQUALS
            right = ((predicted == expected) & is_answer).sum(1) / is_answer.sum(1)
            yield method, torch.as_tensor(right).tolist(), rival.share
