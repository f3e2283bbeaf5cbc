"""Fixtures of the tests of Loki."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tiny_loki import calibrated_llama


@pytest.fixture
def llama() -> tuple[Any, Any]:
    """A Llama of the test's own, and its basis."""
    return calibrated_llama()


@pytest.fixture
def no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield
