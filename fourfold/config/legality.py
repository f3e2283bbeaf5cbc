"""Decide which layouts are legal. A layout is a grid plus options such as the micro-batch size. The check of a run file
and the planner's search use the same list of rules.

Each condition is arithmetic on ``Sizes``, whose fields are ints for one layout and NumPy arrays for many layouts.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from pydantic import ValidationError

from fourfold.config.expected_values import round_to_multiple
from fourfold.config.layout_sizes import FLOAT8_MULTIPLE, Number, Sizes
from fourfold.config.run import RunConfig
from fourfold.config.stages import balanced


class Rule(NamedTuple):
    """A rule that a legal layout must satisfy, and what to tell the user if a layout breaks the rule."""

    reason: str
    """A short text without numbers, such as "x does not divide the heads". The planner's search counts how many layouts
    each rule refuses."""
    broken: Callable[[Sizes], Number]
    sentence: Callable[[RunConfig, Any], str]
    """Returns an error message for one run (whose ``Sizes`` are ints), with the nearest values that work."""


@dataclass(frozen=True)
class Divides:
    """A rule that the product of some axes' sizes must divide a number. It has the same attributes as a ``Rule``."""

    axes: tuple[str, ...]
    what: str
    number: str
    """Name in ``Sizes`` of the number to divide."""
    layer: str
    """Names of the layers that need the division, for error messages."""
    key: str
    """The run file's key for which an error message suggests another value."""
    product: str = ""
    """Text that says how run-file keys determine the number, with names from ``Sizes`` as placeholders. Empty if the
    number is the value of ``key``."""
    unit: str = ""
    """Name in ``Sizes`` of a second number that must divide ``number``. Empty if there is none."""

    @property
    def reason(self) -> str:
        return f"{' · '.join(self.axes)} does not divide {self.what}"

    def broken(self, sizes: Sizes) -> Number:
        number: Number = getattr(sizes, self.number)
        if isinstance(number, int) and number == 0:  # Skip the modulo to save time: a search checks many layouts.
            return False
        return number % self._ranks(sizes) != 0

    def sentence(self, run: RunConfig, sizes: Sizes) -> str:
        number, ranks = getattr(sizes, self.number), self._ranks(sizes)
        split = [axis for axis in self.axes if getattr(sizes, axis) > 1]
        axes = " or ".join(text for axis in split if (text := self._other_sizes(run, sizes, axis)))
        value = next((n for n in self._other_values(run, sizes) if accepts(run, self.key, n)), None)
        works = [axes] * bool(axes) + ([] if value is None else [f"{self.key} = {value}"])
        what = f"{self.product.format(s=sizes) or self.key} = {number}"
        return f"{self.layer}: {what} cannot be split over {'·'.join(split)} = {ranks}; " + (
            ", and so does ".join([f"{works[0]} works", *works[1:]]) if works else self._start(sizes, split[0])
        )

    def _start(self, sizes: Sizes, axis: str) -> str:
        """Return text that suggests a size of the axis that satisfies this rule. The run may break other rules too."""
        number, others = getattr(sizes, self.number), self._ranks(sizes) // getattr(sizes, axis)
        most = next(n for n in range(getattr(sizes, axis), 0, -1) if number % (others * n) == 0 or n == 1)
        return f"{axis} = {most} works here, and other rules are broken too"

    def _other_sizes(self, run: RunConfig, sizes: Sizes, axis: str) -> str:
        """Return text with the sizes of an axis that make the run legal: the nearest smaller size and the nearest
        larger size. The text is empty if there are none."""
        now, number = getattr(sizes, axis), getattr(sizes, self.number)
        whole = [n for n in range(1, 4 * now + 1) if number % (self._ranks(sizes) // now * n) == 0]
        below = next((n for n in reversed(whole) if n < now and accepts(run, f"parallel.{axis}", n)), None)
        above = next((n for n in whole if n > now and accepts(run, f"parallel.{axis}", n)), None)
        found = [str(n) for n in (below, above) if n is not None]
        return f"{axis} = {' or '.join(found)}" if found else ""

    def _other_values(self, run: RunConfig, sizes: Sizes) -> list[int]:
        """Return values to try for the key, nearest first. The error message suggests the first value that makes the
        run legal."""
        ranks, section = self._ranks(sizes), self.key.partition(".")
        now = int(getattr(getattr(run, section[0]), section[2]))
        if self.key == "model.num_key_value_heads":
            return sorted((n for n in range(1, sizes.heads + 1) if sizes.heads % n == 0), key=lambda n: abs(n - now))
        unit = math.lcm(ranks, getattr(sizes, self.unit) if self.unit else 1)
        if self.key == "model.pad_vocab_size_to_multiple_of":
            return [unit]
        nearest = round_to_multiple(now, unit)
        return [nearest + unit * i for i in range(8)]

    def _ranks(self, sizes: Sizes) -> Number:
        ranks: Number = math.prod(getattr(sizes, axis) for axis in self.axes)
        return ranks


Q_PROJ, K_PROJ, RESIDUAL = "layers.*.self_attn.qkv.q_proj", "layers.*.self_attn.qkv.k_proj", "the residual stream"
KEYS = "the features of keys and values"
KV_FEATURES = "model.num_key_value_heads × head_dim = {s.kv_heads} × {s.head_dim}"
TOKENS = "training.micro_batch_size × seq_length = {s.micro_batch} × {s.seq}"
PADDING = "model.pad_vocab_size_to_multiple_of"
PADDED = "model.vocab_size (pad_vocab_size_to_multiple_of = {s.vocab_multiple})"
EXPERTS, SHARED_EXPERT = "layers.*.mlp.experts", "layers.*.mlp.shared_expert.up"
LINEAR = "the key heads of linear attention"
PLAIN = "dense models with neither latent, linear, nor gated attention, and without multi-token prediction"
TIED = "model.tie_word_embeddings = true"
LATENTS = "the common divisor of model.q_lora_rank, kv_lora_rank, and qk_rope_head_dim"

RULES: tuple[Divides | Rule, ...] = (
    Divides(("x",), "the heads", "heads", Q_PROJ, "model.num_attention_heads", unit="kv_heads"),
    Divides(("x",), KEYS, "keys", K_PROJ, "model.num_key_value_heads", KV_FEATURES),
    Divides(("x",), "the MLP's width", "inner", "layers.*.mlp.up", "model.intermediate_size"),
    Divides(("x",), "the vocabulary", "vocab", "embed_tokens and lm_head", PADDING, PADDED, unit="vocab_multiple"),
    Divides(("x",), "the position table", "positions", "embed_positions", "model.max_position_embeddings"),
    Divides(("y",), "the hidden size", "hidden", RESIDUAL, "model.hidden_size", unit="heads"),
    Divides(
        ("y",), "the widths of the latents", "latents", "layers.*.self_attn.down", "model.qk_rope_head_dim", LATENTS
    ),
    Rule(
        "2 · cp does not divide the sequence",
        lambda s: (s.cp > 1) & (s.seq % (2 * s.cp) != 0),
        lambda run, s: (
            f"training.seq_length = {s.seq} must be a multiple of 2·cp = {2 * s.cp}, because every rank of cp has two "
            f"chunks of the sequence; seq_length = {round_to_multiple(s.seq, 2 * s.cp)} works"
        ),
    ),
    Divides(("x", "cp"), "the sequence", "seq", RESIDUAL, "training.seq_length"),
    Divides(("y", "cp"), "the tokens of a micro-batch", "tokens", "lm_head", "training.seq_length", TOKENS),
    Rule(
        "with cp above 1, x · y does not divide the heads, and y does not divide the micro-batch",
        lambda s: s.splits_queries & (s.cp > 1),
        lambda run, s: (
            f"attention cannot be split over y = {s.y} together with cp = {s.cp}: model.num_attention_heads = "
            f"{s.heads} is not divisible by x·y = {s.x * s.y}, and training.micro_batch_size = {s.micro_batch} is not "
            f"divisible by y; micro_batch_size = {round_to_multiple(s.micro_batch, s.y)} works"
        ),
    ),
    Rule(
        "x · y does not divide the heads, and y divides neither the micro-batch nor the sequence",
        lambda s: s.splits_queries & (s.seq % s.y != 0),
        lambda run, s: (
            f"attention cannot be split over y = {s.y}: model.num_attention_heads = {s.heads} is not divisible by x·y "
            f"= {s.x * s.y}, and neither training.micro_batch_size = {s.micro_batch} nor training.seq_length = {s.seq} "
            f"is divisible by y; seq_length = {round_to_multiple(s.seq, s.x * s.y)} works"
        ),
    ),
    Divides(("x", "y"), KEYS, "whole_keys", K_PROJ, "model.num_key_value_heads", KV_FEATURES),
    Rule(
        "linear attention: x · y does not divide the heads, and y does not divide the micro-batch",
        lambda s: s.linear_heads > 0 and s.splits_queries,
        lambda run, s: (
            f"linear attention cannot be split over y = {s.y}: model.num_attention_heads = {s.heads} is not divisible "
            f"by x·y = {s.x * s.y}, and training.micro_batch_size = {s.micro_batch} is not divisible by y; "
            f"micro_batch_size = {round_to_multiple(s.micro_batch, s.y)} works"
        ),
    ),
    Divides(("x", "cp"), LINEAR, "linear_heads", "linear attention", "model.linear_num_key_heads"),
    Divides(("x", "y", "cp"), LINEAR, "whole_linear_heads", "linear attention", "model.linear_num_key_heads"),
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
        "shards_per_node neither divides the size of a shard group nor is a multiple of it",
        lambda s: s.uneven_nodes,
        lambda run, s: (
            f"overlap.shards_per_node = {s.shards_per_node} must divide the size of a shard group (z = {s.z}"
            + (f", dp·cp·z = {s.dp * s.cp * s.z}" if s.zero else "")
            + ") or be a multiple of it, so that every node has the same number of ranks; shards_per_node = "
            f"{_largest_divisor(s.z, s.shards_per_node)} works"
        ),
    ),
    Rule(
        "z · dp · micro_batch_size does not divide the global batch",
        lambda s: s.batch % s.at_once != 0,
        lambda run, s: (
            f"training.global_batch_size = {s.batch} is not a multiple of micro_batch_size × dp × z = {s.micro_batch} "
            f"× {s.dp} × {s.z} = {s.at_once}; global_batch_size = {round_to_multiple(s.batch, s.at_once)} works"
        ),
    ),
    Rule(
        "more stages (pp · stages_per_rank) than layers",
        lambda s: s.stages > s.layers,
        lambda run, s: (
            f"parallel.pp = {s.pp} with schedule '{run.parallel.schedule}' makes {s.stages} stages, but the model has "
            f"{s.layers} layers; pp = {max(1, s.layers * s.pp // s.stages)} works, and so does num_hidden_layers = "
            f"{s.stages}"
        ),
    ),
    Rule(
        "interleaved schedule: pp does not divide the micro-batches of a step",
        lambda s: s.in_rounds & (s.micro_batches % s.rounds != 0),
        lambda run, s: (
            f"parallel.schedule = '{run.parallel.schedule}' runs micro-batches in rounds of pp = {s.pp}, but a step "
            f"has {s.micro_batches} micro-batches; global_batch_size = "
            f"{round_to_multiple(s.micro_batches, s.pp) * s.at_once} works, and so does schedule = '1F1B'"
        ),
    ),
    Rule(
        "schedule with a split backward pass: z or zero is above 1",
        lambda s: s.split_backward & ((s.z > 1) | (s.zero > 1)),
        lambda run, s: (
            f"parallel.schedule = '{run.parallel.schedule}' computes weight gradients later, from weights that stay "
            f"whole until the step ends; it allows z = 1 with zero 0 or 1, but this grid has z = {s.z} and zero = "
            f"{s.zero}; schedule = '1F1B' or 'Interleaved1F1B' works"
        ),
    ),
    Rule(
        "DualPipeV: a step has fewer than 2 · pp micro-batches",
        lambda s: s.dual_pipe_v & (s.micro_batches < 2 * s.pp),
        lambda run, s: (
            f"parallel.schedule = 'DualPipeV' needs at least 2·pp = {2 * s.pp} micro-batches in a step, but there are "
            f"{s.micro_batches}; schedule = 'ZBVZeroBubble' or '1F1B' works"
        ),
    ),
    Rule(
        "ulysses: the query or key heads cannot be divided over cp, x, and y",
        lambda s: s.ulysses & (s.cp > 1) & s.uneven_heads,
        lambda run, s: (
            f"parallel.cp_method = 'ulysses': model.num_attention_heads = {s.heads} and num_key_value_heads = "
            f"{s.kv_heads} must be divisible by {s.head_ranks}, the number of ranks (over cp, x, and y) that share the "
            "heads; cp_method = 'ring' works"
        ),
    ),
    Rule(
        "ep splits experts, and the model has none",
        lambda s: (s.ep > 1) & (s.experts == 0),
        lambda run, s: f"parallel.ep = {s.ep} splits experts, but model.num_experts is 0; ep = 1 works",
    ),
    Divides(("ep",), "the experts", "experts", EXPERTS, "model.num_experts"),
    Divides(("x",), "the experts' width", "expert_inner", EXPERTS, "model.moe_intermediate_size"),
    Divides(
        ("x",), "the shared expert's width", "shared_inner", SHARED_EXPERT, "model.shared_expert_intermediate_size"
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
        "zero below 3: ep neither divides z nor is a multiple of z",
        lambda s: s.experts > 0 and (s.zero < 3) & (s.z % s.ep != 0) & (s.ep % s.z != 0),
        lambda run, s: (
            f"parallel.ep = {s.ep} must divide z = {s.z} or be a multiple of it, so that the processes of z with the "
            f"same experts share their weights; ep = {math.gcd(s.ep, s.z)} works, and so does zero = 3"
        ),
    ),
    Rule(
        f"batch parts are for {PLAIN}",
        lambda s: not s.is_plain and (s.batch_parts > 1) & (s.x * s.y > 1),
        lambda run, s: f"overlap.batch_parts = {s.batch_parts} is for {PLAIN}; batch_parts = 1 works",
    ),
    Rule(
        f"float8 is for {PLAIN}",
        lambda s: (not s.is_plain) & s.float8,
        lambda run, s: f"training.float8 = '{run.training.float8}' is for {PLAIN}; float8 = 'none' works",
    ),
    Rule(
        f"float8 needs multiples of {FLOAT8_MULTIPLE} features and tokens on every rank",
        lambda s: s.uneven_float8,
        lambda run, s: next(
            f"training.float8 = '{run.training.float8}': {what} = {size} must be a multiple of {FLOAT8_MULTIPLE} on "
            f"every rank, such as {round_to_multiple(size, FLOAT8_MULTIPLE)}; float8 = 'none' works"
            for what, size in s.float8_sizes.items()
            if size % FLOAT8_MULTIPLE
        ),
    ),
    Rule(
        "the sequence is longer than the position table",
        lambda s: (s.positions > 0) & (s.seq > s.positions),
        lambda run, s: (
            f"training.seq_length = {s.seq} is longer than the position table, which has "
            f"model.max_position_embeddings = {s.positions} entries; seq_length = {s.positions} works"
        ),
    ),
    Rule(
        "prediction layers need pp = 1 if embeddings are tied, and more tokens than prediction layers",
        lambda s: (s.predictions > 0) & ((s.seq <= s.predictions) | (s.tied & (s.pp > 1))),
        lambda run, s: (
            f"model.num_nextn_predict_layers = {s.predictions} does not work with "
            + (f"training.seq_length = {s.seq}" if s.seq <= s.predictions else f"{TIED} and parallel.pp = {s.pp}")
            + "; num_nextn_predict_layers = 0 works"
        ),
    ),
    Rule(
        "layers_per_stage needs a positive number for each stage, with the number of layers as their sum",
        lambda s: s.layers_per_stage is not None and not _is_split(s.layers_per_stage, s.stages, s.layers),
        lambda run, s: (
            f"parallel.layers_per_stage = {list(s.layers_per_stage or ())} must be {s.stages} positive numbers that "
            f"sum to {s.layers}; layers_per_stage = {list(balanced(s.layers, s.stages, 0.0, 0.0))} works"
        ),
    ),
)
"""Rules that a legal layout must satisfy. The error message is about the first rule that a layout breaks."""


def accepts(run: RunConfig, key: str, value: int) -> bool:
    """Return whether a run stays legal if one key (``section.key``) gets another value.

    The user may or may not have set the sizes that fourfold derives from the key, such as head_dim. So the run must be
    legal in both cases: if the derived sizes keep their values, and if they are derived again.
    """
    section, _, name = key.partition(".")
    table = run.model_dump()
    table[section][name] = value
    model = run.model
    derived = {"head_dim"} if model.head_dim * model.num_attention_heads == model.hidden_size else set[str]()
    derived |= {"query_pre_attn_scalar"} if model.query_pre_attn_scalar == model.head_dim else set()
    for dropped in (set[str](), derived):
        sizes_given = {k: v for k, v in table["model"].items() if k not in dropped}
        try:
            sizes = Sizes.of(RunConfig.model_validate(table | {"model": sizes_given}))
        except ValidationError:
            return False
        if any(rule.broken(sizes) for rule in RULES):
            return False
    return True


def _largest_divisor(number: int, most: int) -> int:
    """Return the largest divisor of ``number`` that is at most ``most``."""
    return next(divisor for divisor in range(min(number, most), 0, -1) if number % divisor == 0)


def _is_split(counts: tuple[int, ...], stages: Number, layers: int) -> bool:
    return bool(len(counts) == stages) and sum(counts) == layers and min(counts) >= 1
