"""The optimizer of the one-process reference: torch's AdamW, and short implementations of Lion and Muon.

This module shares no code with ``training.optimizer``. ``tests/training/test_optimizer.py`` compares the Muon of both
modules with torch's Muon.
"""

import fnmatch
import math
import re
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from fourfold.config.run import RunConfig

NOT_OF_MUON = re.compile(r"mlp\.(gate|shared_expert_gate)\.weight$|_bias$|_conv$")
"""Matches the names of those matrices in the layers that AdamW updates even if the optimizer is Muon. These are the
weights of routers and convolutions, the gates of shared experts, and the stacked biases of experts."""


class ReferenceOptimizer:
    """Updates unsharded parameters in their own dtype."""

    matmul_dtype: torch.dtype | None = None
    """The dtype of Muon's matmuls. None means the dtype of the parameters."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], run: RunConfig) -> None:
        self.run, name = run, run.optimizer.name
        self.settings = {key: _settings(key, p, run) for key, p in parameters.items()}
        self.own = {
            key: p for key, p in parameters.items() if name == "lion" or (name == "muon" and is_for_muon(key, p))
        }
        self.means = {key: torch.zeros_like(p) for key, p in self.own.items()}
        self.cut = {key: torch.zeros_like(p) for key, p in (self.own.items() if name == "lion" else ())}
        """Lion limits each update to ±1. For each parameter, this is the sum of the parts that were cut off, times the
        learning rate. Empty for other optimizers."""
        of_adamw = [{"params": [p], **self.settings[key]} for key, p in parameters.items() if key not in self.own]
        self.adamw = torch.optim.AdamW(
            of_adamw or [{"params": []}], betas=run.optimizer.betas, eps=run.optimizer.eps
        )  # fmt: skip
        self.parameters = list(parameters.values())

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """Update the parameters with their gradients and the learning rate ``lr``, and set the gradients to None."""
        for group in self.adamw.param_groups:
            group["lr"] = lr * group.get("lr_ratio", 1.0)
        self.adamw.step()
        config, direction = self.run.optimizer, {"lion": self._lion, "muon": self._muon}
        for key, parameter in self.own.items():
            if parameter.grad is not None:
                own = self.settings[key]
                update = direction[config.name](self.means[key], parameter.grad)
                rate = lr * own["lr_ratio"]
                if config.name == "lion":
                    uncut, update = update, update.clamp(-1, 1)
                    self.cut[key] += rate * (uncut - update)
                parameter.copy_(parameter * (1 - rate * own["weight_decay"]) - rate * update)
        for parameter in self.parameters:
            parameter.grad = None

    def _lion(self, mean: Tensor, gradient: Tensor) -> Tensor:
        """Update the running mean in place, and return u / eps. Here u is Lion's interpolated momentum (arXiv
        2302.06675, algorithm 2).

        ``step`` clips u / eps to ±1. The clipped value is the sign of u if |u| ≥ eps, and u / eps otherwise.
        """
        beta1, beta2 = self.run.optimizer.betas
        between = beta1 * mean + (1 - beta1) * gradient
        mean.copy_(beta2 * mean + (1 - beta2) * gradient)
        return between / self.run.optimizer.eps

    def _muon(self, mean: Tensor, gradient: Tensor) -> Tensor:
        """Update the running mean in place, and return Muon's direction with Nesterov momentum, scaled as in arXiv
        2502.16982. If the parameter is a stack of matrices, each matrix gets its own direction."""
        momentum = self.run.optimizer.momentum
        mean.copy_(momentum * mean + (1 - momentum) * gradient)
        ahead = momentum * mean + (1 - momentum) * gradient
        matrices = (ahead if ahead.ndim == 3 else ahead[None]).to(self.matmul_dtype)
        updates = torch.stack([0.2 * math.sqrt(max(matrix.shape)) * _orthogonal(matrix) for matrix in matrices])
        return updates.view_as(ahead).to(ahead.dtype)


def _orthogonal(matrix: Tensor) -> Tensor:
    """Orthogonalize a matrix with five fifth-order Newton-Schulz iterations (Jordan 2024)."""
    x: Tensor = matrix / matrix.norm().clamp(min=1e-7)
    for _ in range(5):
        square = x @ x.T if len(x) <= x.shape[1] else x.T @ x
        factor = 3.4445 * torch.eye(len(square), dtype=x.dtype, device=x.device) - 4.7750 * square
        factor += 2.0315 * square @ square
        x = factor @ x if len(x) <= x.shape[1] else x @ factor
    return x


def is_for_muon(name: str, parameter: Tensor) -> bool:
    """Return whether Muon (and not AdamW) updates this parameter, in a run whose optimizer is Muon."""
    return parameter.ndim > 1 and name.startswith("layers.") and NOT_OF_MUON.search(name) is None


def _settings(name: str, parameter: Tensor, run: RunConfig) -> dict[str, float]:
    decay = run.optimizer.weight_decay if parameter.ndim > 1 and not name.endswith("_proj_bias") else 0.0
    for group in run.optimizer.groups:
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in group.parameters):
            given = group.weight_decay
            return {"lr_ratio": group.lr_ratio, "weight_decay": decay if given is None else given}
    return {"lr_ratio": 1.0, "weight_decay": decay}
