"""Activation checkpointing and compilation of a model's parts."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fourfold.config.run import ActivationCheckpointConfig, ParallelConfig
from fourfold.models.transformer import Transformer

SELECTIVE = {
    "attention": ("self_attn.core",),
    "mlp": ("mlp.activation",),
    "norms": ("input_layernorm", "post_attention_layernorm"),
}
"""Which modules of a block a name of the run file stands for."""


def recompute(model: Transformer, config: ActivationCheckpointConfig) -> None:
    """Store only the inputs of blocks ("full") or of the named modules ("selective"); the backward runs them again."""
    for layer in model.blocks:
        if config.mode == "full":
            _recompute(layer)
        elif config.mode == "selective":
            for name in config.modules:
                for path in SELECTIVE[name]:
                    _recompute(layer.get_submodule(path))


def _recompute(module: nn.Module) -> None:
    # The forward itself is wrapped, not the module: its name, hooks and parameters stay as they are.
    # Nothing in a block is random, so there is no random state to restore.
    module.forward = partial(checkpoint, module.forward, use_reentrant=False, preserve_rng_state=False)


def compile_blocks(model: Transformer, grid: ParallelConfig) -> None:
    """Compile whole blocks where they hold no collectives, else what lies between the collectives."""
    for layer in model.blocks:
        if grid.x * grid.y == 1:
            layer.forward = torch.compile(layer.forward)
        else:
            layer.self_attn.core.forward = torch.compile(layer.self_attn.core.forward)
            layer.mlp.activation.forward = torch.compile(layer.mlp.activation.forward)
