"""Both backends, in virtual time."""

from __future__ import annotations

import gc
import signal

import hypothesis  # noqa: F401 - it looks for who refers to what trio gives it, and would not see those that are frozen
import jax  # as any program that asks for configs has done: the event loop does not import it
import pytest
from blockbuster import blockbuster_ctx
from pydantic import TypeAdapter

from asel.kernels.call_registry import clear_invocations
from asel.testing import virtual_backend

# Pydantic looks for its plugins when the first adapter is made, in files: no business of the event loop either.
TypeAdapter(int)
# Importing ejKernel turns JAX's cache of compiled programs on, for the whole process and from one run to the next.
jax.config.update("jax_enable_compilation_cache", False)
# Shells start background commands with Ctrl-C ignored, and their children inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish():
    """What was imported stays: a collection that looks through all of JAX takes an eighth of a second."""
    gc.collect()
    gc.freeze()


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request):
    """Every async test runs on both backends, and never really sleeps."""
    return virtual_backend(request.param)


@pytest.fixture(params=["asyncio", "trio"])
def real_backend(request):
    """Both backends in real time, for tests of threads, files and processes."""
    return request.param


@pytest.fixture(scope="session", autouse=True)
def _loop_is_never_blocked():
    """A blocking call on an asyncio event loop fails the test that made it."""
    with blockbuster_ctx(scanned_modules=["asel"]):
        yield


@pytest.fixture(scope="session", autouse=True)
def _own_device_locks(tmp_path_factory):
    """Tests that run at the same time in another process do not wait for ours, nor we for theirs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", str(tmp_path_factory.mktemp("runtime")))
        yield


@pytest.fixture(autouse=True)
def _fresh_registry(monkeypatch):
    monkeypatch.delenv("ASEL_AUTOTUNE", raising=False)
    clear_invocations()
    yield
    clear_invocations()
