"""The section of the run file that says what is recomputed in the backward, or kept on the CPU."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from fourfold.config.strict import Strict


class ActivationCheckpointConfig(Strict):
    mode: Literal["none", "selective", "full"] = Field(
        "none", description="full recomputes whole blocks in the backward, selective only the modules listed."
    )
    modules: list[Literal["attention", "mlp", "norms", "gathers"]] = Field(
        ["mlp", "norms", "gathers"],
        description="selective: the attention core, the MLP's activation, the norms; gathers: linear layers keep only "
        "their own part of an input that the ranks of x or y share, and gather it again. All but attention cost "
        "next to nothing.",
    )
    every: int = Field(1, ge=1, description="Only in every n-th block; the others keep everything.")
    offload: bool = Field(
        False, description="full: the inputs of blocks are offloaded to the CPU's memory until the backward."
    )

    @model_validator(mode="after")
    def _offload_needs_full(self) -> ActivationCheckpointConfig:
        if self.offload and self.mode != "full":
            raise ValueError(
                f"offload = true moves what mode = 'full' keeps, and mode is '{self.mode}'; offload = false works"
            )
        return self
