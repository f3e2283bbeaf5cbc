"""Find the line of fourfold that is running. Tests use it to name the line that makes the host wait."""

from __future__ import annotations

import traceback
from pathlib import Path

import fourfold

PACKAGE = Path(fourfold.__file__).parent


def line_of_fourfold() -> str:
    """Return the innermost line of fourfold on the stack, as ``file.py:function``."""
    for frame, _ in traceback.walk_stack(None):
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(PACKAGE):
            return f"{path.name}:{frame.f_code.co_name}"
    return "elsewhere"
