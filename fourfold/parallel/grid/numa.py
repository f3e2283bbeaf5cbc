"""Pin a process to the CPU cores next to its GPU. Copies between the host and the GPU then stay within a socket."""

import os
from pathlib import Path
from typing import Any

import torch

PCI_DEVICES = Path("/sys/bus/pci/devices")


def bind_to_gpu(device: torch.device) -> None:
    """Restrict this process to the cores next to its GPU.

    Do nothing if these cores are unknown, or if the process is not allowed to use any of them.
    """
    # Old versions of torch do not report the device's PCI address.
    properties: Any = torch.cuda.get_device_properties(device)
    if hasattr(properties, "pci_bus_id") and hasattr(os, "sched_setaffinity"):
        address = f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
        bind_to(cores_beside(address))


def cores_beside(address: str) -> set[int]:
    """Return the cores of a PCI device's NUMA node. Return an empty set if Linux does not report them."""
    try:
        listed = (PCI_DEVICES / address / "local_cpulist").read_text().strip()
    except OSError:
        return set()
    cores: set[int] = set()
    for part in filter(None, listed.split(",")):
        first, _, last = part.partition("-")
        cores |= set(range(int(first), int(last or first) + 1))
    return cores


def bind_to(cores: set[int]) -> None:
    """Restrict this process to the given cores. Leave out cores that the launcher does not let the process use."""
    if shared := cores & os.sched_getaffinity(0):
        os.sched_setaffinity(0, shared)
