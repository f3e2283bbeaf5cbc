"""Examine the links between the GPUs of this machine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations

import torch

from fourfold.doctor.finding import Finding, ok, warning


def examine_links() -> Iterator[Finding]:
    """Examine whether the GPUs can access each other's memory."""
    gpus = torch.cuda.device_count()
    if gpus < 2:
        return
    pairs = list(combinations(range(gpus), 2))
    closed = [(a, b) for a, b in pairs if not torch.cuda.can_device_access_peer(a, b)]
    yield peer_access(len(pairs), closed)


def peer_access(pairs: int, closed: Sequence[tuple[int, int]]) -> Finding:
    """Judge the pairs of GPUs that cannot access each other's memory."""
    if closed:
        names = ", ".join(f"{a}-{b}" for a, b in closed[:4]) + (", …" if len(closed) > 4 else "")
        advice = "traffic goes through the host's memory: check NVLink, IOMMU (ACS) and the virtual machine's settings"
        return warning("peer access", f"{len(closed)} of {pairs} pairs of GPUs have none: {names}", advice)
    return ok("peer access", f"{pairs} of {pairs} pairs of GPUs")
