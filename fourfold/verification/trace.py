"""What one rank holds and sends in a training step, found by running the step itself without data.

The real step runs in one process under a fake process group of the run file's size, with fake tensors that have shapes
and no memory. Layers are alike and so are micro-batches: bytes are linear in the number of both, so a long run is
traced at a few small counts and continued from there (``tests/verification/test_trace.py`` shows that this is exact).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from fourfold.config.run import RunConfig
from fourfold.config.stages import rank_of_stage, stage_layers, stages_per_rank
from fourfold.parallel.grid import Grid
from fourfold.parallel.head import CHUNK_LOGITS
from fourfold.training.job import Job, MicroBatch, meta_stages
from fourfold.verification.recorder import Recorder

WINDOWS = ("early", "late")
"""Parts of a step in which the peaks of memory are linear in the layers: ``Recorder.watch``."""

Line = tuple[str, str, str]
"""Axis, operation and purpose of a collective."""


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank.

    parameters, gradients, optimizer: the stored shards, gradients as they stand when the optimizer steps.
    activations_peak: the most that saved activations and work space take at once. gathered_weights_peak: the most that
    weights gathered for use, with their buffers, take. total_peak: the most of all together, at one moment.
    """

    parameters: int
    gradients: int
    optimizer: int
    activations_peak: int
    gathered_weights_peak: int
    total_peak: int


@dataclass(frozen=True)
class Collective:
    """All collectives of one kind in a step: how many, and the bytes of their full tensors together."""

    axis: str
    op: str
    purpose: str
    count: int
    bytes: int


@dataclass(frozen=True)
class RankTrace:
    """Of one rank of a pipeline: its layers, [first, last + 1] of each of its stages, and what it holds and sends."""

    pp_rank: int
    layers: list[tuple[int, int]]
    memory: Memory
    collectives: list[Collective]


@dataclass(frozen=True)
class TraceReport:
    """For one optimizer step, of rank 0, and of one rank for every place on pp where there are several."""

    world_size: int
    memory: Memory
    collectives: list[Collective]
    pipeline: list[RankTrace]

    def record(self) -> dict:
        """The report as JSON values."""
        return asdict(self)


class Sample(NamedTuple):
    """One traced step: count and bytes of every kind of collective, and the bytes of memory in every window."""

    collectives: dict[Line, tuple[int, int]]
    memory: dict[str, tuple[int, ...]]


def trace(run: RunConfig, whole: bool = False) -> TraceReport:
    """Trace a run; ``whole`` runs every layer and micro-batch instead of continuing from a few."""
    ranks = [_trace_rank(run, pp_rank, whole) for pp_rank in range(run.parallel.pp)]
    first = ranks[0]
    return TraceReport(run.parallel.world_size, first.memory, first.collectives, ranks if len(ranks) > 1 else [])


