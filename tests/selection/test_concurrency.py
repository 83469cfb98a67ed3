"""Tunes that many callers share: their owner, and their end."""

from __future__ import annotations

import threading
import time
from functools import partial

import anyio
import anyio.from_thread
import anyio.lowlevel
import anyio.to_thread
import pytest
from support.kernels import A100, BEST, COSTS, GUESS, H100, TUNE_S, Bench, Blocks, Toy, call

from asel import InvalidRequestError, SelectorClosedError, Tuner, overlay_cache, policy_override

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize(("is_open", "callers"), [(True, 3_000), (False, 1_000)], ids=["open", "without async with"])
async def test_thousands_of_callers_share_one_tune(is_open, callers):
    """A cold key is tuned once for any number of tasks, and all get the same answer."""
    bench = Bench()
    kernel, inv, answers = Toy(), call(), []

    async def ask():
        answers.append(await bench.chain.choose(inv, kernel))

    async def ask_all():
        async with anyio.create_task_group() as tasks:
            for _ in range(callers):
                tasks.start_soon(ask)

    if is_open:
        async with bench.chain:
            await ask_all()
    else:
        await ask_all()
    assert answers == [BEST] * callers
    assert bench.tunes == 1
    assert len(bench.measure.compiled) == 3
    assert len(bench.sink.named("pending_join")) == callers - 1


async def test_callers_share_one_read_of_the_store():
    """Concurrent callers of a cold key read the store once."""
    reads = 0

    class Slow:
        async def load(self, key, checksum):
            nonlocal reads
            reads += 1
            await anyio.sleep(1)

        async def save(self, report, *, replace):
            raise OSError("read-only")

    bench = Bench(persistent=Slow())
    async with bench.chain as chain, anyio.create_task_group() as tasks:
        for _ in range(100):
            tasks.start_soon(chain.choose, call(), Toy())
    assert reads == 1
    assert bench.tunes == 1


async def test_a_tune_that_ends_while_another_caller_reads_the_store_is_not_repeated():
    """Memory is asked again after the store was awaited: no await lies between look-up and insert."""
    first = True

    class FirstReadIsSlow:
        async def load(self, key, checksum):
            nonlocal first
            slow, first = first, False
            await anyio.sleep(10 if slow else 0)

        async def save(self, report, *, replace):
            raise OSError("read-only")

    bench = Bench(persistent=FirstReadIsSlow())
    tiers = []
    async with bench.chain as chain, anyio.create_task_group() as tasks:

        async def ask():
            selection = await chain.select(call(), Toy())
            tiers.append((selection.tier, list(selection.declined)))

        tasks.start_soon(ask)
        await anyio.sleep(1)
        await chain.retune(call(), Toy())
        assert tiers == []
    assert tiers == [("memory", ["override", "overlay"])]
    assert bench.tunes == 1


async def test_keys_on_one_device_take_turns_and_devices_do_not_wait_for_each_other():
    """Sampling is alone on its device: two keys there take twice as long, on two devices as long as one."""
    for devices, seconds in (((H100, H100), 2 * TUNE_S), ((H100, A100), TUNE_S)):
        bench = Bench()
        async with bench.chain as chain:
            start = anyio.current_time()
            async with anyio.create_task_group() as tasks:
                for size, device in zip((8, 16), devices, strict=True):
                    tasks.start_soon(chain.choose, call(size, device), Toy())
            assert anyio.current_time() - start == pytest.approx(seconds)
            starts = bench.sink.named("autotune_start")
            assert starts[0].start == starts[1].start == start


async def test_callers_with_other_checksums_do_not_evict_each_other():
    """One key with two objectives and two candidate lists has an entry for each, tuned once."""

    class Wider(Toy):
        candidates = (*Toy.candidates, Blocks(4))

    bench = Bench(costs=lambda cfg: 1 / cfg.m)
    narrow, wide = Toy(), Wider()
    async with bench.chain as chain:
        for _ in range(3):
            assert await chain.choose(call(), narrow) == Blocks(3)
            assert await chain.choose(call(), wide) == Blocks(4)
            with policy_override(chain, validate_backward=True):
                assert await chain.choose(call(), narrow) == Blocks(3)
    assert bench.tunes == 3
    assert bench.cache.size() == 3
    assert len(bench.cache.keys()) == 1
    assert [e.objective for e in bench.sink.named("autotune_start")] == ["forward", "forward", "forward+backward"]


