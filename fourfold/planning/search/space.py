"""List all layouts for a number of GPUs as arrays, and determine which of them are illegal, and why."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np

from fourfold.config.layout_sizes import Sizes
from fourfold.config.legality import RULES
from fourfold.errors import UserError
from fourfold.planning.machines.machine import Machine
from fourfold.planning.workload import CP_METHODS, SCHEDULES, Workload

AXES = ("x", "y", "z", "dp", "cp", "pp")
LIMITED = (*AXES, "ep")
"""Axes whose size can be limited. The expert axis ep uses the ranks of dp, cp, and z."""
MOST_GPUS = 1 << 24
"""Largest number of GPUs to plan for. With more GPUs, sizes could overflow the search's 32-bit integers."""
MICRO_BATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
"""Micro-batch sizes to try."""
PIPELINES = (
    ("1F1B", 1),
    *(("Interleaved1F1B", chunks) for chunks in (2, 3, 4, 6, 8)),
    *(("InterleavedZeroBubble", chunks) for chunks in (2, 4)),
    ("ZBVZeroBubble", 2),
)
"""Schedules that the search tries, each with its number of stages per rank. Three other schedules are tried only if a
limit names them. GPipe and LoopedBFS are no faster than 1F1B and need more memory. DualPipeV is like ZBVZeroBubble."""
RECOMPUTES = ((0, 1, False), (1, 1, False), (2, 1, False), (2, 2, False), (2, 4, False), (2, 1, True))
"""Recompute choices to try. Each has a mode (an index into ``workload.RECOMPUTE``), ``recompute_every``, and
``offload``."""
BATCH_PARTS = (1, 2, 4)
"""Counts of batch parts to try."""

REASONS = (
    "legal",
    *(rule.reason for rule in RULES),
    "offload: the machine file does not say how fast the host's memory is",
    "too likely to run out of memory",
)
"""Reasons to refuse a point (one layout of the search). A point stores the index of the first reason that applies."""
NO_OFFLOAD, OUT_OF_MEMORY = len(REASONS) - 2, len(REASONS) - 1
CHUNK = 1 << 15
"""Number of points that are evaluated at once, so that their arrays fit into the CPU's cache."""


@dataclass(frozen=True)
class SearchLimits:
    """Limits of a search. ``at_most`` lists axes with their largest sizes, and ``fixed`` lists axes with their allowed
    sizes. All other fields list the values to try."""

    at_most: tuple[tuple[str, int], ...] = ()
    fixed: tuple[tuple[str, int | tuple[int, ...]], ...] = ()
    zeros: tuple[int, ...] = (0, 1, 2, 3)
    recomputes: tuple[tuple[int, int, bool], ...] = RECOMPUTES
    micro_batches: tuple[int, ...] = MICRO_BATCHES
    pipelines: tuple[tuple[str, int], ...] = PIPELINES
    cp_methods: tuple[str, ...] = ("ring", "ulysses")
    batch_parts: tuple[int, ...] = BATCH_PARTS
    written: str = field(default="the limits of the search", compare=False)
    """The options that set these limits, for error messages."""


def all_grids(base: Workload, gpus: int, limits: SearchLimits) -> dict[str, np.ndarray]:
    """Return all grids of ``gpus`` GPUs within the limits, as columns [n]. Each grid is combined with every micro-batch
    size, and in models with experts also with every ep.

    Raises:
        UserError: There is a limit on ep, but the model has no experts.
    """
    axes = factorisations(gpus, len(AXES)).astype(np.int32)
    columns = {name: axes[:, i] for i, name in enumerate(AXES)}
    if experts := int(base.model.num_experts):
        columns = _crossed(columns, {"ep": [n for n in range(1, experts + 1) if experts % n == 0]})
        columns = _kept(columns, columns["dp"] * columns["cp"] * columns["z"] % columns["ep"] == 0)
    elif "ep" in dict((*limits.at_most, *limits.fixed)):
        raise UserError(f"{limits.written}: ep needs a model with experts; leave ep out")
    for name, most in limits.at_most:
        columns = _kept(columns, columns[name] <= most)
    for name, sizes in limits.fixed:
        columns = _kept(columns, np.isin(columns[name], sizes))
    return _crossed(columns, {"micro_batch_size": limits.micro_batches})


