"""Write the section on memory: the errors of each source, and how well the planner predicts whether a run fits."""

from __future__ import annotations

from statistics import NormalDist

import numpy as np

from fourfold.planning.array_fields import stack
from fourfold.planning.calibration.rows import Row
from fourfold.planning.cost.memory import peak_memory
from fourfold.planning.cost.out_of_memory import CACHED, SPREAD, UNUSABLE, normal_share, runtime_bytes
from fourfold.planning.search.fastest import MAX_P_OUT_OF_MEMORY
from validation_page.cells import percent, table
from validation_page.memory_cases import CAPACITIES, FitCases, memory_cases

NOISE_OF_MEMORY = 0.12
"""Standard deviation of measured memory / predicted memory, for one row."""
CACHED_SPREAD = 0.05
"""Standard deviation of the prior in ``allocator_share``. The mean of the prior is ``UNUSABLE``."""


def memory_rows(rows: list[Row]) -> list[tuple[str, ...]]:
    """Return the rows of a table with the memory errors of each source. For each source, ``allocator_share`` is fitted
    to all other sources."""
    found, everything = [], []
    for source in dict.fromkeys(row.source for row in rows if row.memory_gb is not None):
        own = [row for row in rows if row.source == source and row.memory_gb is not None]
        share = allocator_share([row for row in rows if row.source != source])
        runtime, allocated, measured = memory_parts(own)
        errors = (runtime + allocated * (1 + share)) / measured - 1
        everything += errors.tolist()
        found.append((source, f"{len(own)}", f"{share:.3f}", percent(np.abs(errors).mean()), f"{errors.mean():+.1%}"))
    return [
        ("all", f"{len(everything)}", "", percent(np.abs(everything).mean()), f"{np.mean(everything):+.1%}"),
        *found,
    ]


def allocator_share(rows: list[Row]) -> float:
    """Estimate how many unused bytes the allocator caches, as a fraction of the allocated bytes. The estimate combines
    the rows with the prior ``UNUSABLE``."""
    runtime, allocated, measured = memory_parts([row for row in rows if row.memory_gb is not None])
    shares = np.clip((measured - runtime) / allocated - 1, -0.1, 0.4)
    return float(
        (UNUSABLE / CACHED_SPREAD**2 + shares.sum() / NOISE_OF_MEMORY**2)
        / (CACHED_SPREAD**-2 + len(shares) / NOISE_OF_MEMORY**2)
    )


def memory_coverage(rows: list[Row]) -> float:
    """Return the fraction of measured rows inside the 90 % interval of the predicted memory (``SPREAD``)."""
    runtime, allocated, measured = memory_parts([row for row in rows if row.memory_gb is not None])
    errors = np.abs(np.log(measured / (runtime + allocated * (1 + CACHED))))
    return float(np.mean(errors <= NormalDist().inv_cdf(0.95) * SPREAD))


def memory_parts(rows: list[Row]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return three arrays for rows with measured memory: the bytes of the runtime, the bytes that a step allocates, and
    the measured bytes."""
    work, machine = stack([row.work for row in rows]), stack([row.machine for row in rows])
    assert np.all(work.program.count_cached), "no published row counts tensors only"
    runtime = np.where(work.program.count_runtime, runtime_bytes(work, machine), 0)
    measured = np.array([row.memory_gb * 1e9 for row in rows if row.memory_gb is not None])
    return runtime, (peak_memory(work, machine) - runtime) / (1 + CACHED), measured


def misfits(rows: list[Row]) -> list[str]:
    """Return a section on how well the planner predicts whether a run fits, on the constructed cases."""
    cases = memory_cases(rows)
    found = [
        (f"{low:.0%} to {high:.0%}", f"{count}", percent(share)) for low, high, count, share in cases.reliability()
    ]
    (precision, recall), (careful, careful_recall) = cases.refused(0.5), cases.refused(MAX_P_OUT_OF_MEMORY)
    capacities = np.array(CAPACITIES)
    fits = np.asarray(normal_share(-np.log(capacities) / SPREAD))
    exact = FitCases(1 - fits, capacities >= 1).refused(MAX_P_OUT_OF_MEMORY)[0]
    margin = np.exp(NormalDist().inv_cdf(1 - MAX_P_OUT_OF_MEMORY) * SPREAD) - 1
    refused = [size for size in CAPACITIES if 1 <= size < 1 + margin]
    return [
        "Few published rows ran out of memory, so we construct cases. We put each of the "
        f"{sum(r.memory_gb is not None for r in rows)} runs with measured memory",
        f"on {len(CAPACITIES)} hypothetical devices, which have {CAPACITIES[0]:.0%} to {CAPACITIES[-1]:.0%} of "
        "the memory that the run needs. So we know which",
        "cases fit. For each case, the planner predicts the probability of running out of memory.",
        "",
        f"If the planner refused cases with a probability above 50 %, {percent(precision)} of the refused cases would",
        f"not fit, and it would refuse {percent(recall)} of the cases that do not fit.",
        "",
        "`fourfold plan` is more careful: it refuses a layout if the probability is above "
        f"{MAX_P_OUT_OF_MEMORY:.0%}. So it refuses {percent(careful_recall)}",
        f"of the cases that do not fit, but {percent(1 - careful)} of the refused cases would fit. Even with exact",
        f"predictions of memory, {percent(1 - exact)} of the refused cases would fit, because the planner keeps a",
        f"margin: it assumes that its predictions have a standard deviation of {SPREAD:.0%}, so it asks for "
        f"{margin:.0%} more",
        "memory than it predicts. With this margin, it refuses the devices that have "
        f"{' and '.join(f'{size:.0%}' for size in refused)} of the needed memory.",
        "",
        "The table groups the cases by the predicted probability that they fit. *Fit* is the share of cases that fit:",
        "",
        *table(("predicted to fit", "cases", "fit"), found),
        "",
    ]
