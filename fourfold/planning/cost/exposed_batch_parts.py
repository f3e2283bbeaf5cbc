"""Compute the exposed communication of blocks whose batch parts take turns. *Batch parts* are parts of a micro-batch.
*Exposed* communication is not hidden by computation. This module replays the events of the blocks, as ``fourfold
trace`` does.

The order of the events does not depend on how long they take. So the order is recorded once per kind of block
(``batch_part_events``), and then timed for many layouts together.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from fourfold.planning.array_fields import Flag, Number, unique_rows
from fourfold.planning.cost.batch_part_events import Event, Kind, events_of
from fourfold.planning.cost.batch_part_time import batch_part_time
from fourfold.planning.cost.block_time import norms_before
from fourfold.planning.cost.tensor_sizes import attention_over_y
from fourfold.planning.machines.constants import Constants
from fourfold.planning.machines.machine import Machine
from fourfold.planning.workload import Workload

KEY = (
    "x", "y", "cp", "micro_batch_size", "cp_method", "batch_parts", "recompute", "recompute_every", "schedule", "pp",
    "stages_per_rank",
)  # fmt: skip
"""Fields of a layout that the exposed communication of batch parts depends on."""


def waits(
    events: Sequence[Event], shares: Sequence[Number], times: Mapping[str, Number], slowed: Number
) -> dict[str, Number]:
    """Return how many seconds a block waits for collectives over x and over y, by the name of the axis. The seconds are
    a mean over all blocks. The module ``verification.exposure`` does the same for a trace.

    Collectives over the same axis run one after another. Collectives over different axes run concurrently.

    Args:
        events: The events of one or several blocks, in the order of execution.
        shares: For each of these blocks, the fraction of the model's blocks that it represents.
        times: Seconds of each event, by ``Event.what``.
        slowed: How much a hidden collective slows down the computation that hides it, as a fraction of the hidden
            seconds.
    """
    now: Number = 0.0
    computed: Number = 0.0
    free: dict[str, Number] = {"x": 0.0, "y": 0.0}
    waited: dict[str, Number] = {"x": 0.0, "y": 0.0}
    flying: dict[tuple[object, ...], tuple[Number, Number, Number]] = {}
    for kind, what, axis, block, flight in events:
        if kind == "compute":
            seconds = times[what]
            now, computed = now + seconds, computed + seconds
        elif kind == "issue":
            seconds = times[what]
            free[axis] = np.maximum(now, free[axis]) + seconds
            flying[flight] = free[axis], seconds, computed
        elif flight in flying:
            end, seconds, before = flying.pop(flight)
            wait = np.maximum(end - now, 0.0)
            wait = wait + slowed * np.minimum(np.maximum(seconds - wait, 0.0), computed - before)
            now = now + wait
            waited[axis] = waited[axis] + shares[block] * wait
    return waited


def exposed_batch_parts(work: Workload, machine: Machine, constants: Constants) -> tuple[Number, Number]:
    """Return the exposed seconds of one block's collectives over x and over y. Both are 0 for cases without batch
    parts."""
    if not np.any(work.active_parts > 1):
        return 0.0, 0.0
    layout = work.layout
    inputs = (work.model, work.step, work.program, machine, constants)
    varying = [v for cases in inputs for v in vars(cases).values() if isinstance(v, np.ndarray) and v.ndim]
    shape = np.broadcast_shapes(*(np.shape(value) for value in (*varying, *(getattr(layout, name) for name in KEY))))
    if not shape:
        x, y = _of_blocks(work.but(x=np.atleast_1d(layout.x)), machine, constants)
        return x[0], y[0]
    places = np.flatnonzero(np.broadcast_to(work.active_parts > 1, shape))
    work, machine, constants = work.take(places), machine.take(places), constants.take(places)
    first = back = np.arange(len(places))
    if not varying:
        first, back = unique_rows([np.broadcast_to(getattr(work.layout, name), back.shape) for name in KEY])
    exposed = np.zeros((2, *shape))
    exposed[:, places] = _of_blocks(work.take(first), machine.take(first), constants.take(first))[:, back]
    return exposed[0], exposed[1]


def _of_blocks(work: Workload, machine: Machine, constants: Constants) -> np.ndarray:
    """Return the exposed seconds of one block over x and over y [2, n], as a mean over blocks with and without
    recompute."""
    count = np.size(work.active_parts)
    share = np.where(np.greater(work.layout.recompute, 0), work.layout.recomputing, 1.0)
    share = np.broadcast_to(share, (count,))
    exposed: np.ndarray = share * _of_kinds(work, work.parts_cross_blocks, machine, constants)
    rest = np.flatnonzero(share < 1)
    if len(rest):
        others = work.take(rest)
        crosses, rates = others.parts_cross_blocks, (machine.take(rest), constants.take(rest))
        of_others = _of_kinds(others.but(recompute=0), crosses, *rates)
        exposed[:, rest] += (1 - share[rest]) * of_others
    return exposed


def _of_kinds(work: Workload, parts_cross_blocks: Flag, machine: Machine, constants: Constants) -> np.ndarray:
    """Return the exposed seconds of one block over x and over y [2, n]. All blocks of a case recompute as
    ``work.layout.recompute`` says."""
    times = batch_part_time(work, machine, constants)
    exposed = np.zeros((2, np.size(work.active_parts)))
    # Number of blocks per stage.
    blocks = work.model.num_hidden_layers / (work.layout.pp * work.layout.stages_per_rank)
    blocks = np.broadcast_to(blocks, (np.size(work.active_parts),))
    for kind, places in _kinds_of(work, parts_cross_blocks & (blocks >= 2)):
        few = 1 / blocks[places]
        shares = (few, 1 - 2 * few, few) if kind.parts_cross_blocks else (1.0,)
        of_kind = {what: np.broadcast_to(seconds, blocks.shape)[places] for what, seconds in times.items()}
        waited = waits(events_of(kind), shares, of_kind, constants.take(places).exposed)
        exposed[0, places], exposed[1, places] = waited["x"], waited["y"]
    return exposed


def _kinds_of(work: Workload, parts_cross_blocks: Flag) -> Iterator[tuple[Kind, np.ndarray]]:
    """Yield every kind of block, each with the indices of the cases that have blocks of this kind."""
    model, layout, program = work.model, work.layout, work.program
    columns = {
        "batch_parts": work.active_parts, "tokens": work.parts_are_tokens, "parts_cross_blocks": parts_cross_blocks,
        "x": np.greater(layout.x, 1), "y": np.greater(layout.y, 1), "overlap": program.overlap_x,
        "recompute": layout.recompute, "split_backward": layout.split_backward, "gate_first": program.gate_first,
        "gate": np.greater(model.gate_up, model.intermediate_size), "parallel_residual": model.parallel_residual,
        "norms_before": norms_before(model) > 0, "norms_after": model.output_norms,
        "whole_keys": attention_over_y(work) == "sequence", "attention_again": program.recomputes_attention,
        "activation_again": program.recomputes_mlp, "norms_again": program.recomputes_norms,
        "gathers_again": program.recomputes_gathers,
    }  # fmt: skip
    count = np.size(work.active_parts)
    each = {name: np.broadcast_to(column, (count,)).astype(int) for name, column in columns.items()}
    first, back = unique_rows(list(each.values()))
    for number, place in enumerate(first):
        kind: dict[str, Any] = {name: int(column[place]) for name, column in each.items()}
        yield Kind(**kind), np.flatnonzero(back == number)
