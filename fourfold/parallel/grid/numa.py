"""Keeps a process on the cores beside its GPU: copies to the host cross no link between sockets."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

PCI_DEVICES = Path("/sys/bus/pci/devices")


def bind_to_gpu(device: torch.device) -> None:
    """Leave this process those of its cores that are beside its GPU; where there are none, or it is unknown, all."""
    properties: Any = torch.cuda.get_device_properties(device)  # older ones do not say where the device is
    if hasattr(properties, "pci_bus_id") and hasattr(os, "sched_setaffinity"):
        address = f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
        bind_to(cores_beside(address))


def cores_beside(address: str) -> set[int]:
    """The cores of the NUMA node of a PCI device; none where Linux does not say."""
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
    """Give up all cores but these; what a launcher has bound further stays so."""
    if shared := cores & os.sched_getaffinity(0):
        os.sched_setaffinity(0, shared)
