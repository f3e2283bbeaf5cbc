"""fourfold: train, plan, audit and run large language models on a four-dimensional grid of devices."""

from __future__ import annotations

from typing import Any

__version__ = "0.1.0"

_LAZY = {
    "parallelize": "fourfold.huggingface.parallelize",
    "Grid": "fourfold.parallel.grid",
    "ParallelConfig": "fourfold.config.run",
}


def __getattr__(name: str) -> Any:
    """The few names for programs of one's own; torch is imported only where one is asked for."""
    if name not in _LAZY:
        raise AttributeError(f"module 'fourfold' has no attribute '{name}'")
    import importlib

    return getattr(importlib.import_module(_LAZY[name]), name)
