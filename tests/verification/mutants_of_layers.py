"""Faults in the collectives and the layers."""

from __future__ import annotations

from mutants import (
    DEEP_GPT,
    LORA,
    ONE_SEQUENCE,
    QWEN3,
    SIX_HEADS,
    TUNED,
    ULYSSES,
    X2,
    X2Y2,
    Y2,
    Z2,
    Mutant,
)
from tiny_runs import GEMMA, GPT

COLLECTIVES = [
    Mutant(
        "an all-reduce is left out",
        "parallel.communicate",
        "        work = dist.all_reduce(partial, group=axis.group, async_op=True)\n    return Pending(partial, [work])",
        "        pass\n    return Pending(partial)",
        grid=Y2,
    ),
    Mutant(
        "an all-reduce is scaled by the group's size",
        "parallel.communicate",
        "        work = dist.all_reduce(partial, group=axis.group, async_op=True)\n    return Pending(partial, [work])",
        "        work = dist.all_reduce(partial, group=axis.group, async_op=True)\n"
        "    return Pending(partial, [work], lambda t: t / axis.size)",
        grid=Y2,
    ),
    Mutant(
        "a reduce-scatter keeps the rank's own part",
        "parallel.communicate",
        "return Pending(received, [work], sum_parts)",
        "return Pending(received, [work], lambda parts: parts[axis.rank])",
        grid=X2,
    ),
    Mutant(
        "an all-gather joins the parts in reverse",
        "parallel.communicate",
        "lambda parts: _join(parts, dim))",
        "lambda parts: _join(parts.flip(0) if parts.ndim > 2 else parts, dim))",
        grid=X2,
    ),
    Mutant(
        "FSDP2's reduce-scatter forgets a rank",
        "parallel.fsdp_on_gloo",
        "sum_parts(self.received.view(self.ranks, -1), out=self.sum)",
        "self.sum.copy_(self.received.view(self.ranks, -1)[0])",
        grid=Z2,
    ),
    Mutant(
        "the backward of a gather does not sum",
        "parallel.communicate",
        "lambda t: all_gather(t, axis, dim, why), lambda g: reduce_scatter(g, axis, dim, why)",
        "lambda t: all_gather(t, axis, dim, why), lambda g: _own_part(g, axis, dim)",
        SIX_HEADS,
        X2Y2,
        ONE_SEQUENCE,
    ),
    Mutant(
        "the backward of a scattered sum is scaled",
        "parallel.communicate",
        "lambda t: reduce_scatter(t, axis, dim, why), lambda g: all_gather(g, axis, dim, why)",
        "lambda t: reduce_scatter(t, axis, dim, why), lambda g: all_gather(g, axis, dim, why) / axis.size",
        grid=X2,
    ),
    Mutant(
        "the backward of an exchange is left out",
        "parallel.communicate",
        "lambda g: all_to_all(g, axis, why)",
        "lambda g: g.clone()",
        grid=ULYSSES,
    ),
]

LINEAR = [
    Mutant(
        "gate's and up's gradients are exchanged",
        "parallel.linear_steps",
        "zip(layers, whole_grads, _by_layer(layers, needed), by_layer, strict=True)",
        "zip(layers, whole_grads[::-1], _by_layer(layers, needed), by_layer, strict=True)",
        GPT,
        X2,
    ),
    Mutant(
        "a bias is added once for every rank",
        "parallel.linear",
        "out if self.bias is None else out + self.bias",
        "out if self.bias is None else out + self.bias * self.reads.axis.size",
        GPT,
        X2,
    ),
    Mutant(
        "a bias's gradient is not summed over x",
        "parallel.linear",
        'return Tile(y=0, partial_over=("x",))',
        "return Tile(y=0)",
        GPT,
        X2,
    ),
    Mutant(
        "the last layer's part of the input gradient is left out",
        "parallel.linear_steps",
        "for layer, grad, (weight, *adapter) in zip(layers, whole_grads, by_layer, strict=True):",
        "for layer, grad, (weight, *adapter) in list(zip(layers, whole_grads, by_layer))[:2]:",
        grid=X2,
    ),
    Mutant(
        "weight gradients of the first sequence alone",
        "parallel.products",
        "return grad.flatten(0, -2).T @ x.flatten(0, -2)",
        "return grad[:1].flatten(0, -2).T @ x[:1].flatten(0, -2)",
        grid=X2,
    ),
    Mutant(
        "a deferred weight gradient is lost",
        "parallel.deferred",
        "linear.products.weight_gradient(grad, x)",
        "linear.products.weight_gradient(grad * 0, x)",
        DEEP_GPT,
        {"pp": 2, "schedule": "ZBVZeroBubble"},
        ONE_SEQUENCE,
    ),
    Mutant(
        "an adapter is not scaled",
        "parallel.products",
        ".addmm_((x @ a.T).flatten(0, 1), b.T, alpha=scale)",
        ".addmm_((x @ a.T).flatten(0, 1), b.T)",
        grid=X2,
        sections=LORA,
    ),
    Mutant(
        "an adapter's B is not summed over y",
        "parallel.products",
        'Tile(y=1, partial_over=("x",)), Tile(x=0, partial_over=("y",))',
        'Tile(y=1, partial_over=("x",)), Tile(x=0)',
        grid=Y2,
        sections=LORA,
    ),
    Mutant(
        "a tile is another rank's",
        "parallel.sharding",
        "begin[dim] += piece * length[dim]",
        "begin[dim] += (pieces - 1 - piece) * length[dim]",
        grid=X2,
    ),
]

