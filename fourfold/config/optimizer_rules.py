"""The section [optimizer] of the run file, and the choice of the update rule for each parameter."""

from typing import Literal, Self

from pydantic import Field, model_validator

from fourfold.config.strict import Strict

UpdateRule = Literal["adamw", "muon", "lion"]

STATES: dict[UpdateRule, tuple[str, ...]] = {
    "adamw": ("exp_avg", "exp_avg_sq"),
    "muon": ("momentum_buffer",),
    "lion": ("exp_avg",),
}
"""The optimizer states of each update rule, under their names in a checkpoint. Each state has the shape of its
weight."""


class ParameterGroup(Strict):
    """A group of parameters with its own learning rate or weight decay. If several groups match a parameter, the first
    group applies.

    Each group begins with `[[optimizer.groups]]`. Parameter names look like `layers.0.mlp.down_proj.weight`, and
    `fourfold parity` prints them.
    """

    parameters: list[str] = Field(min_length=1)
    """Names of the group's parameters. * matches anything, as in 'embed_tokens.*' or 'layers.*.mlp.*'."""
    lr_ratio: float = Field(1.0, ge=0)
    """Factor on the learning rate of these parameters. 0 freezes the parameters."""
    weight_decay: float | None = Field(None, ge=0)
    """Weight decay of these parameters. It also applies to norms and biases if `parameters` names them. Default: the
    weight decay that the parameters have without the group."""

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        if self.lr_ratio == 1 and self.weight_decay is None:
            raise ValueError(
                f"the group of parameters = {self.parameters} sets neither lr_ratio nor weight_decay; lr_ratio = 0.1 "
                "works"
            )
        return self


class OptimizerConfig(Strict):
    """The optimizer ([optimizers.md](optimizers.md)).

    Weight decay applies to matrices. Norms and biases have no weight decay unless a group sets it.
    """

    name: UpdateRule = "adamw"
    """Update rule. `muon` uses Muon for the matrices of the layers, and AdamW with the same `lr` for all other
    parameters: embeddings, head, norms, biases, routers, convolutions, and the gates of shared experts."""
    lr: float = Field(3e-4, gt=0)
    """Peak learning rate, after the warm-up."""
    betas: tuple[float, float] = Field((0.9, 0.95), strict=False)
    """AdamW: decay rates of the running means of the gradient and of its square. Lion: β1 and β2. Lion's authors use
    [0.95, 0.98] for language models."""
    eps: float = Field(1e-8, gt=0)
    """AdamW adds eps to the denominator of its update. Lion updates with the sign of its interpolated momentum u, or
    with u / eps if u is between -eps and eps."""
    momentum: float = Field(0.95, ge=0, lt=1)
    """Decay rate of Muon's running mean of the gradient."""
    weight_decay: float = Field(0.1, ge=0)
    """Decoupled weight decay: each step multiplies matrices by 1 − lr × weight_decay."""
    max_grad_norm: float = Field(1.0, gt=0)
    """Clip gradients to this global norm."""
    stochastic_rounding: bool = False
    """With training.master_weights = 'bf16', round updated weights up or down at random. Updates that are too small for
    bf16 then still take effect on average. The optimizer states stay in float32."""
    groups: list[ParameterGroup] = Field([], examples=[[{"parameters": ["embed_tokens.*"], "lr_ratio": 0.1}]])
    """Parameters with their own learning rate or weight decay."""

    @model_validator(mode="after")
    def _betas_in_range(self) -> Self:
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas = {list(self.betas)} must both be at least 0 and below 1; [0.9, 0.95] works")
        return self


def rule_of(name: str, dims: int, optimizer: UpdateRule) -> UpdateRule:
    """Return the update rule of a parameter.

    With `muon`, Muon updates the matrices of the layers, and AdamW updates everything else. Routers, convolutions, and
    gates of shared experts also get AdamW: each of their rows is a vector that computes one output, and Muon's authors
    use AdamW for such weights.

    Args:
        name: Name of the parameter.
        dims: Number of dimensions of the parameter.
        optimizer: The value of `optimizer.name`.
    """
    if optimizer != "muon":
        return optimizer
    by_row = ".mlp.gate." in name or ".shared_expert_gate." in name or name.endswith("_conv")
    return "muon" if name.startswith("layers.") and is_matrix(name, dims) and not by_row else "adamw"


def is_matrix(name: str, dims: int) -> bool:
    """Return whether a parameter is a matrix or a stack of matrices. A stack of the experts' biases is not a matrix,
    although it has two dimensions."""
    return dims > 1 and not name.endswith("bias")
