"""Train, plan, audit, and run large language models on a grid of devices."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fourfold.extras import drop_harmless_warnings

if TYPE_CHECKING:
    from fourfold.config.run import ParallelConfig
    from fourfold.huggingface.parallelize import parallelize
    from fourfold.huggingface.parallelized import Parallelized
    from fourfold.jobs import train
    from fourfold.parallel.grid.grid import Grid
    from fourfold.run_file.load import load_run

__version__ = "0.1.0"
__all__ = ["Grid", "ParallelConfig", "Parallelized", "__version__", "load_run", "parallelize", "train"]

_MODULES = {
    "Grid": "fourfold.parallel.grid.grid",
    "ParallelConfig": "fourfold.config.run",
    "Parallelized": "fourfold.huggingface.parallelized",
    "load_run": "fourfold.run_file.load",
    "parallelize": "fourfold.huggingface.parallelize",
    "train": "fourfold.jobs",
}


drop_harmless_warnings()


def __getattr__(name: str) -> Any:
    """Import a public name on first use, so that `import fourfold` does not import torch."""
    if name not in _MODULES:
        raise AttributeError(f"module 'fourfold' has no attribute '{name}'")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
