"""Examine the links between the GPUs of this machine."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import combinations

import torch

from fourfold.doctor.finding import Finding, ok, warning
from fourfold.doctor.nvidia_smi import ask_nvidia_smi

NAMES = {
    "NV": "NVLink",
    "PIX": "one PCIe switch",
    "PXB": "several PCIe switches",
    "PHB": "the PCIe host bridge",
    "NODE": "PCIe host bridges of one NUMA node",
    "SYS": "the link between NUMA nodes",
}
"""nvidia-smi's types of links, best first."""


def examine_links() -> Iterator[Finding]:
    """Examine how each pair of GPUs is linked, and whether the GPUs can access each other's memory."""
    gpus = torch.cuda.device_count()
    if gpus < 2:
        return
    pairs = list(combinations(range(gpus), 2))
    closed = [(a, b) for a, b in pairs if not torch.cuda.can_device_access_peer(a, b)]
    yield peer_access(len(pairs), closed)
    kinds = link_kinds(ask_nvidia_smi("topo", "-m") or "")
    if kinds:
        yield topology(kinds)


def peer_access(pairs: int, closed: Sequence[tuple[int, int]]) -> Finding:
    """Judge the pairs of GPUs that cannot access each other's memory."""
    if closed:
        names = ", ".join(f"{a}-{b}" for a, b in closed[:4]) + (", …" if len(closed) > 4 else "")
        advice = "traffic goes through the host's memory: check NVLink, IOMMU (ACS) and the virtual machine's settings"
        return warning("peer access", f"{len(closed)} of {pairs} pairs of GPUs have none: {names}", advice)
    return ok("peer access", f"{pairs} of {pairs} pairs of GPUs")


def link_kinds(matrix: str) -> Counter[str]:
    """Count the pairs of GPUs by type of link in the matrix that ``nvidia-smi topo -m`` prints."""
    text = re.sub(r"\x1b\[[\d;]*m", "", matrix)
    rows = [line.split() for line in text.splitlines() if re.match(r"GPU\d+\s", line)]
    kinds: Counter[str] = Counter()
    for number, row in enumerate(rows):
        kinds.update(row[number + 2 : len(rows) + 1])  # Read the upper triangle. The first word is the row's name.
    return kinds


def topology(kinds: Counter[str]) -> Finding:
    """Return a finding about the links. They may be all alike, or some may be slower."""
    parts = [f"{count} by {NAMES.get(re.sub(r'[0-9]', '', kind), kind)} ({kind})" for kind, count in kinds.items()]
    text = f"pairs of GPUs: {', '.join(parts)}"
    by_nvlink = [kind.startswith("NV") for kind in kinds]
    if any(by_nvlink) and not all(by_nvlink):
        advice = "keep x (and y) among GPUs that NVLink joins: order them with CUDA_VISIBLE_DEVICES"
        return warning("links", text, advice, **kinds)
    return ok("links", text, **kinds)
