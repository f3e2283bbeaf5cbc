"""Decide which layouts are legal. Run files and the planner's search use the same list of rules, ``legality.toml``.

Each condition is arithmetic on ``Sizes``, whose fields are ints for one layout and NumPy arrays for many layouts.
"""

import math
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, NamedTuple

from pydantic import ValidationError

from fourfold.config.expected_values import round_to_multiple
from fourfold.config.layout_sizes import FLOAT8_MULTIPLE, Number, Sizes
from fourfold.config.run import RunConfig
from fourfold.config.stages import balanced


class Condition(NamedTuple):
    """The arithmetic of a rule."""

    broken: Callable[[Sizes], Number]
    values: Callable[[Any], dict[str, object]] = lambda s: {}
    """Computes values for the error message from the ``Sizes`` of one run (which are ints). ``works`` is the nearest
    value that works."""


class Rule(NamedTuple):
    """A rule that legal layouts obey, and the reason to give if a layout breaks it."""

    reason: str
    """A short text without numbers, such as "x does not divide the heads". The planner's search counts how many layouts
    each rule refuses."""
    text: str
    """The error message for one run, with placeholders."""
    condition: Condition

    def broken(self, sizes: Sizes) -> Number:
        return self.condition.broken(sizes)

    def sentence(self, run: RunConfig, sizes: Sizes) -> str:
        return self.text.format(run=run, s=sizes, **self.condition.values(sizes))


@dataclass(frozen=True)
class Divides:
    """A rule that the product of some axes' sizes must divide a number. The class has the attributes of a ``Rule``."""

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
        """Suggest a size of the axis that satisfies this rule. The run may break other rules too."""
        number, others = getattr(sizes, self.number), self._ranks(sizes) // getattr(sizes, axis)
        most = next(n for n in range(getattr(sizes, axis), 0, -1) if number % (others * n) == 0 or n == 1)
        return f"{axis} = {most} works here, and other rules are broken too"

    def _other_sizes(self, run: RunConfig, sizes: Sizes, axis: str) -> str:
        """Return the nearest sizes of an axis that make the run legal, as text. Empty if there are none."""
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


PLAIN = "dense models with neither latent, linear, nor gated attention, and without multi-token prediction"

