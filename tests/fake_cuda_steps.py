"""Take one training step of every case of the parity suite on fake CUDA tensors, and print where the host would wait.

``python tests/fake_cuda_steps.py [NAME ...]`` prints JSON, with one entry per case. Without names, it runs all cases.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent / "verification")]

import test_parity  # noqa: E402 (found by the line above)
import torch  # noqa: E402
from fake_cuda import HostWaits, pretend  # noqa: E402
from layouts import Case  # noqa: E402
from tiny_runs import tiny_run  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402

from fourfold.checkpoints.checkpoint import layout_of  # noqa: E402
from fourfold.checkpoints.global_tensors import trained_parts  # noqa: E402
from fourfold.checkpoints.rank_files import entries_of  # noqa: E402
from fourfold.parallel.data import fully_sharded  # noqa: E402
from fourfold.parallel.grid.grid import Grid  # noqa: E402
from fourfold.parallel.memory.offload import CopyStream  # noqa: E402
from fourfold.training.job import Job, StepResult, meta_stages  # noqa: E402
from fourfold.training.step_checks import figures_of_all_ranks  # noqa: E402
from fourfold.verification.batches import random_micro_batches  # noqa: E402
from fourfold.verification.trace import fake_processes  # noqa: E402


def cases() -> dict[str, Case]:
    """Return the cases of the parity suite by name."""
    found = test_parity.CASES | test_parity.SLOW_CASES
    for family, model in test_parity.FAMILIES.items():
        for axis, (grid, sections) in test_parity.ONE_AXIS.items():
            found[f"{family} on {axis}"] = (model, grid, sections)
    return found


def take_step(case: Case, precision: str = "bf16") -> dict[str, int]:
    """Run a step and an asynchronous save. Return each line that makes the host wait, and how often it does so."""
    model, grid_sizes, sections = case
    training = {**sections.get("training", {}), "precision": precision}
    micro_batches = 2 * grid_sizes.get("pp", 1) * grid_sizes.get("dp", 1) * grid_sizes.get("z", 1)
    training["global_batch_size"] = micro_batches * training.get("micro_batch_size", 2)
    run = tiny_run(model, grid_sizes, **{**sections, "training": training})
    ranks = run.parallel.world_size
    rank = ranks - ranks // run.parallel.pp  # a rank of the last stage, because it has the head
    cuda = torch.device("cuda", 0)
    waits = HostWaits()
    with fake_processes(ranks, rank), waits.patched():
        grid = Grid(run.parallel, "cuda")
        tokens = run.training.micro_batch_size * run.training.seq_length // (run.parallel.x * run.parallel.cp)
        waits.rows = tokens * run.model.num_experts_per_tok // max(1, run.model.num_experts)
        fake = FakeTensorMode(allow_non_fake_inputs=True)
        with patch.object(fully_sharded, "fully_shard", partial(_inside, fake)):
            stages = meta_stages(run, grid)
        with fake, waits:
            job = Job(run, grid, cuda, stages)
            batches = random_micro_batches(run, 0, grid, cuda)
            kept = job.count_kept(batches)
            loss = job.forward_backward(batches, kept)
            figures = figures_of_all_ranks(StepResult(loss, job.clip(), kept), False, False)
            # Skip the save with a pipeline, because its stages exchange lists, and fake collectives send nothing.
            if grid.pp.size == 1:
                parts, job.copies = trained_parts(job, with_averages=False), CopyStream(cuda)
                entries_of(parts, layout_of(parts, grid, run.overlap.shards_per_node), job.copies)
            job.update(0, figures.grad_norm)
    return dict(waits.waits)


def _inside(mode: FakeTensorMode, *args: Any, **kwargs: Any) -> object:
    """Make ``fully_shard`` run inside the mode, because it allocates an empty buffer on the device."""
    with mode:
        return fully_shard(*args, **kwargs)


def main(names: list[str]) -> None:
    """Print where the host waits in each case."""
    pretend()
    everything, found = cases(), dict[str, Any]()
    for name in names or everything:
        try:
            found[name] = take_step(everything[name])
        except Exception as error:
            traceback.print_exc()
            found[name] = {f"{type(error).__name__}: {str(error)[:300]}": 1}
    print(json.dumps(found, indent=1), flush=True)
    # End without torch's exit handlers, because they would look for a GPU.
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