def _trace_rank(run: RunConfig, pp_rank: int, whole: bool) -> RankTrace:
    grid, micro_batches = run.parallel, run.gradient_accumulation_steps
    split = stage_layers(run.model, grid)
    mine = [layers for stage, layers in enumerate(split) if rank_of_stage(stage, grid) == pp_rank]
    layers = len(mine[0])
    layer_counts, batch_counts = [layers], [micro_batches]
    if not whole:
        # Beyond the first and the last, and the weights gathered ahead, one layer is like the next; so are
        # micro-batches beyond the second, when gradients of the one before are there. With a single one gradients
        # outgrow activations only after some layers.
        few = (3 if micro_batches > 1 else 4) + run.overlap.weight_prefetch
        if layers > few + 1 and all(len(other) == layers for other in mine):
            layer_counts = [few, few + 1]
        # A pipeline must have filled; its schedules know only some numbers of micro-batches.
        filled, step = (3, 1) if grid.pp == 1 else (2 * len(split), grid.pp)
        if micro_batches > filled + step and (micro_batches - filled) % step == 0:
            batch_counts = [filled, filled + step]
    with fake_processes(grid.world_size, pp_rank * (grid.world_size // grid.pp)):
        axes = Grid(grid, "cpu")
        samples = {
            (n_layers, n_batches): _trace_step(_shrunk(run, n_layers, n_batches), axes)
            for n_layers, n_batches in itertools.product(layer_counts, batch_counts)
        }

    def continued(value: Callable[[Sample], int]) -> int:
        return _continue({at: value(sample) for at, sample in samples.items()}, layers, micro_batches)

    lines = dict.fromkeys(line for sample in samples.values() for line in sample.collectives)
    collectives = [
        Collective(*line, *(continued(lambda s, k=k, line=line: s.collectives.get(line, (0, 0))[k]) for k in (0, 1)))
        for line in lines
    ]
    names = next(iter(samples.values())).memory
    memory = {
        name: max(continued(lambda s, n=name, i=i: s.memory[n][i]) for i in range(len(WINDOWS))) for name in names
    }
    return RankTrace(
        pp_rank,
        [(part.start, part.stop) for part in mine],
        Memory(**memory),
        sorted(collectives, key=lambda c: -c.bytes),
    )


def _continue(values: dict[tuple[int, int], int], layers: int, micro_batches: int) -> int:
    """The value at (layers, micro_batches), on the bilinear surface through the values at smaller counts."""
    layer_counts, batch_counts = (sorted(set(counts)) for counts in zip(*values, strict=True))
    at_layers = [
        _continue_line(layer_counts, [values[n_layers, n_batches] for n_layers in layer_counts], layers)
        for n_batches in batch_counts
    ]
    return _continue_line(batch_counts, at_layers, micro_batches)


def _continue_line(at: list[int], values: list[int], wanted: int) -> int:
    """The value ``wanted`` on the line through one (constant) or two points."""
    if len(at) == 1:
        return values[0]
    return values[0] + (values[1] - values[0]) * (wanted - at[0]) // (at[1] - at[0])


def _shrunk(run: RunConfig, layers: int, micro_batches: int) -> RunConfig:
    training, parallel = run.training, run.parallel
    batch = micro_batches * training.micro_batch_size * parallel.batch_ranks
    if parallel.pp > 1 and any(layers != len(stage) for stage in stage_layers(run.model, parallel)):
        # Which other layers the other ranks have makes no difference to this one.
        stages = parallel.pp * stages_per_rank(parallel)
        parallel = parallel.model_copy(update={"layers_per_stage": (layers,) * stages})
        layers *= stages
    elif parallel.pp > 1:
        layers = run.model.num_hidden_layers
    return run.model_copy(
        update={
            "parallel": parallel,
            "model": run.model.model_copy(update={"num_hidden_layers": layers}),
            "training": training.model_copy(update={"global_batch_size": batch, "compile": False}),
        }
    )


def _trace_step(run: RunConfig, grid: Grid) -> Sample:
    """One real training step on fake tensors."""
    stages = meta_stages(run, grid)
    # A trace is of the machine that the run is for, and not of the one that traces.
    for stage in stages.values():
        if stage.model.lm_head is not None:
            stage.model.lm_head.chunk_logits = CHUNK_LOGITS["cpu" if run.training.device == "cpu" else "cuda"]
    with FakeTensorMode(allow_non_fake_inputs=True):
        recorder = Recorder(grid)
        with recorder:
            job = Job(run, grid, torch.device("cpu"), stages)
            recorder.own(job)
            recorder.watch(next(iter(stages.values())).model.blocks)
            recorder.start()
            shape = (run.training.micro_batch_size, run.training.seq_length)
            micro_batches = [
                MicroBatch(*(torch.zeros(shape, dtype=torch.int64) for _ in range(4 if run.data.mask_documents else 2)))
                for _ in range(run.gradient_accumulation_steps)
            ]
            job.train_step(micro_batches, 0)
    states = {"parameters": recorder.parameters, "gradients": recorder.gradients, "optimizer": recorder.optimizer}
    peaks = {"activations_peak": "activations", "gathered_weights_peak": "weights", "total_peak": "total"}
    memory = {name: (size,) * len(WINDOWS) for name, size in states.items()}
    memory |= {name: tuple(recorder.peaks[kind, window] for window in WINDOWS) for name, kind in peaks.items()}
    return Sample({line: (count, size) for line, (count, size) in recorder.collectives.items()}, memory)


@contextmanager
def fake_processes(world_size: int, rank: int = 0) -> Iterator[None]:
    """This process as one rank of a job of ``world_size`` whose collectives move nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()
