"""Compute the sizes that determine whether a layout is legal. A layout is a grid plus options such as the micro-batch
size. x, y, z, dp, cp, and pp are the axes of the grid.

The planner checks many layouts at once, so a size can be a number or a NumPy array with one number per layout.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Self, TypeAlias

from fourfold.config.run import RunConfig
from fourfold.config.stages import IN_ROUNDS, SPLIT_BACKWARD, stages_per_rank

if TYPE_CHECKING:  # Do not import NumPy at run time, because checking a run file does not need it.
    import numpy as np
    from numpy.typing import NDArray

FLOAT8_MULTIPLE = 16
"""Every size of a float8 matmul must be a multiple of this number (torch._scaled_mm)."""

Number: TypeAlias = "int | NDArray[np.int64] | NDArray[np.bool_]"
"""An int or a bool for one layout, or an array [n] with one entry per layout."""


@dataclass(frozen=True)
class Sizes:
    """The sizes of a run that determine whether its layout is legal."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    """Width of the dense MLPs. 0 if there are none."""
    vocab: int
    positions: int
    """Number of learned position embeddings. 0 if there are none."""
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
    """Whether pp > 1 and the schedule is one of ``IN_ROUNDS``."""
    split_backward: Number
    """Whether pp > 1 and the schedule is one of ``SPLIT_BACKWARD``."""
    dual_pipe_v: Number
    ulysses: Number
    layers_per_stage: tuple[int, ...] | None = None
    vocab_multiple: int = 1
    experts: int = 0
    """Number of experts. 0 for dense MLPs."""
    expert_inner: int = 0
    """Width of one expert."""
    latents: int = 0
    """Greatest common divisor of q_lora_rank, kv_lora_rank, and qk_rope_head_dim. 0 without latent attention."""
    linear_heads: int = 0
    """Number of key heads of linear attention. 0 without linear attention."""
    output_gate: bool = False
    """Whether attention has an output gate."""
    shared_inner: int = 0
    """Width of the shared expert. 0 if there is none."""
    ep: Number = 1
    predictions: int = 0
    """Number of layers for multi-token prediction."""
    tied: bool = False
    """Whether the embedding and the head share one weight."""

    @classmethod
    def of(cls, run: RunConfig) -> Self:
        """Return the sizes of a run, given its run file."""
        model, grid, training = run.model, run.parallel, run.training
        return cls(
            layers=model.num_hidden_layers, hidden=model.hidden_size, heads=model.num_attention_heads,
            kv_heads=model.num_key_value_heads, head_dim=model.head_dim, vocab=model.padded_vocab_size,
            inner=model.intermediate_size if model.sparse_layers < model.num_hidden_layers else 0,
            positions=model.max_position_embeddings if model.position_embedding == "learned" else 0,
            seq=training.seq_length, batch=training.global_batch_size, float8=training.float8 != "none",
            **{axis: getattr(grid, axis) for axis in ("x", "y", "z", "dp", "cp", "pp", "ep", "zero")},
            micro_batch=training.micro_batch_size, batch_parts=run.overlap.batch_parts,
            shards_per_node=run.overlap.shards_per_node, stages=grid.pp * stages_per_rank(grid),
            in_rounds=grid.pp > 1 and grid.schedule in IN_ROUNDS,
            split_backward=grid.pp > 1 and grid.schedule in SPLIT_BACKWARD,
            dual_pipe_v=grid.pp > 1 and grid.schedule == "DualPipeV", ulysses=grid.cp_method == "ulysses",
            layers_per_stage=grid.layers_per_stage if grid.pp > 1 else None,
            vocab_multiple=model.pad_vocab_size_to_multiple_of, experts=model.num_experts,
            expert_inner=model.moe_intermediate_size if model.num_experts else 0,
            latents=math.gcd(model.q_lora_rank, model.kv_lora_rank, model.qk_rope_head_dim),
            linear_heads=model.linear_num_key_heads, output_gate=model.attention_output_gate,
            shared_inner=model.shared_expert_intermediate_size, predictions=model.num_nextn_predict_layers,
            tied=model.tie_word_embeddings,
        )  # fmt: skip

    @property
    def keys(self) -> int:
        """Return the width of all key heads together."""
        return self.kv_heads * self.head_dim

    @property
    def tokens(self) -> Number:
        """Return the number of tokens of a micro-batch, summed over the ranks of cp."""
        return self.micro_batch * self.seq

    @cached_property
    def sequences_per_part(self) -> Number:
        """Return the number of sequences that one matmul processes.

        If x·y > 1 and ``batch_parts`` divides the number of sequences of the micro-batch, a matmul processes the
        sequences of one batch part. Otherwise it processes all sequences of the micro-batch.
        """
        parts_are_sequences = (self.x * self.y > 1) & (self.micro_batch % self.batch_parts == 0)
        return self.micro_batch // (1 + (self.batch_parts - 1) * parts_are_sequences)

    @cached_property
    def at_once(self) -> Number:
        """Return the number of sequences that all ranks together process at the same time."""
        return self.micro_batch * self.dp * self.z

    @cached_property
    def micro_batches(self) -> Number:
        """Return the number of micro-batches that each rank runs in an optimizer step."""
        return self.batch // self.at_once

    @property
    def rounds(self) -> Number:
        """Return how many rounds of micro-batches a step has in the pipeline schedules ``IN_ROUNDS``. Each round has at
        least pp micro-batches. A step with fewer micro-batches has one round."""
        whole = self.micro_batches // self.pp
        return whole + (whole == 0)

    @cached_property
    def whole_heads(self) -> Number:
        """Return whether x·y divides the number of query heads."""
        return self.heads % (self.x * self.y) == 0

    @cached_property
    def splits_queries(self) -> Number:
        """Return whether each rank of y computes attention for a part of the queries. The ranks of y do this if they
        can divide neither the heads nor the sequences equally."""
        return (self.heads % (self.x * self.y) != 0) & (self.sequences_per_part % self.y != 0)

    @property
    def whole_keys(self) -> Number:
        """Return a number that x·y must divide in a legal layout: the width of the keys if x·y divides the number of
        query heads. Otherwise return 0, which every number divides."""
        return self.keys * self.whole_heads

    @property
    def whole_linear_heads(self) -> Number:
        """Return a number that x·y·cp must divide in a legal layout: the number of key heads of linear attention if x·y
        divides the number of query heads. Otherwise return 0, which every number divides."""
        return self.linear_heads * self.whole_heads

    @property
    def is_plain(self) -> bool:
        """Return whether batch parts and float8 support the model. They support dense models with neither latent,
        linear, nor gated attention, and without layers for multi-token prediction."""
        return self.experts + self.latents + self.linear_heads + self.output_gate + self.predictions == 0

    @cached_property
    def head_ranks(self) -> Number:
        """Return the number of ranks that share the heads with the context-parallel method Ulysses: cp·x·y if x·y
        divides the number of heads, and cp·x otherwise."""
        return self.cp * self.x * (1 + self.whole_heads * (self.y - 1))

    @property
    def uneven_heads(self) -> Number:
        """Return whether the query heads or the key heads cannot be divided equally among ``head_ranks`` ranks."""
        return (self.heads % self.head_ranks != 0) | (self.kv_heads % self.head_ranks != 0)

    @property
    def uneven_nodes(self) -> Number:
        """Return whether the size of a shard group is neither a multiple nor a divisor of ``shards_per_node``. With
        zero below 3, the ranks of z are a shard group. With zero above 0, the ranks of dp·cp·z are a shard group."""
        over_z, over_all = self.zero < 3, self.zero > 0
        everyone = self.dp * self.cp * self.z
        return (over_z & _is_uneven(self.z, self.shards_per_node)) | (
            over_all & _is_uneven(everyone, self.shards_per_node)
        )

    @cached_property
    def token_ranks(self) -> Number:
        """Return the number of ranks that split the tokens of a step. Among these ranks, each group of ``ep``
        consecutive ranks shares one copy of the experts."""
        return self.dp * self.cp * self.z

    @property
    def float8_sizes(self) -> dict[str, Number]:
        """Return the sizes of one rank's matmuls that must be multiples of ``FLOAT8_MULTIPLE``. The dictionary's keys
        say how each size follows from the run file."""
        return {
            "model.hidden_size / y": self.hidden // self.y,
            "model.num_attention_heads × head_dim / x": self.heads * self.head_dim // self.x,
            "model.num_key_value_heads × head_dim / x": self.keys // self.x,
            "model.intermediate_size / x": self.inner // self.x,
            "training.micro_batch_size × seq_length / cp": self.tokens // self.cp,
        }

    @property
    def uneven_float8(self) -> Number:
        """Return whether the run uses float8 and a rank's matmul has a size that float8 kernels do not support."""
        return self.float8 and sum(size % FLOAT8_MULTIPLE for size in self.float8_sizes.values()) != 0


def _is_uneven(ranks: Number, per_node: Number) -> Number:
    return (ranks % per_node != 0) & (per_node % ranks != 0)
