"""Compute the order of a rank's operations in 1F1B, plain and interleaved (Narayanan et al., arXiv 2104.04473)."""

from __future__ import annotations

from fourfold.config.stages import FORWARDS_FIRST


def stage_order(stage: int, stages: int, micro_batches: int, interleave: int) -> list[tuple[int, int, bool]]:
    """Return (chunk, micro-batch, backward) for each operation of a rank, in the order of torch's lists. A chunk is one
    of the rank's ``interleave`` pipeline stages."""
    # With interleaving, a rank runs ``at_once`` micro-batches through one chunk before it continues with the next
    # chunk.
    total, at_once = micro_batches * interleave, micro_batches // max(micro_batches // stages, 1)
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
    """For each operation of a stage, in order, return whether it is a backward. The pipeline has stages · interleave
    stages. Use this function only for schedules that do not split the backward."""
    if schedule in FORWARDS_FIRST:
        return [False] * micro_batches + [True] * micro_batches
    chunk, rank = divmod(stage, stages)
    return [back for c, _, back in stage_order(rank, stages, micro_batches, interleave) if c == chunk]