async def test_a_tune_ignores_its_first_callers_overlays():
    """The selections of a candidate under measurement must not depend on the first caller."""
    seen = []

    class Nested(Toy):
        def candidate_cfgs(self, inv):
            return (Blocks(1),)

    class Asking:
        async def compile(self, trial):
            seen.append(bench.chain.choose_nowait(call(99), Nested()))

            async def sample():
                return 0.1

            return sample

    bench = Bench(tuner=Tuner(0, 1, measure=Asking()))
    async with bench.chain as chain:
        inner = (await chain.explain(call(99), Nested())).key
        with overlay_cache({inner: Blocks(42)}):
            await chain.choose(call(), Toy())
    assert len(seen) >= 3  # one for each candidate, and for that of the inner key's own tune
    assert set(seen) == {GUESS}


async def test_a_candidate_that_selects_its_own_key_does_not_deadlock():
    """A selection from inside a tune never waits for a tune: it gets the heuristic."""
    inner = []

    class Recursive:
        async def compile(self, trial):
            inner.append(await bench.chain.select(call(), Toy()))
            inner.append(await bench.chain.select(call(99), Toy()))

            async def sample():
                return COSTS[trial.cfg]

            return sample

    bench = Bench(tuner=Tuner(0, 1, measure=Recursive()))
    async with bench.chain as chain:
        assert await chain.choose(call(), Toy()) == BEST
        await chain.settled()
        assert {s.tier for s in inner[:2]} == {"heuristics"}
        assert (await chain.select(call(99), Toy())).tier == "memory"
    assert "pending" in inner[0].declined["autotune"]
    assert "queued" in inner[1].declined["autotune"]


def test_a_candidate_that_selects_from_its_thread_does_not_deadlock(real_backend):
    """Context follows into worker threads, so a blocking call back into the loop is recognised too."""
    from asel.runtime.threads import run_in_thread

    answers = []

    async def main():
        token = anyio.lowlevel.current_token()

        class CallsBack:
            async def compile(self, trial):
                def work():
                    answers.append(anyio.from_thread.run(bench.chain.choose, call(), Toy(), token=token))

                await run_in_thread("compiling", work)

                async def sample():
                    return COSTS[trial.cfg]

                return sample

        bench = Bench(tuner=Tuner(0, 1, measure=CallsBack()))
        async with bench.chain as chain:
            with anyio.fail_after(10):
                assert await chain.choose(call(), Toy()) == BEST

    anyio.run(main, backend=real_backend)
    assert answers == [GUESS] * 3


async def test_closing_wakes_every_waiter_and_ends_every_tune():
    """Leaving the context cancels tunes in flight; each waiter gets its own SelectorClosedError."""
    bench = Bench(script={"hangs": list(COSTS)}, allow={"candidate_timeout_s": 1000.0})
    errors = []

    async def ask():
        with pytest.raises(SelectorClosedError) as caught:
            await bench.chain.choose(call(), Toy())
        errors.append(caught.value)

    async with anyio.create_task_group() as tasks, bench.chain:
        for _ in range(3):
            tasks.start_soon(ask)
        await anyio.wait_all_tasks_blocked()
        start = anyio.current_time()
    assert anyio.current_time() == start
    assert len({id(error) for error in errors}) == 3
    assert bench.cache.pending() == []
    closed = bench.sink.events[-1]
    assert (closed.name, closed.cancelled, closed.abandoned) == ("closed", 1, ())


async def test_a_closed_chain_raises_selector_closed_error():
    """A closed chain selects nothing; it may be opened again."""
    bench = Bench()
    async with bench.chain as chain:
        await chain.choose(call(), Toy())
    for ask in (bench.chain.choose, bench.chain.select, bench.chain.retune):
        with pytest.raises(SelectorClosedError, match="closed"):
            await ask(call(), Toy())
    with pytest.raises(SelectorClosedError):
        bench.chain.choose_nowait(call(), Toy())
    async with bench.chain as chain:
        assert await chain.choose(call(), Toy()) == BEST
        assert await chain.choose(call(16), Toy()) == BEST


