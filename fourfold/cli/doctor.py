"""fourfold machine doctor"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from fourfold.cli.options import AsJson


def doctor(
    folder: Annotated[
        Path, typer.Option(metavar="DIR", help="Folder that runs write to. Its disk is tested, and no file is left.")
    ] = Path("runs"),
    as_json: AsJson = False,
) -> None:
    """Check this machine before a run: versions, devices, links, limits, ports, disk, and an all-reduce.

    Each finding is one line: ok, a warning, or an error, and what to do about it. The exit code is 1 if there is an
    error. The check takes a minute or two. Under srun or torchrun, the all-reduce includes all processes. The first
    machine shows every finding, and the remaining machines show only warnings and errors. With --json, every machine
    prints one line.
    """
    import os
    import socket
    from dataclasses import asdict

    from fourfold.doctor.examine import examine
    from fourfold.environment import read_environment
    from fourfold.reports.findings import show_finding, summary

    place, host = read_environment(os.environ), socket.gethostname()
    is_first = place is None or place.rank == 0
    findings = []
    for finding in examine(folder):
        findings.append(finding)
        if not as_json and (is_first or finding.level != "ok"):
            show_finding(finding, None if is_first else host)
    failed = any(finding.level == "error" for finding in findings)
    if as_json and findings:
        print(json.dumps({"ok": not failed, "host": host, "findings": [asdict(finding) for finding in findings]}))
    elif is_first:
        print(summary([finding.level for finding in findings]))
    if failed:
        raise typer.Exit(1)
