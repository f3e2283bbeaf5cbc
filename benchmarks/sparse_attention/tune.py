"""Choose each method's settings for each budget, on contexts that the comparison does not use.

Methods that score all keys divide their budget: more bytes for scores leave fewer bytes for the keys that they attend
to. This module chooses the division, for every method in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from benchmarks.sparse_attention.decoding import Decoder
from benchmarks.sparse_attention.evaluate import Answered, evaluate
from benchmarks.sparse_attention.rivals.exact import ExactTopK
from benchmarks.sparse_attention.rivals.interface import Rival
from benchmarks.sparse_attention.rivals.top_p import ScoreRecorder, TopP, threshold_for
from benchmarks.sparse_attention.settings import LOKI, PAPER, VARIANTS, Setup, keys_within, loki_scoring, rival

DEVELOPMENT_TASKS = ("multi-key", "tracking", "common word")
SEED = 1
LENGTH = 1024
CONTEXTS, QUESTIONS = 8, 1
THRESHOLD_CONTEXTS = 2
OPTIONS = {LOKI: (8, 16, 32), PAPER: (1, 2, 4, 8), "SparQ": (1, 2, 4, 8), "Quest": (8, 16, 32, 64)}
"""The values to choose from: the number of Loki's components, SparQ's channels, and Quest's tokens per page. All
variants of Loki with codes use the same number of components."""


def tuned(decoder: Decoder, setup: Setup, budgets: Sequence[float], lengths: Sequence[int]) -> Setup:
    """Return a setup with the settings that answer the most questions on the development contexts.

    If several settings are equally good, the first one is chosen. The thresholds of top-p are chosen so that the
    methods read as many keys on average as the budget allows.

    Args:
        decoder: The model.
        setup: The model's basis.
        budgets: Shares of the bytes that dense attention reads.
        lengths: Lengths for which top-p needs a threshold.
    """
    for budget in budgets:
        setup = _with_split(decoder, setup, budget)
        for length in lengths:
            run = partial(_development, decoder, length, contexts=THRESHOLD_CONTEXTS)
            setup = with_thresholds(setup, budget, length, run)
    return setup


def _with_split(decoder: Decoder, setup: Setup, budget: float) -> Setup:
    tried = {
        (name, option): replace(setup, dims={**setup.dims, (name, budget): option})
        for name, options in OPTIONS.items()
        for option in options
    }
    made = {f"{name}/{option}": rival(name, budget, LENGTH, each) for (name, option), each in tried.items()}
    rivals = {name: each for name, each in made.items() if each is not None}
    scores: dict[str, list[float]] = {}
    for result in _development(decoder, LENGTH, rivals):
        scores.setdefault(result.method, []).append(result.right)
    dims = dict(setup.dims)
    for name, options in OPTIONS.items():
        found = {option: sum(scores[key]) for option in options if (key := f"{name}/{option}") in scores}
        dims[name, budget] = max(found, key=found.__getitem__) if found else options[0]
    dims |= {(name, budget): dims[LOKI, budget] for name in VARIANTS if name != PAPER}
    return replace(setup, dims=dims)


def with_thresholds(setup: Setup, budget: float, length: int, run: Callable[[Mapping[str, Rival]], object]) -> Setup:
    """Return a setup with a threshold p for every method with top-p. With this p, the method reads as many keys on
    average as the budget allows.

    Args:
        setup: A setup with the dims, channels, and page sizes.
        budget: Share of the bytes that dense attention reads.
        length: Number of cached keys.
        run: A function that decodes with the given methods.
    """
    head_dim = setup.basis.head_dim
    scorers: dict[str, tuple[Rival, float, int | None]] = {}
    plain = keys_within(budget, length, head_dim, 0)
    scorers["exact top-p"] = ExactTopK(plain), plain, None
    for name, settings in VARIANTS.items():
        made = rival(name, budget, length, setup) if settings.is_top_p else None
        if isinstance(made, TopP):
            assert made.cap is not None
            keys = keys_within(budget, length, head_dim, loki_scoring(name, budget, setup) * length)
            scorers[name] = made.scorer, keys, made.cap
    recorders = {name: ScoreRecorder(scorer) for name, (scorer, _, _) in scorers.items()}
    run(recorders)
    found = {
        (name, budget, length): threshold_for(recorders[name].before, keys, cap)
        for name, (_, keys, cap) in scorers.items()
    }
    return replace(setup, thresholds={**setup.thresholds, **found})


def _development(
    decoder: Decoder, length: int, rivals: Mapping[str, Rival], contexts: int = CONTEXTS
) -> list[Answered]:
    found = evaluate(
        decoder,
        DEVELOPMENT_TASKS,
        length,
        rivals,
        contexts=contexts,
        questions=QUESTIONS,
        batch=contexts,
        seed=SEED,
    )
    return list(found)
