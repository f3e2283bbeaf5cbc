"""Fixtures for the tests of starting a job."""

import multiprocessing

import pytest

from fourfold.launch import worker_processes


@pytest.fixture(autouse=True)
def real_starter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start workers as programs do, because these tests check how workers start."""
    monkeypatch.setattr(worker_processes, "STARTED_BY", multiprocessing.get_context("spawn"))
