"""Which layouts are legal: one table of rules, for the run file and for the planner's search.

Conditions are arithmetic on ``Sizes``: those of one layout are ints, those of many are NumPy arrays.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from fourfold.config.layout_sizes import FLOAT8_MULTIPLE, Number, Sizes
from fourfold.config.model import round_to_multiple
from fourfold.config.run import RunConfig
from fourfold.config.stages import balanced


class Rule(NamedTuple):
    """Something that makes a layout illegal."""

    reason: str
    """The reason for refusing many layouts, without numbers."""
    broken: Callable[[Sizes], Number]
    sentence: Callable[[RunConfig, Sizes], str]
    """The refusal of one run: the keys with their values, and the nearest values that work."""


@dataclass(frozen=True)
class Divides:
    """The rule that axes, together, divide a number; it has the attributes of a ``Rule``."""

    axes: tuple[str, ...]
    what: str
    number: str
    """Name in ``Sizes``."""
    layer: str
    key: str
    """Name in the run file."""
    unit: str = ""
    """Name in ``Sizes`` of the unit, of which the number is always a multiple."""
    unit_key: str = ""
    """Name in the run file of the unit, where that is what a user sets and the number follows."""

    @property
    def reason(self) -> str:
        return f"{' · '.join(self.axes)} does not divide {self.what}"

    def broken(self, sizes: Sizes) -> Number:
        number = getattr(sizes, self.number)
        if isinstance(number, int) and number == 0:  # quick for many layouts
            return False
        return number % self._ranks(sizes) != 0

    def sentence(self, run: RunConfig, sizes: Sizes) -> str:
        number, ranks = getattr(sizes, self.number), self._ranks(sizes)
        unit = getattr(sizes, self.unit) if self.unit else 1
        below = next(n for n in range(min(ranks, number), 0, -1) if number % n == 0)
        above = next((n for n in range(ranks, min(number, 10 * ranks) + 1) if number % n == 0), below)
        axes = "·".join(axis for axis in self.axes if getattr(sizes, axis) > 1)
        nearest = " or ".join(str(n) for n in sorted({below, above}))
        multiple = math.lcm(ranks, unit)
        other = (
            f"{self.unit_key} = {multiple}" if self.unit_key else f"{self.key} = {round_to_multiple(number, multiple)}"
        )
        return (
            f"{self.layer}: {self.key} = {number} cannot be split over {axes} = {ranks}; {axes} = {nearest} works, "
            f"and so does {other}"
        )

    def _ranks(self, sizes: Sizes) -> Number:
        return math.prod(getattr(sizes, axis) for axis in self.axes)


Q_PROJ, K_PROJ, RESIDUAL = "layers.*.self_attn.qkv.q_proj", "layers.*.self_attn.qkv.k_proj", "the residual stream"
KEYS = "the features of keys and values"
EXPERTS = "layers.*.mlp.experts"

RULES: tuple[Divides | Rule, ...] = (
    Divides(("x",), "the heads", "heads", Q_PROJ, "model.num_attention_heads", unit="kv_heads"),
    Divides(("x",), KEYS, "keys", K_PROJ, "key and value features", unit="head_dim"),
    Divides(("x",), "the MLP's width", "inner", "layers.*.mlp.up", "model.intermediate_size"),
    Divides(
        ("x",),
        "the vocabulary",
        "vocab",
        "embed_tokens and lm_head",
        "the padded vocabulary",
        unit="vocab_multiple",
        unit_key="model.pad_vocab_size_to_multiple_of",
    ),
    Divides(("x",), "the position table", "positions", "embed_positions", "model.max_position_embeddings"),
    Divides(("y",), "the hidden size", "hidden", RESIDUAL, "model.hidden_size", unit="heads"),
    Rule(
        "2 · cp does not divide the sequence",
        lambda s: (s.cp > 1) & (s.seq % (2 * s.cp) != 0),
        lambda run, s: (
            f"training.seq_length = {s.seq} must be a multiple of 2·cp = {2 * s.cp}, as every rank of cp has two "
            f"chunks of the sequence; {round_to_multiple(s.seq, 2 * s.cp)} works"
        ),
    ),
    Divides(("x", "cp"), "the sequence", "seq", RESIDUAL, "training.seq_length"),
    Divides(("y", "cp"), "the tokens of a micro-batch", "tokens", "lm_head", "tokens of a micro-batch"),
    Rule(
        "attention cannot be shared over y besides cp: it divides neither the heads nor the micro-batch",
        lambda s: s.splits_queries & (s.cp > 1),
        lambda run, s: (
            f"attention cannot be shared over y = {s.y} besides cp = {s.cp}: neither model.num_attention_heads = "
            f"{s.heads} (over x·y = {s.x * s.y}) nor training.micro_batch_size = {s.micro_batch} divides; "
            f"a micro_batch_size of {round_to_multiple(s.micro_batch, s.y)} would"
        ),
    ),
    Rule(
        "attention cannot be shared over y: it divides neither the heads, the micro-batch nor the sequence",
        lambda s: s.splits_queries & (s.seq % s.y != 0),
        lambda run, s: (
            f"attention cannot be shared over y = {s.y}: none of model.num_attention_heads = {s.heads} (over x·y = "
            f"{s.x * s.y}), training.micro_batch_size = {s.micro_batch} and training.seq_length = {s.seq} divides; "
            f"a seq_length of {round_to_multiple(s.seq, s.x * s.y)} would"
        ),
    ),
    Divides(("x", "y"), KEYS, "whole_keys", K_PROJ, "key and value features", unit="head_dim"),
    Rule(
        "batch_parts divides neither the micro-batch nor its tokens",
        lambda s: (
            (s.x * s.y > 1)
            & (s.micro_batch % s.batch_parts != 0)
            & ((s.seq // (s.cp * s.x) % s.batch_parts != 0) | s.splits_queries)
        ),
        lambda run, s: (
            (
                f"training.micro_batch_size = {s.micro_batch} cannot be split into"
                if s.splits_queries
                else f"neither training.micro_batch_size = {s.micro_batch} nor a rank's {s.seq // (s.cp * s.x)} tokens "
                f"of a sequence (over cp·x = {s.cp * s.x}) can be split into"
            )
            + f" overlap.batch_parts = {s.batch_parts}; batch_parts = "
            f"{_largest_divisor(s.micro_batch, s.batch_parts)} works"
        ),
    ),
    Rule(
        "shards_per_node and the ranks of a shard group do not divide each other",
        lambda s: s.uneven_nodes,
        lambda run, s: (
            f"overlap.shards_per_node = {s.shards_per_node} and the ranks of a shard group (z = {s.z}"
            + (f", dp·cp·z = {s.dp * s.cp * s.z}" if s.zero else "")
            + ") must divide each other, so that all nodes have as many of them; shards_per_node = "
            f"{_largest_divisor(s.z, s.shards_per_node)} works"
        ),
    ),
    Rule(
        "z · dp · micro_batch_size does not divide the global batch",
        lambda s: s.batch % s.at_once != 0,
        lambda run, s: (
            f"training.global_batch_size = {s.batch} is not a multiple of micro_batch_size × dp × z = {s.micro_batch} "
            f"× {s.dp} × {s.z} = {s.at_once}; {round_to_multiple(s.batch, s.at_once)} works"
        ),
    ),
    Rule(
        "pp · stages_per_rank is more than the layers",
        lambda s: s.stages > s.layers,
        lambda run, s: (
            f"parallel.pp = {s.pp} with schedule '{run.parallel.schedule}' makes {s.stages} stages, and the model has "
            f"{s.layers} layers; pp = {max(1, s.layers * s.pp // s.stages)} works, and so does num_hidden_layers = "
            f"{s.stages}"
        ),
    ),
    Rule(
        "interleaved schedules need whole rounds of pp micro-batches",
        lambda s: s.in_rounds & (s.micro_batches % s.rounds != 0),
        lambda run, s: (
            f"parallel.schedule = '{run.parallel.schedule}' runs micro-batches in rounds of pp = {s.pp}, and a step "
            f"has {s.micro_batches}; {round_to_multiple(s.micro_batches, s.pp)} micro-batches work (change "
            "training.global_batch_size or micro_batch_size), and so does schedule = '1F1B'"
        ),
    ),
    Rule(
        "schedules that compute weight gradients apart need z = 1 and zero 0 or 1",
        lambda s: s.split_backward & ((s.z > 1) | (s.zero > 1)),
        lambda run, s: (
            f"parallel.schedule = '{run.parallel.schedule}' computes weight gradients apart, from weights that stay "
            f"whole until the step ends: it allows z = 1 with zero 0 or 1, and this grid has z = {s.z} and zero = "
            f"{s.zero}; schedule = '1F1B' or 'Interleaved1F1B' works"
        ),
    ),
    Rule(
        "DualPipeV needs 2 · pp micro-batches",
        lambda s: s.dual_pipe_v & (s.micro_batches < 2 * s.pp),
        lambda run, s: (
            f"parallel.schedule = 'DualPipeV' needs at least 2·pp = {2 * s.pp} micro-batches in a step, and there are "
            f"{s.micro_batches}; schedule = 'ZBVZeroBubble' or '1F1B' works"
        ),
    ),
    Rule(
        "ulysses needs the heads of queries and of keys to divide over cp · x · y",
        lambda s: s.ulysses & (s.cp > 1) & s.uneven_heads,
        lambda run, s: (
            f"parallel.cp_method = 'ulysses': model.num_attention_heads = {s.heads} and num_key_value_heads = "
            f"{s.kv_heads} must divide over the {s.head_ranks} ranks of cp, x and y that share the heads; "
            "cp_method = 'ring' works"
        ),
    ),
    Rule(
        "ep splits experts, and the model has none",
        lambda s: (s.ep > 1) & (s.experts == 0),
        lambda run, s: f"parallel.ep = {s.ep} splits experts, and model.num_experts is 0; set ep = 1",
    ),
    Divides(("ep",), "the experts", "experts", EXPERTS, "model.num_experts"),
    Divides(("x",), "the experts' width", "expert_inner", EXPERTS, "model.moe_intermediate_size"),
    Divides(
        ("x",),
        "the shared expert's width",
        "shared_inner",
        "layers.*.mlp.shared_expert.up",
        "model.shared_expert_intermediate_size",
    ),
    Rule(
        "ep does not divide dp · cp · z",
        lambda s: s.experts > 0 and s.token_ranks % s.ep != 0,
        lambda run, s: (
            f"parallel.ep = {s.ep} must divide dp·cp·z = {s.token_ranks}, the processes that the experts are split "
            f"over; ep = {math.gcd(s.ep, s.token_ranks)} works"
        ),
    ),
    Rule(
        "ep and z do not divide each other, with zero below 3",
        lambda s: s.experts > 0 and (s.zero < 3) & (s.z % s.ep != 0) & (s.ep % s.z != 0),
        lambda run, s: (
            f"parallel.ep = {s.ep} and z = {s.z} must divide each other, so that the processes of z with the same "
            f"experts share their weights; ep = {math.gcd(s.ep, s.z)} works, and so does zero = 3"
        ),
    ),
    Rule(
        "parts of a micro-batch do not take turns where there are experts",
        lambda s: s.experts > 0 and (s.batch_parts > 1) & (s.x * s.y > 1),
        lambda run, s: f"overlap.batch_parts = {s.batch_parts} is for dense models; with experts it must be 1",
    ),
    Rule(
        "float8 does not compute experts",
        lambda s: (s.experts > 0) & s.float8,
        lambda run, s: f"training.float8 = '{run.training.float8}' is for dense models; with experts it must be 'none'",
    ),
    Rule(
        f"float8 needs multiples of {FLOAT8_MULTIPLE} features and tokens on every rank",
        lambda s: s.uneven_float8,
        lambda run, s: next(
            f"training.float8 = '{run.training.float8}': {what} = {size} must be a multiple of {FLOAT8_MULTIPLE} on "
            f"every rank; {round_to_multiple(size, FLOAT8_MULTIPLE)} works, and so does float8 = 'none'"
            for what, size in s.float8_sizes.items()
            if size % FLOAT8_MULTIPLE
        ),
    ),
    Rule(
        "the sequence is longer than the position table",
        lambda s: (s.positions > 0) & (s.seq > s.positions),
        lambda run, s: (
            f"training.seq_length = {s.seq} is longer than the position table: model.max_position_embeddings = "
            f"{s.positions} is the most"
        ),
    ),
    Rule(
        "layers_per_stage needs a positive number for each stage, which sum to the layers",
        lambda s: s.layers_per_stage is not None and not _is_split(s.layers_per_stage, s.stages, s.layers),
        lambda run, s: (
            f"parallel.layers_per_stage = {list(s.layers_per_stage or ())} must be {s.stages} positive numbers that "
            f"sum to {s.layers}; {list(balanced(s.layers, s.stages, 0.0, 0.0))} works"
        ),
    ),
)
"""A layout is refused for the first rule that it breaks."""


def _largest_divisor(number: int, most: int) -> int:
    """The largest divisor that is at most ``most``."""
    return next(divisor for divisor in range(min(number, most), 0, -1) if number % divisor == 0)


def _is_split(counts: tuple[int, ...], stages: int, layers: int) -> bool:
    return len(counts) == stages and sum(counts) == layers and min(counts) >= 1
