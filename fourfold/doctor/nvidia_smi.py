"""Query nvidia-smi if it is installed."""

from __future__ import annotations

import shutil
import subprocess

SECONDS = 30
"""Number of seconds to wait for nvidia-smi. A faulty driver may never answer."""


def ask_nvidia_smi(*arguments: str) -> str | None:
    """Return nvidia-smi's output, or None if the program is missing, fails, or does not answer."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    try:
        done = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return None
    return done.stdout if done.returncode == 0 else None


def query_gpus(*fields: str) -> list[dict[str, str]]:
    """Return the given fields of every GPU as text, or an empty list if nvidia-smi does not know these fields."""
    printed = ask_nvidia_smi(f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits") or ""
    return [dict(zip(fields, line.split(", "), strict=True)) for line in printed.splitlines() if line]