CONDITIONS: dict[str, Condition] = {
    "2 · cp does not divide the sequence": Condition(
        lambda s: (s.cp > 1) & (s.seq % (2 * s.cp) != 0),
        lambda s: {"chunks": 2 * s.cp, "works": round_to_multiple(s.seq, 2 * s.cp)},
    ),
    "with cp above 1, x · y does not divide the heads, and y does not divide the micro-batch": Condition(
        lambda s: s.splits_queries & (s.cp > 1),
        lambda s: {"xy": s.x * s.y, "works": round_to_multiple(s.micro_batch, s.y)},
    ),
    "x · y does not divide the heads, and y divides neither the micro-batch nor the sequence": Condition(
        lambda s: s.splits_queries & (s.seq % s.y != 0),
        lambda s: {"xy": s.x * s.y, "works": round_to_multiple(s.seq, s.x * s.y)},
    ),
    "linear attention: x · y does not divide the heads, and y does not divide the micro-batch": Condition(
        lambda s: s.linear_heads > 0 and s.splits_queries,
        lambda s: {"xy": s.x * s.y, "works": round_to_multiple(s.micro_batch, s.y)},
    ),
    "batch_parts divides neither the micro-batch nor its tokens": Condition(
        lambda s: (
            (s.x * s.y > 1)
            & (s.micro_batch % s.batch_parts != 0)
            & ((s.seq // (s.cp * s.x) % s.batch_parts != 0) | s.splits_queries)
        ),
        lambda s: {"what": _unsplit_parts(s), "works": _largest_divisor(s.micro_batch, s.batch_parts)},
    ),
    "shards_per_node neither divides the size of a shard group nor is a multiple of it": Condition(
        lambda s: s.uneven_nodes,
        lambda s: {
            "sizes": f"z = {s.z}" + (f", dp·cp·z = {s.token_ranks}" if s.zero else ""),
            "works": _largest_divisor(s.z, s.shards_per_node),
        },
    ),
    "z · dp · micro_batch_size does not divide the global batch": Condition(
        lambda s: s.batch % s.at_once != 0, lambda s: {"works": round_to_multiple(s.batch, s.at_once)}
    ),
    "more stages (pp · stages_per_rank) than layers": Condition(
        lambda s: s.stages > s.layers, lambda s: {"works": max(1, s.layers * s.pp // s.stages)}
    ),
    "interleaved schedule: pp does not divide the micro-batches of a step": Condition(
        lambda s: s.in_rounds & (s.micro_batches % s.rounds != 0),
        lambda s: {"works": round_to_multiple(s.micro_batches, s.pp) * s.at_once},
    ),
    "schedule with a split backward pass: z or zero is above 1": Condition(
        lambda s: s.split_backward & ((s.z > 1) | (s.zero > 1))
    ),
    "DualPipeV: a step has fewer than 2 · pp micro-batches": Condition(
        lambda s: s.dual_pipe_v & (s.micro_batches < 2 * s.pp), lambda s: {"least": 2 * s.pp}
    ),
    "ulysses: the query or key heads cannot be divided over cp, x, and y": Condition(
        lambda s: s.ulysses & (s.cp > 1) & s.uneven_heads
    ),
    "ep splits experts, and the model has none": Condition(lambda s: (s.ep > 1) & (s.experts == 0)),
    "ep does not divide dp · cp · z": Condition(
        lambda s: s.experts > 0 and s.token_ranks % s.ep != 0, lambda s: {"works": math.gcd(s.ep, s.token_ranks)}
    ),
    "zero below 3: ep neither divides z nor is a multiple of z": Condition(
        lambda s: s.experts > 0 and (s.zero < 3) & (s.z % s.ep != 0) & (s.ep % s.z != 0),
        lambda s: {"works": math.gcd(s.ep, s.z)},
    ),
    f"batch parts are for {PLAIN}": Condition(lambda s: not s.is_plain and (s.batch_parts > 1) & (s.x * s.y > 1)),
    f"float8 is for {PLAIN}": Condition(lambda s: (not s.is_plain) & s.float8),
    f"float8 needs multiples of {FLOAT8_MULTIPLE} features and tokens on every rank": Condition(
        lambda s: s.uneven_float8, lambda s: _uneven_float8_size(s)
    ),
    "the sequence is longer than the position table": Condition(lambda s: (s.positions > 0) & (s.seq > s.positions)),
    "layers_per_stage needs a positive number for each stage, with the number of layers as their sum": Condition(
        lambda s: s.layers_per_stage is not None and not _is_split(s.layers_per_stage, s.stages, s.layers),
        lambda s: {
            "given": list(s.layers_per_stage or ()),
            "works": list(balanced(s.layers, s.stages, 0.0, 0.0)),
        },
    ),
}
"""The conditions of the rules that are not ``Divides``, by reason."""


def _read_rules() -> tuple[Divides | Rule, ...]:
    table = tomllib.loads((files("fourfold.config") / "legality.toml").read_text(encoding="utf-8"))
    return tuple(
        Divides(**{**rule, "axes": tuple(rule["axes"])})
        if "axes" in rule
        else Rule(rule["reason"], rule["sentence"], CONDITIONS[rule["reason"]])
        for rule in table["rules"]
    )


RULES = _read_rules()
"""Rules that a legal layout must satisfy. The error message is about the first rule that a layout breaks."""
assert {rule.reason for rule in RULES} >= set(CONDITIONS), "every condition has a rule in legality.toml"


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


def _unsplit_parts(s: Any) -> str:
    """Return the beginning of the sentence about ``batch_parts``. It says what cannot be split."""
    if s.splits_queries:
        return f"training.micro_batch_size = {s.micro_batch} cannot be split into"
    return (
        f"neither training.micro_batch_size = {s.micro_batch} nor a rank's {s.seq // (s.cp * s.x)} tokens of a "
        f"sequence (over cp·x = {s.cp * s.x}) can be split into"
    )


def _uneven_float8_size(s: Any) -> dict[str, object]:
    what, size = next((what, size) for what, size in s.float8_sizes.items() if size % FLOAT8_MULTIPLE)
    return {"what": what, "size": size, "works": round_to_multiple(size, FLOAT8_MULTIPLE)}


def _is_split(counts: tuple[int, ...], stages: Number, layers: int) -> bool:
    return bool(len(counts) == stages) and sum(counts) == layers and min(counts) >= 1
