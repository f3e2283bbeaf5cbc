"""The section [activation_checkpoint] of the run file: what the backward pass recomputes, and what is offloaded to CPU
memory."""

from typing import Literal, Self

from pydantic import Field, model_validator

from fourfold.config.strict import Strict


class ActivationCheckpointConfig(Strict):
    mode: Literal["none", "selective", "full"] = "none"
    """What the backward pass recomputes: nothing (none), the modules listed in `modules` (selective), or entire blocks
    (full). `full` saves the most memory and costs about a third more computation."""
    modules: list[Literal["attention", "mlp", "norms", "gathers"]] = Field(["mlp", "norms", "gathers"])
    """With mode = 'selective', the modules to recompute. `attention` is the computation of attention between the linear
    layers, `mlp` is the MLP's activation function, and `norms` is all norms. `gathers` is for linear layers whose input
    is sharded over x or y: each rank saves only its shard, and the backward pass gathers the full input again. All
    choices except `attention` add very little computation."""
    every: int = Field(1, ge=1)
    """Recompute only every n-th block. All other blocks save all of their activations."""
    offload: bool = False
    """With mode = 'full', store the inputs of recomputed blocks in CPU memory until the backward pass needs them."""

    @model_validator(mode="after")
    def _offload_needs_full(self) -> Self:
        if self.offload and self.mode != "full":
            raise ValueError(f"offload = true needs mode = 'full', and mode is '{self.mode}'; offload = false works")
        return self
