"""Selectors that are opened in one task and closed in another, as in notebooks and servers."""

from __future__ import annotations

from contextlib import asynccontextmanager

import anyio
import pytest
from support.kernels import BEST, TUNE_S, Bench, call
from support.traces import TOY

from asel import SelectorClosedError

pytestmark = pytest.mark.anyio


async def in_another_task(step):
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(step)


async def test_a_chain_may_be_opened_and_closed_in_different_tasks():
    """As in two cells of a notebook, any number of times."""
    bench = Bench()
    for _ in range(2):
        await in_another_task(bench.chain.aopen)
        assert await bench.chain.choose(call(), TOY) == BEST
        await in_another_task(bench.chain.aclose)
        with pytest.raises(SelectorClosedError):
            await bench.chain.choose(call(), TOY)
    assert bench.tunes == 1
    assert bench.sink.names.count("closed") == 2


async def test_another_task_may_close_a_chain_whose_block_is_still_open():
    """Its callers get their errors immediately, and the end of the block does nothing more."""
    bench = Bench()
    async with bench.chain as chain, anyio.create_task_group() as tasks:
        tasks.start_soon(chain.aclose)
        with pytest.raises(SelectorClosedError):
            await chain.choose(call(), TOY)
    assert bench.sink.names.count("closed") == 1
    assert bench.cache.pending() == []


async def test_a_tune_cannot_close_its_own_chain():
    """Closing would wait for the tune, and the tune for the closing."""

    class ClosesItsChain:
        async def autotune(self, make_fn, args, kwargs, candidates):
            await bench.chain.aclose()

    bench = Bench(tuner=ClosesItsChain())
    async with bench.chain as chain:
        selection = await chain.select(call(), TOY)
    assert selection.tier == "heuristics"
    assert "aclose: called inside a tune of this chain" in selection.declined["autotune"]


async def test_closing_waits_for_the_task_that_is_closing():
    """Once any of them returns, the chain is closed. Closing a chain that is not open does nothing."""
    bench, ended = Bench(close_grace_s=1.0), []
    await bench.chain.aclose()
    await bench.chain.aopen()

    async def close():
        await bench.chain.aclose()
        ended.append(bench.sink.names.count("closed"))

    async with anyio.create_task_group() as tasks:
        for _ in range(3):
            tasks.start_soon(close)
    await bench.chain.aclose()
    assert ended == [1, 1, 1]


async def test_resources_are_closed_by_the_task_that_opened_them():
    """A store or tuner may have its own task group, which only the same task may leave."""
    steps = []

    class Grouped:
        @asynccontextmanager
        async def _open(self):
            async with anyio.create_task_group():
                steps.append("open")
                yield
                steps.append("close")

        async def __aenter__(self):
            self._context = self._open()
            await self._context.__aenter__()

        async def __aexit__(self, *error):
            await self._context.__aexit__(*error)

        async def load(self, key, checksum):
            return None

        async def save(self, report, *, replace):
            raise OSError("full")

    bench = Bench(persistent=Grouped())
    await in_another_task(bench.chain.aopen)
    await in_another_task(bench.chain.aclose)
    assert steps == ["open", "close"]


async def test_an_error_while_opening_is_raised_and_leaves_the_chain_closed():
    """The store's error is raised, and the chain may be opened later."""

    class Refusing:
        refuses = True

        async def __aenter__(self):
            if self.refuses:
                raise OSError("no such place")

        async def __aexit__(self, *error):
            pass

        async def get(self, device, op_id, call_key):
            return None

        async def put(self, device, op_id, call_key, cfg):
            pass

    store = Refusing()
    bench = Bench(persistent=store)
    with pytest.raises(OSError, match="no such place"):
        await bench.chain.aopen()
    store.refuses = False
    async with bench.chain as chain:
        assert await chain.choose(call(), TOY) == BEST


async def test_a_cancelled_aclose_still_closes_the_chain():
    """Closing is bounded and shielded; the cancellation is raised afterwards."""
    bench = Bench()
    await bench.chain.aopen()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(anyio.sleep, TUNE_S / 2)
    with anyio.CancelScope() as scope:
        scope.cancel()
        await bench.chain.aclose()
    assert bench.sink.names.count("closed") == 1


async def test_opening_and_closing_may_overlap():
    """Opening raises if the chain is closed meanwhile; a later opening waits for the close, and works."""
    bench, errors = Bench(), []

    async def begin(step, begun):
        begun.set()
        try:
            await step()
        except SelectorClosedError as error:
            errors.append(str(error))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(begin, bench.chain.aopen, begun := anyio.Event())
        await begun.wait()
        await bench.chain.aclose()
    assert errors == ["the selector was closed while it was being opened"]
    await bench.chain.aopen()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(begin, bench.chain.aclose, begun := anyio.Event())
        await begun.wait()
        closed_before = bench.sink.names.count("closed")
        await bench.chain.aopen()
        assert bench.sink.names.count("closed") == closed_before + 1
    assert await bench.chain.choose(call(), TOY) == BEST
    await bench.chain.aclose()
