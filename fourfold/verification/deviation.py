"""Measure the errors of the grid's results and the errors of one process in float32. An error is the difference from
the exact result, which one process computes in float64.

The grid's gathered results are on the CPU. The results of the references are on the job's device.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from fourfold.config.run import RunConfig
from fourfold.parallel.state import Part
from fourfold.verification.parity_report import Deviation

ROUNDING = 1e-12
"""A tensor counts as zero if its norm is at most this fraction of the norm of all tensors together. Such a tensor
contains only rounding errors of float64, so its relative error means nothing. An example is the gradient of the bias
of the attention keys, which is zero without rounding."""


def amplification(run: RunConfig) -> float:
    """Return how much the loss of a run amplifies the rounding errors of float32, as a factor of at least 1.

    The factor is 1, except in preference training (section [dpo]). The DPO loss subtracts log-probabilities of whole
    answers, which are large numbers, and multiplies the difference by beta.
    """
    return max(1.0, run.dpo.beta * run.training.seq_length * math.log(run.model.vocab_size))


def deviation(name: str, grid: Tensor, one_process: Tensor, exact: Tensor, amplification: float = 1.0) -> Deviation:
    """Return the largest errors of one tensor, on the grid and on one process.

    Args:
        name: The tensor's name.
        grid: The grid's result, on the CPU.
        one_process: The result of one process in float32.
        exact: The result of one process in float64.
        amplification: Factor on the lower bound for the error of one process (see the function ``amplification``).
    """
    # Always allow an error of float32's smallest normal number. Smaller numbers have fewer bits, so their relative
    # errors can be large.
    ulp = amplification * torch.finfo(torch.float32).eps * float(exact.abs().max()) + torch.finfo(torch.float32).tiny
    return Deviation(name, _difference(grid, exact), max(_difference(one_process, exact), ulp))


def deviations(
    grid: Mapping[str, Tensor],
    one_process: Mapping[str, Tensor],
    exact: Mapping[str, Tensor],
    noise: Mapping[str, float] | None = None,
    amplification: float = 1.0,
) -> list[Deviation]:
    """Return the largest errors of each tensor, on the grid and on one process.

    A tensor that is missing on the grid or in the reference has an infinite deviation.

    Args:
        grid: The grid's results by tensor name, on the CPU.
        one_process: The results of one process in float32.
        exact: The results of one process in float64.
        noise: Additional lower bounds for the error of one process, by tensor name. Some tensors may have none.
        amplification: Factor on the lower bound for the error of one process (see the function ``amplification``).
    """
    missing = [Deviation(name, math.inf, 0.0) for name in sorted(grid.keys() ^ exact.keys())]
    least = noise or {}
    common = [name for name in exact if name in grid]
    found = [deviation(name, grid[name], one_process[name], exact[name], amplification) for name in common]
    return missing + [each._replace(one_process=max(each.one_process, least.get(each.tensor, 0.0))) for each in found]


def largest_differences(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> dict[str, float]:
    """Return the largest absolute difference between the entries of ``a`` and ``b``, for each tensor."""
    return {name: _difference(a[name], b[name]) for name in a}


def replica_difference(parts: list[Part]) -> float:
    """Compare the copies that several processes hold of the same part of a tensor. Return the largest absolute
    difference between two copies."""
    first: dict[str, Tensor] = {}
    worst = 0.0
    for name, shape, slices, part in parts:
        whole = first.setdefault(name, torch.full(shape, torch.nan, dtype=part.dtype))
        known = ~whole[slices].isnan()
        if known.any():
            worst = max(worst, _difference(part[known], whole[slices][known]))
        whole[slices] = part
    return worst


def relative_differences(
    got: Mapping[str, Tensor], exact: Mapping[str, Tensor], negligible: float = ROUNDING
) -> dict[str, float]:
    """Return the relative error ‖got − exact‖ / ‖exact‖ of each tensor, with 2-norms.

    Args:
        got: The tensors, by name.
        exact: The same tensors without rounding errors.
        negligible: Leave a tensor out of the result if its norm is at most this fraction of the norm of all tensors
            together.
    """
    norms = {name: float(tensor.norm()) for name, tensor in exact.items()}
    least = negligible * math.hypot(*norms.values())
    known = {name: tensor for name, tensor in exact.items() if norms[name] > least}
    return {name: float((got[name].to(t.device, t.dtype) - t).norm() / norms[name]) for name, t in known.items()}


def _difference(a: Tensor, b: Tensor) -> float:
    return float((a.to(b.device, torch.float64) - b.double()).abs().nan_to_num(nan=math.inf).max())
