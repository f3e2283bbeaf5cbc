"""Measure the perplexity of text if Loki reuses its choice of keys in the next layer or in the next step.

    FOURFOLD_TEST_DATA=data python -m benchmarks.sparse_attention.reuse

All variants read the same number of bytes: a variant that reads fewer codes attends to more keys.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Literal

import torch

from benchmarks.sparse_attention.decoding import Decoder
from benchmarks.sparse_attention.page import table
from benchmarks.sparse_attention.rivals.loki import SUM_ELEMENTS, Loki
from benchmarks.sparse_attention.rivals.reuse import ReusingLoki
from benchmarks.sparse_attention.settings import keys_within
from benchmarks.sparse_attention.text import CALIBRATION_STORIES, LENGTH, WINDOW, losses, rise_of, windows
from fourfold.inference.loki import LokiBasis, LokiConfig, calibrate

BUDGETS = (0.05, 0.1, 0.25)
DIMS = (4, 8, 12, 16)
"""The numbers of components to choose from, for every variant and budget."""

CODE_ELEMENTS = 1 / 8
"""Size of a component's code, in elements of the cache."""

Across = Literal["layers", "steps"] | None


def main() -> None:
    sys.path.append(str(Path(__file__).parents[2] / "tests"))
    from babyllama import babyllama, needs_babyllama, stories

    data = needs_babyllama()
    model, tokens = babyllama(data), stories(data)
    chosen_on, held_out = windows(tokens[:CALIBRATION_STORIES]), windows(tokens[CALIBRATION_STORIES:])
    basis = calibrate(model, chosen_on)
    decoder = Decoder(model, WINDOW)
    variants: dict[str, Across] = {
        "Loki": None,
        "every second layer reuses": "layers",
        "every second step reuses": "steps",
    }
    rows = {name: [name] for name in variants}
    for budget in BUDGETS:
        usual = torch.empty(0)
        for name, across in variants.items():
            made = [each for d in DIMS if (each := variant(basis, budget, d, across)) is not None]
            tried = [losses(decoder, chosen_on, {name: each})[name][0].mean().item() for each in made]
            lost, share = losses(decoder, held_out, {name: made[tried.index(min(tried))]})[name]
            usual = lost if across is None else usual
            change = rise_of(lost - usual)
            against = "" if across is None else f" ({change.low:+.1%} to {change.high:+.1%})"
            rows[name].append(f"{lost.mean().exp().item():.3f}{against}, {share:.1%}")
    print(table(["variant", *(f"{budget:.0%} of the bytes" for budget in BUDGETS)], list(rows.values())))


def variant(basis: LokiBasis, budget: float, d: int, across: Across) -> Loki | None:
    """Return Loki, or Loki with reused choices, within a budget. Return None if no key fits into the budget.

    Args:
        basis: The model's basis.
        budget: Share of the bytes that dense attention reads.
        d: Number of components.
        across: Which choices are reused (see ``ReusingLoki``). None reuses no choices.
    """
    layers = len(basis.best)
    part = {None: 1.0, "layers": (layers + 1) // 2 / layers, "steps": 0.5}[across]
    scoring = part * (d * CODE_ELEMENTS * LENGTH + SUM_ELEMENTS * basis.head_dim)
    k = keys_within(budget, LENGTH, basis.head_dim, scoring)
    if k < 1:
        return None
    config = LokiConfig(d=d, k=k, min_seq=0)
    encoders = [basis.of_layer(layer, config) for layer in range(layers)]
    return Loki(encoders, config) if across is None else ReusingLoki(encoders, config, across)


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
