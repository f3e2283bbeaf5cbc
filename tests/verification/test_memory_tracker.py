"""Compare the trace on small models with torch's own memory tracker, which knows nothing of the trace."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_runs import GPT, HYBRID, LLAMA, QWEN, tiny_run
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker

from fourfold.config.run import RunConfig
from fourfold.data.loader import MicroBatch
from fourfold.parallel.grid.grid import Grid
from fourfold.training.job import Job, meta_stages
from fourfold.verification.trace import fake_processes, trace


def tracked_peak(run: RunConfig) -> int:
    """Return the peak memory of one training step without its inputs, in bytes, as torch's tracker counts it."""
    with fake_processes(run.parallel.world_size):
        grid = Grid(run.parallel, "cpu")
        stages = meta_stages(run, grid)
        with FakeTensorMode(allow_non_fake_inputs=True):
            job = Job(run, grid, torch.device("cpu"), stages)
            if job.expert_load is not None:
                job.expert_load.planned = [1.0] * run.model.num_experts
            shape = (run.training.micro_batch_size, run.training.seq_length)
            batches = [
                MicroBatch(*(torch.zeros(shape, dtype=torch.int64) for _ in range(2)))
                for _ in range(run.gradient_accumulation_steps)
            ]
            # Create the moments now. Otherwise the first step would create them after its peak.
            for index in range(len(job.trained)):
                job.optimizer.moments(index)
            tracker = MemTracker()
            tracker.track_external(*(stage.model for stage in job.stages.values()), job.optimizer.adamw)
            with tracker:
                job.train_step(batches, 0)
            peak = tracker.get_tracker_snapshot("peak")
    return peak[torch.device("cpu")]["Total"]


def check_against_tracker(model: dict[str, Any], grid: dict[str, int], sections: dict[str, Any]) -> None:
    """Compare the peak of a run's trace with the peak of torch's tracker."""
    # Use a single micro-batch per rank, because the tracker supports only one forward pass per module.
    batch = 2 * grid.get("z", 1) * grid.get("dp", 1)
    training = {"micro_batch_size": 2, "seq_length": 128, "global_batch_size": batch, "device": "cpu"}
    run = tiny_run(model, grid, training=training, **sections)
    assert trace(run, whole=True).memory.total_peak == pytest.approx(tracked_peak(run), rel=0.03)


@pytest.mark.parametrize(
    ("model", "grid", "sections"),
    [
        (LLAMA, {}, {}),
        (HYBRID, {}, {}),
        pytest.param(GPT, {}, {"activation_checkpoint": {"mode": "full"}}, marks=pytest.mark.slow),
        pytest.param(QWEN, {"x": 2, "y": 2}, {}, marks=pytest.mark.slow),
        (GPT, {"z": 2, "dp": 2, "zero": 3}, {}),
    ],
    ids=str,
)
def test_the_trace_is_within_three_percent_of_torchs_tracker(
    model: dict[str, Any], grid: dict[str, int], sections: dict[str, Any]
) -> None:
    check_against_tracker(model, grid, sections)
