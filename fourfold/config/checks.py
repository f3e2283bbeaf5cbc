"""The section [checks] of the run file."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from fourfold.config.strict import Strict


class ChecksConfig(Strict):
    """Checks of every step before its update is applied ([reliability.md](reliability.md#bad-numbers))."""

    non_finite: Literal["stop", "skip", "roll_back"] = Field(
        "stop",
        description="A loss or gradient norm that is not finite: stop ends the run, skip does not apply the step's "
        "update, roll_back returns to the newest checkpoint and skips the batch when it comes again. Gradients that "
        "overflow in fp16 belong to [loss_scaling](#loss_scaling).",
    )
    spike: Literal["off", "stop", "skip", "roll_back"] = Field(
        "off", description="The same for a loss or gradient norm far above those of the steps before."
    )
    spike_sigma: float = Field(
        6.0, gt=0, description="Far above: this many standard deviations over the mean of the window."
    )
    spike_window: int = Field(
        128, ge=2, description="The last steps that were good; until there are so many, nothing is a spike."
    )
    roll_back_batches: int = Field(
        1, ge=1, description="Batches that are skipped after a roll-back: the bad one, and those right before it."
    )
    max_in_a_row: int = Field(
        10,
        ge=1,
        description="Bad steps in a row that are skipped, or from which it returns; one more ends the run.",
    )
    replay_interval: int = Field(
        0,
        ge=0,
        description="Every n-th step's gradients are computed twice and compared bit for bit, and copies of weights "
        "are compared ([silent corruption](reliability.md#silent-corruption)); 0: never.",
    )
