"""Fixtures of the tests of Loki."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch


@pytest.fixture
def llama() -> tuple[Any, Any]:
    """Return a separate Llama for the test, and its basis."""
    from tiny_loki import calibrated_llama  # imports Triton, which must wait until tests/conftest.py has configured it

    return calibrated_llama()


@pytest.fixture
def no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield
