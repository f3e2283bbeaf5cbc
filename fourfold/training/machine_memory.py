"""Check that this machine's memory can hold the model, before any process starts."""

from __future__ import annotations

import os
import resource
from pathlib import Path

from fourfold.config.run import RunConfig
from fourfold.errors import UserError

GPUS = ("/dev/nvidiactl", "/dev/kfd")
"""Files that exist on machines with NVIDIA or AMD GPUs."""


def check_machine_memory(run: RunConfig) -> None:
    """Refuse a model that is too large for this machine's memory, if its processes run on the CPU.

    On every grid, the processes together hold the model's weights, gradients, and moments. With LoRA they hold little
    more than the weights.

    Raises:
        UserError: The machine does not have enough memory.
    """
    if run.training.device == "cuda" or (run.training.device == "auto" and any(Path(file).exists() for file in GPUS)):
        return
    bits = run.training.precision if run.lora.rank else run.training.master_weights
    copies = 1 if run.lora.rank else 4
    needed = run.model.num_parameters * copies * (4 if bits == "fp32" else 2)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit != resource.RLIM_INFINITY:
        memory = min(memory, limit * run.parallel.world_size)
    if needed > memory:
        raise UserError(
            f"training [model] takes at least {needed / 1e9:,.0f} GB, and this machine has {memory / 1e9:,.0f} GB of "
            "memory; make it smaller, or train on more machines"
        )