async def test_an_open_chain_cannot_be_entered_again():
    """One owner at a time."""
    bench = Bench()
    async with bench.chain as chain:
        with pytest.raises(InvalidRequestError, match="open already"):
            await chain.__aenter__()
        assert await chain.choose(call(), Toy()) == BEST


@pytest.mark.parametrize("busy", [False, True], ids=["idle", "tuning"])
async def test_an_exception_of_the_body_is_not_wrapped(busy):
    """It is raised without an ExceptionGroup, with or without tunes in flight."""
    bench = Bench(allow={"cache_miss_fallback": "background"})
    with pytest.raises(ZeroDivisionError, match="mine"):
        async with bench.chain as chain:
            if busy:
                await chain.choose(call(), Toy())
            raise ZeroDivisionError("mine")
    assert bench.cache.pending() == []


async def test_a_cancelled_body_stays_cancelled():
    """Cancellation from outside passes through the chain, and the tunes end with it."""
    bench = Bench()
    with anyio.move_on_after(0.1) as scope:
        async with bench.chain as chain:
            await chain.choose(call(), Toy())
    assert scope.cancelled_caught
    assert bench.cache.pending() == []
    assert bench.sink.names[-1] == "closed"


def test_a_natively_cancelled_asyncio_task_stays_cancelled():
    """task.cancel() is not swallowed by the chain's own task group."""
    import asyncio

    async def main():
        bench = Bench()

        async def body():
            async with bench.chain as chain:
                await chain.choose(call(), Toy())

        task = asyncio.ensure_future(body())
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert bench.cache.pending() == []

    asyncio.run(main())


@pytest.mark.parametrize("stage", ["compiling", "measuring"])
def test_closing_gives_threads_their_grace_and_names_busy_ones(real_backend, stage):
    """A thread gets close_grace_s to finish its step; one that is still busy is abandoned and named."""
    from asel.runtime.threads import run_in_thread

    release = threading.Event()

    async def main():
        started = anyio.Event()
        token = anyio.lowlevel.current_token()

        class Stuck:
            async def compile(self, trial):
                def work():
                    anyio.from_thread.run_sync(started.set, token=token)
                    release.wait(30)
                    return 0.001

                step = partial(
                    run_in_thread, f"{stage} {trial.cfg}", work, grace_s=trial.grace_s, left_behind=trial.left_behind
                )
                return step if stage == "measuring" else await step()

        bench = Bench(tuner=Tuner(measure=Stuck()), close_grace_s=0.2)
        with anyio.fail_after(10):
            async with bench.chain as chain:
                with policy_override(chain, cache_miss_fallback="background"):
                    await chain.choose(call(), Toy())
                await started.wait()
                closing = time.monotonic()
        assert 0.2 <= time.monotonic() - closing < 2
        closed = bench.sink.events[-1]
        assert closed.abandoned == (f"{stage} {GUESS}",)
        assert 0.2 <= closed.end - closed.start < 2

        in_time = Bench(tuner=Tuner(measure=Stuck()), close_grace_s=30)
        started = anyio.Event()
        with anyio.fail_after(10):
            async with in_time.chain as chain:
                with policy_override(chain, cache_miss_fallback="background"):
                    await chain.choose(call(device=A100), Toy())  # the other device may be occupied
                await started.wait()
                release.set()
        assert in_time.sink.events[-1].abandoned == ()

    try:
        anyio.run(main, backend=real_backend)
    finally:
        release.set()


async def test_a_tune_without_waiters_continues():
    """Its result is still useful: the next caller finds it in memory."""
    bench = Bench()
    async with bench.chain as chain:
        with anyio.move_on_after(0.1):
            await chain.choose(call(), Toy())
        await chain.settled()
        assert (await chain.select(call(), Toy())).tier == "memory"
    assert bench.tunes == 1


