"""Query nvidia-smi if it is installed."""

from __future__ import annotations

import shutil
import subprocess

SECONDS = 30
"""Number of seconds to wait for nvidia-smi. A faulty driver may never answer."""


def query_gpus(*fields: str) -> list[dict[str, str]]:
    """Return the given fields of every GPU as text.

    The list is empty if nvidia-smi is missing, does not know these fields, or does not answer.
    """
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    command = [program, f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return []
    lines = done.stdout.splitlines() if done.returncode == 0 else []
    return [dict(zip(fields, line.split(", "), strict=True)) for line in lines if line]
