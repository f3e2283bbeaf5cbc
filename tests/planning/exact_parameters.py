"""Compute the parameters that one rank of fourfold stores, grouped as in FSDP2, with closed formulas. The formulas
include all rounding and padding, so the bytes equal ``fourfold trace`` (tests/planning/test_exact.py).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from exact_muon import layers_of, stepped_by_muon

from fourfold.config.layout import attention_split
from fourfold.config.run import RunConfig
from fourfold.config.stages import rank_of_stage, stage_layers


class Part(NamedTuple):
    """A parameter's tile on one (x, y) rank: the rows, the entries of a row, and the axes whose ranks each have only a
    part of its gradient."""

    rows: int
    width: int
    partial_over: tuple[str, ...] = ()

    def chunk(self, shards: int) -> int:
        """Return the number of entries in the first of ``shards`` shards. FSDP2 splits rows like torch.chunk."""
        return math.ceil(self.rows / shards) * self.width


class Stage(NamedTuple):
    """One of a rank's pipeline stages, or the whole model if pp is 1."""

    number: int
    layers: int
    is_first: bool
    is_last: bool
    dense: int = 0
    """Number of layers with a dense MLP in a mixture of experts. They come first."""
    before: int = 0
    """Number of layers of the stage that come before these layers. It is above 0 if this object describes only a part
    of the stage."""
    linear: int = 0
    """Number of layers with linear attention."""

    def kinds(self) -> tuple[Stage, Stage]:
        """Split the stage into its layers with softmax attention and its layers with linear attention. Layers with a
        dense MLP in a mixture of experts have softmax attention."""
        softmax = self._replace(layers=self.layers - self.linear, linear=0)
        return softmax, self._replace(layers=self.linear, linear=0, dense=0)

    def parts(self) -> tuple[Stage, Stage]:
        """Split the stage into its layers with a dense MLP, which come first, and its remaining layers."""
        dense = Stage(self.number, self.dense, self.is_first, self.is_last)
        rest = Stage(self.number, self.layers - self.dense, self.is_first, self.is_last, before=self.dense)
        return dense, rest

    def recomputed(self, every: int) -> int:
        """Return how many layers of the stage recompute."""
        return math.ceil((self.before + self.layers) / every) - math.ceil(self.before / every)


@dataclass(frozen=True)
class Tiles:
    """The parameters of one stage on an (x, y) rank. Each group holds the parameters that FSDP2 gathers together. Empty
    groups are left out."""

    block: tuple[Part, ...]
    layers: int
    dense_block: tuple[Part, ...]
    dense_layers: int
    """Number of blocks with a dense MLP in a mixture of experts. They come first, and each has the parameters in
    ``dense_block``."""
    linear_block: tuple[Part, ...]
    linear_layers: int
    """Number of blocks with linear attention."""
    last: tuple[Part, ...]
    embedding: tuple[Part, ...]
    positions: tuple[Part, ...]
    experts: tuple[Part, ...] = ()
    """The experts of one block, if ep divides the experts. Otherwise, ``block`` includes them."""

    @property
    def sparse_layers(self) -> int:
        """Number of blocks with experts in a mixture of experts."""
        return self.layers + self.linear_layers

    def parts(self) -> list[Part]:
        """All parameters except ``experts``."""
        return [
            *self.dense_block * self.dense_layers,
            *self.linear_block * self.linear_layers,
            *self.block * self.layers,
            *self.last,
            *self.embedding,
            *self.positions,
        ]


def stages_of_rank(run: RunConfig, pp_rank: int) -> list[Stage]:
    """Return the stages of one rank of pp, as ``config.stages`` splits the layers."""
    every = stage_layers(run.model, run.parallel)
    return [
        Stage(
            number,
            len(layers),
            number == 0,
            number == len(every) - 1,
            dense_layers(run, layers),
            linear=sum(run.model.type_of(layer) == "linear_attention" for layer in layers),
        )
        for number, layers in enumerate(every)
        if rank_of_stage(number, run.parallel) == pp_rank
    ]


def dense_layers(run: RunConfig, layers: range) -> int:
    """Return how many of these layers have a dense MLP in a mixture of experts."""
    return len(range(layers.start, min(layers.stop, run.model.first_k_dense_replace)))


def without_experts(run: RunConfig) -> RunConfig:
    """Return a run whose model has only the dense layers of a mixture of experts."""
    keys = {"num_experts": 0, "shared_expert_intermediate_size": 0, "shared_expert_gate": False}
    return run.model_copy(update={"model": run.model.model_copy(update=keys)})


