"""The section [activation_checkpoint] of the run file: what the backward pass recomputes, and what is offloaded to CPU
memory."""

from typing import Literal, Self

from pydantic import Field, model_validator

from fourfold.config.strict import Strict


class ActivationCheckpointConfig(Strict):
    mode: Literal["none", "selective", "full"] = "none"
    """What the backward pass recomputes. `none`: nothing. `selective`: what `modules` lists. `full`: entire blocks.
    `full` saves the most memory and costs about a third more computation."""
    modules: list[Literal["attention", "mlp", "norms", "gathers"]] = Field(["mlp", "norms", "gathers"])
    """With mode = 'selective', what to recompute. `attention`: the computation of attention between the linear
    layers. `mlp`: the MLP's activation function. `norms`: all norms. `gathers`: the inputs of linear layers, which x
    or y shard and the backward pass gathers again. Only `attention` adds much computation."""
    every: int = Field(1, ge=1)
    """With every = n, the backward pass recomputes only every n-th block. All other blocks save all activations."""
    offload: bool = False
    """With mode = 'full', store the inputs of recomputed blocks in CPU memory until the backward pass needs them."""

    @model_validator(mode="after")
    def _offload_needs_full(self) -> Self:
        if self.offload and self.mode != "full":
            raise ValueError(f"offload = true needs mode = 'full', and mode is '{self.mode}'; offload = false works")
        return self