def test_choose_nowait_in_a_thread_emits_and_tunes_on_the_loop(real_backend):
    """Sinks are called only on the loop, and the background tune belongs to the chain."""
    threads = set()

    async def main():
        bench = Bench(on_event=lambda event: threads.add(threading.get_ident()), costs=0.0)
        async with bench.chain as chain:
            guess = await anyio.to_thread.run_sync(chain.choose_nowait, call(), Toy())
            assert guess == GUESS
            await chain.settled()
            assert bench.tunes == 1
            assert (await chain.select(call(), Toy())).tier == "memory"
            await anyio.to_thread.run_sync(chain.choose_nowait, call(), Toy())
        assert bench.sink.names.count("cache_hit") == 2
        assert threads == {threading.get_ident()}

    anyio.run(main, backend=real_backend)


async def test_two_chains_over_one_cache_share_their_tunes():
    """A pending entry is the tune, even if another chain began it."""
    one = Bench()
    two = Bench(cache=one.cache)
    answers = []

    async def ask(chain):
        answers.append(await chain.choose(call(), Toy()))

    async with one.chain, two.chain, anyio.create_task_group() as tasks:
        tasks.start_soon(ask, one.chain)
        tasks.start_soon(ask, two.chain)
    assert answers == [BEST, BEST]
    assert one.tunes + two.tunes == 1


@pytest.mark.anyio
@pytest.mark.parametrize("turns", [0, 1, 2, 3])
async def test_a_call_still_queued_at_closing_begins_no_tune(turns):
    """No task could run the tune, so its key would stay pending."""
    bench = Bench()
    async with bench.chain as chain:
        chain.choose_nowait(call(32), Toy())
        for _ in range(turns):
            await anyio.lowlevel.checkpoint()
    assert bench.cache.pending() == []


async def test_a_waiter_of_another_chain_tunes_again_when_that_chain_closes():
    """A waiter does not fail because another chain closes."""
    one = Bench()
    two = Bench(cache=one.cache)
    answers = []

    async def ask():
        answers.append(await two.chain.choose(call(), Toy()))

    async with two.chain, anyio.create_task_group() as tasks:
        with policy_override(one.chain, cache_miss_fallback="background"):
            async with one.chain:
                await one.chain.choose(call(), Toy())
                tasks.start_soon(ask)
                await anyio.wait_all_tasks_blocked()
    assert answers == [BEST]
    assert (one.tunes, two.tunes) == (1, 1)


async def test_a_chain_serves_a_shielded_body_until_its_end():
    """A chain closes when its block is left, not when the task that opened it is cancelled."""
    bench = Bench()
    async with anyio.create_task_group() as callers:
        with anyio.CancelScope() as outer:
            async with bench.chain:
                callers.start_soon(bench.chain.choose, call(), Toy())
                await anyio.wait_all_tasks_blocked()
                try:
                    outer.cancel()
                    await anyio.sleep_forever()
                finally:
                    with anyio.CancelScope(shield=True):
                        await anyio.sleep(2 * TUNE_S)
                        assert await bench.chain.choose(call(), Toy()) == BEST
    with pytest.raises(SelectorClosedError):
        await bench.chain.choose(call(), Toy())
    assert bench.tunes == 1
    assert bench.cache.pending() == []


class HungStore:
    """A store that never answers."""

    async def load(self, key, checksum):
        await anyio.sleep_forever()

    async def save(self, report, *, replace):
        await anyio.sleep_forever()


async def test_closing_wakes_callers_that_wait_for_the_store():
    """A close ends every kind of wait."""
    bench = Bench(persistent=HungStore(), store_timeout_s=1000.0)
    errors = []

    async def ask():
        with pytest.raises(SelectorClosedError) as caught:
            await bench.chain.choose(call(), Toy())
        errors.append(caught.value)

    async with anyio.create_task_group() as tasks, bench.chain:
        tasks.start_soon(ask)
        tasks.start_soon(ask)
        await anyio.wait_all_tasks_blocked()
        start = anyio.current_time()
    assert len(errors) == 2
    assert anyio.current_time() == start
    assert sorted(bench.sink.names) == ["caller_left", "caller_left", "closed"]


