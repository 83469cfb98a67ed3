"""What every test of tuning needs."""

from __future__ import annotations

import pytest

from asel import device_fingerprint


@pytest.fixture(scope="session", autouse=True)
def _first_call_is_behind_us():
    """Asel learns of JAX and of the machine at its first call; what that costs the loop is a test of its own."""
    device_fingerprint()


@pytest.fixture
def _no_threads(monkeypatch):
    """A virtual clock would jump while a thread compares outputs."""

    async def at_once(what, work, **options):
        return work()

    monkeypatch.setattr("asel.tuning.sampling.run_in_thread", at_once)
