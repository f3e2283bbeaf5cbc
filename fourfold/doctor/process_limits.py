"""Examine the kernel's limit for the memory that a network adapter may pin."""

from __future__ import annotations

import resource
from collections.abc import Iterator

from fourfold.doctor.finding import Finding, ok, warning
from fourfold.doctor.network_interfaces import CLASSES
from fourfold.training.console import format_bytes


def examine_limits() -> Iterator[Finding]:
    """If there is InfiniBand, examine the limit of locked memory. (Jobs raise the limit of open files themselves.)"""
    if (CLASSES / "infiniband").is_dir():
        yield locked_memory(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0])


def locked_memory(soft: int) -> Finding:
    """Judge the limit of locked memory, which RDMA needs."""
    if soft == resource.RLIM_INFINITY:
        return ok("locked memory", "no limit")
    advice = "ulimit -l unlimited (memlock in limits.conf, or the container's --ulimit memlock=-1)"
    return warning("locked memory", f"at most {format_bytes(soft)}; InfiniBand needs more", advice, limit=soft)
