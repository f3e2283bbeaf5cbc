"""Choose each method's settings for each budget, on tasks and contexts that the table does not use for this choice.

The methods that score all keys share their budget between scores and kept keys. The split is chosen here, for every
method in the same way.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from benchmarks.sparse_attention.decoding import Decoder
from benchmarks.sparse_attention.evaluate import Answered, Makers, evaluate
from benchmarks.sparse_attention.rivals.exact import ExactTopK
from benchmarks.sparse_attention.rivals.interface import Rival
from benchmarks.sparse_attention.rivals.top_p import ScoreRecorder, TopP, threshold_for
from benchmarks.sparse_attention.settings import LOKI, VARIANTS, Setup, keys_within, rival

DEVELOPMENT_TASKS = ("multi-key", "tracking", "common word")
SEED = 1
LENGTH = 1024
CONTEXTS, QUESTIONS = 8, 2
THRESHOLD_CONTEXTS = 2
OPTIONS = {"Quest": (8, 16, 32, 64), "SparQ": (1, 2, 4, 8), **dict.fromkeys(VARIANTS, (1, 2, 4, 8))}
"""Tokens of a page, channels, or dims to choose from."""


def tuned(decoder: Decoder, setup: Setup, budgets: Sequence[float], lengths: Sequence[int]) -> Setup:
    """Return the setup with the settings that answer the most questions of the development tasks.

    Among settings that are equally good, the first one wins. The thresholds of top-p read as many keys on average as
    the budget allows.

    Args:
        decoder: The model.
        setup: The model's basis.
        budgets: Shares of dense bytes.
        lengths: Lengths for which top-p needs a threshold.
    """
    for budget in budgets:
        setup = _with_split(decoder, setup, budget)
        for length in lengths:
            setup = _with_thresholds(decoder, setup, budget, length)
    return setup


def _with_split(decoder: Decoder, setup: Setup, budget: float) -> Setup:
    tried = {
        (name, option): replace(setup, dims={**setup.dims, (name, budget): option})
        for name, options in OPTIONS.items()
        if not (name in VARIANTS and VARIANTS[name].is_top_p)
        for option in options
    }

    def make() -> dict[str, Rival]:
        made = {f"{name}/{option}": rival(name, budget, LENGTH, each) for (name, option), each in tried.items()}
        return {name: each for name, each in made.items() if each is not None}

    scores: dict[str, list[float]] = {}
    for result in _development(decoder, LENGTH, make):
        scores.setdefault(result.method, []).append(result.right)
    dims = dict(setup.dims)
    for name, options in OPTIONS.items():
        source = LOKI if name in VARIANTS and VARIANTS[name].is_top_p else name
        found = {option: sum(scores[key]) for option in options if (key := f"{source}/{option}") in scores}
        dims[name, budget] = max(found, key=found.__getitem__) if found else options[0]
    return replace(setup, dims=dims)


def _with_thresholds(decoder: Decoder, setup: Setup, budget: float, length: int) -> Setup:
    """Return the setup with the p of every top-p method. It reads as many keys on average as the budget allows."""
    head_dim = setup.basis.head_dim
    scorers: dict[str, tuple[Rival, float, int | None]] = {}
    plain = keys_within(budget, length, head_dim, 0)
    scorers["exact top-p"] = ExactTopK(plain), plain, None
    for name, settings in VARIANTS.items():
        made = rival(name, budget, length, setup) if settings.is_top_p else None
        if isinstance(made, TopP):
            assert made.cap is not None
            keys = keys_within(budget, length, head_dim, setup.dims[name, budget] * length)
            scorers[name] = made.scorer, keys, made.cap
    recorders = {name: ScoreRecorder(scorer) for name, (scorer, _, _) in scorers.items()}
    list(_development(decoder, length, lambda: dict(recorders), THRESHOLD_CONTEXTS))
    found = {
        (name, budget, length): threshold_for(recorders[name].before, keys, cap)
        for name, (_, keys, cap) in scorers.items()
    }
    return replace(setup, thresholds={**setup.thresholds, **found})


def _development(decoder: Decoder, length: int, make: Makers, contexts: int = CONTEXTS) -> Iterator[Answered]:
    yield from evaluate(
        decoder,
        DEVELOPMENT_TASKS,
        length,
        make,
        contexts=contexts,
        questions=QUESTIONS,
        batch=contexts,
        seed=SEED,
    )
