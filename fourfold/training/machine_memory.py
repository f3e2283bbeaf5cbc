"""Check before a run starts that this machine's memory can hold the model."""

import os
from pathlib import Path

from fourfold.config.optimizer_rules import STATES
from fourfold.config.parameter_counts import num_parameters
from fourfold.config.run import RunConfig
from fourfold.errors import UserError

GPUS = ("/dev/nvidiactl", "/dev/kfd")
"""Files that exist on machines with NVIDIA or AMD GPUs."""


def check_machine_memory(run: RunConfig) -> None:
    """Refuse a model that is too large for this machine's memory. Runs on GPUs are not checked.

    The check is for a run whose processes are all on this machine. On any grid, these processes together hold at least
    the model's weights, gradients, and optimizer moments. With LoRA, they hold little more than the weights.

    Raises:
        UserError: The machine does not have enough memory.
    """
    if run.training.device == "cuda" or (run.training.device == "auto" and any(Path(file).exists() for file in GPUS)):
        return
    needed = num_parameters(run.model) * _bytes_per_parameter(run)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > memory:
        raise UserError(
            f"training [model] takes at least {needed / 1e9:,.0f} GB, but this machine has {memory / 1e9:,.0f} GB of "
            "memory; make the model smaller, or train on more machines"
        )


def _bytes_per_parameter(run: RunConfig) -> int:
    """Return how many bytes one parameter takes: its weight, its gradient, and its optimizer moments. With LoRA, count
    only the weight.

    With Muon, count one moment, because most parameters have only one.
    """
    training, size = run.training, {"fp32": 4, "bf16": 2, "fp16": 2}
    if run.lora.rank:
        return size[training.precision]
    return size[training.master_weights] * (2 + len(STATES[run.optimizer.name]))
