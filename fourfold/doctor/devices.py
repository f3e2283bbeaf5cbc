"""Examine the devices that will train: GPUs with their memory, clocks, and errors, and the host's cores and memory."""

import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from fourfold.doctor.finding import Finding, error, ok, warning
from fourfold.processes import available_cores
from fourfold.training.console import format_bytes

SLOWED = {
    0x08: "slowed by its hardware",
    0x20: "slowed by the driver's thermal limit",
    0x40: "slowed by heat",
    0x80: "slowed by its power supply",
}
"""Text for each bit of nvidia-smi's clock-throttle reasons. Only reasons that indicate a problem are listed.
(Idleness and the power cap are no problem.)"""

FIELDS = (
    "uuid", "driver_version", "clocks.sm", "clocks.max.sm", "temperature.gpu",
    "ecc.errors.uncorrected.volatile.total", "clocks_event_reasons.active",
)  # fmt: skip

NVIDIA_SMI_SECONDS = 30
"""Number of seconds to wait for nvidia-smi. A faulty driver may never answer."""
CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


def examine_devices() -> Iterator[Finding]:
    """Examine every GPU that torch sees, and then the host."""
    gpus = torch.cuda.device_count()
    queried = query_gpus(*FIELDS) if gpus else []
    reported = {gpu["uuid"].removeprefix("GPU-"): gpu for gpu in queried}
    for index in range(gpus):
        properties = torch.cuda.get_device_properties(index)
        known = reported.get(str(getattr(properties, "uuid", "")), {})
        yield gpu_state(f"GPU {index}", properties.name, properties.total_memory, known)
    yield host(available_cores(), host_memory(), gpus)


def query_gpus(*fields: str) -> list[dict[str, str]]:
    """Query nvidia-smi. Return one dictionary per GPU, which maps each of the given fields to its text.

    The list is empty if nvidia-smi is missing, does not know these fields, or does not answer.
    """
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    command = [program, f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=NVIDIA_SMI_SECONDS)
    except subprocess.TimeoutExpired:
        return []
    lines = done.stdout.splitlines() if done.returncode == 0 else []
    return [dict(zip(fields, line.split(", "), strict=True)) for line in lines if line]


def gpu_state(subject: str, name: str, memory: float, reported: Mapping[str, str]) -> Finding:
    """Judge a GPU by nvidia-smi's report.

    Args:
        subject: The GPU's name in the finding, such as "GPU 0".
        name: The GPU's model.
        memory: The GPU's memory in bytes.
        reported: nvidia-smi's fields. Empty if nvidia-smi does not know the GPU, for example an AMD GPU.
    """
    text = f"{name}, {format_bytes(memory)}"
    if not reported:
        return ok(subject, text, name=name, memory=memory)
    figures = {"name": name, "memory": memory, **reported}
    text += (
        f", driver {reported['driver_version']}, {reported['clocks.sm']} of {reported['clocks.max.sm']} MHz, "
        f"{reported['temperature.gpu']} °C"
    )
    errors = reported["ecc.errors.uncorrected.volatile.total"]
    if errors.isdecimal() and int(errors) > 0:
        return error(subject, f"{text}, {errors} uncorrected memory errors", "reset or replace this GPU", **figures)
    reasons = reported["clocks_event_reasons.active"]
    bits = int(reasons, 16) if reasons.startswith("0x") else 0
    slowed = [words for bit, words in SLOWED.items() if bits & bit]
    if slowed:
        return warning(subject, f"{text}, {', '.join(slowed)}", "check cooling and power of this node", **figures)
    return ok(subject, text, **figures)


def host(cores: int, memory: float, gpus: int) -> Finding:
    """Judge whether this process may use at least one core per GPU, and report the number of cores and the memory."""
    text, figures = f"{cores} cores, {format_bytes(memory)} of memory", {"cores": cores, "memory": memory}
    if cores < gpus:
        advice = "give every process its own cores: srun --cpus-per-task, or torchrun without a binding to one core"
        return warning("host", f"{text}, for {gpus} GPUs", advice, **figures)
    return ok("host", text, **figures)


def host_memory() -> float:
    """Return the machine's memory in bytes, or the container's limit if it is lower."""
    installed = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = CGROUP_LIMIT.read_text().strip() if CGROUP_LIMIT.exists() else "max"
    return min(installed, int(limit)) if limit.isdecimal() else installed