def choices_of(base: Workload, grids: dict[str, np.ndarray], limits: SearchLimits) -> Workload:
    """Return ``base`` with every combination of a grid, a pipeline schedule, a context-parallel method, and a ZeRO
    stage. All layouts have the first number of batch parts in ``limits`` (1 if x = y = 1).

    Recompute modes are added later, because no rule of legality depends on them.
    """
    columns = grids
    pipelines = [(SCHEDULES.index(schedule), chunks) for schedule, chunks in limits.pipelines]
    columns = _crossed(columns, {"schedule": [s for s, _ in pipelines], "stages_per_rank": [c for _, c in pipelines]})
    # If a choice has no effect on a grid, keep only one of its values. For example, without a pipeline, all schedules
    # are equal.
    first = (columns["schedule"] == pipelines[0][0]) & (columns["stages_per_rank"] == pipelines[0][1])
    columns = _kept(columns, (columns["pp"] > 1) | first)
    alone = columns["pp"] == 1
    columns["schedule"][alone], columns["stages_per_rank"][alone] = 0, 1
    columns = _crossed(columns, {"cp_method": [CP_METHODS.index(name) for name in limits.cp_methods]})
    columns = _kept(columns, (columns["cp"] > 1) | (columns["cp_method"] == CP_METHODS.index(limits.cp_methods[0])))
    columns = _crossed(columns, {"zero": limits.zeros})
    copies = columns["dp"] * columns["cp"] > 1
    columns = _kept(columns, (columns["zero"] == min(limits.zeros)) | copies)
    parts = np.broadcast_to(np.int32(limits.batch_parts[0]), columns["x"].shape)
    if limits.batch_parts[0] > 1:
        parts = np.where(columns["x"] * columns["y"] > 1, parts, np.int32(1))
    return base.but(**columns, batch_parts=parts, recompute=0, recompute_every=1, offload=False, layers_per_stage=None)


def with_recomputes(choices: Workload, limits: SearchLimits) -> Workload:
    """Return all combinations of a layout in ``choices`` and a recompute choice of the limits."""
    columns = {name: column for name, column in vars(choices.layout).items() if isinstance(column, np.ndarray)}
    modes, everies, offloads = zip(*limits.recomputes, strict=True)
    columns = _crossed(columns, {"recompute": modes, "recompute_every": everies, "offload": offloads})
    return choices.but(**columns)


def refused_grids(
    base: Workload, grids: dict[str, np.ndarray], limits: SearchLimits, machine: Machine
) -> tuple[np.ndarray, np.ndarray]:
    """Find the grids that are illegal with every combination of the other choices, such as the schedule, the ZeRO
    stage, and the recompute mode.

    Returns:
        Two arrays with one entry per grid [n]. The first array says why all layouts of the grid are illegal, as an
        index into ``REASONS``. 0 means that some layouts of the grid may be legal. The second array is the number of
        the grid's layouts.
    """
    # These choices break the fewest rules, so a grid that is illegal with them is illegal with any choices. They
    # include ZeRO-3, because ZeRO-0, 1, and 2 need an ep that divides z or is a multiple of z.
    simplest = base.but(**grids, schedule=0, stages_per_rank=1, zero=3, recompute=0, offload=False, cp_method=0,
                        batch_parts=1, shards_per_node=1, layers_per_stage=None)  # fmt: skip
    copies = grids["dp"] * grids["cp"] > 1
    layouts = np.where(grids["pp"] > 1, len(limits.pipelines), 1) * np.where(grids["cp"] > 1, len(limits.cp_methods), 1)
    return rejections(simplest, machine), layouts * np.where(copies, len(limits.zeros), 1) * len(limits.recomputes)


def rejections(work: Workload, machine: Machine) -> np.ndarray:
    """Return why each point is refused, as indices into ``REASONS`` [n]. 0 means legal. Memory is not checked."""
    count = np.size(work.layout.x)
    if count > CHUNK:
        chunks = [rejections(work.take(slice(at, at + CHUNK)), machine) for at in range(0, count, CHUNK)]
        return np.concatenate(chunks)
    sizes = _sizes(work)
    broken = [rule.broken(sizes) for rule in RULES]
    broken.append(np.asarray(work.layout.offload, bool) & (machine.host == 0))
    reason = np.zeros(count, dtype=np.uint8)
    for index, mask in reversed(list(enumerate(broken, start=1))):
        reason[np.broadcast_to(mask, reason.shape)] = index
    return reason


