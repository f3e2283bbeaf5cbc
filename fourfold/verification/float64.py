"""Run float32 code in float64."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class InFloat64(TorchFunctionMode):
    """Replaces float32 by float64 in the arguments of every torch function.

    Models convert to float32 when they compute norms, rotary tables, and softmax. A model in float64 would lose
    precision there.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is Tensor.float:
            func = Tensor.double
        return func(*map(_widened, args), **{name: _widened(value) for name, value in (kwargs or {}).items()})


def _widened(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value
