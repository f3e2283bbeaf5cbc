"""Generate tasks like RULER's (arXiv 2404.06654) over a vocabulary of 128 tokens.

A document is a context and questions about it: START context ASK question EQUALS answer … END. Each answer is one
token, after EQUALS. There are two kinds of contexts:

- A haystack is random filler tokens with facts at random positions. There are four kinds of facts. A *pair* is a name
  and its value. A *link* is a name and the next name in a chain of names (the last name is followed by a value). A
  *record* is a name, a relation, and a value or another name. The *needle* is a marker and its value.
- A list of words, some of which are more frequent. The questions ask for the most frequent words.

A haystack contains the facts for all tasks about facts, so a model processes it only once for all of these tasks.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

START, ASK, EQUALS, END, NEEDLE, COMMON = range(6)
RANKS = (6, 7, 8)
"""Tokens that ask for the most frequent word, for the second most frequent word, and for the third."""
RELATIONS = np.arange(9, 16)
NAMES = np.arange(16, 80)
VALUES = np.arange(80, 104)
FILLER = np.arange(104, 128)
VOCABULARY = 128

HAYSTACK_TASKS = ("single", "multi-key", "multi-query", "multi-value", "tracking", "long chain", "two-hop QA")
RECORD_TASKS = ("multi-value", "two-hop QA")
WORD_TASKS = ("common word", "frequent words")
TASKS = (*HAYSTACK_TASKS, *WORD_TASKS)

WORD_SHARE = 1 / 8
LONGEST_WORD_TAIL = 4 * len(RANKS)

Turns = list[tuple[list[int], int]]
"""A sequence of questions, each with its answer. An empty question stands for a question about the previous answer."""


@dataclass
class Document:
    """A context, and for each task a list of questions about the context."""

    context: NDArray[np.int64]
    questions: dict[str, list[Turns]] = field(default_factory=dict)


def tail_of(turns: Turns) -> list[int]:
    """Return the tokens of a sequence of questions and answers."""
    tokens: list[int] = []
    for question, answer in turns:
        tokens += [ASK, *question] if question else []
        tokens += [EQUALS, answer]
    return tokens


def haystack(length: int, rng: np.random.Generator) -> Document:
    """Return a document with a haystack, and with questions for all tasks of ``HAYSTACK_TASKS``.

    The number of facts grows with the length, until it reaches a limit: there are only 64 different names.

    Args:
        length: Number of tokens of the context, at least 56.
        rng: Source of randomness.
    """
    names = [int(name) for name in rng.permutation(NAMES)]
    share = min(length / 512, 1.0)
    pairs, records, hops = max(4, int(32 * share)), max(1, int(6 * share)), max(6, int(12 * share))
    needle = int(rng.choice(VALUES))
    facts: list[list[int]] = [[NEEDLE, needle]]
    questions: dict[str, list[Turns]] = {"single": [[([NEEDLE], needle)]]}

    keyed = [(names.pop(), int(rng.choice(VALUES))) for _ in range(pairs)]
    facts += [list(pair) for pair in keyed]
    questions["multi-key"] = [[([name], value)] for name, value in keyed]
    questions["multi-query"] = [
        [([name], value) for name, value in keyed[at : at + 4]] for at in range(0, pairs - 3, 4)
    ]

    for task, count in (("tracking", 4), ("long chain", hops)):
        chain = [names.pop() for _ in range(count)] + [int(rng.choice(VALUES))]
        facts += [[chain[at], chain[at + 1]] for at in range(count)]
        questions[task] = [[([chain[0]], chain[1]), *[([], each) for each in chain[2:]]]]

    questions["multi-value"], questions["two-hop QA"] = [], []
    for _ in range(records):
        subject, bridge = names.pop(), names.pop()
        relations = [int(each) for each in rng.permutation(RELATIONS)[:5]]
        values = [int(each) for each in rng.choice(VALUES, 5)]
        of_subject = [(subject, relation, value) for relation, value in zip(relations[:4], values[:4], strict=True)]
        hop = [(subject, relations[4], bridge), (bridge, relations[0], values[4])]
        facts += [list(fact) for fact in of_subject + hop]
        questions["multi-value"].append([([name, relation], value) for name, relation, value in of_subject])
        questions["two-hop QA"].append([([name, relation], value) for name, relation, value in hop])
    return Document(_planted(facts, length, rng), questions)


def _planted(facts: list[list[int]], length: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """Return START and filler tokens, with the facts at random positions and in random order."""
    spare = length - 1 - sum(map(len, facts))
    if spare < 0:
        raise ValueError(f"a haystack of {length} tokens has no room for {len(facts)} facts")
    before = np.sort(rng.integers(0, spare + 1, len(facts)))
    filler = rng.choice(FILLER, spare)
    pieces: list[NDArray[np.int64]] = [np.array([START])]
    begin = 0
    for place, number in zip(before, rng.permutation(len(facts)), strict=True):
        pieces += [filler[begin:place], np.array(facts[number])]
        begin = place
    return np.concatenate([*pieces, filler[begin:]]).astype(np.int64)


def word_list(length: int, rng: np.random.Generator, task: str) -> Document:
    """Return a document with a list of words, and with a question about the most frequent words.

    In the task "common word", a sixth of the list is one word, and all other words are equally frequent. In the task
    "frequent words", the word of rank r has a frequency proportional to 1 / r², as in RULER (zeta 2.0).

    Args:
        length: Number of tokens of the context.
        rng: Source of randomness.
        task: One of ``WORD_TASKS``.
    """
    words = rng.permutation(FILLER)
    if task == "common word":
        shares = np.r_[1 / 6, np.full(len(words) - 1, 5 / 6 / (len(words) - 1))]
        questions: dict[str, list[Turns]] = {"common word": [[([COMMON], int(words[0]))]]}
    else:
        shares = np.arange(1.0, len(words) + 1) ** -2.0
        turns: Turns = [([rank], int(word)) for rank, word in zip(RANKS, words, strict=False)]
        questions = {"frequent words": [turns]}
    counts = np.floor(shares / shares.sum() * (length - 1)).astype(int)
    # The counts are rounded down, so some words are missing. Add only rare words, so that the most frequent words stay
    # the same.
    missing = length - 1 - counts.sum()
    counts[: len(RANKS) - 1 : -1] += np.bincount(
        np.arange(missing) % (len(words) - len(RANKS)), None, len(words) - len(RANKS)
    )
    return Document(np.r_[START, rng.permutation(np.repeat(words, counts))], questions)


def training_document(length: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """Return the tokens of a training document with this length: a context, as many questions as fit, and END.

    A fraction ``WORD_SHARE`` of the documents has a list of words. All other documents have a haystack, with questions
    from random tasks.

    Args:
        length: Number of tokens, at least 128.
        rng: Source of randomness.
    """
    if rng.random() < WORD_SHARE:
        document = word_list(length - LONGEST_WORD_TAIL - 1, rng, WORD_TASKS[int(rng.integers(2))])
        return _ended([*document.context.tolist(), *_word_tail(document)], length)
    document = haystack(length * 7 // 16, rng)
    asked = [(task, number) for task in HAYSTACK_TASKS for number in range(len(document.questions[task]))]
    tokens, known = document.context.tolist(), set[int]()
    for place in rng.permutation(len(asked)):
        task, number = asked[place]
        turns = document.questions[task][number]
        names = {question[0] for question, _ in turns if question}
        tail = tail_of(turns)
        # Do not ask twice about the same name, because the model could copy its earlier answer.
        if len(tokens) + len(tail) < length and (task in RECORD_TASKS or not names & known):
            tokens += tail
            known |= names
    return _ended(tokens, length)


def _word_tail(document: Document) -> list[int]:
    return [token for asked in document.questions.values() for token in tail_of(asked[0])]


def _ended(tokens: list[int], length: int) -> NDArray[np.int64]:
    return np.array([*tokens, *[END] * (length - len(tokens))], dtype=np.int64)
