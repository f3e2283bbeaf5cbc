"""Compute the bytes that one rank sends in a step of fourfold, with closed formulas. These are the formulas of
docs/parallelism.md, but exact: they include all rounding and padding. For any number of layers, micro-batches, and
ranks, they equal ``fourfold trace`` byte for byte (tests/planning/test_exact.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from exact_lines import Line, axis_name
from exact_muon import exchanged, layers_of
from exact_parameters import (
    Stage,
    expert_shards,
    gradient_item,
    is_linear,
    linear_widths,
    stages_of_rank,
    tiles_of,
    weight_shards,
    with_linear_attention,
    without_experts,
)
from exact_weights import weight_lines

from fourfold.config.layout import CHUNK_LOGITS, attention_split, context_method
from fourfold.config.run import ParallelConfig, RunConfig
from fourfold.config.stages import rank_of_stage, stages_per_rank


def collective_lines(run: RunConfig, pp_rank: int = 0) -> list[Line]:
    """Return every collective that the first rank of a pp stage runs in a step, with its count and the bytes of its
    full tensors. Groups of one rank have no collectives."""
    merged: dict[tuple[str, str, str], list[int]] = {}
    for line in _all_lines(run, pp_rank):
        if line.count:
            entry = merged.setdefault((line.axis, line.op, line.purpose), [0, 0])
            entry[0] += line.count
            entry[1] += line.bytes
    return [Line(*key, *entry) for key, entry in merged.items()]


def _all_lines(run: RunConfig, pp_rank: int) -> Iterator[Line]:
    stages = stages_of_rank(run, pp_rank)
    parts = run.overlap.batch_parts if run.parallel.x * run.parallel.y > 1 else 1
    # If a part has only some tokens of each sequence, all parts share one call of attention.
    attended = 1 if run.training.micro_batch_size % parts else parts
    for stage in stages:
        for kind, layers in zip((run, with_linear_attention(run)), stage.kinds(), strict=True):
            of_attention = [*_head_norm_lines(kind, layers), *_key_lines(kind, layers), *_context_lines(kind, layers)]
            dense, rest = layers.parts()
            of_blocks = [*_block_lines(without_experts(kind), dense), *_block_lines(kind, rest)]
            for lines, times in ((of_blocks, parts), (of_attention, attended)):
                yield from (replace(line, count=line.count * times) for line in lines)
        if stage.is_first:
            yield from _embedding_lines(run)
        if stage.is_last:
            yield from _head_lines(run)
        yield from weight_lines(run, stage)
        yield from _transfer_lines(run, stage)
    yield from _once_a_step_lines(run, stages)
    yield from _optimizer_lines(run, pp_rank)


class _Sizes:
    """Bytes and counts that several formulas use."""

    def __init__(self, run: RunConfig) -> None:
        model, grid, training = run.model, run.parallel, run.training
        self.item = 4 if training.precision == "fp32" else 2
        self.tokens = training.micro_batch_size * training.seq_length // grid.cp
        self.queries, self.keys = (n * model.head_dim for n in (model.num_attention_heads, model.num_key_value_heads))
        self.residual = self.item * self.tokens * model.hidden_size // grid.y
        # Bytes per token of a norm's statistics, in the forward pass and in the backward pass (parallel.tensor.norm).
        self.sums, self.sums_back = (4, 4) if model.norm == "rmsnorm" else (16, 8)
        self.split = attention_split(run)
        mode, modules = run.activation_checkpoint.mode, run.activation_checkpoint.modules
        self.block_again = mode == "full"
        self.norms_again = mode == "full" or (mode == "selective" and "norms" in modules)
        self.gathers_again = mode == "full" or (mode == "selective" and "gathers" in modules)
        self.core_again = mode == "full" or (mode == "selective" and "attention" in modules)


def _times(run: RunConfig, stage: Stage, again: bool) -> int:
    """Return how many forward passes of blocks the stage runs in a step. With ``again``, a recomputed block counts
    twice."""
    repeated = stage.recomputed(run.activation_checkpoint.every) if again else 0
    return (stage.layers + repeated) * run.gradient_accumulation_steps


def _line(grid: ParallelConfig, axis: str, op: str, purpose: str, size: int, count: int) -> Iterator[Line]:
    if getattr(grid, axis) > 1:
        yield Line(axis, op, purpose, count, count * size)


def _block_lines(run: RunConfig, stage: Stage) -> Iterator[Line]:
    model, grid, sizes = run.model, run.parallel, _Sizes(run)
    x, item, tokens, residual = grid.x, sizes.item, sizes.tokens, sizes.residual
    queries = model.num_attention_heads * (model.v_head_dim or model.head_dim)
    inner, ups = model.intermediate_size, 2 if model.gated_mlp else 1
    once, forward = _times(run, stage, False), _times(run, stage, sizes.block_again)
    gathers, norms = _times(run, stage, sizes.gathers_again), _times(run, stage, sizes.norms_again)
    line = partial(_line, grid)
    yield from _head_lines_of(run, once, forward, gathers)
    yield from line("x", "reduce_scatter", "o_proj: outputs", residual, forward)
    if model.num_experts:
        yield from _expert_lines(run, once, forward)
    shared = bool(model.shared_expert_intermediate_size)
    up, down = ("shared up", "shared down") if shared else ("up", "down")
    inner = model.shared_expert_intermediate_size if model.num_experts else inner
    if inner:
        yield from line("x", "all_gather", f"{up}: tokens", residual, gathers)
        are_read = model.norm_placement != "before" or (model.num_experts and model.shared_expert_gate)
        # Only an output norm and the gate of a shared expert read these outputs. Without them, recompute skips the sum.
        yield from line("x", "reduce_scatter", f"{down}: outputs", residual, forward if are_read else once)
        yield from line("x", "all_gather", f"{down}: output gradient", residual, once)
        yield from line("x", "reduce_scatter", f"{up}: input gradient", residual, once)
        yield from line("y", "all_reduce", f"{up}: outputs", item * tokens * inner // x, ups * forward)
        yield from line("y", "all_reduce", f"{down}: input gradient", item * tokens * inner // x, once)
    yield from line("x", "all_gather", "o_proj: output gradient", residual, once)
    yield from line("y", "all_gather", "o_proj: inputs", item * tokens * queries // x, gathers)
    yield from line("y", "reduce_scatter", "o_proj: input gradient", item * tokens * queries // x, once)
    yield from line("y", "all_reduce", "norm: statistics", sizes.sums * tokens // x, _norms(run, norms, forward))
    statistics = sizes.sums_back * tokens // x
    yield from line("y", "all_reduce", "norm: statistics' gradient", statistics, _norms(run, once, once))


def _head_lines_of(run: RunConfig, once: int, forward: int, gathers: int) -> Iterator[Line]:
    """Yield the collectives of the projections to queries, keys, and values, including latents."""
    model, grid, sizes = run.model, run.parallel, _Sizes(run)
    line, item, tokens = partial(_line, grid), sizes.item, sizes.tokens
    groups = {"qkv": (model.hidden_size, sizes.queries * (1 + model.attention_output_gate) + 2 * sizes.keys)}
    if is_linear(run):
        keys, values, heads_of_values = linear_widths(run)
        groups = {"linear attention": (model.hidden_size, 2 * (keys + values + heads_of_values))}
    if model.kv_lora_rank:
        latents = model.q_lora_rank + model.kv_lora_rank + model.qk_rope_head_dim
        own = item * tokens // grid.x * latents
        yield from line("y", "reduce_scatter", "latents: outputs", own, forward)
        yield from line("y", "all_gather", "latents: output gradient", own, once)
        kinds = 1 + (model.q_lora_rank > 0)
        yield from line("y", "all_reduce", "norm: statistics", 4 * tokens // grid.x, kinds * forward)
        yield from line("y", "all_reduce", "norm: statistics' gradient", 4 * tokens // grid.x, kinds * once)
        heads = model.num_attention_heads
        groups = {
            "queries": (model.q_lora_rank or model.hidden_size, sizes.queries),
            "keys and values": (model.kv_lora_rank, heads * (model.qk_nope_head_dim + model.v_head_dim)),
        }
    for name, (read, features) in groups.items():
        whole, outputs = item * tokens * read // grid.y, item * tokens * features // grid.x
        yield from line("x", "all_gather", f"{name}: tokens", whole, gathers)
        yield from line("x", "reduce_scatter", f"{name}: input gradient", whole, once)
        yield from line("y", "reduce_scatter", f"{name}: outputs", outputs, forward)
        yield from line("y", "all_gather", f"{name}: output gradient", outputs, once)


def _norms(run: RunConfig, inputs: int, outputs: int) -> int:
    """Return how often the norms of a block run, as a sum over these norms.

    Args:
        run: The run.
        inputs: How often each norm on the inputs of attention and MLP runs.
        outputs: How often each norm on the outputs of attention and MLP runs.
    """
    placement = run.model.norm_placement
    return 2 * (inputs * (placement != "after") + outputs * (placement != "before"))


def _head_norm_lines(run: RunConfig, stage: Stage) -> Iterator[Line]:
    """Yield the collectives of norms over all heads of the queries or keys, if several ranks share the heads."""
    if is_linear(run) or not run.model.qk_norm or run.model.qk_norm_over == "head":
        return
    sizes = _Sizes(run)
    over_both = sizes.split == "heads"
    axis = axis_name(run, ("y", "x") if over_both else ("x",))
    size = 4 * (sizes.tokens if over_both else sizes.tokens // run.parallel.y)
    if run.parallel.x * (run.parallel.y if over_both else 1) > 1:
        for name in ("q_norm", "k_norm"):
            for purpose, again in (("statistics", sizes.core_again), ("statistics' gradient", False)):
                count = _times(run, stage, again)
                yield Line(axis, "all_reduce", f"{name}: {purpose}", count, count * size)


def _expert_lines(run: RunConfig, once: int, forward: int) -> Iterator[Line]:
    """Yield the collectives of a router and its experts, if every expert gets the same number of rows."""
    model, grid, sizes = run.model, run.parallel, _Sizes(run)
    line, item, experts = partial(_line, grid), sizes.item, model.num_experts
    tokens, hidden = sizes.tokens // grid.x, model.hidden_size // grid.y
    chosen, width = tokens * model.num_experts_per_tok, model.moe_intermediate_size // grid.x
    limit, rows = run.moe.capacity_factor, chosen
    if limit:
        rows = experts * min(chosen // experts, math.ceil(limit * chosen / experts))
        yield from line("x", "all_gather", "router: chosen experts", 4 * grid.x * chosen, forward)
        yield from line("cp", "all_gather", "router: chosen experts", 4 * grid.cp * grid.x * chosen, forward)
    for purpose in ("experts: dispatch", "experts: combine"):
        yield from line("ep", "all_to_all", purpose, item * rows * hidden, forward + once)
    for purpose in ("experts: tokens", "experts: outputs"):
        yield from line("x", "all_to_all", purpose, item * grid.x * rows * hidden, forward + once)
    yield from line("ep", "all_to_all", "experts: counts of rows", 8 * experts, once)
    yield from line("x", "all_gather", "experts: counts of rows", 8 * grid.x * experts, once)
    yield from line("y", "all_reduce", "router: logits", 4 * tokens * experts, forward)
    yield from line("y", "all_reduce", "router: weights' gradient", 4 * chosen, once)
    yield from line("y", "all_reduce", "experts: outputs of up", item * grid.x * rows * width, 2 * forward)
    yield from line("y", "all_reduce", "experts: input gradient of down", item * grid.x * rows * width, once)
    if model.shared_expert_gate:
        yield from line("y", "all_reduce", "shared expert: gate", 4 * tokens, forward)
        yield from line("y", "all_reduce", "shared expert: gate's gradient", 4 * tokens, once)


def _key_lines(run: RunConfig, stage: Stage) -> Iterator[Line]:
    """Yield the collectives for keys and values that several ranks of x and y use in attention."""
    model, grid, sizes = run.model, run.parallel, _Sizes(run)
    x, item, tokens, keys, once = grid.x, sizes.item, sizes.tokens, sizes.keys, _times(run, stage, False)
    line = partial(_line, grid)
    ranks = x * grid.y if sizes.split == "heads" else x
    apart = model.num_key_value_heads % ranks != 0
    shared = item * tokens * model.qk_rope_head_dim
    if model.kv_lora_rank:
        for op, count in (("all_gather", _times(run, stage, sizes.core_again)), ("reduce_scatter", once)):
            yield from line("y", op, "attention: shared key", shared // x, count)
            yield from line("x", op, "attention: shared key", shared, count)
    mine = tokens // grid.y if sizes.split == "batch" else tokens
    for op, count in (("all_gather", _times(run, stage, sizes.core_again)), ("reduce_scatter", once)):
        if sizes.split == "sequence" or (sizes.split == "heads" and apart):
            yield from line("y", op, "attention: keys and values", item * tokens * keys // x, 2 * count)
        if apart and model.num_key_value_heads % x:
            yield from line("x", op, "attention: keys and values", item * mine * keys, 2 * count)


def _context_lines(run: RunConfig, stage: Stage) -> Iterator[Line]:
    """Yield the collectives of attention over cp (``parallel.attention.ring`` and ``parallel.attention.context``)."""
    model, grid, sizes = run.model, run.parallel, _Sizes(run)
    if grid.cp == 1:
        return
    once, forward = _times(run, stage, False), _times(run, stage, sizes.core_again)
    ranks = grid.x * grid.y if sizes.split == "heads" else grid.x
    tokens = sizes.tokens // grid.y if sizes.split == "batch" else sizes.tokens
    queries = sizes.queries // ranks
    # The core is always recomputed, and reads the exchanged outputs again.
    if is_linear(run):
        keys, values, heads = linear_widths(run)
        count = 3 * once
        parts, outputs = sizes.item * (2 * keys + values + 2 * heads), 4 * values  # Outputs are in fp32.
        for purpose, entries in (("inputs", parts), ("outputs", outputs)):
            size = tokens * entries // ranks
            yield Line("cp", "all_to_all", f"attention: {purpose}", count, count * size)
        return
    method = context_method(run)
    if method == "ulysses":
        parts = sizes.item * tokens * (queries + 2 * sizes.keys // ranks)
        # The output of a recomputed attention core is not exchanged again, because nothing reads it.
        back, block = sizes.item * tokens * queries, _times(run, stage, sizes.block_again)
        for purpose, size, again in (("inputs", parts, forward), ("outputs", back, block)):
            yield Line("cp", "all_to_all", f"attention: {purpose}", once + again, (once + again) * size)
        return
    pair = 2 * tokens * model.head_dim * key_value_heads(run, ranks)
    sent, back = (grid.cp - 1) * (once + forward), grid.cp * once
    yield Line("cp", "send", "attention: keys and values", sent, sent * sizes.item * pair)
    yield Line("cp", "send", "attention: keys' and values' gradients", back, back * 4 * pair)


def key_value_heads(run: RunConfig, ranks: int) -> int:
    """Return the number of key-value heads that the first of ``ranks`` ranks uses. If the heads cannot be divided
    evenly over the ranks, this rank uses one key-value head for each of its query heads."""
    heads, kv_heads = run.model.num_attention_heads, run.model.num_key_value_heads
    if kv_heads % ranks == 0:
        return kv_heads // ranks
    heads_on_rank, heads_per_kv = heads // ranks, heads // kv_heads
    needed = [head // heads_per_kv for head in range(heads_on_rank)]
    distinct = sorted(set(needed))
    regular = all(needed.count(kv) == heads_on_rank // len(distinct) for kv in distinct)
    return len(distinct) if regular else len(needed)


def _embedding_lines(run: RunConfig) -> Iterator[Line]:
    model, grid, sizes = run.model, run.parallel, _Sizes(run)
    if grid.x == 1:
        return
    steps = run.gradient_accumulation_steps
    tokens = sizes.tokens if run.data.mask_documents else run.training.seq_length // grid.cp
    positions = sizes.item * tokens * model.hidden_size // grid.y
    for op in ("reduce_scatter", "all_gather"):
        yield Line("x", op, "embed_tokens: rows", steps, steps * sizes.residual)
        if model.position_embedding == "learned":
            yield Line("x", op, "embed_positions: rows", steps, steps * positions)


def _head_lines(run: RunConfig) -> Iterator[Line]:
    """Yield the collectives of the last norm, the head, and the loss."""
    model, grid, sizes = run.model, run.parallel, _Sizes(run)
    x, y, tokens, steps = grid.x, grid.y, sizes.tokens, run.gradient_accumulation_steps
    columns = model.padded_vocab_size // x
    device = "cpu" if run.training.device == "cpu" else "cuda"
    chunk = min(tokens, max(1, CHUNK_LOGITS[device] // columns // y) * y)
    chunks = math.ceil(tokens / chunk)

    def line(axis: str, op: str, purpose: str, size: int, count: int = 1) -> Iterator[Line]:
        if getattr(grid, axis) > 1:
            yield Line(axis, op, purpose, steps * count, steps * size)

    yield from line("y", "all_reduce", "norm: statistics", sizes.sums * tokens // x)
    yield from line("y", "all_reduce", "norm: statistics' gradient", sizes.sums_back * tokens // x)
    yield from line("x", "all_gather", "lm_head: tokens", sizes.residual)
    yield from line("y", "reduce_scatter", "lm_head: logits", sizes.item * tokens * columns, chunks)
    yield from line("x", "all_gather", "lm_head: normalizers", 8 * x * tokens // y, chunks)
    yield from line("y", "all_gather", "lm_head: logits' gradient", sizes.item * tokens * columns, chunks)
    yield from line("x", "reduce_scatter", "lm_head: input gradient", sizes.residual)
    yield from line("y", "all_reduce", "lm_head: loss", 4)


def _transfer_lines(run: RunConfig, stage: Stage) -> Iterator[Line]:
    """Yield the transfers of hidden states and their gradients from a stage to its neighbors on other ranks."""
    grid, sizes, steps = run.parallel, _Sizes(run), run.gradient_accumulation_steps
    last, here = grid.pp * stages_per_rank(grid) - 1, rank_of_stage(stage.number, grid)
    size = steps * sizes.residual // grid.x
    if stage.number < last and rank_of_stage(stage.number + 1, grid) != here:
        yield Line("pp", "send", "pipeline: hidden states", steps, size)
    if stage.number > 0 and rank_of_stage(stage.number - 1, grid) != here:
        yield Line("pp", "send", "pipeline: hidden states' gradients", steps, size)


def _once_a_step_lines(run: RunConfig, stages: list[Stage]) -> Iterator[Line]:
    """Yield the collectives that run once per step: for gradients of parameters that several ranks of x, y, or pp
    store, and for the step's loss and gradient norm."""
    grid, shards = run.parallel, weight_shards(run)
    item = gradient_item(run)
    shares: dict[str, int] = {}
    tiles = [tiles_of(run, stage) for stage in stages]
    parts = [(part, shards) for each in tiles for part in each.parts()]
    parts += [(part, expert_shards(run)) for each in tiles for part in each.experts * each.sparse_layers]
    for part, ranks in parts:
        over = tuple(a for a in ("y", "x") if a in part.partial_over and getattr(grid, a) > 1)
        if over:
            shares["_".join(over)] = shares.get("_".join(over), 0) + part.chunk(ranks)
    for axis, entries in shares.items():
        yield Line(axis, "all_reduce", "gradients of norms and biases", 1, item * entries)
    ends = [stage for stage in stages if stage.is_first or stage.is_last]
    if run.model.tie_word_embeddings and grid.pp > 1 and len(ends) == 1:
        of_end = tiles_of(run, ends[0])
        (*_, table) = of_end.last or of_end.embedding
        yield Line("pp", "all_reduce", "gradients of the embedding's copies", 1, item * table.chunk(shards))
    if grid.dp * grid.cp * grid.z > 1:
        tokens = axis_name(run, ("dp", "cp", "z"))
        yield Line(tokens, "all_reduce", "kept tokens", 1, 8)
        if run.model.num_experts and run.data.format != "text":
            yield Line(tokens, "all_reduce", "data tokens", 1, 8)
        yield Line(tokens, "all_reduce", "loss", 1, 4)
    if grid.pp > 1:
        yield Line("pp", "all_reduce", "loss", 1, 4)
    if grid.world_size > 1:
        world = axis_name(run, ("pp", "dp", "cp", "z", "y", "x"))
        yield Line(world, "all_reduce", "gradient norm", 1, 8)
        if run.model.num_experts:
            counts = run.model.num_hidden_layers * (run.model.num_experts + 4)
            yield Line(world, "all_reduce", "load of experts", 1, 8 * counts)


def _optimizer_lines(run: RunConfig, pp_rank: int) -> Iterator[Line]:
    """Yield the all-to-alls that bring Muon's matrices to their owners and the updates back."""
    axes = ("dp", "cp", "z", "y", "x")
    if run.optimizer.name == "muon" and any(getattr(run.parallel, axis) > 1 for axis in axes):
        (rounds, *sent), axis = exchanged(run, layers_of(run, pp_rank)), axis_name(run, axes)
        axis = "stage" if axis == "world" and run.parallel.pp > 1 else axis
        for purpose, size in zip(("matrices to their owners", "updates of matrices"), sent, strict=True):
            yield Line(axis, "all_to_all", f"optimizer: {purpose}", rounds, size)
