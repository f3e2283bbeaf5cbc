"""Activation checkpointing and compilation of a model's parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fourfold.config.activation_checkpoint import ActivationCheckpointConfig
from fourfold.config.run import ParallelConfig
from fourfold.models.mlp import MLP
from fourfold.models.transformer import Block, Transformer
from fourfold.parallel.tensor.linear import Linear4D

T = TypeVar("T")

SELECTIVE = {
    "attention": ("self_attn.core.forward",),
    "mlp": ("mlp.down",),
    "norms": ("input_layernorm.forward", "post_attention_layernorm.forward"),
}
"""Methods of a block that each name in the run file recomputes. Of ``mlp.down`` only the activation runs again: the
backward does not read the result of the product after it."""

RECOMPUTES: ContextVar[bool] = ContextVar("recomputes", default=False)
"""True while a part of the model runs again, whose output nothing reads."""

MEMORY: ContextVar[dict[object, Any] | None] = ContextVar("memory", default=None)
"""Results of the forward of a part that runs again, which it takes over then."""


def recompute(model: Transformer, config: ActivationCheckpointConfig) -> None:
    """Keep only the inputs of every n-th block ("full"), or of named parts of those blocks ("selective"), and run them
    again in the backward. Those whose inputs are offloaded are left to ``offload``.
    """
    for block in model.blocks[:: config.every]:
        if config.mode == "full" and not config.offload:
            _recompute(block, "forward")
        elif config.mode == "selective":
            for name in config.modules:
                for path in _methods(block, name):
                    module, _, method = path.rpartition(".")
                    _recompute(block.get_submodule(module), method)
            if "gathers" in config.modules:
                for linear in (module for module in block.modules() if isinstance(module, Linear4D)):
                    linear.gather_again = True


def _methods(block: Block, name: str) -> tuple[str, ...]:
    """The methods that a name of the run file stands for in a block."""
    if name != "mlp" or isinstance(block.mlp, MLP):
        there = dict(block.named_modules())
        return tuple(path for path in SELECTIVE.get(name, ()) if path.rpartition(".")[0] in there)
    return ("mlp.experts.down", *(("mlp.shared_expert.down",) if block.mlp.shared_expert is not None else ()))


def _recompute(module: nn.Module, method: str) -> None:
    """Change a method of a module; its name, hooks and parameters stay as they are."""
    module.__class__ = _recomputing(type(module), method)


_CLASSES: dict[tuple[type[nn.Module], str], type[nn.Module]] = {}


def _recomputing(kind: type[nn.Module], method: str) -> type[nn.Module]:
    """The class like ``kind`` with one method that runs again in the backward.

    All blocks have the same: a compiler that sees a function of its own in each would compile each anew.
    """

    def again(self: nn.Module, *inputs: Any) -> Tensor:
        return checkpointed(partial(getattr(kind, method), self), *inputs)

    return _CLASSES.setdefault((kind, method), type(kind.__name__, (kind,), {method: again}))


def checkpointed(forward: Callable[..., Tensor], *inputs: Any) -> Tensor:
    """Call a function of which nothing but the inputs is kept, and again in the backward."""
    # Nothing in a block is random, so there is no random state to restore.
    how: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
    if not torch.compiler.is_compiling():  # compiled code takes no contexts, and asks for none
        how["context_fn"] = _first_and_again
    out: Tensor = checkpoint(forward, *inputs, **how)
    return out


def remembered(owner: object, compute: Callable[[], T]) -> T:
    """Compute a value without a gradient. When its part of the model runs again, take the value of the first time."""
    memory = MEMORY.get()
    if memory is None:
        return compute()
    if not RECOMPUTES.get():
        memory[owner] = compute()
    value: T = memory[owner]
    return value


def _first_and_again() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    memory: dict[object, Any] = {}
    return _running(memory, again=False), _running(memory, again=True)


@contextmanager
def _running(memory: dict[object, Any], again: bool) -> Iterator[None]:
    tokens = MEMORY.set(memory), RECOMPUTES.set(again)
    try:
        yield
    finally:
        MEMORY.reset(tokens[0])
        RECOMPUTES.reset(tokens[1])


def compile_blocks(model: Transformer, grid: ParallelConfig) -> None:
    """Compile whole blocks where they issue no collectives, else the parts between the collectives."""
    for block in model.blocks:
        if grid.x * grid.y * grid.cp == 1:
            _compile(block)
            continue
        assert isinstance(block.mlp, MLP), "blocks with experts are not compiled"
        _compile(block.mlp.activation)
        if grid.cp == 1:
            _compile(block.self_attn.core, "attend_here")


def _compile(module: nn.Module, method: str = "forward") -> None:
    setattr(module, method, torch.compile(getattr(module, method)))
