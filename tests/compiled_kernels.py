"""Compile Triton kernels for a GPU without having one. A separate process compiles each kernel, and the tests check how
many registers and how much stack the kernel needs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from patience import PATIENCE


class Usage(NamedTuple):
    """Registers and stack that each thread of a kernel uses."""

    registers: int
    stack: int
    """Bytes of local memory. A kernel uses local memory if the GPU has too few registers for it."""


def usage_of(cubin: bytes) -> Usage:
    """Return the resources that a kernel needs, from NVIDIA machine code with one kernel."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        report = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    ((registers, stack),) = re.findall(r"REG:(\d+) STACK:(\d+)", report)
    return Usage(int(registers), int(stack))


def output_of(script: Path) -> str:
    """Run a script that compiles kernels, without Triton's interpreter, and return what it prints."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    paths = [str(Path(__file__).parent), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout
