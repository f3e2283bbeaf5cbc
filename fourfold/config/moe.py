"""The section [moe] of the run file, which sets how a mixture-of-experts (MoE) model is trained."""

from pydantic import Field

from fourfold.config.strict import Strict


class MoEConfig(Strict):
    """Training of a mixture-of-experts (MoE) model ([moe.md](moe.md)). The keys of [model](#model) define the experts
    themselves."""

    capacity_factor: float = Field(0.0, ge=0)
    """Limit on how many tokens of a sequence an expert takes in training. The limit is this factor times the expert's
    equal share: tokens of the sequence · num_experts_per_tok / num_experts. When the limit is reached, all later
    tokens of the sequence skip the expert. 0 (default) sets no limit. Validation, audits, and exported models have no
    limit."""
    load_balancing_loss: float = Field(0.0, ge=0)
    """Coefficient of the [load-balancing loss](moe.md#load-balancing-loss). This loss is larger if the tokens are
    spread unevenly over the experts. Raise the coefficient if a few experts get most tokens."""
    z_loss: float = Field(0.0, ge=0)
    """Coefficient of the router's z-loss, logsumexp(logits)², per token. The z-loss keeps router logits small."""
    bias_update_rate: float = Field(0.0, ge=0)
    """With model.router_bias, each step changes each expert's bias by this amount: up if the expert got fewer tokens
    than the mean of all experts, and down if it got more."""
