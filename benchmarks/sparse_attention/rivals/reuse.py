"""Loki that chooses keys only in every second layer, or only in every second step. It reuses each choice once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from benchmarks.sparse_attention.rivals.interface import Prompt, Rival, Step
from benchmarks.sparse_attention.rivals.loki import Loki
from fourfold.inference.loki import LokiConfig
from fourfold.inference.loki.codes import Encoder
from fourfold.inference.loki.select import always_chosen


class ReusingLoki(Loki):
    """Loki with reused choices.

    If a choice is reused, Loki reads no codes. So it cannot estimate the weight of the mean of all other keys, and
    attends only to the chosen keys. The last keys are always among the chosen keys, even if they are newer than the
    choice.

    Args:
        encoders: For each layer, what ``LokiBasis.of_layer`` returns.
        config: Loki's settings, with ``k``.
        across: Whether a layer reuses the choice of the layer before it, or a step reuses the choice of the step before
            it.
    """

    def __init__(self, encoders: Sequence[Encoder], config: LokiConfig, across: Literal["layers", "steps"]) -> None:
        super().__init__(encoders, config)
        self.across = across
        self.chosen: dict[int, Tensor] = {}
        self.steps: list[int] = []

    def start(self, prompts: Sequence[Prompt]) -> None:
        super().start(prompts)
        self.chosen, self.steps = {}, [0] * len(prompts)

    def decode(self, step: Step) -> Tensor:
        out = super().decode(step)
        self.steps[step.layer] += 1
        return out

    def score(self, step: Step) -> Tensor | None:  # type: ignore[override]
        return None if self._reuses(step) else super().score(step)

    def select(self, step: Step, worth_BKS: Tensor | None) -> Tensor:
        if worth_BKS is not None:
            self.chosen[step.layer] = super().select(step, worth_BKS)
            return self.chosen[step.layer]
        chosen_BKS = self.chosen[step.layer - 1 if self.across == "layers" else step.layer]
        newer = step.length - chosen_BKS.shape[-1]
        chosen_BKS = torch.cat([chosen_BKS, torch.ones_like(chosen_BKS[..., :newer])], -1)
        kept_S = always_chosen(self.config, self.config.key_count(step.length), None, None, step.length, "cpu")
        return chosen_BKS if kept_S is None else chosen_BKS | kept_S

    def attend(self, step: Step, chosen_BKS: Tensor) -> Tensor:
        return Rival.attend(self, step, chosen_BKS) if self._reuses(step) else super().attend(step, chosen_BKS)

    def scoring_elements(self, step: Step) -> float:
        return 0.0 if self._reuses(step) else super().scoring_elements(step)

    def _reuses(self, step: Step) -> bool:
        return (step.layer if self.across == "layers" else self.steps[step.layer]) % 2 == 1
