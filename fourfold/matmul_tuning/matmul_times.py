"""Time a linear layer's matmuls with all memory layouts, and choose layouts whose gain is larger than the noise. A
layout is the memory order in which the weight is stored, and the operands that a matmul copies before it runs.

Timings are noisy, so the fastest of many layouts is often just the luckiest. Therefore layouts are timed in rounds, and
each round times every layout once. The first rounds only nominate layouts: one for each matmul and each memory order of
the weight. Later rounds time the nominees and the default layout, which copies no operand. Only the later rounds
determine the choice.
"""

import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from fourfold.config.layout import MatmulSizes
from fourfold.heartbeat import doing
from fourfold.matmul_tuning.matmul_table import Gain, TunedLayer
from fourfold.parallel.tensor.matmul_layouts import Copies, LaidOutMatmuls, LayerLayout

LEAST_GAIN = 1.02
"""A layout is chosen only if it is faster than the default by this factor in about three quarters
of the rounds (the lower quartile of the ratios)."""

HOPELESS = 1.1
"""If a layout that copies operands is slower than the default by this factor in the first round, it is not timed
again."""

NOMINATING_ROUNDS = 3
DECIDING_SECONDS, FEWEST_ROUNDS, MOST_ROUNDS = 1.0, 7, 21
LEAST_SECONDS = 2e-3
"""A matmul is repeated for at least this number of seconds. Then the clock's resolution and a GPU's launch times hardly
affect the result."""

_WEIGHT_COPIES = (
    Copies(), Copies(right="turned"), Copies(right="padded"), Copies(right="turned and padded"), Copies(left="padded"),
)  # fmt: skip
COPIES_TO_TRY = {
    "output": _WEIGHT_COPIES,
    "input_gradient": _WEIGHT_COPIES,
    "weight_gradient": (
        Copies(), Copies(left="turned"), Copies(right="turned"), Copies(left="turned and padded"),
        Copies(right="turned and padded"), Copies(left="padded", right="padded"),
    ),
}  # fmt: skip
"""For each matmul, the ways to copy its operands that ``tune_layer`` tries. The first way copies nothing."""

K = TypeVar("K", bound=Hashable)


class Candidate(NamedTuple):
    """A way to compute a matmul. ``turned`` says whether the weight is stored transposed, and ``copies`` says which
    operands are copied first."""

    turned: bool
    copies: Copies


AS_STORED = Candidate(False, Copies())
Ratios = tuple[float, float, float]
"""Speed of a candidate relative to the default layout: the lower quartile, the median, and the upper quartile over the
rounds."""


class Chosen(NamedTuple):
    """The best way to copy the operands of one matmul, for one memory order of the weight."""

    copies: Copies
    ratios: Ratios


def tune_layer(sizes: MatmulSizes, dtype: torch.dtype, device: torch.device) -> TunedLayer:
    """Time the three matmuls of a linear layer with these sizes, and return the chosen layouts with their gains."""
    doing(f"timing matmuls of {sizes.tokens} × {sizes.outputs} × {sizes.inputs}")
    seconds, by_matmul = {}, {}
    for matmul in COPIES_TO_TRY:
        seconds[matmul], by_matmul[matmul] = _tune_matmul(matmul, sizes, dtype, device)
    turned = _turning_pays(seconds, by_matmul)
    chosen = {matmul: both[turned] for matmul, both in by_matmul.items()}
    others = sum(seconds[matmul] / both[not turned].ratios[1] for matmul, both in by_matmul.items())
    return TunedLayer(
        layout=LayerLayout(turned=turned, **{matmul: each.copies for matmul, each in chosen.items()}),
        gains={
            matmul: Gain(seconds=seconds[matmul], low=each.ratios[0], gain=each.ratios[1], high=each.ratios[2])
            for matmul, each in chosen.items()
        },
        other_order=sum(seconds.values()) / others,
    )


def _turning_pays(seconds: dict[str, float], by_matmul: dict[str, dict[bool, Chosen]]) -> bool:
    """Return whether the layer is faster with a transposed weight. This must be true for a step that computes the
    output once, and also for a step with recompute, which computes the output twice."""

    def layer_seconds(turned: bool, outputs: int, quartile: int) -> float:
        times = {matmul: seconds[matmul] / both[turned].ratios[quartile] for matmul, both in by_matmul.items()}
        return sum(times.values()) + (outputs - 1) * times["output"]

    return all(layer_seconds(True, n, quartile=0) * LEAST_GAIN < layer_seconds(False, n, quartile=1) for n in (1, 2))


