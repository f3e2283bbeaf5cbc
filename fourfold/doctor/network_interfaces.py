"""Examine the network interfaces, and which of them gloo and NCCL choose."""

from __future__ import annotations

import fcntl
import os
import resource
import socket
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from fourfold.doctor.finding import Finding, error, ok, warning
from fourfold.training.console import format_bytes

CLASSES = Path("/sys/class")
SIOCGIFADDR = 0x8915


class Interface(NamedTuple):
    """An interface that is up. ``address`` is its IPv4 address, or None if it has none."""

    name: str
    address: str | None
    gigabits: float | None

    def __str__(self) -> str:
        speed = f" ({self.gigabits:g} Gb/s)" if self.gigabits else ""
        return f"{self.name} {self.address or 'without IPv4'}{speed}"


def examine_network(several_machines: bool) -> Iterator[Finding]:
    """Examine the network interfaces, the fast networks, and the limit of locked memory. Also find which interfaces
    NCCL and gloo choose."""
    found = interfaces()
    shown = [str(each) for each in found if each.address] or ["none with an IPv4 address"]
    yield ok("network", ", ".join(shown), **{each.name: each.address for each in found})
    fabrics = [name for name in ("infiniband", "cxi") if (CLASSES / name).is_dir() and any((CLASSES / name).iterdir())]
    for name in fabrics:
        yield ok("fabric", f"{name}: {', '.join(sorted(path.name for path in (CLASSES / name).iterdir()))}")
    if "infiniband" in fabrics:
        yield locked_memory(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0])
    if torch.cuda.device_count() and (chosen := os.environ.get("NCCL_SOCKET_IFNAME", "^")) and chosen[0] != "^":
        yield nccl_choice(found, chosen)
    # GPU jobs need gloo too, because checkpoint.async_mode = 'async' saves in a gloo group.
    yield gloo_choice(found, os.environ, _address_of_name(), several_machines)


def interfaces() -> list[Interface]:
    """Return the interfaces that are up, in the kernel's order."""
    return [
        Interface(name, _address(name), _gigabits(name))
        for _, name in socket.if_nameindex()
        if name == "lo" or _read(name, "operstate") in ("up", "unknown")
    ]


def locked_memory(soft: int) -> Finding:
    """Judge the limit of locked memory, which RDMA needs."""
    if soft == resource.RLIM_INFINITY:
        return ok("locked memory", "no limit")
    advice = "ulimit -l unlimited (memlock in limits.conf, or the container's --ulimit memlock=-1)"
    return warning("locked memory", f"at most {format_bytes(soft)}; InfiniBand needs more", advice, limit=soft)


def gloo_choice(
    found: Sequence[Interface], environ: Mapping[str, str], address_of_name: str | None, several_machines: bool
) -> Finding:
    """Find the interface that gloo uses: GLOO_SOCKET_IFNAME if it is set, or otherwise the interface with the host
    name's address.

    On one machine, fourfold makes gloo use loopback.
    """
    chosen = environ.get("GLOO_SOCKET_IFNAME")
    if chosen:
        return _chosen("gloo", f"GLOO_SOCKET_IFNAME = {chosen}", chosen.split(","), found)
    if not several_machines:
        return ok("gloo", "uses loopback on one machine")
    name = next((each.name for each in found if each.address == address_of_name), None)
    if name is None or name == "lo":
        where = f"is {address_of_name}, which other machines cannot reach" if address_of_name else "does not resolve"
        advice = f"set GLOO_SOCKET_IFNAME to an interface that the machines share: {_others(found)}"
        return warning("gloo", f"the host name {socket.gethostname()} {where}", advice)
    return ok("gloo", f"uses {name}, the interface of the host name", interface=name)


def nccl_choice(found: Sequence[Interface], chosen: str) -> Finding:
    """Check the interfaces that NCCL_SOCKET_IFNAME selects. The variable lists prefixes of names, or full names if it
    starts with "="."""
    names = [each.name for each in found if each.name.startswith(tuple(chosen.split(",")))]
    names = chosen[1:].split(",") if chosen[0] == "=" else names
    return _chosen("nccl", f"NCCL_SOCKET_IFNAME = {chosen}", names, found)


def _chosen(subject: str, setting: str, names: Sequence[str], found: Sequence[Interface]) -> Finding:
    """Check that an environment variable names at least one interface with an address."""
    usable = [each.name for each in found if each.address and each.name in names]
    if usable:
        return ok(subject, f"uses {', '.join(usable)}: {setting}", interfaces=usable)
    return error(subject, f"{setting} is no interface with an address here", f"set it to one of {_others(found)}")


def _others(found: Sequence[Interface]) -> str:
    return ", ".join(each.name for each in found if each.address and each.name != "lo") or "lo"


def _address(name: str) -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
        except OSError:
            return None
    return socket.inet_ntoa(answer[20:24])


def _gigabits(name: str) -> float | None:
    speed = _read(name, "speed")
    return int(speed) / 1000 if speed.isdecimal() else None


def _read(name: str, what: str) -> str:
    try:
        return (CLASSES / "net" / name / what).read_text().strip()
    except OSError:  # Loopback and tunnels report no speed.
        return ""


def _address_of_name() -> str | None:
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return None
