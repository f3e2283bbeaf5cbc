"""Activation checkpointing, offloading and compilation of a model's parts."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fourfold.config.run import ActivationCheckpointConfig, ParallelConfig
from fourfold.models.transformer import Transformer
from fourfold.parallel.communicate import purpose
from fourfold.parallel.linear import Linear4D

SELECTIVE = {
    "attention": ("self_attn.core.forward",),
    "mlp": ("mlp.down",),
    "norms": ("input_layernorm.forward", "post_attention_layernorm.forward"),
}
"""Methods of a block that a name of the run file has run again. Of ``mlp.down`` only the activation is: the backward
does not read the product behind it."""

OFFLOAD = "offload to the CPU"


def recompute(model: Transformer, config: ActivationCheckpointConfig) -> None:
    """Store only the inputs of every n-th block ("full") or of the named parts of a block ("selective"); the backward
    runs them again. With ``offload`` the inputs of blocks wait in the CPU's memory.
    """
    for block in model.blocks[:: config.every]:
        if config.mode == "full":
            _recompute(block, "forward", _run_twice_from_cpu if config.offload else _run_twice)
        elif config.mode == "selective":
            for name in config.modules:
                for path in SELECTIVE.get(name, ()):
                    module, _, method = path.rpartition(".")
                    _recompute(block.get_submodule(module), method, _run_twice)
            if "gathers" in config.modules:
                _gather_again(block)


def _recompute(module: nn.Module, method: str, run: Callable[..., Tensor]) -> None:
    # The method itself is wrapped, not the module: its name, hooks and parameters stay as they are.
    # Nothing in a block is random, so there is no random state to restore.
    setattr(module, method, partial(run, getattr(module, method)))


def _gather_again(block: nn.Module) -> None:
    for module in block.modules():
        if isinstance(module, Linear4D):
            module.gather_again = True


def _run_twice(forward: Callable[..., Tensor], *inputs: Any) -> Tensor:
    out: Tensor = checkpoint(forward, *inputs, use_reentrant=False, preserve_rng_state=False)
    return out


def _run_twice_from_cpu(forward: Callable[..., Tensor], x: Tensor, *others: Any) -> Tensor:
    """The same with the first input kept on the CPU until the backward."""
    kept, first = _OnCPU(x), [x]

    def run() -> Tensor:
        # Held by nothing here after the first run, the input's own memory is free.
        return forward(first.pop() if first else kept.back(), *others)

    return _run_twice(run)


class _OnCPU:
    """A copy of a tensor in the CPU's memory."""

    def __init__(self, tensor: Tensor) -> None:
        self.device, self.requires_grad = tensor.device, tensor.requires_grad
        with purpose(OFFLOAD):
            self.copy = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda, requires_grad=False)
            self.copy.copy_(tensor.detach(), non_blocking=True)

    def back(self) -> Tensor:
        return self.copy.to(self.device, non_blocking=True).requires_grad_(self.requires_grad)


def compile_blocks(model: Transformer, grid: ParallelConfig) -> None:
    """Compile whole blocks where they hold no collectives, else what lies between the collectives."""
    for block in model.blocks:
        if grid.x * grid.y * grid.cp == 1:
            _compile(block)
            continue
        _compile(block.mlp.activation)
        if grid.cp == 1:
            _compile(block.self_attn.core)


def _compile(module: nn.Module) -> None:
    setattr(module, "forward", torch.compile(module.forward))  # noqa: B010 (types forbid to assign a method)
