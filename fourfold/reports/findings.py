"""Print the findings of ``fourfold machine doctor`` in the terminal."""

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from fourfold.doctor.finding import Finding, Level
from fourfold.reports.numbers import counted

STYLES: dict[Level, str] = {"ok": "green", "warning": "bold yellow", "error": "bold red"}
LEVEL_WIDTH, SUBJECT_WIDTH = 9, 15


def show_finding(finding: Finding, host: str | None = None) -> None:
    """Print a finding, and in the next line the advice on what to do about it, if there is any. ``host`` is the name of
    the finding's machine, and is printed in front of the finding. It is None for the first machine."""
    console, subject = Console(soft_wrap=True), f"{finding.subject:<{SUBJECT_WIDTH}}"
    text = finding.text if host is None else f"{host}: {finding.text}"
    console.print(Text.assemble((f"{finding.level:<{LEVEL_WIDTH}}", STYLES[finding.level]), subject, text))
    if finding.advice is not None:
        console.print(Text(f"{'':<{LEVEL_WIDTH + SUBJECT_WIDTH}}→ {finding.advice}", "bold"))


def summary(levels: Sequence[Level]) -> str:
    """Return a text with three numbers: of errors, of warnings, and of all findings. ``levels`` has the level of each
    finding."""
    errors, warnings = levels.count("error"), levels.count("warning")
    return f"{counted(errors, 'error')}, {counted(warnings, 'warning')}, {counted(len(levels), 'finding')}"