def with_linear_attention(run: RunConfig) -> RunConfig:
    """Return a run whose layers all have linear attention. Its heads are so wide that queries are as wide as values."""
    model = run.model
    width = linear_widths(run)[1] // model.num_attention_heads
    changed = model.model_copy(update={"layer_types": ["linear_attention"], "head_dim": width})
    return run.model_copy(update={"model": changed})


def is_linear(run: RunConfig) -> bool:
    return run.model.layer_types == ["linear_attention"]


def linear_widths(run: RunConfig) -> tuple[int, int, int]:
    """Return the widths of keys and values, and the number of value heads, of linear attention."""
    model = run.model
    keys = model.linear_num_key_heads * model.linear_key_head_dim
    return keys, model.linear_num_value_heads * model.linear_value_head_dim, model.linear_num_value_heads


def tiles_of(run: RunConfig, stage: Stage) -> Tiles:
    """Return the tiles that one (x, y) rank has of a stage's parameters."""
    model, grid = run.model, run.parallel
    hidden = model.hidden_size // grid.y
    table = Part(model.padded_vocab_size // grid.x, hidden)
    shared = model.tie_word_embeddings and grid.pp == 1
    learned = stage.is_first and model.position_embedding == "learned"
    return Tiles(
        block=(*_block(run), *(() if grid.ep > 1 else _experts(run))),
        layers=stage.layers - stage.dense - stage.linear,
        dense_block=_block(without_experts(run)),
        dense_layers=stage.dense,
        linear_block=(*_block(with_linear_attention(run)), *(() if grid.ep > 1 else _experts(run))),
        linear_layers=stage.linear,
        last=(*_norm(run), table) if stage.is_last else (),
        embedding=(table,) if stage.is_first and not shared else (),
        positions=(Part(model.max_position_embeddings // grid.x, hidden),) if learned else (),
        experts=_experts(run) if grid.ep > 1 else (),
    )


def _norm(run: RunConfig) -> list[Part]:
    return [Part(run.model.hidden_size // run.parallel.y, 1, ("x",))] * (2 if run.model.norm == "layernorm" else 1)


def _latents(run: RunConfig) -> list[Part]:
    """Return the parameters of latent attention: the projections to latents and from latents to heads, and the latents'
    norms."""
    model, x, y = run.model, run.parallel.x, run.parallel.y
    heads, of_queries = model.num_attention_heads // x, model.q_lora_rank or model.hidden_size
    down = [rank for rank in (model.q_lora_rank, model.kv_lora_rank, model.qk_rope_head_dim) if rank]
    normed = [rank for rank in (model.q_lora_rank, model.kv_lora_rank) if rank]
    return [
        *(Part(rank, model.hidden_size // y, ("x",)) for rank in down),
        *(Part(rank // y, 1, ("x",)) for rank in normed),
        *(Part(heads * width, of_queries // y) for width in (model.qk_nope_head_dim, model.qk_rope_head_dim)),
        *(Part(heads * width, model.kv_lora_rank // y) for width in (model.qk_nope_head_dim, model.v_head_dim)),
    ]


def _linear_attention(run: RunConfig) -> list[Part]:
    """The projections, convolutions, decays, and gated norm of linear attention."""
    model, x, y = run.model, run.parallel.x, run.parallel.y
    keys, values, heads = linear_widths(run)
    over = () if attention_split(run) == "heads" else ("y",)
    ranks = x if over else x * y
    return [
        *(Part(out // x, model.hidden_size // y) for out in (keys, keys, values, values, heads, heads)),
        *(Part(width // ranks, model.linear_conv_kernel_dim, over) for width in (keys, keys, values)),
        *((Part(heads // ranks, 1, over),) * 2),
        Part(model.linear_value_head_dim, 1, ("y", "x")),
    ]


def _attention(run: RunConfig) -> list[Part]:
    """The parameters of attention, without the output projection."""
    model, x, y = run.model, run.parallel.x, run.parallel.y
    hidden = model.hidden_size // y
    queries, keys = (n * model.head_dim for n in (model.num_attention_heads, model.num_key_value_heads))
    split = attention_split(run)
    bias_over = () if split == "heads" else ("y",)
    bias_ranks = x * y if split == "heads" else x
    block = _latents(run) if model.kv_lora_rank else []
    for out in () if model.kv_lora_rank else (queries, keys, keys, *([queries] * model.attention_output_gate)):
        block.append(Part(out // x, hidden))
        if model.attention_bias:
            block.append(Part(out // bias_ranks, 1, bias_over))
    if model.qk_norm and model.qk_norm_over == "all_heads":
        block += [Part(out // bias_ranks, 1, bias_over) for out in (queries, keys)]
    elif model.qk_norm:
        block += [Part(model.head_dim, 1, ("y", "x"))] * 2
    if model.attention_sinks:
        block.append(Part(model.num_attention_heads // bias_ranks, 1, bias_over))
    return block


def _block(run: RunConfig) -> tuple[Part, ...]:
    model, x, y = run.model, run.parallel.x, run.parallel.y
    hidden, inner = model.hidden_size // y, model.intermediate_size // x
    block = _norm(run) * (4 if model.norm_placement == "around" else 2)
    block += _linear_attention(run) if is_linear(run) else _attention(run)
    block.append(Part(hidden, model.num_attention_heads * (model.v_head_dim or model.head_dim) // x))
    if model.attention_output_bias:
        block.append(Part(hidden, 1, ("x",)))
    if model.num_experts:
        inner = model.shared_expert_intermediate_size // x
        block.append(Part(model.num_experts, hidden, ("x",)))
        if model.mlp_bias:
            block.append(Part(model.num_experts, 1, ("x",)))
        if model.shared_expert_gate:
            block.append(Part(1, hidden, ("x",)))
    if inner == 0:
        return tuple(block)
    for _ in range(2 if model.gated_mlp else 1):
        block.append(Part(inner, hidden))
        if model.mlp_bias:
            block.append(Part(inner, 1))
    block.append(Part(hidden, inner))
    if model.mlp_bias:
        block.append(Part(hidden, 1, ("x",)))
    return tuple(block)


def _experts(run: RunConfig) -> tuple[Part, ...]:
    """Return the gate, up, and down matrices of a rank's experts, and their biases."""
    model, grid = run.model, run.parallel
    if not model.num_experts:
        return ()
    inner, hidden, experts = model.moe_intermediate_size // grid.x, model.hidden_size // grid.y, model.num_experts
    shards = expert_shards(run) if grid.ep > 1 else weight_shards(run)

    def part(second: int, others: int, *over: str) -> Part:
        """FSDP2 splits the experts or the second dim, whichever needs less padding."""
        both = Part(experts // grid.ep, second * others, over), Part(second, experts // grid.ep * others, over)
        return min(both, key=lambda each: each.chunk(shards))

    matrices = (part(inner, hidden),) * 2 + (part(hidden, inner),)
    biases = (part(inner, 1),) * 2 + (part(hidden, 1, "x"),)
    return matrices + biases * model.mlp_bias


def expert_shards(run: RunConfig) -> int:
    """Return the number of ranks that share the stored experts of one tile, if ep divides them."""
    grid = run.parallel
    return max(grid.z // grid.ep, 1) if grid.zero == 0 else grid.z * grid.dp * grid.cp // grid.ep


def weight_shards(run: RunConfig) -> int:
    """Return the number of ranks that share the stored parameters of one tile."""
    grid = run.parallel
    return grid.z if grid.zero == 0 else grid.z * grid.dp * grid.cp


def stored_bytes(run: RunConfig, pp_rank: int = 0) -> tuple[int, int, int]:
    """Return three numbers for the first rank of a pp position: the bytes of its parameters, of its gradients at the
    optimizer step, and of its optimizer states together with the averages."""
    item = 4 if run.training.master_weights == "fp32" else 2
    shards = weight_shards(run)
    tiles = [tiles_of(run, stage) for stage in stages_of_rank(run, pp_rank)]
    entries = sum(part.chunk(shards) for each in tiles for part in each.parts())
    entries += sum(part.chunk(expert_shards(run)) for each in tiles for part in each.experts * each.sparse_layers)
    moment = 4 if run.optimizer.stochastic_rounding else item
    states = 2 * entries
    if run.optimizer.name == "lion":
        states = entries
    elif run.optimizer.name == "muon":
        states -= stepped_by_muon(run, layers_of(run, pp_rank))
    averages = 4 * entries if run.ema.decay else 0
    return item * entries, gradient_item(run) * entries, moment * states + averages


def gradient_item(run: RunConfig) -> int:
    """Return the number of bytes of one entry of a summed gradient."""
    return 4 if "fp32" in (run.training.master_weights, run.training.reduce_dtype) else 2
