"""Trace the memory and communication of one rank in a training step, without data and without a GPU.

One process runs the code of the real step. Its process group is fake, with as many ranks as the run file needs. Its
tensors are fake too: they have shapes, but no memory. A large run is traced at a few small sizes and extrapolated (see
``continuation``).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from fourfold.config.layout import CHUNK_LOGITS
from fourfold.config.run import RunConfig
from fourfold.data.loader import MicroBatch
from fourfold.models.causal_attention import AttentionCore
from fourfold.parallel.attention.context import share_of_sequences
from fourfold.parallel.grid.grid import Grid
from fourfold.parallel.tensor.head import ParallelHead
from fourfold.planning.machines.machine import Machine
from fourfold.torch_internals import FakeTensorMode
from fourfold.training.job import Job, meta_stages
from fourfold.verification.continuation import (
    ContinuedRun,
    continue_memory,
    continue_sent,
    layers_of_rank,
    point_of,
    run_at,
    small_points,
)
from fourfold.verification.durations import PICOSECOND, Durations
from fourfold.verification.exposure import Line
from fourfold.verification.recorder import Recorder

WINDOWS = ("early", "late")
"""Names of the two parts of a step. Each part's peak memory is linear in the number of layers (``Recorder.watch``)."""


@dataclass(frozen=True)
class Memory:
    """Bytes in memory on one rank. Tokens, labels, and tensors that are offloaded to the CPU are not counted."""

    parameters: int
    """Number of bytes of the weight shards that the rank stores."""

    gradients: int
    """Number of bytes of the weight shards' gradients when the optimizer steps."""

    optimizer: int
    """Number of bytes of the optimizer's states and of the weight averages."""

    activations_peak: int
    """Peak number of bytes of saved activations and workspaces."""

    gathered_weights_peak: int
    """Peak number of bytes of gathered weights and of the buffers that they are gathered into."""

    total_peak: int
    """Largest number of bytes in memory at one moment, in all categories together."""


@dataclass(frozen=True)
class Collective:
    """All collectives in a step with the same axis, operation, and purpose. ``count`` is the number of collectives."""

    axis: str
    op: str
    purpose: str
    count: int

    bytes: int
    """Sum of the sizes of the full tensors. A tensor is full after a gather, and before a reduction."""

    exposed_bytes: int
    """Number of bytes that no matmul hides, because no matmul is issued between the collective and the wait for its
    result."""

    seconds: float | None = None
    """Sum of the collectives' durations on a machine, without the time that collectives wait for each other. None if no
    machine is given."""

    exposed_seconds: float | None = None
    """Number of seconds that these collectives add to the step, because the step waits for them, or because they slow
    down its computation. None if no machine is given."""


@dataclass(frozen=True)
class RankTrace:
    """What one pipeline rank stores and sends in a step."""

    pp_rank: int

    layers: list[tuple[int, int]]
    """For each of the rank's stages, the index of its first layer, and the index after its last layer."""

    memory: Memory
    collectives: list[Collective]


@dataclass(frozen=True)
class TraceReport:
    """What rank 0 stores and sends in one optimizer step."""

    world_size: int
    memory: Memory
    collectives: list[Collective]

    pipeline: list[RankTrace]
    """The trace of each pipeline rank, in order. Empty if the run has no pipeline."""

    def record(self) -> dict[str, Any]:
        """Return the report as JSON values. It has seconds only if a machine was given."""
        record = asdict(self)
        for rank in (record, *record["pipeline"]):
            rank["collectives"] = [{k: v for k, v in c.items() if v is not None} for c in rank["collectives"]]
        return record


class Sample(NamedTuple):
    """The result of tracing one step."""

    collectives: dict[Line, tuple[int, ...]]
    """Totals by axis, operation, and purpose. In this order: count, bytes, exposed bytes, duration, and exposed
    duration. Durations are in picoseconds, and 0 without a machine."""

    memory: dict[str, tuple[int, ...]]
    """Peak bytes in each of the step's ``WINDOWS``. The keys are the fields of ``Memory``."""


def trace(
    run: RunConfig, whole: bool = False, machine: Machine | None = None, expert_load: Sequence[float] | None = None
) -> TraceReport:
    """Compute what each pipeline rank of a run stores and sends in one optimizer step.

    Args:
        run: The run to trace.
        whole: Whether to run every layer and micro-batch instead of extrapolating from a few.
        machine: If given, the report also has the seconds that collectives take on this machine, and the seconds that
            they add to the step.
        expert_load: Relative number of tokens that each expert gets. By default, all experts get the same number.

    Raises:
        UserError: A machine is given, and the planner does not support the run.
    """
    traced: dict[ContinuedRun, Sample] = {}
    ranks = [_trace_rank(run, pp_rank, whole, machine, traced, expert_load) for pp_rank in range(run.parallel.pp)]
    first = ranks[0]
    return TraceReport(run.parallel.world_size, first.memory, first.collectives, ranks if len(ranks) > 1 else [])


