"""Fixtures of all tests."""

import contextlib
from collections.abc import Iterator

import pytest
from pool import Pool


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Worker processes for tests on several ranks: ``pool.run(world_size, body, *args)``; started at first use."""
    with contextlib.closing(Pool()) as workers:
        yield workers
