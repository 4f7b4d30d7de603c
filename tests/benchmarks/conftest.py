"""Two test files run at a time, so that no bench would find a quiet machine."""

import pytest

from benchmarks import quiet


@pytest.fixture(autouse=True)
def _busy_machines_are_accepted(monkeypatch):
    monkeypatch.setattr(quiet, "WATCH_S", 0.0)
