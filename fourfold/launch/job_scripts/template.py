"""Parts of the scripts of all launchers: the command that trains, and templates with @NAMES@ to fill."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from importlib.resources import files

from fourfold.launch.job_scripts.slurm_site import one_line


def fill(template: str, parts: Mapping[str, str]) -> str:
    """The text of a template of this folder, in which each @NAME@ is replaced by its part."""
    text = files("fourfold.launch.job_scripts").joinpath(template).read_text(encoding="utf-8")
    return re.sub(r"@([A-Z_]+)@", lambda place: parts[place[1]], text)


def train_words(run_file: str, overrides: Sequence[str]) -> list[str]:
    """The words of the command that trains a run file; raises ``UserError`` for words of several lines."""
    words = ["fourfold", "train", one_line(run_file, "the run file's path")]
    return words + [word for override in overrides for word in ("--set", one_line(override, "--set"))]


def source_line(setup: str) -> str:
    """The shell line that reads a user's setup file."""
    path = shlex.quote(one_line(setup, "--setup"))
    # Without a slash bash would search PATH for it.
    return f". {path if '/' in path else f'./{path}'}"
