"""Examine the versions of Python, torch, and its communication libraries, and whether torch's build fits the
machine."""

import platform
import re
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist

from fourfold import __version__
from fourfold.doctor.finding import Finding, error, ok, warning

OLDEST_TORCH = (2, 11)
GPU_FILES = {"NVIDIA": Path("/dev/nvidiactl"), "AMD": Path("/dev/kfd")}
"""Device files that the kernel's drivers create."""


def examine_versions() -> Iterator[Finding]:
    """Examine Python, fourfold, torch, and the communication library."""
    yield ok("python", f"{platform.python_version()} on {platform.platform()}", version=platform.python_version())
    yield ok("fourfold", __version__, version=__version__)
    makers = [maker for maker, path in GPU_FILES.items() if path.exists()]
    yield torch_build(torch.__version__, torch.version.cuda, torch.version.hip, torch.cuda.device_count(), makers)
    yield _backend()


def torch_build(version: str, cuda: str | None, rocm: str | None, visible: int, makers: list[str]) -> Finding:
    """Compare torch's build with the machine's GPUs.

    Args:
        version: torch's version.
        cuda: The version of CUDA that torch was built for, or None.
        rocm: The version of ROCm that torch was built for, or None.
        visible: Number of GPUs that torch sees.
        makers: The GPU makers whose drivers are installed.
    """
    build = f"CUDA {cuda}" if cuda else f"ROCm {rocm}" if rocm else "the CPU alone"
    text = f"{version}, built for {build}"
    found = re.match(r"(\d+)\.(\d+)", version)
    if found and (int(found[1]), int(found[2])) < OLDEST_TORCH:
        oldest = ".".join(map(str, OLDEST_TORCH))
        return error("torch", text, f"install torch {oldest} or newer", version=version)
    if visible == 0 and makers:
        advice = (
            "CUDA_VISIBLE_DEVICES or ROCR_VISIBLE_DEVICES may hide them, or the driver is older than this build needs"
            if cuda or rocm
            else "install the build of torch for CUDA or ROCm (pytorch.org/get-started)"
        )
        return warning("torch", f"{text}, sees none of the {' and '.join(makers)} GPUs here", advice, version=version)
    return ok("torch", text, version=version, cuda=cuda, rocm=rocm)


def _backend() -> Finding:
    """Check the library that fourfold will use: NCCL (RCCL on AMD) between GPUs, gloo between CPUs."""
    if torch.cuda.device_count() == 0:
        if not dist.is_gloo_available():
            return error("backend", "torch was built without gloo", "install a build of torch with gloo")
        return ok("backend", "gloo, between processes on the CPU", name="gloo")
    if not dist.is_nccl_available():
        return error("backend", "torch was built without NCCL", "install a build of torch with NCCL, or RCCL on AMD")
    version = ".".join(map(str, torch.cuda.nccl.version()))
    return ok("backend", f"{'RCCL' if torch.version.hip else 'NCCL'} {version}", name="nccl", version=version)
