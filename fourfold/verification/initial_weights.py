"""Check that initial weights come from the distributions that the documentation names."""

import math
import re
from collections.abc import Mapping

import torch
from torch import Tensor

from fourfold.config.run import RunConfig
from fourfold.models.initialize import initialize
from fourfold.training.job import build_model


def initial_weights_error(run: RunConfig, weights: Mapping[str, Tensor]) -> float:
    """Return the largest deviation of the weights' first, second, and fourth moments from their expected values, in
    standard errors.

    Moments are computed for each tensor, and for each group of tensors that have the same name in different layers.

    The result is infinite in these cases:

    - The weights of the grid and of one process differ.
    - A tensor that should be constant has a wrong value.
    - Two rows of weights, in one tensor or in two, begin with the same four values. The values are divided by their
      expected standard deviation and rounded to three decimals before they are compared.
    - Another seed gives the same weights.
    """
    model = build_model(run)
    own = dict(model.named_parameters())
    initialize(model, run.model, run.training.seed + 1)
    if any(weights[name].ndim > 1 and torch.equal(weights[name], own[name]) for name in own if not _is_zero(name)):
        return math.inf
    initialize(model, run.model, run.training.seed)
    if any(not torch.equal(weights[name], own[name].detach()) for name in own):
        return math.inf
    scaled = {name: weight.double() / _std(name, weight, run) for name, weight in weights.items()}
    drawn = {name: weight for name, weight in scaled.items() if weight.ndim > 1 and not _is_zero(name)}
    matrices = [weight.flatten(0, -2).round(decimals=3) for weight in drawn.values()]
    rows = [tuple(row[:4].tolist()) for matrix in matrices for row in matrix]
    if min(weight.shape[-1] for weight in drawn.values()) >= 4 and len(set(rows)) < len(rows):
        return math.inf
    rates = {name: weights[name].double() for name in weights if name.endswith("A_log")}
    constants = [weights[name] == _constant(name, run) for name in weights if name not in drawn | rates]
    if not all(bool(is_right.all()) for is_right in constants):
        return math.inf
    kinds = {name: re.sub(r"\d+", "", name) for name in drawn}
    pooled = [torch.cat([drawn[n].flatten() for n in drawn if kinds[n] == kind]) for kind in set(kinds.values())]
    # exp(A_log) should be uniform between 0 and 16. If it is, the inverse normal CDF of exp(A_log) / 16 is standard
    # normal.
    normal = [torch.special.ndtri(torch.cat([rate.exp() / 16 for rate in rates.values()]))] if rates else []
    return max(_standard_errors(weight) for weight in (*drawn.values(), *pooled, *normal))


def _is_zero(name: str) -> bool:
    return name.endswith(("bias", "sinks", "lora_B")) and not name.endswith("dt_bias")


def _constant(name: str, run: RunConfig) -> float:
    if name.endswith(("dt_bias", "core.norm.weight")):
        return 1.0
    return 0.0 if _is_zero(name) or run.model.zero_centered_norm else 1.0


def _std(name: str, weight: Tensor, run: RunConfig) -> float:
    """Return the standard deviation that the documentation gives for a tensor. It follows GPT-2 for the decoder, and
    peft for LoRA."""
    if name.endswith("lora_A"):
        return 1 / math.sqrt(3 * weight.shape[1])
    is_residual = name.endswith(("o_proj.weight", "down_proj.weight", "experts.down_proj"))
    return run.model.initializer_range / (math.sqrt(2 * run.model.num_hidden_layers) if is_residual else 1.0)


def _standard_errors(z: Tensor) -> float:
    """Return the largest of three errors, in standard errors: the errors of the means of z, z², and z⁴.

    The values of ``z`` should be standard normal. Then the variances of z, z², and z⁴ are 1, 2, and 96.
    """
    deviations = ((z, 0.0, 1.0), (z.square(), 1.0, 2.0), (z**4, 3.0, 96.0))
    return max(
        abs(float(power.mean()) - mean) / math.sqrt(variance / z.numel()) for power, mean, variance in deviations
    )
