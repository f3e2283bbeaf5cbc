"""Sharding over (dp, z) with torch's FSDP2: z always splits the stored weights, dp what ``zero`` says."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from fourfold.config.run import RunConfig
from fourfold.models.transformer import Transformer
from fourfold.parallel.communicate import ExchangeAndSum, by_all_to_all
from fourfold.parallel.grid import Grid

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def shard_data_parallel(model: Transformer, grid: Grid, run: RunConfig) -> None:
    """Wrap embedding, each block, head and root: weights are gathered a block at a time, gradients summed behind it.

    zero 0: replicas over dp, gradients all-reduced once a step; 1 and 2: one shard group (dp·z), weights gathered
    over it once a forward and kept as z shards until the backward; 3: gathered from all of (dp·z) both times.
    """
    zero, z = run.parallel.zero, run.parallel.z
    policy = MixedPrecisionPolicy(
        param_dtype=DTYPES[run.training.precision],
        reduce_dtype=DTYPES[run.training.reduce_dtype],
        cast_forward_inputs=False,  # activations have the weights' type already, and rotary tables must stay float32
    )
    if zero == 0:
        mesh, reshard = grid.mesh["dp", "z"], z > 1
    else:
        mesh = grid.batch_mesh
        # After the forward: shards over all of (dp·z), or over z alone, or (z = 1) the whole weights are kept.
        keeps_z_shards = zero < 3 and 1 < z < mesh.size()
        reshard = z if keeps_z_shards else zero == 3 or z > 1

    def shard(module: nn.Module | list[nn.Module], reshard_after_forward: bool | int) -> None:
        fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard_after_forward)

    for embedding in (model.embed_tokens, model.embed_positions):
        if embedding is not None and embedding.weight is not model.lm_head.weight:
            shard(embedding, reshard)
            embedding.set_unshard_in_backward(False)  # the gradient of a look-up does not read the table
    for layer in model.layers:
        shard(layer, reshard)
    # The head's weights are needed again as soon as the backward begins; a tied embedding stays with them.
    last = [model.norm, model.lm_head]
    if run.model.tie_word_embeddings:
        last.append(model.embed_tokens)
    shard(last, False)
    shard(model, False)
    for module in fsdp_modules(model):
        if by_all_to_all(grid.axis("z").group):
            module.set_custom_reduce_scatter(ExchangeAndSum())
        # Losses are divided by the tokens of the whole step, so gradients are sums. gloo knows no scaled sum.
        if mesh.size() > 1:
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    _prefetch(model, run.overlap.weight_prefetch)


def fsdp_modules(model: nn.Module) -> list[FSDPModule]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def set_last_micro_batch(model: FSDPModule, last: bool, zero: int) -> None:
    """Before each backward of a step: which reductions wait for the last micro-batch.

    zero 0 sums over z every time and over dp once; 1 sums once, and keeps whole gradients until then; 2 and 3 sum
    every time, and keep shards.
    """
    model.set_is_last_backward(last)
    if zero == 0:
        model.set_requires_all_reduce(last)
    elif zero == 1:
        model.set_requires_gradient_sync(last)


def _prefetch(model: Transformer, depth: int) -> None:
    """OAG: while one layer computes, gather the weights of the next ``depth``."""
    layers = list(model.layers)
    if depth == 0:
        # FSDP2 prefetches the backward by itself; naming the module just used keeps it from doing so.
        for layer in layers:
            layer.set_modules_to_backward_prefetch([layer])
    for i, layer in enumerate(layers):
        layer.set_modules_to_forward_prefetch(layers[i + 1 : i + 1 + depth])
        if depth > 0:
            layer.set_modules_to_backward_prefetch(layers[max(i - depth, 0) : i][::-1])
