"""Compute the sizes that determine whether a layout is legal. The letters x, y, z, dp, cp, and pp are the axes of the
grid."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

from fourfold.config.run import RunConfig
from fourfold.config.stages import IN_ROUNDS, SPLIT_BACKWARD, stages_per_rank

FLOAT8_MULTIPLE = 16
"""Every size of a float8 matmul is a multiple of this (torch._scaled_mm)."""

Number = Any
"""An int or a bool, or a NumPy array of them with one entry per layout."""


@dataclass(frozen=True)
class Sizes:
    """Every size that determines whether a layout is legal."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    """Width of the dense MLPs. 0 if there are none."""
    vocab: int
    positions: int
    """Rows of a learned position table. 0 if there is none."""
    seq: int
    batch: int
    float8: bool
    x: Number
    y: Number
    z: Number
    dp: Number
    cp: Number
    pp: Number
    zero: Number
    micro_batch: Number
    batch_parts: Number
    shards_per_node: Number
    stages: Number
    in_rounds: Number
    """Whether a pipeline has one of the schedules ``IN_ROUNDS``."""
    split_backward: Number
    """Whether a pipeline has one of the schedules ``SPLIT_BACKWARD``."""
    dual_pipe_v: Number
    ulysses: Number
    layers_per_stage: tuple[int, ...] | None = None
    vocab_multiple: int = 1
    experts: int = 0
    """Number of experts. 0 for dense MLPs."""
    expert_inner: int = 0
    """Width of one expert."""
    latents: int = 0
    """Largest number that divides the widths of all latents. 0 if there are none."""
    linear_heads: int = 0
    """Number of key heads of linear attention. 0 if there is none."""
    output_gate: bool = False
    """Whether attention's output has a gate."""
    shared_inner: int = 0
    """Width of the shared expert. 0 if there is none."""
    ep: Number = 1

    @classmethod
    def of(cls, run: RunConfig) -> Self:
        model, grid, training = run.model, run.parallel, run.training
        return cls(
            layers=model.num_hidden_layers,
            hidden=model.hidden_size,
            heads=model.num_attention_heads,
            kv_heads=model.num_key_value_heads,
            head_dim=model.head_dim,
            inner=model.intermediate_size if model.sparse_layers < model.num_hidden_layers else 0,
            vocab=model.padded_vocab_size,
            positions=model.max_position_embeddings if model.position_embedding == "learned" else 0,
            seq=training.seq_length,
            batch=training.global_batch_size,
            float8=training.float8 != "none",
            **{axis: getattr(grid, axis) for axis in ("x", "y", "z", "dp", "cp", "pp", "zero")},
            micro_batch=training.micro_batch_size,
            batch_parts=run.overlap.batch_parts,
            shards_per_node=run.overlap.shards_per_node,
            stages=grid.pp * stages_per_rank(grid),
            in_rounds=grid.pp > 1 and grid.schedule in IN_ROUNDS,
            split_backward=grid.pp > 1 and grid.schedule in SPLIT_BACKWARD,
            dual_pipe_v=grid.pp > 1 and grid.schedule == "DualPipeV",
            ulysses=grid.cp_method == "ulysses",
            layers_per_stage=grid.layers_per_stage if grid.pp > 1 else None,
            vocab_multiple=model.pad_vocab_size_to_multiple_of,
            experts=model.num_experts,
            expert_inner=model.moe_intermediate_size if model.num_experts else 0,
            latents=math.gcd(model.q_lora_rank, model.kv_lora_rank, model.qk_rope_head_dim),
            linear_heads=model.linear_num_key_heads,
            output_gate=model.attention_output_gate,
            shared_inner=model.shared_expert_intermediate_size,
            ep=grid.ep,
        )

    @property
    def keys(self) -> int:
        """Return the number of features of all key heads."""
        return self.kv_heads * self.head_dim

    @property
    def tokens(self) -> Number:
        """Return the number of tokens of a micro-batch on all ranks of cp."""
        return self.micro_batch * self.seq

    @cached_property
    def sequences_per_part(self) -> Number:
        """Return the number of sequences in one matmul of a rank: the whole micro-batch, or one part if a
        micro-batch is split into parts by sequences."""
        parts_are_sequences = (self.x * self.y > 1) & (self.micro_batch % self.batch_parts == 0)
        return self.micro_batch // (1 + (self.batch_parts - 1) * parts_are_sequences)

    @cached_property
    def at_once(self) -> Number:
        """Return the number of sequences that all ranks together run at the same time."""
        return self.micro_batch * self.dp * self.z

    @cached_property
    def micro_batches(self) -> Number:
        """Return the number of micro-batches that each rank runs in a step."""
        return self.batch // self.at_once

    @property
    def rounds(self) -> Number:
        """Return the number of rounds (at least one) in the schedules ``IN_ROUNDS``. Each round has at least pp
        micro-batches."""
        whole = self.micro_batches // self.pp
        return whole + (whole == 0)

    @cached_property
    def whole_heads(self) -> Number:
        """Return whether the number of heads is divisible over x and y."""
        return self.heads % (self.x * self.y) == 0

    @cached_property
    def splits_queries(self) -> Number:
        """Return whether the y ranks share attention by queries, because neither the heads nor the sequences divide
        evenly over y."""
        return (self.heads % (self.x * self.y) != 0) & (self.sequences_per_part % self.y != 0)

    @property
    def whole_keys(self) -> Number:
        """Return the number of key and value features that the axes x and y must split: all of them if the heads divide
        evenly over x and y, and otherwise none."""
        return self.keys * self.whole_heads

    @property
    def whole_linear_heads(self) -> Number:
        """Return the number of key heads of linear attention that x, y, and cp must split together."""
        return self.linear_heads * self.whole_heads

    @property
    def is_plain(self) -> bool:
        """Return whether the blocks have only the parts that batch parts and float8 support."""
        return self.experts + self.latents + self.linear_heads + self.output_gate == 0

    @cached_property
    def head_ranks(self) -> Number:
        """Return the number of ranks that share the heads when cp exchanges heads for tokens."""
        return self.cp * self.x * (1 + self.whole_heads * (self.y - 1))

    @property
    def uneven_heads(self) -> Number:
        """Return whether the heads cannot be divided equally among these ranks without cutting a query head or a key
        head."""
        return (self.heads % self.head_ranks != 0) | (self.kv_heads % self.head_ranks != 0)

    @property
    def uneven_nodes(self) -> Number:
        """Return whether the size of a shard group is neither a multiple nor a divisor of ``shards_per_node``."""
        over_z, over_all = self.zero < 3, self.zero > 0
        everyone = self.dp * self.cp * self.z
        return (over_z & _is_uneven(self.z, self.shards_per_node)) | (
            over_all & _is_uneven(everyone, self.shards_per_node)
        )

    @cached_property
    def token_ranks(self) -> Number:
        """Return the number of ranks that split the tokens. Each group of ``ep`` neighbors among them shares one
        copy of the experts."""
        return self.dp * self.cp * self.z

    @property
    def float8_sizes(self) -> dict[str, Number]:
        """Return the sizes of one rank's matmuls by name."""
        return {
            "model.hidden_size / y": self.hidden // self.y,
            "model.num_attention_heads × head_dim / x": self.heads * self.head_dim // self.x,
            "model.num_key_value_heads × head_dim / x": self.keys // self.x,
            "model.intermediate_size / x": self.inner // self.x,
            "training.micro_batch_size × seq_length / cp": self.tokens // self.cp,
        }

    @property
    def uneven_float8(self) -> Number:
        """Return whether a float8 matmul has a size that its kernel does not support."""
        return self.float8 and sum(size % FLOAT8_MULTIPLE for size in self.float8_sizes.values()) != 0


def _is_uneven(ranks: Number, per_node: Number) -> Number:
    return (ranks % per_node != 0) & (per_node % ranks != 0)
