"""Parse the limits of a search as the user writes them: ``x<=8``, ``pp=1,2``, ``recompute=full``."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from fourfold.errors import UserError
from fourfold.planning.search.space import LIMITED, PIPELINES, SearchLimits
from fourfold.planning.workload import RECOMPUTE

ON_REQUEST = (("GPipe", 1), ("LoopedBFS", 2), ("LoopedBFS", 4), ("DualPipeV", 2))
"""Schedules that are searched only if a limit names them, each with its number of stages per rank."""
EVERYTHING = SearchLimits(pipelines=(*PIPELINES, *ON_REQUEST))
"""No limits, and all schedules."""
CHOICE_OF: dict[str, tuple[str, Callable[[Any], str]]] = {
    "zero": ("zeros", str),
    "recompute": ("recomputes", lambda recompute: RECOMPUTE[recompute[0]]),
    "schedule": ("pipelines", lambda pipeline: str(pipeline[0])),
    "stages_per_rank": ("pipelines", lambda pipeline: str(pipeline[1])),
    "cp_method": ("cp_methods", str),
    "batch_parts": ("batch_parts", str),
}
"""Maps the name of each choice to two values: the field of ``SearchLimits`` that the choice restricts, and a function
that returns an entry of this field as text."""
CHOICES = {
    name: tuple(dict.fromkeys(map(text_of, getattr(EVERYTHING, field)))) for name, (field, text_of) in CHOICE_OF.items()
}
LARGEST_SIZE = 1 << 24
"""Largest size of an axis or of a micro-batch that a limit can name."""
SYNTAX = (
    "write it as x<=8 (only axes and ep), pp=1, micro_batch_size=1, batch_parts=2, zero=0, stages_per_rank=2, "
    "schedule=1F1B, cp_method=ring or recompute=full, or with several values, such as pp=1,2"
)


def parse_limits(settings: Sequence[str], option: str = "--limit") -> SearchLimits:
    """Parse the limits of a search.

    Args:
        settings: Limits, such as ``x<=8``.
        option: The option that the limits come from, for error messages.

    Raises:
        UserError: A setting is unknown, or settings contradict each other.
    """
    at_most: list[tuple[str, int]] = []
    fixed: list[tuple[str, tuple[int, ...]]] = []
    limits = EVERYTHING
    names = set()
    for setting in settings:
        sign = "<=" if "<=" in setting else "="
        name, _, text = setting.partition(sign)
        names.add(name)
        texts = text.split(",")
        try:
            if name in LIMITED and sign == "<=":
                at_most.append((name, _size(text)))
            elif name in (*LIMITED, "micro_batch_size") and sign == "=":
                fixed.append((name, tuple(map(_size, texts))))
            elif sign == "=" and set(texts) <= set(CHOICES.get(name, ())):
                field, text_of = CHOICE_OF[name]
                kept: Any = tuple(entry for entry in getattr(limits, field) if text_of(entry) in texts)
                limits = replace(limits, **{field: kept})
            else:
                raise ValueError(name)
        except ValueError:
            known = f"{name}= takes one of {', '.join(CHOICES[name])}" if name in CHOICES else SYNTAX
            raise UserError(f"{option} {setting}: {known}") from None
    written = " ".join(f"{option} {setting}" for setting in settings) or limits.written
    if "schedule" not in names:
        limits = replace(limits, pipelines=tuple(pipeline for pipeline in limits.pipelines if pipeline in PIPELINES))
    sizes = dict(fixed)
    contradicted = [name for name, most in at_most if min(sizes.get(name, (1,))) > most]
    contradicted += [name for name, given in fixed if sizes[name] != given]
    contradicted += [name for name, (field, _) in CHOICE_OF.items() if not getattr(limits, field)]
    if contradicted:
        names_of = ", ".join(dict.fromkeys(contradicted))
        raise UserError(f"{written}: these limits contradict each other ({names_of}); leave a limit out")
    if "micro_batch_size" in sizes:
        limits = replace(limits, micro_batches=sizes.pop("micro_batch_size"))
    return replace(limits, at_most=tuple(at_most), fixed=tuple(sizes.items()), written=written)


def _size(text: str) -> int:
    size = int(text)
    if not 1 <= size <= LARGEST_SIZE:
        raise ValueError(text)
    return size
