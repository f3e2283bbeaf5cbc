"""Keep the inputs of recomputed blocks in CPU memory between the forward and the backward pass.

On a GPU, the copies run on a separate stream. A block's input is copied to the CPU while the block's forward pass runs.
The input is copied back while a later block's backward pass runs. A copy that takes less time than this computation
does not slow down the step.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from fourfold.config.activation_checkpoint import ActivationCheckpointConfig
from fourfold.models.recomputation import checkpointed
from fourfold.models.transformer import Transformer
from fourfold.parallel.grid.communicate import purpose

T = TypeVar("T")

OFFLOAD = "offload to the CPU"


def offload_inputs(model: Transformer, config: ActivationCheckpointConfig) -> None:
    """Recompute every n-th block (``config.every``) in the backward pass, and keep its input in CPU memory until then.

    Call this after compilation, so that the copies are not part of the compiled code.
    """
    inputs = OffloadedInputs()
    for number, block in enumerate(model.blocks[:: config.every]):
        setattr(block, "forward", partial(inputs.checkpointed, block.forward, number == 0))  # noqa: B010 (mypy)


class OffloadedInputs:
    """Moves the inputs of a model's blocks to CPU memory and back."""

    def __init__(self) -> None:
        self._copies: CopyStream | None = None
        self._last: weakref.ref[_OnCPU] | None = None

    def checkpointed(self, forward: Callable[..., T], is_first: bool, x: Tensor, *others: Any) -> T:
        """Call a block's ``forward``. In the backward pass, copy the input ``x`` back, and call ``forward`` again.

        Args:
            is_first: whether this is the first recomputed block of its stage. The backward pass ends with this block,
                so this block need not start to copy another input back.
        """
        if not torch.is_grad_enabled():
            return forward(x, *others)
        if self._copies is None:
            self._copies = CopyStream(x.device)
        before = None if is_first or self._last is None else self._last()
        kept, first = _OnCPU(x, self._copies, before), [x]
        self._last = weakref.ref(kept)

        def run() -> T:
            # The forward pass takes the input out of ``first``. If the input stayed there, this closure would keep it
            # on the device until the backward pass.
            return forward(first.pop() if first else kept.back(), *others)

        out = checkpointed(run)
        # Wait for the copy to host memory, because the caller may free the input after this return. Later computation
        # could then overwrite the input.
        kept.wait_until_out()
        return out


class _OnCPU:
    """A copy of a tensor in CPU memory.

    Args:
        before: the copy of the previous recomputed block's input. The backward pass needs that input right after
            this tensor. None if there is no previous recomputed block.
    """

    def __init__(self, tensor: Tensor, copies: CopyStream, before: _OnCPU | None) -> None:
        self._device, self._requires_grad = tensor.device, tensor.requires_grad
        self._copies, self._before = copies, before
        with purpose(OFFLOAD, axis=""):
            self._copy = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda, requires_grad=False)
        self.wait_until_out = copies.start(self._copy, tensor.detach())
        self._arriving: tuple[Tensor, Callable[[], None]] | None = None

    def start_back(self) -> None:
        """Start to copy the tensor back to its device, unless this has already started."""
        if self._arriving is None:
            tensor = torch.empty_like(self._copy, device=self._device)
            self._arriving = tensor, self._copies.start(tensor, self._copy)

    def back(self) -> Tensor:
        """Return the tensor on its device. Also start to copy ``before`` back, because it is needed next."""
        self.start_back()
        assert self._arriving is not None
        (tensor, wait), self._arriving = self._arriving, None
        if self._before is not None:
            self._before.start_back()
            self._before = None
        wait()
        return tensor.requires_grad_(self._requires_grad)


class CopyStream:
    """Copies between GPU and CPU memory on a separate stream. If the device is a CPU, copies run immediately."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def start(self, out: Tensor, source: Tensor) -> Callable[[], None]:
        """Start a copy. It runs after all computation that was started before this call.

        Returns:
            A function that makes later computation wait for the copy. Keep both tensors until you call it. Otherwise
            later computation could reuse their memory before the copy is complete.
        """
        if self._stream is None:
            out.copy_(source)
            return lambda: None
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            out.copy_(source, non_blocking=True)
            copied = self._stream.record_event()
        return lambda: torch.cuda.current_stream(self._device).wait_event(copied)

    def join(self) -> None:
        """Make later computation wait for all copies that were started."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def finish(self) -> None:
        """Wait on the host for all copies that were started."""
        if self._stream is not None:
            self._stream.synchronize()
