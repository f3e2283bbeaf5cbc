"""Examine the kernel's limits for a process: the number of open files, and the memory that a network adapter may
pin."""

from __future__ import annotations

import resource
from collections.abc import Iterator

from fourfold.doctor.finding import Finding, ok, warning
from fourfold.doctor.network_interfaces import CLASSES
from fourfold.processes import ENOUGH_FILES
from fourfold.training.console import format_bytes


def examine_limits() -> Iterator[Finding]:
    """Examine the limit of open files. If there is InfiniBand, also examine the limit of locked memory."""
    yield open_files(*resource.getrlimit(resource.RLIMIT_NOFILE))
    if (CLASSES / "infiniband").is_dir():
        yield locked_memory(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0])


def open_files(soft: int, hard: int) -> Finding:
    """Judge the limit of open files."""
    if soft == resource.RLIM_INFINITY:
        return ok("open files", "no limit")
    if soft < ENOUGH_FILES:
        most = "" if hard == resource.RLIM_INFINITY else f" (at most {hard:,} without the administrator)"
        advice = f"for jobs of many ranks: ulimit -n 65536{most}, in the script that starts the job"
        return warning("open files", f"at most {soft:,}", advice, limit=soft)
    return ok("open files", f"at most {soft:,}", limit=soft)


def locked_memory(soft: int) -> Finding:
    """Judge the limit of locked memory, which RDMA needs."""
    if soft == resource.RLIM_INFINITY:
        return ok("locked memory", "no limit")
    advice = "ulimit -l unlimited (memlock in limits.conf, or the container's --ulimit memlock=-1)"
    return warning("locked memory", f"at most {format_bytes(soft)}; InfiniBand needs more", advice, limit=soft)
