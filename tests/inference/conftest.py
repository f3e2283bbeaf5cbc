"""Fixtures of the tests of Loki."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch


@pytest.fixture
def llama() -> tuple[Any, Any]:
    """Return a separate Llama for the test, and its basis."""
    # Import this only now. It imports Triton, which tests/conftest.py must configure first.
    from tiny_loki import calibrated_llama

    return calibrated_llama()


@pytest.fixture
def no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield
