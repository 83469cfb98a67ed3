"""The limits on background tunes, in virtual time."""

from __future__ import annotations

import anyio
import pytest
from support.kernels import BEST, GUESS, TUNE_S, Bench, call
from support.traces import TOY

from asel import InvalidRequestError

pytestmark = pytest.mark.anyio

BACKGROUND = {"cache_miss_fallback": "background"}


def starts(bench):
    return [event.start for event in bench.sink.named("autotune_start")]


def ends(bench):
    return [event.end for event in bench.sink.named("autotune_finish")]


async def ask_for(bench, sizes):
    for size in sizes:
        assert await bench.chain.choose(call(size), TOY) == GUESS


async def test_concurrent_background_tunes_are_limited():
    """The other tunes wait their turn, in the order of their calls."""
    bench = Bench(allow=BACKGROUND, max_background_tunes=1)
    async with bench.chain:
        await ask_for(bench, (8, 16, 32))
        await bench.chain.settled()
    assert starts(bench)[1:] == ends(bench)[:2]
    assert bench.cache.size() == 3


async def test_a_tune_with_a_waiting_caller_is_not_limited():
    """Limits apply to background tunes; a tune that a caller joins begins immediately."""
    bench = Bench(allow=BACKGROUND, max_background_tunes=1, background_duty_cycle=0.01)
    async with bench.chain as chain:
        await ask_for(bench, (8, 16))
        start = anyio.current_time()
        chain.policy = type(chain.policy)()
        assert await chain.choose(call(16), TOY) == BEST
        assert anyio.current_time() - start < 2 * TUNE_S
        assert len(ends(bench)) == 1


async def test_a_duty_cycle_spreads_a_tune_over_time():
    """With a duty cycle of a quarter, a tune takes four times as long, with a rest after each step."""
    took = []
    for duty_cycle in (1.0, 0.25):
        bench = Bench(allow=BACKGROUND, background_duty_cycle=duty_cycle)
        async with bench.chain:
            await ask_for(bench, (8,))
            await bench.chain.settled()
        took.append(ends(bench)[0] - starts(bench)[0])
    assert took[1] / took[0] == pytest.approx(4.0, rel=0.05)


async def test_background_tunes_wait_until_the_selector_is_idle():
    """Hits count as selections; the tune continues between requests that are far enough apart."""
    bench = Bench(allow=BACKGROUND, background_idle_s=1.0)
    bench.cache.put(*(await bench.chain.explain(call(64), TOY)).key, BEST)
    async with bench.chain as chain:
        await ask_for(bench, (8,))
        for _ in range(20):
            await anyio.sleep(0.5)
            assert await chain.choose(call(64), TOY) == BEST
        assert starts(bench) == []
        last = anyio.current_time()
        await chain.settled()
        assert last + 1.0 <= starts(bench)[0] <= last + 2.0
        assert await chain.choose(call(8), TOY) == BEST


async def test_closing_ends_tunes_that_wait_for_their_limits():
    """No delayed tune keeps a selector open."""
    bench = Bench(allow=BACKGROUND, background_idle_s=3600.0)
    async with bench.chain:
        await ask_for(bench, (8,))
        start = anyio.current_time()
    assert anyio.current_time() == start
    assert bench.cache.pending() == []


@pytest.mark.parametrize(
    "limit", [{"max_background_tunes": 0}, {"background_duty_cycle": 0}, {"background_idle_s": -1}]
)
async def test_limits_are_checked_where_they_enter(limit):
    """The message names the parameter and the value."""
    ((name, value),) = limit.items()
    with pytest.raises(InvalidRequestError, match=f"{name}={value}"):
        Bench(**limit)