def _sizes(work: Workload) -> Sizes:
    model, layout, step = work.model, work.layout, work.step
    numbers = (model.queries, model.keys, model.hidden_size, model.intermediate_size, model.padded_vocab_size,
               model.positions, step.seq_length, step.global_batch_size)  # fmt: skip
    # Compute with 32-bit integers if all sizes fit into 32 bits, because these integers are faster.
    bits = np.int32 if max(int(np.max(number)) for number in numbers) < 2**31 else np.int64
    x, y, z, dp, cp, pp = (np.asarray(getattr(layout, axis), bits) for axis in AXES)
    # The rules are written for one layout at a time, but their operators also work on arrays.
    sizes: dict[str, Any] = {
        "layers": model.num_hidden_layers - model.predictions, "hidden": model.hidden_size,
        "heads": model.queries // model.head_dim, "kv_heads": model.keys // model.head_dim,
        "head_dim": model.head_dim, "inner": model.intermediate_size, "vocab": model.padded_vocab_size,
        "positions": model.positions, "seq": step.seq_length, "batch": step.global_batch_size,
        "float8": step.bits == 8, "experts": model.num_experts, "expert_inner": model.moe_intermediate_size,
        "shared_inner": model.shared_expert_intermediate_size,
        "latents": math.gcd(*(int(width) for width in (model.q_latent, model.kv_latent, model.shared_key))),
        "linear_heads": model.linear_num_key_heads, "output_gate": model.output_gate,
        "predictions": model.predictions, "tied": model.tie_word_embeddings,
        "x": x, "y": y, "z": z, "dp": dp, "cp": cp, "pp": pp, "ep": layout.ep, "zero": layout.zero,
        # The rules multiply this number by other sizes, and the result can overflow 32 bits.
        "micro_batch": np.asarray(layout.micro_batch_size, np.int64),
        "batch_parts": work.layout.batch_parts,
        "shards_per_node": work.program.shards_per_node,
        "stages": layout.pp * layout.stages_per_rank,
        "in_rounds": layout.in_rounds,
        "split_backward": layout.split_backward,
        "dual_pipe_v": np.equal(layout.schedule, SCHEDULES.index("DualPipeV")) & (layout.pp > 1),
        "ulysses": np.equal(layout.cp_method, CP_METHODS.index("ulysses")),
    }  # fmt: skip
    return Sizes(**sizes)


def refusal(work: Workload, machine: Machine) -> str:
    """Return the reason why a single layout is illegal, or an empty text if it is legal."""
    reason = int(rejections(work, machine)[0])
    return REASONS[reason] if reason else ""


@cache
def factorisations(number: int, parts: int) -> np.ndarray:
    """Return all ways to write ``number`` as an ordered product of ``parts`` factors, [n, parts]."""
    if parts == 1:
        return np.array([[number]])
    rows = []
    for first in (d for d in range(1, number + 1) if number % d == 0):
        rest = factorisations(number // first, parts - 1)
        rows.append(np.column_stack([np.full(len(rest), first), rest]))
    return np.concatenate(rows)


def _crossed(columns: dict[str, np.ndarray], more: Mapping[str, Sequence[int]]) -> dict[str, np.ndarray]:
    """Return columns with all combinations of a row of ``columns`` and a row of ``more``."""
    count, times = len(next(iter(columns.values()))), len(next(iter(more.values())))
    crossed = {key: np.repeat(column, times) for key, column in columns.items()}
    for key, values in more.items():
        narrow = bool if isinstance(values[0], bool) else np.int32
        crossed[key] = np.tile(np.array(values, dtype=narrow), count)
    return crossed


def _kept(columns: dict[str, np.ndarray], mask: np.ndarray) -> dict[str, np.ndarray]:
    return {key: column[mask] for key, column in columns.items()}
