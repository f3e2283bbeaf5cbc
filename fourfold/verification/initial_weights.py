"""Initial weights are drawn from the distributions that the documentation names."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from fourfold.config.run import RunConfig
from fourfold.models.initialize import initialize
from fourfold.training.job import build_model


def initial_weights_error(run: RunConfig, weights: Mapping[str, Tensor]) -> float:
    """The largest deviation of a tensor's mean or standard deviation from its law, in standard errors.

    Infinite where a grid's weights are not those of one process, or a constant is another.
    """
    model = build_model(run)
    initialize(model, run.model, run.training.seed)
    own = dict(model.named_parameters())
    if any(not torch.equal(weights[name], own[name].detach()) for name in own):
        return math.inf
    return max(_error(name, weight.double(), run) for name, weight in weights.items())


def _error(name: str, weight: Tensor, run: RunConfig) -> float:
    if name.endswith(("bias", "lora_B")) or weight.ndim == 1:
        is_norm_weight = weight.ndim == 1 and name.endswith("weight")
        constant = 1.0 if is_norm_weight and not run.model.zero_centered_norm else 0.0
        return 0.0 if bool((weight == constant).all()) else math.inf
    std = run.model.initializer_range
    if name.endswith("lora_A"):
        std = 1 / math.sqrt(3 * weight.shape[1])
    elif name.endswith(("o_proj.weight", "down_proj.weight")):
        std /= math.sqrt(2 * run.model.num_hidden_layers)
    if len(weight.unique(dim=0)) < len(weight):
        return math.inf
    n = weight.numel()
    return max(abs(float(weight.mean())) / std * math.sqrt(n), abs(float(weight.std()) / std - 1) * math.sqrt(2 * n))
