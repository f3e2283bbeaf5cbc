"""Check that a port can be opened and reached, because the processes of a job connect through a port."""

from __future__ import annotations

import socket
from collections.abc import Iterator

from fourfold.doctor.finding import Finding, error, ok, warning

SECONDS = 5


def examine_ports(several_machines: bool) -> Iterator[Finding]:
    """Examine loopback and the host name's address, which other machines use to reach this machine."""
    failure = failure_to_connect("127.0.0.1")
    if failure:
        yield error("loopback", failure, "a firewall or sandbox forbids local connections; allow them")
    else:
        yield ok("loopback", "a port opens, and connects")
    name = socket.gethostname()
    failure = failure_to_connect(name)
    if failure and several_machines:
        yield error("host name", f"{name}: {failure}", "add it to DNS or /etc/hosts; other machines look for it")
    elif failure:
        advice = "nothing on one machine; for several, add the name to DNS or /etc/hosts, or set MASTER_ADDR"
        yield warning("host name", f"{name}: {failure}", advice)
    else:
        yield ok("host name", f"{name}: a port opens, and connects")


def failure_to_connect(host: str) -> str | None:
    """Open a port at the host's address and connect to it. Return a description of what failed, or None."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.create_server(address[:2], family=family) as server:
            server.settimeout(SECONDS)
            with socket.create_connection(server.getsockname()[:2], timeout=SECONDS) as client:
                accepted, _ = server.accept()
                with accepted:
                    client.sendall(b"x")
                    accepted.settimeout(SECONDS)
                    return None if accepted.recv(1) == b"x" else "the data that was sent did not arrive"
    except OSError as failure:
        return failure.strerror or str(failure)
