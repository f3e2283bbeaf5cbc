"""The section of the run file that sets what the backward pass recomputes and what is offloaded to the CPU."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from fourfold.config.strict import Strict


class ActivationCheckpointConfig(Strict):
    mode: Literal["none", "selective", "full"] = "none"
    """Recompute whole blocks in the backward pass (full), or only the modules listed in `modules` (selective). `full`
    saves the most memory and costs about a third more computation."""
    modules: list[Literal["attention", "mlp", "norms", "gathers"]] = Field(["mlp", "norms", "gathers"])
    """With mode = 'selective', the modules to recompute. `attention` is the attention core, `mlp` is the MLP's
    activation function, and `norms` is the norms. With `gathers`, linear layers keep only their own shard of an input
    that is split over the tensor axes x or y, and gather the full input again in the backward pass. Every choice except
    `attention` costs next to nothing."""
    every: int = Field(1, ge=1)
    """Recompute only every n-th block. The remaining blocks keep everything."""
    offload: bool = False
    """With mode = 'full', keep the inputs of blocks in CPU memory until the backward pass needs them."""

    @model_validator(mode="after")
    def _offload_needs_full(self) -> ActivationCheckpointConfig:
        if self.offload and self.mode != "full":
            raise ValueError(
                f"offload = true moves what mode = 'full' keeps, and mode is '{self.mode}'; offload = false works"
            )
        return self
