"""Limits of the search, as the command line writes them: ``x<=8``, ``pp=1``, ``recompute=full``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fourfold.errors import UserError
from fourfold.planning.search.space import AXES, PIPELINES, Limits
from fourfold.planning.workload import RECOMPUTE

ON_REQUEST = (("GPipe", 1), ("LoopedBFS", 2), ("LoopedBFS", 4), ("DualPipeV", 2))
"""Schedules that are searched only where a limit names them."""
CHOICES = {
    "zero": tuple(map(str, Limits().zeros)),
    "recompute": RECOMPUTE,
    "interleave": tuple(str(chunks) for chunks in sorted({chunks for _, chunks in PIPELINES})),
    "schedule": tuple(dict.fromkeys(name for name, _ in (*PIPELINES, *ON_REQUEST))),
    "cp_method": Limits().contexts,
}
"""Choices of each limit but those of sizes."""
LARGEST_SIZE = 1 << 24
SYNTAX = (
    "write it as x<=8 (axes alone), pp=1, micro_batch=1, zero=0, interleave=2, schedule=1F1B, cp_method=ring or "
    "recompute=full"
)


def parse_limits(settings: Sequence[str]) -> Limits:
    """Parse ``--limit`` settings; raises ``UserError`` for one that is unknown, and where two contradict each other."""
    at_most: list[tuple[str, int]] = []
    fixed: list[tuple[str, int]] = []
    limits = Limits(pipelines=(*PIPELINES, *ON_REQUEST))
    names = set()
    for setting in settings:
        sign = "<=" if "<=" in setting else "="
        name, _, text = setting.partition(sign)
        names.add(name)
        try:
            if name in AXES:
                (at_most if sign == "<=" else fixed).append((name, _size(text)))
            elif name == "micro_batch" and sign == "=":
                fixed.append((name, _size(text)))
            elif sign == "=" and text in CHOICES.get(name, ()):
                limits = _restricted(limits, name, text)
            else:
                raise ValueError(name)
        except ValueError:
            known = f"{name}= takes one of {', '.join(CHOICES[name])}" if name in CHOICES else SYNTAX
            raise UserError(f"--limit {setting}: {known}") from None
    if "schedule" not in names:
        limits = replace(limits, pipelines=tuple(pipeline for pipeline in limits.pipelines if pipeline in PIPELINES))
    sizes = dict(fixed)
    choices = {"zero": limits.zeros, "recompute": limits.recomputes, "cp_method": limits.contexts,
               "schedule, interleave": limits.pipelines}  # fmt: skip
    contradicted = [name for name, most in at_most if sizes.get(name, 1) > most]
    contradicted += [name for name, size in fixed if sizes[name] != size]
    contradicted += [name for name, left in choices.items() if not left]
    if contradicted:
        given = " --limit ".join(settings)
        raise UserError(f"--limit {given}: these limits contradict each other ({contradicted[0]}); leave one out")
    if "micro_batch" in sizes:
        limits = replace(limits, micro_batches=(sizes.pop("micro_batch"),))
    return replace(limits, at_most=tuple(at_most), fixed=tuple(sizes.items()))


def _restricted(limits: Limits, name: str, text: str) -> Limits:
    """``limits`` with one of ``CHOICES``."""
    if name == "zero":
        return replace(limits, zeros=tuple(zero for zero in limits.zeros if str(zero) == text))
    if name == "recompute":
        return replace(limits, recomputes=tuple(mode for mode in limits.recomputes if RECOMPUTE[mode[0]] == text))
    if name == "cp_method":
        return replace(limits, contexts=tuple(method for method in limits.contexts if method == text))
    part = ("schedule", "interleave").index(name)
    return replace(limits, pipelines=tuple(pipeline for pipeline in limits.pipelines if str(pipeline[part]) == text))


def _size(text: str) -> int:
    size = int(text)
    if not 1 <= size <= LARGEST_SIZE:
        raise ValueError(text)
    return size
