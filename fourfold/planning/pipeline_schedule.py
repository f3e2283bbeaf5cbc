"""When each stage of a pipeline computes what: 1F1B, plain and interleaved (Narayanan et al., arXiv 2104.04473)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fourfold.planning.machine import Number


@dataclass(frozen=True)
class Slot:
    """One forward or backward of a micro-batch through one chunk of a stage's layers; times in seconds."""

    stage: int
    chunk: int
    micro_batch: int
    backward: bool
    start: float
    end: float


def pipeline_slots(stages: int, micro_batches: int, interleave: int, forward: float, backward: float) -> list[Slot]:
    """Every slot, in order of its start. forward, backward: seconds of a stage's whole share of one micro-batch.

    Interleaving needs micro-batches in whole rounds. Sending takes no time here.
    """
    orders = [stage_order(stage, stages, micro_batches, interleave) for stage in range(stages)]
    last = stages * interleave - 1
    done: dict[tuple[int, int, bool], float] = {}
    free, at, slots = [0.0] * stages, [0] * stages, []
    while any(at[stage] < len(orders[stage]) for stage in range(stages)):
        moved = False
        for stage in range(stages):
            while at[stage] < len(orders[stage]):
                chunk, micro_batch, back = orders[stage][at[stage]]
                place = chunk * stages + stage
                needs = (place, micro_batch, False) if back and place == last else (
                    (place + 1, micro_batch, True) if back else (place - 1, micro_batch, False)
                )  # fmt: skip
                if needs[0] >= 0 and needs not in done:
                    break
                start = max(free[stage], done.get(needs, 0.0))
                end = start + (backward if back else forward) / interleave
                done[place, micro_batch, back] = free[stage] = end
                slots.append(Slot(stage, chunk, micro_batch, back, start, end))
                at[stage] += 1
                moved = True
        assert moved, "a schedule in which every stage waits for another"
    return sorted(slots, key=lambda slot: slot.start)


def bubble_share(slots: list[Slot]) -> float:
    """Share of all stages' time in which they wait."""
    stages = 1 + max(slot.stage for slot in slots)
    whole = max(slot.end for slot in slots) * stages
    return 1 - sum(slot.end - slot.start for slot in slots) / whole


def round_size(stages: Number, micro_batches: Number) -> Number:
    """Micro-batches that an interleaved schedule runs through a chunk before it turns to the next one."""
    return micro_batches // np.maximum(micro_batches // stages, 1)


def stage_order(stage: int, stages: int, micro_batches: int, interleave: int) -> list[tuple[int, int, bool]]:
    """(chunk, micro-batch, backward) in the order in which a rank runs them, as torch's lists have it."""
    total, at_once = micro_batches * interleave, int(round_size(stages, micro_batches))
    assert interleave == 1 or micro_batches % at_once == 0
    if interleave == 1:
        ahead = min(stages - stage - 1, total)
    else:
        ahead = min(2 * (stages - stage - 1) + (interleave - 1) * at_once, total)

    def place(step: int, back: bool) -> tuple[int, int, bool]:
        if interleave == 1:
            return (0, step, back)
        group, inside = divmod(step, at_once * interleave)
        chunk = inside // at_once
        return (interleave - 1 - chunk if back else chunk, group * at_once + inside % at_once, back)

    forwards, backwards = ([place(step, back) for step in range(total)] for back in (False, True))
    order = forwards[:ahead]
    for step in range(total - ahead):
        order += [forwards[ahead + step], backwards[step]]
    return order + backwards[total - ahead :]


def directions(schedule: str, stage: int, stages: int, micro_batches: int, interleave: int) -> list[bool]:
    """Of one stage (of stages · interleave) whether its operations are backwards, in their order; for the schedules
    that do not split the backward."""
    if schedule in ("GPipe", "LoopedBFS"):
        return [False] * micro_batches + [True] * micro_batches
    chunk, rank = divmod(stage, stages)
    return [back for c, _, back in stage_order(rank, stages, micro_batches, interleave) if c == chunk]
