"""Repeat the one-process run with random rounding, to learn how far rounding can change its gradients.

One float32 run is only one sample of the rounding error, and this sample can be far smaller than usual. For example,
all terms of a gradient may cancel exactly on one process, but not on the grid. Random rounding gives more samples. The
run computes in float64, and each operation's result changes by up to one unit in the last place of float32 (Monte Carlo
arithmetic, Denis et al. 2015, arXiv 1509.01347).
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from fourfold.config.run import RunConfig
from fourfold.torch_internals import TorchDispatchMode
from fourfold.verification.deviation import largest_differences
from fourfold.verification.one_process import Figures, Logits, Parameters, Reference
from fourfold.verification.reference_batches import Sequences, random_batch

SAMPLES = 4
"""Number of times that the one-process run is repeated with random rounding."""


class RandomRounding(TorchDispatchMode):
    """Multiplies every float64 result by 1 + u. The random number u is uniform between -eps and eps, and eps is the
    machine epsilon of float32.

    Results of in-place operations are not rounded.
    """

    def __init__(self, seed: int, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's has no annotations
        self.generator = torch.Generator(device).manual_seed(seed)

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        is_in_place = any(out is each for each in args)
        return out if func.is_view or is_in_place else self._rounded(out)

    def _rounded(self, exact: Any) -> Any:
        """Round one result of an operation, or each of several results."""
        if isinstance(exact, tuple | list):
            return type(exact)(map(self._rounded, exact))
        if not isinstance(exact, Tensor) or exact.dtype != torch.float64:
            return exact
        noise = torch.rand(exact.shape, dtype=exact.dtype, device=exact.device, generator=self.generator)
        return exact * (1 + torch.finfo(torch.float32).eps * (2 * noise - 1))


class RandomlyRounded(Reference):
    """The reference model on one process, with a random rounding error after each operation."""

    def __init__(self, run: RunConfig, logits: Logits, weights: Parameters, device: torch.device, seed: int) -> None:
        super().__init__(run, logits, weights, device, torch.float64)
        self.rounding = RandomRounding(seed, device)

    def step(self, step: int, batch: Sequences, max_grad_norm: float) -> Figures:
        # Do not use a fused attention kernel, because only its result would be rounded, not its intermediate values.
        with sdpa_kernel(SDPBackend.MATH), self.rounding:
            return super().step(step, batch, max_grad_norm)


def gradient_noise(
    first: Reference, weights: Parameters, steps: Mapping[int, float], exact: Figures
) -> dict[str, float]:
    """Run some steps ``SAMPLES`` times with random rounding. For each gradient of the last step, return the largest
    difference from its exact value.

    Args:
        first: A reference that has taken these steps. The new references use its model and its device.
        weights: The weights before the first step.
        steps: Maps the index of each step to the clipping limit of its gradient norm.
        exact: The results of the last step in float64.
    """
    largest: dict[str, float] = {}
    for seed in range(SAMPLES):
        reference = RandomlyRounded(first.run, first.logits, weights, first.device, seed)
        for step, max_grad_norm in steps.items():
            found = reference.step(step, random_batch(first.run, step, first.device), max_grad_norm)
        for name, noise in largest_differences(found.gradients, exact.gradients).items():
            largest[name] = max(noise, largest.get(name, 0.0))
    return largest
