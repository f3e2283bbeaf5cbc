"""When each stage of a pipeline computes what: 1F1B, plain and interleaved (Narayanan et al., arXiv 2104.04473)."""

from __future__ import annotations

from dataclasses import dataclass


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

    Interleaving needs micro-batches in multiples of the stages. Sending takes no time here.
    """
    assert interleave == 1 or micro_batches % stages == 0
    orders = [_order(stage, stages, micro_batches, interleave) for stage in range(stages)]
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


def _order(stage: int, stages: int, micro_batches: int, interleave: int) -> list[tuple[int, int, bool]]:
    """(chunk, micro-batch, backward) in the order in which a stage runs them."""
    total = micro_batches * interleave
    if interleave == 1:
        ahead = min(stages - stage - 1, total)
    else:
        ahead = min(2 * (stages - stage - 1) + (interleave - 1) * stages, total)

    def place(step: int, back: bool) -> tuple[int, int, bool]:
        group, inside = divmod(step, stages * interleave)
        chunk = inside // stages
        return (interleave - 1 - chunk if back else chunk, group * stages + inside % stages, back)

    if interleave == 1:
        forwards = [(0, mb, False) for mb in range(total)]
        backwards = [(0, mb, True) for mb in range(total)]
    else:
        forwards = [place(step, False) for step in range(total)]
        backwards = [place(step, True) for step in range(total)]
    order = forwards[:ahead]
    for step in range(total - ahead):
        order += [forwards[ahead + step], backwards[step]]
    return order + backwards[total - ahead :]
