"""fourfold: train, plan, audit and run large language models on a four-dimensional grid of devices."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fourfold.extras import drop_harmless_warnings

if TYPE_CHECKING:
    from fourfold.config.run import ParallelConfig
    from fourfold.huggingface.parallelize import parallelize
    from fourfold.parallel.grid import Grid

__version__ = "0.1.0"
__all__ = ["Grid", "ParallelConfig", "__version__", "parallelize"]

_MODULES = {
    "Grid": "fourfold.parallel.grid",
    "ParallelConfig": "fourfold.config.run",
    "parallelize": "fourfold.huggingface.parallelize",
}


drop_harmless_warnings()


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, so that ``import fourfold`` does not import torch."""
    if name not in _MODULES:
        raise AttributeError(f"module 'fourfold' has no attribute '{name}'")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
