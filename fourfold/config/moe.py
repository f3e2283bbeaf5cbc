"""The section [moe] of the run file: how a mixture of experts is trained."""

from __future__ import annotations

from pydantic import Field

from fourfold.config.strict import Strict


class MoEConfig(Strict):
    """Training of a mixture of experts ([moe.md](moe.md)); the experts themselves are keys of [model](#model)."""

    capacity_factor: float = Field(
        0.0,
        ge=0,
        description="In training, an expert takes at most this many times its equal share of the tokens of a sequence, "
        "the first ones. Later tokens skip it. Padding does not count. Validation, audits, evaluation, and exports "
        "have no limit. 0: no limit.",
    )
    load_balancing_loss: float = Field(
        0.0, ge=0, description="Coefficient of the load-balancing loss: experts × load × router probability, per token."
    )
    z_loss: float = Field(0.0, ge=0, description="Coefficient of the router's z-loss: logsumexp(logits)², per token.")
    bias_update_rate: float = Field(
        0.0,
        ge=0,
        description="With model.router_bias: every step moves the bias of each expert by this much towards an equal "
        "load.",
    )
