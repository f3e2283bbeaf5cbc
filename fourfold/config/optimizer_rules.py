"""[optimizer]: the optimizer of a run, the rule that each parameter follows, and the states that a rule keeps."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from fourfold.config.strict import Strict

Rule = Literal["adamw", "muon", "lion"]

STATES: dict[Rule, tuple[str, ...]] = {
    "adamw": ("exp_avg", "exp_avg_sq"),
    "muon": ("momentum_buffer",),
    "lion": ("exp_avg",),
}
"""The states of a rule, each of its weight's shape, by their names in a checkpoint."""


class ParameterGroup(Strict):
    """Parameters that are trained differently from the rest; the first group that matches a parameter applies.

    `[[optimizer.groups]]` begins one. Names are as `layers.0.mlp.down_proj.weight`, those of `fourfold parity`.
    """

    parameters: list[str] = Field(
        min_length=1, description="Names, in which * stands for anything: 'embed_tokens.*', 'layers.*.mlp.*'."
    )
    lr_ratio: float = Field(1.0, ge=0, description="Factor on their learning rate; 0 freezes them.")
    weight_decay: float | None = Field(
        None, ge=0, description="Also applied to norms and biases that the group names. Default: as without the group."
    )

    @model_validator(mode="after")
    def _says_something(self) -> ParameterGroup:
        if self.lr_ratio == 1 and self.weight_decay is None:
            raise ValueError(
                f"parameters = {self.parameters} have neither lr_ratio nor weight_decay; lr_ratio = 0.1 works"
            )
        return self


class OptimizerConfig(Strict):
    """The optimizer ([optimizers.md](optimizers.md)). Weight decay applies to matrices; norms and biases have none
    unless a group gives them one.
    """

    name: Rule = Field(
        "adamw",
        description="muon: Muon for the matrices of the layers, and AdamW for embeddings, head, norms, biases and "
        "routers, with the same `lr`. lion: Lion for all.",
    )
    lr: float = Field(3e-4, gt=0, description="Peak learning rate, after the warm-up.")
    betas: tuple[float, float] = Field(
        (0.9, 0.95),
        strict=False,
        description="Decay of AdamW's running means of the gradient and of its square; Lion's β1 and β2, of which its "
        "authors take [0.95, 0.98] for language models.",
    )
    eps: float = Field(
        1e-8,
        gt=0,
        description="Added to the root of AdamW's second mean before dividing by it. Lion's sign is linear below it.",
    )
    momentum: float = Field(0.95, ge=0, lt=1, description="Decay of Muon's running mean of the gradient.")
    weight_decay: float = Field(0.1, ge=0, description="Decoupled: a step shrinks matrices by lr × weight_decay.")
    max_grad_norm: float = Field(1.0, gt=0, description="Gradients are clipped to this global norm.")
    stochastic_rounding: bool = Field(
        False,
        description="With training.master_weights = 'bf16': updates are rounded up or down at random, so that those "
        "too small for bf16 are right on average; moments are float32.",
    )
    groups: list[ParameterGroup] = Field(
        [],
        examples=[[{"parameters": ["embed_tokens.*"], "lr_ratio": 0.1}]],
        description="Parameters with a learning rate, or a weight decay, of their own.",
    )

    @model_validator(mode="after")
    def _betas_in_range(self) -> OptimizerConfig:
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas = {list(self.betas)} must both be at least 0 and below 1; [0.9, 0.95] works")
        return self


def rule_of(name: str, dims: int, optimizer: Rule) -> Rule:
    """The rule that a parameter follows: with Muon only matrices of the layers do, of which a router is none.

    A router, and the gate of a shared expert, are vectors of single outputs; Muon's authors leave such to AdamW.
    """
    if optimizer != "muon":
        return optimizer
    of_router = ".mlp.gate." in name or ".shared_expert_gate." in name
    return "muon" if name.startswith("layers.") and dims > 1 and not of_router else "adamw"
