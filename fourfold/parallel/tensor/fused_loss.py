"""Wrap the two kernels of ``loss_kernels`` as custom operators, so that ``fourfold trace`` needs no Triton."""

import functools
import importlib.util
import os
import shutil

import torch
from torch import Tensor


@functools.cache
def triton_works() -> bool:
    """Return whether both Triton and a C compiler are installed. Triton needs the compiler to launch kernels."""
    has_compiler = "CC" in os.environ or any(map(shutil.which, ("gcc", "clang")))
    return importlib.util.find_spec("triton") is not None and has_compiler


def fuses_loss(device_type: str) -> bool:
    """Return whether the loss runs as Triton kernels on this device."""
    return device_type == "cuda" and triton_works()


@torch.library.custom_op("fourfold::normalize_logits", mutates_args=())
def normalize_logits(logits_mv: Tensor, labels_m: Tensor, first: int, real: int, softcap: float) -> Tensor:
    """Return the log-sum-exp of each token's logits, and the logit of each token's label, [2, m] in float32.

    Args:
        first: the label that belongs to column 0. If another rank has a label's column, the returned logit is 0.
        real: the number of columns that are not padding.
        softcap: the soft-cap of the logits. 0 means no soft-capping.
    """
    from fourfold.parallel.tensor import loss_kernels

    return loss_kernels.normalize(logits_mv, labels_m, first, real, softcap)


@normalize_logits.register_fake
def _(logits_mv: Tensor, labels_m: Tensor, first: int, real: int, softcap: float) -> Tensor:
    return logits_mv.new_empty((2, len(logits_mv)), dtype=torch.float32)


@torch.library.custom_op("fourfold::differentiate_logits", mutates_args=("logits_mv",))
def differentiate_logits(
    logits_mv: Tensor, labels_m: Tensor, normalizer_m: Tensor, factor_m: Tensor, first: int, real: int, softcap: float
) -> None:
    """Overwrite the logits with the gradient of the losses.

    Args:
        normalizer_m: the log-sum-exp of each token's logits, over the columns of all ranks.
        factor_m: the factor that each token's gradient is multiplied by. It must be 0 for tokens without a loss.
        first: as in ``normalize_logits``.
        real: as in ``normalize_logits``.
        softcap: as in ``normalize_logits``.
    """
    from fourfold.parallel.tensor import loss_kernels

    loss_kernels.differentiate(logits_mv, labels_m, normalizer_m, factor_m, first, real, softcap)