TUNED_PRODUCTS = [
    Mutant(
        "the gradient of a turned weight is read in the order of the other",
        "parallel.product_layouts",
        "(right.T @ left.T).T if self.layout.turned",
        "(right.T @ left.T).view(len(left), -1) if self.layout.turned",
        grid=X2,
        sections=TUNED,
    ),
    Mutant(
        "a tuned input gradient replaces those before it",
        "parallel.product_layouts",
        "total.view(-1, total.shape[-1]).addmm_(left, right)",
        "total.view(-1, total.shape[-1]).copy_(left @ right)",
        grid=Y2,
        sections=TUNED,
    ),
    Mutant(
        "a copy of an operand is kept for the next product of its size",
        "parallel.product_layouts",
        "return copy.T if by_columns else copy",
        "return vars(copied).setdefault((how, matrix.shape), copy.T if by_columns else copy)",
        grid=X2,
        sections=TUNED,
    ),
    Mutant(
        "the columns of a padded copy are a place off",
        "parallel.product_layouts",
        "[:, : rows.shape[1]].copy_(rows)",
        "[:, : rows.shape[1]].copy_(rows.roll(1, 1))",
        grid=Y2,
        sections=TUNED,
    ),
    Mutant(
        "a turned weight's deferred gradient is read in the order of the other",
        "parallel.deferred",
        'receive(linear.weight, linear.tiles["weight"].as_tile(gradient))',
        "receive(linear.weight, gradient.reshape(linear.weight.shape))",
        DEEP_GPT,
        {"pp": 2, "schedule": "ZBVZeroBubble"},
        {"training": {"tuned_products": "cached", "micro_batch_size": 1}},
    ),
    Mutant(
        "the optimizer reads a turned weight's gradient in the order of the other",
        "training.optimizer",
        "gradient = None if shard.grad is None else shard.tile.as_tile(shard.grad)",
        "gradient = None if shard.grad is None else shard.grad.reshape(parameter.shape)",
        grid=X2,
        sections=TUNED,
    ),
]

EMBEDDING_AND_HEAD = [
    Mutant(
        "tokens of other ranks look up row 0",
        "parallel.embedding",
        "return partial_BSh.masked_fill(elsewhere_BS[..., None], 0)",
        "return partial_BSh",
        grid=X2,
    ),
    Mutant(
        "padding of the vocabulary takes part in the softmax",
        "parallel.head",
        "    if real < rows:",
        "    if real < 0:",
        grid=X2,
    ),
    Mutant(
        "labels that are masked count",
        "parallel.head",
        "kept_m = labels_m != IGNORE_INDEX",
        "kept_m = labels_m != -1",
        grid=X2,
    ),
    Mutant(
        "the loss is that of one rank's tokens",
        "parallel.head",
        'return all_reduce(loss, head.y, "lm_head: loss")',
        "return loss",
        grid=Y2,
    ),
    Mutant(
        "the normalizer is the largest of the ranks'",
        "parallel.head",
        "both_x2m[:, 0].logsumexp(0)",
        "both_x2m[:, 0].amax(0)",
        grid=X2,
    ),
    Mutant(
        "the gradient of the logits is scaled by y",
        "parallel.head",
        "dlogits_mv *= loss_scale",
        "dlogits_mv *= loss_scale / head.y.size",
        grid=Y2,
    ),
]

NORMS = [
    Mutant(
        "a norm's statistics are those of the rank's channels",
        "parallel.norm",
        'square = all_reduce(square, layer.y, f"{layer.name}: statistics")',
        "square = square * layer.y.size",
        grid=Y2,
    ),
    Mutant(
        "the gradient of the statistics is not summed",
        "parallel.norm",
        'all_reduce(torch.stack(shares), layer.y, f"{layer.name}: statistics\' gradient") / layer.size',
        "torch.stack(shares) * (layer.y.size / layer.size)",
        grid=Y2,
    ),
    Mutant(
        "a norm forgets eps",
        "parallel.norm",
        "(square / layer.size + layer.eps).rsqrt()",
        "(square / layer.size).rsqrt()",
        grid=X2,
    ),
    Mutant(
        "a norm's gradient is not summed over x",
        "parallel.norm",
        'tile = Tile(y=0, partial_over=("x",))',
        "tile = Tile(y=0)",
        grid=X2,
    ),
    Mutant(
        "a head norm's gradient is not summed over y",
        "parallel.norm",
        'Tile(partial_over=("x", "y"))',
        'Tile(partial_over=("x",))',
        QWEN3,
        Y2,
    ),
    Mutant(
        "LayerNorm's backward forgets the mean",
        "parallel.norm",
        "dx -= sums[1][..., None]",
        "dx -= 0 * sums[1][..., None]",
        GPT,
        X2,
    ),
    Mutant(
        "weights counted from one are counted from zero in the backward",
        "parallel.norm",
        "weight.float() + (1 if layer.zero_centered else 0)",
        "weight.float()",
        GEMMA,
        X2,
    ),
]

LAYERS = [*COLLECTIVES, *LINEAR, *TUNED_PRODUCTS, *EMBEDDING_AND_HEAD, *NORMS]
