"""fourfold doctor"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from fourfold.cli.options import AsJson


def doctor(
    folder: Annotated[
        Path, typer.Option(metavar="DIR", help="Folder that runs write to: its disk is tested, nothing is left in it.")
    ] = Path("runs"),
    as_json: AsJson = False,
) -> None:
    """Examine this machine before a run: versions, devices, links, limits, ports, disk, and an all-reduce.

    Each finding is one line: ok, a warning, or an error, with what to do. Exit code 1 when there is an error. It takes
    at most a minute or two. Started with srun or torchrun, the all-reduce goes over all processes; the other findings
    are about the first machine.
    """
    from dataclasses import asdict

    from fourfold.doctor.examine import examine
    from fourfold.reports.findings import show_finding, summary

    findings = []
    for finding in examine(folder):
        findings.append(finding)
        if not as_json:
            show_finding(finding)
    if not findings:  # another process of the launcher reports
        return
    levels = [finding.level for finding in findings]
    if as_json:
        record = {"ok": "error" not in levels, "findings": [asdict(finding) for finding in findings]}
        print(json.dumps(record))
    else:
        print(summary(levels))
    if "error" in levels:
        raise typer.Exit(1)
