"""Fixtures of the tests of the tuner."""

from __future__ import annotations

import pytest
from fake_trials import tiny_candidates

from fourfold.tuning.candidates import Candidates


@pytest.fixture(scope="session")
def candidates() -> Candidates:
    """Return the layouts of a small GPT on eight A100s."""
    return tiny_candidates()


@pytest.fixture(autouse=True)
def quick_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Poll often, because pretended trials are done at once."""
    monkeypatch.setattr("fourfold.tuning.tuner.POLL_SECONDS", 0.005)