def _trace_rank(
    run: RunConfig,
    pp_rank: int,
    whole: bool,
    machine: Machine | None,
    traced: dict[ContinuedRun, Sample],
    expert_load: Sequence[float] | None,
) -> RankTrace:
    """Compute what one pipeline rank stores and sends in a step.

    Args:
        traced: The results of the small runs that were traced so far. If another rank has already traced a small run
            of the same size, this function uses that result. It adds the results of new small runs.
    """
    target = point_of(run, pp_rank)
    points = [target] if whole else small_points(run, pp_rank, timed=machine is not None)
    samples: dict[ContinuedRun, Sample] = {}
    for point in points:
        if point not in traced:
            traced[point] = _trace_step(run_at(run, point), point.pp_rank, machine, expert_load)
        samples[point] = traced[point]

    def sent(value: Callable[[Sample], int]) -> int:
        return continue_sent({point: value(sample) for point, sample in samples.items()}, target)

    def held(value: Callable[[Sample], int]) -> int:
        return continue_memory({point: value(sample) for point, sample in samples.items()}, target)

    lines = dict.fromkeys(line for sample in samples.values() for line in sample.collectives)

    def collective(line: Line) -> Collective:
        def of_line(figure: int) -> int:
            return sent(lambda sample: sample.collectives.get(line, (0, 0, 0, 0, 0))[figure])

        seconds = [] if machine is None else [PICOSECOND * of_line(figure) for figure in (3, 4)]
        return Collective(*line, *map(of_line, range(3)), *seconds)

    def peak(name: str) -> int:
        def in_window(window: int) -> int:
            return held(lambda sample: sample.memory[name][window])

        return max(map(in_window, range(len(WINDOWS))))

    names = next(iter(samples.values())).memory
    return RankTrace(
        pp_rank,
        [(layers.start, layers.stop) for layers in layers_of_rank(run, pp_rank)],
        Memory(**{name: peak(name) for name in names}),
        sorted(map(collective, lines), key=lambda c: -c.bytes),
    )


def _trace_step(run: RunConfig, pp_rank: int, machine: Machine | None, expert_load: Sequence[float] | None) -> Sample:
    """Run one real training step on fake tensors, as the first process of a pipeline rank."""
    world_size = run.parallel.world_size
    with fake_processes(world_size, pp_rank * (world_size // run.parallel.pp)):
        durations = None if machine is None else Durations(run, machine)
        return _fake_step(run, Grid(run.parallel, "cpu"), durations, expert_load)


def _fake_step(run: RunConfig, grid: Grid, durations: Durations | None, expert_load: Sequence[float] | None) -> Sample:
    stages = meta_stages(run, grid)
    # The trace runs on a CPU. Use the chunk size, the loss, and the attention of the device that will run the step.
    is_for_gpu = run.training.device != "cpu"
    for module in (module for stage in stages.values() for module in stage.model.modules()):
        if isinstance(module, ParallelHead):
            module.chunk_logits, module.is_fused = CHUNK_LOGITS["cuda" if is_for_gpu else "cpu"], is_for_gpu
        elif isinstance(module, AttentionCore):
            module.is_for_gpu = is_for_gpu
    with FakeTensorMode(allow_non_fake_inputs=True):
        shape = (run.training.micro_batch_size, run.training.seq_length)
        fields = 4 if run.data.mask_documents else 2
        micro_batches = []
        for _ in range(run.gradient_accumulation_steps):
            batch = MicroBatch(*(torch.zeros(shape, dtype=torch.int64) for _ in range(fields)))
            # Kernels allocate memory for each document. The number of documents is unknown, so assume one per sequence.
            if batch.document_ends is not None:
                batch = replace(batch, document_ends=batch.document_ends[:, :1])
            reference = torch.zeros(len(batch.tokens)) if run.dpo.beta else None
            is_padded = run.model.num_experts > 0 and run.data.format != "text"
            is_data = torch.ones(shape, dtype=torch.bool) if is_padded else None
            depths = run.model.num_nextn_predict_layers
            ahead = torch.zeros(*shape, depths, dtype=torch.int64) if depths else None
            batch = replace(batch, reference=reference, is_data=is_data, next_tokens=ahead, next_labels=ahead)
            micro_batches.append(share_of_sequences(batch, grid.cp))
        recorder = Recorder(grid, durations, is_for_gpu)
        recorder.exclude(micro_batches)
        with recorder:
            job = Job(run, grid, torch.device("cpu"), stages)
            if job.expert_load is not None:
                job.expert_load.planned = expert_load or [1.0] * run.model.num_experts
            # Loss scaling looks for overflows, which fake data cannot have.
            job.loss_scale = None
            recorder.own(job)
            recorder.watch(next(iter(stages.values())).units.blocks)
            recorder.start()
            job.train_step(micro_batches, 0)
    states = {"parameters": recorder.parameters, "gradients": recorder.gradients, "optimizer": recorder.optimizer}
    peaks = {"activations_peak": "activations", "gathered_weights_peak": "weights", "total_peak": "total"}
    memory = {name: (size,) * len(WINDOWS) for name, size in states.items()}
    memory |= {name: tuple(recorder.peaks[kind, window] for window in WINDOWS) for name, kind in peaks.items()}
    exposed, taken, waited = recorder.flights.exposed, recorder.flights.taken, recorder.flights.waited
    sent = {
        line: (*figures, exposed[line], taken[line], waited[line]) for line, figures in recorder.collectives.items()
    }
    return Sample(sent, memory)


@contextmanager
def fake_processes(world_size: int, rank: int = 0) -> Iterator[None]:
    """Make this process one rank of a simulated job of ``world_size`` processes, whose collectives move no data."""
    dist.init_process_group("fake", rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()
