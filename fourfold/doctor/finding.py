"""Define a finding of ``fourfold machine doctor``: a level, a line of text, and advice."""

from dataclasses import dataclass, field
from typing import Any, Literal

Level = Literal["ok", "warning", "error"]


@dataclass(frozen=True)
class Finding:
    """The result of one examination. ``figures`` holds the values that the text shows, by name, so that programs can
    read these values."""

    subject: str
    level: Level
    text: str
    advice: str | None = None
    figures: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        assert (self.advice is None) == (self.level == "ok"), "a warning or an error says what to do"


def ok(subject: str, text: str, **figures: Any) -> Finding:
    """Return a finding that needs no action."""
    return Finding(subject, "ok", text, None, figures)


def warning(subject: str, text: str, advice: str, **figures: Any) -> Finding:
    """Return a finding about something that makes runs slow, or that makes some runs fail."""
    return Finding(subject, "warning", text, advice, figures)


def error(subject: str, text: str, advice: str, **figures: Any) -> Finding:
    """Return a finding about something that will make a run on this machine fail."""
    return Finding(subject, "error", text, advice, figures)