async def test_closing_gives_a_result_the_grace_to_be_stored():
    """A result gets close_grace_s to reach the store, and its tune ends once."""

    class SlowToSave(HungStore):
        async def load(self, key, checksum):
            return None

    bench = Bench(persistent=SlowToSave(), store_timeout_s=1000.0, close_grace_s=2.0)
    async with anyio.create_task_group() as tasks:
        async with bench.chain as chain:
            with policy_override(chain, cache_miss_fallback="background"):
                await chain.choose(call(), Toy())
            await anyio.sleep(TUNE_S + 1)
            start = anyio.current_time()
        assert anyio.current_time() - start == pytest.approx(2.0)
        tasks.cancel_scope.cancel()
    ends = [name for name in bench.sink.names if name in ("autotune_failed", "autotune_finish")]
    assert ends == ["autotune_failed"]


async def test_settled_also_waits_for_calls_queued_meanwhile():
    """A call queued during the last tune is handled before `settled` returns."""

    class SlowToLoad:
        async def load(self, key, checksum):
            await anyio.sleep(1)

        async def save(self, report, *, replace):
            raise OSError("read-only")

    bench = Bench(persistent=SlowToLoad())
    async with bench.chain as chain, anyio.create_task_group() as tasks:
        chain.choose_nowait(call(8), Toy())

        async def later():
            await anyio.sleep(1 + TUNE_S / 2)
            chain.choose_nowait(call(16), Toy())

        tasks.start_soon(later)
        await chain.settled()
        assert (await chain.select(call(16), Toy())).tier == "memory"


def test_a_chain_may_be_opened_again_on_another_backend():
    """No state of the first event loop remains, except that a failed key's pause continues."""
    bench = Bench(script={"run_errors": lambda cfg: ValueError("bad")}, allow={"retry_after_s": 1000.0})

    async def main():
        async with bench.chain as chain:
            chain.choose_nowait(call(), Toy())
            await chain.settled()
            return (await chain.select(call(), Toy())).declined["autotune"]

    for backend in ("asyncio", "trio", "trio", "asyncio"):
        why = anyio.run(main, backend=backend)
        seconds = int(why.rpartition(" in ")[2].removesuffix(" s"))
        assert 900 < seconds <= 1000
    assert bench.tunes == 1


def test_a_tune_of_another_event_loop_is_not_waited_for(real_backend):
    """Tunes belong to one loop; waiting for one in another loop is an error, not a hang."""
    bench = Bench(costs=lambda cfg: 3600.0)
    started, done = threading.Event(), threading.Event()

    async def other():
        for ask in (bench.chain.choose, bench.chain.select, bench.chain.retune):
            with pytest.raises(InvalidRequestError, match=r"another event loop.*choose_nowait.*BlockingSelector"):
                await ask(call(), Toy())
        assert bench.chain.choose_nowait(call(), Toy()) == GUESS

    async def main():
        async with bench.chain as chain:
            with policy_override(chain, cache_miss_fallback="background"):
                await chain.choose(call(), Toy())
            started.set()
            await anyio.to_thread.run_sync(done.wait)

    thread = threading.Thread(target=lambda: anyio.run(main, backend=real_backend))
    thread.start()
    assert started.wait(10)
    try:
        anyio.run(other, backend=real_backend)
    finally:
        done.set()
        thread.join(10)
    assert not thread.is_alive()


async def test_a_retune_that_joins_a_tune_replaces_a_put_config():
    """A retune has the same effect if a tune is already in flight."""
    bench = Bench()
    async with bench.chain as chain, anyio.create_task_group() as tasks:
        tasks.start_soon(chain.choose, call(), Toy())
        await anyio.wait_all_tasks_blocked()
        bench.cache.put(*bench.sink.events[0].key, Blocks(99))
        assert await chain.retune(call(), Toy()) == BEST
        assert await chain.choose(call(), Toy()) == BEST
    assert bench.tunes == 1


async def test_a_sink_that_interrupts_leaves_no_key_pending():
    """The tune's task has started before its first event is emitted."""

    def interrupt(event):
        if event.name == "autotune_start":
            raise KeyboardInterrupt

    bench = Bench(on_event=interrupt)
    async with bench.chain as chain:
        with pytest.raises(KeyboardInterrupt):
            await chain.choose(call(), Toy())
        await chain.settled()
        assert (await chain.select(call(), Toy())).tier == "memory"