def _tune_matmul(
    matmul: str, sizes: MatmulSizes, dtype: torch.dtype, device: torch.device
) -> tuple[float, dict[bool, Chosen]]:
    """Time one matmul with all layouts.

    Returns:
        The seconds with the default layout, and the best way to copy the operands for each memory order of the weight.
        The key True stands for a transposed weight.
    """
    candidates = [Candidate(turned, copies) for turned in (False, True) for copies in COPIES_TO_TRY[matmul]]
    calls = matmul_calls(matmul, candidates, sizes, dtype, device)
    times = seconds_in_rounds(calls, 1, device)
    kept = [c for c in candidates if c.copies == Copies() or times[c][0] < HOPELESS * times[AS_STORED][0]]
    times = seconds_in_rounds({each: calls[each] for each in kept}, NOMINATING_ROUNDS, device)
    medians = {candidate: statistics.median(each) for candidate, each in times.items()}
    nominated = {turned: _nominee(medians, turned) for turned in (False, True)}
    finalists = list(dict.fromkeys([AS_STORED, *nominated.values()]))
    rounds = math.ceil(DECIDING_SECONDS / (medians[AS_STORED] * len(finalists)))
    rounds = min(max(rounds, FEWEST_ROUNDS), MOST_ROUNDS)
    times = seconds_in_rounds({each: calls[each] for each in finalists}, rounds, device)
    chosen = {turned: Chosen(each.copies, _ratios(times, each)) for turned, each in nominated.items()}
    if chosen[False].ratios[0] < LEAST_GAIN:
        chosen[False] = Chosen(Copies(), (1.0, 1.0, 1.0))
    # Take the minimum over rounds, because other programs only make a round slower.
    return min(times[AS_STORED]), chosen


def _nominee(medians: dict[Candidate, float], turned: bool) -> Candidate:
    """Return the fastest candidate for one memory order of the weight.

    If the candidate without copies is only slightly slower, return the candidate without copies instead.
    """
    plain = Candidate(turned, Copies())
    best = min((candidate for candidate in medians if candidate.turned == turned), key=medians.__getitem__)
    return best if medians[best] * LEAST_GAIN < medians[plain] else plain


def _ratios(times: dict[Candidate, list[float]], candidate: Candidate) -> Ratios:
    ratios = [base / own for base, own in zip(times[AS_STORED], times[candidate], strict=True)]
    low, median, high = statistics.quantiles(ratios, n=4)
    return low, median, high


def matmul_calls(
    matmul: str, candidates: Iterable[Candidate], sizes: MatmulSizes, dtype: torch.dtype, device: torch.device
) -> dict[Candidate, Callable[[], Tensor]]:
    """Return one function per candidate. Each function computes the matmul on random operands."""
    generator = torch.Generator(device).manual_seed(0)

    def random(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=generator, device=device).to(dtype)

    x, grad = random(sizes.tokens, sizes.inputs), random(sizes.tokens, sizes.outputs)
    weights = {False: random(sizes.outputs, sizes.inputs), True: random(sizes.inputs, sizes.outputs).T}

    def call(turned: bool, copies: Copies) -> Callable[[], Tensor]:
        matmuls, weight = LaidOutMatmuls(LayerLayout(turned=turned, **{matmul: copies})), weights[turned]
        if matmul == "weight_gradient":
            return lambda: matmuls.weight_gradient(grad, x)
        if matmul == "input_gradient":
            return lambda: matmuls.input_gradient(grad, weight)
        return lambda: matmuls.output(x, weight)

    return {candidate: call(*candidate) for candidate in candidates}


def seconds_in_rounds(
    calls: Mapping[K, Callable[[], object]], rounds: int, device: torch.device
) -> dict[K, list[float]]:
    """Return the seconds of each call in each round. A round makes every call once, and each round starts with a
    different call."""
    times: dict[K, list[float]] = {name: [] for name in calls}
    turns = deque(calls)
    calls[turns[0]]()
    for _ in range(rounds):
        for name in turns:
            times[name].append(_seconds(calls[name], device))
        turns.rotate()
    return times


def _seconds(call: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of one call, averaged over enough calls to fill ``LEAST_SECONDS``."""
    timed = gpu_seconds if device.type == "cuda" else _cpu_seconds
    once = timed(call, 1)
    repetitions = math.ceil(LEAST_SECONDS / max(once, 1e-7))
    return timed(call, repetitions) / repetitions if repetitions > 1 else once


def _cpu_seconds(call: Callable[[], object], repetitions: int) -> float:
    """Return the total seconds of ``repetitions`` calls. With one thread, this is CPU time, which excludes the time
    that other programs take."""
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    begin = clock()
    for _ in range(repetitions):
        call()
    return clock() - begin


def gpu_seconds(call: Callable[[], object], repetitions: int) -> float:
    """Return the total seconds of ``repetitions`` calls, measured on the GPU with CUDA events. The seconds exclude the
    time that the host takes to wait for the result."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(repetitions):
        call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1000
