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
from fourfold.parallel.grid import Grid
from fourfold.parallel.head import CHUNK_LOGITS
from fourfold.training.job import Job, MicroBatch, meta_stages
from fourfold.verification.recorder import Recorder

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
class TraceReport:
    """Of rank 0, for one optimizer step."""

    world_size: int
    memory: Memory
    collectives: list[Collective]

    def record(self) -> dict:
        """The report as JSON values."""
        return asdict(self)


class Sample(NamedTuple):
    """One traced step: count and bytes of every kind of collective, and of the memory what is linear in the layers."""

    collectives: dict[Line, tuple[int, int]]
    memory: dict[str, int]


def trace(run: RunConfig, whole: bool = False) -> TraceReport:
    """Trace a run; ``whole`` runs every layer and micro-batch instead of continuing from a few."""
    layers, micro_batches = run.model.num_hidden_layers, run.gradient_accumulation_steps
    # Beyond the first and the last, and the weights gathered ahead, one layer is like the next; so are micro-batches
    # beyond the second, when gradients of the one before are there. With a single one gradients outgrow activations
    # only after some layers.
    few = (2 if micro_batches > 1 else 4) + run.overlap.weight_prefetch
    layer_counts = [layers] if whole or layers <= few + 1 else [few, few + 1]
    batch_counts = [micro_batches] if whole or micro_batches <= 4 else [3, 4]
    with fake_processes(run.parallel.world_size):
        grid = Grid(run.parallel, "cpu")
        samples = {
            (n_layers, n_batches): _trace_step(_shrunk(run, n_layers, n_batches), grid)
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
    memory = {name: continued(lambda s, name=name: s.memory[name]) for name in names}
    memory["total_peak"] = max(memory.pop("early"), memory.pop("late"))
    return TraceReport(run.parallel.world_size, Memory(**memory), sorted(collectives, key=lambda c: -c.bytes))


def _continue(values: dict[tuple[int, int], int], layers: int, micro_batches: int) -> int:
    """The value at (layers, micro_batches), on the bilinear surface through the values at smaller counts."""
    layer_counts, batch_counts = (sorted(set(counts)) for counts in zip(*values, strict=True))
    at_layers = [
        _continue_line([values[n_layers, n_batches] for n_layers in layer_counts], layers - layer_counts[0])
        for n_batches in batch_counts
    ]
    return _continue_line(at_layers, micro_batches - batch_counts[0])


def _continue_line(values: list[int], steps: int) -> int:
    """The value ``steps`` after the first of one (constant) or two values."""
    return values[0] + (values[-1] - values[0]) * steps


def _shrunk(run: RunConfig, layers: int, micro_batches: int) -> RunConfig:
    training, parallel = run.training, run.parallel
    batch = micro_batches * training.micro_batch_size * parallel.batch_ranks
    return run.model_copy(
        update={
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
    memory = {
        "parameters": recorder.parameters,
        "gradients": recorder.gradients,
        "optimizer": recorder.optimizer,
        "activations_peak": recorder.peaks["activations"],
        "gathered_weights_peak": recorder.peaks["weights"],
        "early": recorder.peaks["early"],
        "late": recorder.peaks["late"],
    }
    return Sample({line: (count, size) for line, (count, size) in recorder.collectives.items()}, memory)


@contextmanager
def fake_processes(world_size: int) -> Iterator[None]:
    """This process as rank 0 of a job of ``world_size`` whose collectives move nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()
