"""The section of the run file that says what is recomputed in the backward or kept on the CPU."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from fourfold.config.strict import Strict


class ActivationCheckpointConfig(Strict):
    mode: Literal["none", "selective", "full"] = "none"
    """Recompute whole blocks in the backward (full), or only the listed modules (selective). full saves the most memory
    and costs about a third more computation."""
    modules: list[Literal["attention", "mlp", "norms", "gathers"]] = Field(["mlp", "norms", "gathers"])
    """selective: what to recompute. Choose the attention core, the MLP's activation (mlp), and the norms. With gathers,
    linear layers keep only their own shard of an input that x or y splits, and gather the input again. Every choice
    except attention costs next to nothing."""
    every: int = Field(1, ge=1)
    """Recompute only every n-th block. The remaining blocks keep everything."""
    offload: bool = False
    """full: move the inputs of blocks to the CPU's memory until the backward."""

    @model_validator(mode="after")
    def _offload_needs_full(self) -> ActivationCheckpointConfig:
        if self.offload and self.mode != "full":
            raise ValueError(
                f"offload = true moves what mode = 'full' keeps, and mode is '{self.mode}'; offload = false works"
            )
        return self
