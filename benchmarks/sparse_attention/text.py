"""Measure the perplexity of text with every sparse-attention method, on the trained model that the tests use.

    FOURFOLD_TEST_DATA=data python -m benchmarks.sparse_attention.text [--budgets 0.05,0.1,0.25]

A window begins with a prompt, which is processed with dense attention. All methods then decode the remaining tokens of
the window, and get the right token after each step.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from benchmarks.sparse_attention.decoding import Decoder, inverse_frequencies, stacked
from benchmarks.sparse_attention.page import table
from benchmarks.sparse_attention.rivals.exact import Dense
from benchmarks.sparse_attention.rivals.interface import Rival
from benchmarks.sparse_attention.settings import LOKI, METHODS, PAPER, VARIANTS, Setup, rival
from benchmarks.sparse_attention.table import TOLERANCE, Estimate, estimate
from benchmarks.sparse_attention.tune import OPTIONS, with_thresholds
from fourfold.inference.loki import calibrate

WINDOW, PROMPT = 256, 192
LENGTH = (WINDOW + PROMPT) // 2
"""Mean number of cached keys during decoding. This length determines how many keys fit into a budget."""
BLOCK = 21
"""Number of consecutive tokens in a block of the bootstrap."""
CALIBRATION_STORIES = 3
"""Number of stories for the calibration of Loki and for the choice of all settings. The perplexity is measured on the
other stories."""

Losses = Mapping[str, tuple[Tensor, float]]
"""For each method: the loss of each decoded token, [windows, tokens], and the bytes that the method read, as a share of
the bytes that dense attention reads."""


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--budgets", default="0.05,0.1,0.25", help="Shares of the bytes that dense attention reads.")
    budgets = [float(budget) for budget in options.parse_args().budgets.split(",")]
    sys.path.append(str(Path(__file__).parents[2] / "tests"))
    from babyllama import babyllama, needs_babyllama, stories

    data = needs_babyllama()
    model, tokens = babyllama(data), stories(data)
    print(text_table(model, windows(tokens[:CALIBRATION_STORIES]), windows(tokens[CALIBRATION_STORIES:]), budgets))


def windows(texts: Sequence[Sequence[int]]) -> list[list[int]]:
    """Cut texts into windows of ``WINDOW`` tokens. Each window begins with its text's first token. No token is decoded
    in more than one window."""
    rest, stride = WINDOW - 1, WINDOW - PROMPT
    return [[text[0], *text[at : at + rest]] for text in texts for at in range(1, len(text) - rest + 1, stride)]


def text_table(
    model: Any, chosen_on: Sequence[Sequence[int]], held_out: Sequence[Sequence[int]], budgets: Sequence[float]
) -> str:
    """Return a table with a row per method and a column per budget. A cell has the perplexity, and its increase over
    dense attention.

    Args:
        model: A transformers model.
        chosen_on: Windows to calibrate Loki on, and to choose settings on.
        held_out: Windows to measure.
        budgets: Shares of the bytes that dense attention reads.
    """
    setup = Setup(calibrate(model, chosen_on), inverse_frequencies(model))
    decoder = Decoder(model, WINDOW)
    cells: dict[str, list[str]] = {name: [] for name in METHODS}
    dense, _ = losses(decoder, held_out, {"dense": Dense()})["dense"]
    for budget in budgets:
        setup = _tuned(decoder, chosen_on, setup, budget)
        found = losses(decoder, held_out, _made(METHODS, budget, setup))
        for name in METHODS:
            if name not in found:
                cells[name].append("–")
                continue
            lost, share = found[name]
            rise = rise_of(lost - dense)
            perplexity = lost.mean().exp().item()
            over = " (over)" if share > TOLERANCE * budget else ""
            cells[name].append(f"{perplexity:.3f} ({rise.low:+.1%} to {rise.high:+.1%}), {share:.1%}{over}")
    header = ["method", *(f"{budget:.0%} of the bytes" for budget in budgets)]
    perplexity = dense.mean().exp().item()
    first = (
        f"Dense attention has a perplexity of {perplexity:.3f}, over {dense.numel():,} tokens. Calibration chose these "
        f"components for the layers, in order: {', '.join(setup.basis.best)}."
    )
    return f"{first}\n\n{table(header, [[name, *row] for name, row in cells.items()])}"


def losses(decoder: Decoder, texts: Sequence[Sequence[int]], rivals: Mapping[str, Rival]) -> Losses:
    """Return every method's losses on the tokens that follow the prompt in each window."""
    tokens = stacked(texts)
    decoder.prefill(tokens[:, :PROMPT])
    found = {}
    for name, each in rivals.items():
        logits = decoder.decode(each, tokens[:, PROMPT:-1])
        expected = tokens[:, PROMPT + 1 :]
        found[name] = (
            cross_entropy(logits.flatten(0, 1), expected.flatten(), reduction="none").view_as(expected),
            each.share,
        )
    return found


def rise_of(more: Tensor) -> Estimate:
    """Return the relative increase in perplexity, with an interval from a bootstrap over blocks of tokens."""
    blocks = more[:, : more.shape[1] // BLOCK * BLOCK].unflatten(1, (-1, BLOCK)).mean(-1)
    found = estimate(blocks.flatten()[None].double().numpy())
    return Estimate(*(float(np.expm1(each)) for each in (found.mean, found.low, found.high)))


def _made(names: Sequence[str], budget: float, setup: Setup) -> dict[str, Rival]:
    made = {name: rival(name, budget, LENGTH, setup) for name in names}
    return {name: each for name, each in made.items() if each is not None}


def _tuned(decoder: Decoder, texts: Sequence[Sequence[int]], setup: Setup, budget: float) -> Setup:
    """Choose the dims, channels, page sizes, and thresholds that are best on these windows, and return a setup with
    them."""
    dims = dict(setup.dims)
    for name, values in OPTIONS.items():
        tried = {}
        for value in values:
            each = rival(name, budget, LENGTH, replace(setup, dims={**dims, (name, budget): value}))
            if each is not None:
                tried[value] = losses(decoder, texts, {"tried": each})["tried"][0].mean().item()
        dims[name, budget] = min(tried, key=tried.__getitem__) if tried else values[0]
    of_codes = {(name, budget): dims[LOKI, budget] for name in VARIANTS if name != PAPER}
    setup = replace(setup, dims=dims | of_codes)
    return with_thresholds(setup, budget, LENGTH, lambda rivals: losses(decoder, texts, rivals))


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
