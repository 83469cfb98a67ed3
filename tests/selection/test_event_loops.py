"""Chains used in several event loops: concurrently, one after the other, or after one has died."""

from __future__ import annotations

import asyncio
import math
import threading
from contextlib import suppress

import anyio
import pytest
from support.kernels import BEST, COSTS, GUESS, Bench, Toy, call

from asel import InvalidRequestError, Tuner, warm_up
from asel.testing import ScriptedMeasure

QUICK = {cfg: cost / 1000 for cfg, cost in COSTS.items()}


def in_a_thread(backend, main):
    """Run `main` in an event loop of its own, in a thread; its error, if any, is in the list."""
    raised = []

    def run():
        try:
            anyio.run(main, backend=backend)
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, raised


def held(measuring, may_end):
    """Return a bench whose measure signals its start and then waits for a gate."""
    bench = Bench(costs=QUICK)
    compile_one = bench.measure.compile

    async def compile_at_the_gate(trial):
        measuring.set()
        await anyio.to_thread.run_sync(may_end.wait)
        return await compile_one(trial)

    bench.measure.compile = compile_at_the_gate
    return bench


@pytest.mark.parametrize("is_warm", [False, True], ids=["cold key", "warm key"])
def test_an_open_chain_cannot_be_awaited_in_a_second_loop(real_backend, is_warm):
    """The await raises, and the block in the first loop continues."""
    bench = Bench(costs=QUICK)
    opened, asked = threading.Event(), threading.Event()
    reached_the_end = []

    async def first():
        async with bench.chain as chain:
            if is_warm:
                await chain.choose(call(), Toy())
            opened.set()
            await anyio.to_thread.run_sync(asked.wait)
            reached_the_end.append(await chain.choose(call(), Toy()))

    async def second():
        with pytest.raises(InvalidRequestError, match=r"choose_nowait.*BlockingSelector"):
            await bench.chain.select(call(), Toy())

    thread, raised = in_a_thread(real_backend, first)
    try:
        assert opened.wait(10)
        anyio.run(second, backend=real_backend)
    finally:
        asked.set()
        thread.join(10)
    assert raised == []
    assert reached_the_end == [BEST]


async def first_event(chain):
    async with chain.events() as stream:
        await stream.receive()


AWAITED = {
    "settled": lambda chain: chain.settled(),
    "aclose": lambda chain: chain.aclose(),
    "explain": lambda chain: chain.explain(call(), Toy()),
    "retune": lambda chain: chain.retune(call(), Toy()),
    "withdraw": lambda chain: chain.withdraw(call(), Toy(), BEST, ValueError("no")),
    "events": first_event,
    "a batch": lambda chain: warm_up(chain, [(Toy(), call())]),
}


@pytest.mark.parametrize("awaited", AWAITED)
def test_no_method_of_an_open_chain_can_be_awaited_in_a_second_loop(real_backend, awaited):
    """Otherwise the end of a tune would wake a task of the wrong loop."""
    measuring, may_end = threading.Event(), threading.Event()
    bench = held(measuring, may_end)
    answers = []

    async def first():
        async with bench.chain as chain:
            answers.append(await chain.choose(call(), Toy()))

    async def second():
        with pytest.raises(InvalidRequestError, match=r"choose_nowait.*BlockingSelector"):
            await AWAITED[awaited](bench.chain)

    thread, raised = in_a_thread(real_backend, first)
    try:
        assert measuring.wait(10)
        anyio.run(second, backend=real_backend)
    finally:
        may_end.set()
        thread.join(10)
    assert (raised, answers) == ([], [BEST])


def test_a_reader_of_events_is_woken_in_its_own_loop(real_backend):
    """A chain that is not open emits its events in the loop of the last call."""
    bench = Bench(costs=QUICK)
    reading, got = threading.Event(), []

    async def read():
        async with bench.chain.events() as stream:
            reading.set()
            with anyio.fail_after(10):
                got.append((await stream.receive()).name)

    async def ask():
        await bench.chain.choose(call(), Toy())

    thread, raised = in_a_thread(real_backend, read)
    assert reading.wait(10)
    anyio.run(ask, backend=real_backend)
    thread.join(10)
    assert (raised, len(got)) == ([], 1)


def test_loops_over_one_unopened_chain_all_get_an_answer(real_backend):
    """A tune of another loop cannot be awaited, so the heuristic answers until it has ended."""
    measuring, may_end = threading.Event(), threading.Event()
    bench = held(measuring, may_end)
    answers = []

    async def first():
        answers.append(await bench.chain.choose(call(), Toy()))

    async def other():
        selection = await bench.chain.select(call(), Toy())
        assert (selection.cfg, selection.tier) == (GUESS, "heuristics")
        assert "another event loop" in selection.declined["autotune"]

    thread, raised = in_a_thread(real_backend, first)
    try:
        assert measuring.wait(10)
        anyio.run(other, backend=real_backend)
    finally:
        may_end.set()
        thread.join(10)
    assert (raised, answers) == ([], [BEST])


def test_a_chain_whose_loop_died_may_be_opened_again():
    """Its old loop cannot close it. Its tunes are dropped, and the next loop begins new ones."""
    costs = {}
    bench = Bench(costs=lambda cfg: costs.get(cfg, 3600.0))
    loop = asyncio.new_event_loop()

    async def begin():
        await bench.chain.__aenter__()
        bench.chain.choose_nowait(call(), Toy())
        await anyio.wait_all_tasks_blocked()
        assert bench.chain.statistics().pending

    loop.run_until_complete(begin())
    dropped = asyncio.all_tasks(loop)
    loop.close()
    costs.update(QUICK)

    async def again():
        async with bench.chain as chain:
            for task in dropped:  # as the garbage collector does at some moment
                task._log_destroy_pending = False
                with suppress(RuntimeError):  # what is not asel's wants its old loop
                    task.get_coro().close()
            return await chain.choose(call(), Toy())

    assert asyncio.run(again()) == BEST
    assert not bench.chain.statistics().pending


def test_coroutines_of_a_loop_that_died_can_be_closed_in_any_context():
    """The garbage collector may close a coroutine in any context."""
    loop, bench = asyncio.new_event_loop(), Bench(costs=lambda cfg: 3600.0)
    task = loop.create_task(bench.chain.choose(call(), Toy()))
    loop.run_until_complete(anyio.wait_all_tasks_blocked())
    assert bench.chain.statistics().pending
    loop.close()
    task._log_destroy_pending = False
    task.get_coro().close()
    assert not bench.chain.statistics().pending


@pytest.mark.anyio
async def test_a_tune_continued_by_another_chain_leaves_its_first_chain():
    """Neither of two chains over one cache keeps the finished tune and its arguments alive."""
    beginner = Bench()
    heir = Bench(cache=beginner.cache)

    async with anyio.create_task_group() as tasks:
        first = anyio.CancelScope()

        async def begins():
            with first:
                await beginner.chain.choose(call(), Toy())

        tasks.start_soon(begins)
        await anyio.wait_all_tasks_blocked()

        async def inherits():
            assert await heir.chain.choose(call(), Toy()) == BEST

        tasks.start_soon(inherits)
        await anyio.wait_all_tasks_blocked()
        first.cancel()
    assert not beginner.chain.statistics().pending
    assert not heir.chain.statistics().pending


@pytest.mark.anyio
@pytest.mark.parametrize("raises", [asyncio.CancelledError, GeneratorExit, BaseException])
@pytest.mark.parametrize("kind", ["sink", "callback"])
async def test_a_base_exception_of_a_sink_cancels_no_task(kind, raises):
    """A CancelledError raised by a sink does not cancel the task that emits."""
    names = []

    def broken(event):
        names.append(event.name)
        raise raises

    class Broken:
        emit = staticmethod(broken)

    bench = Bench(on_event=broken if kind == "callback" else None)
    if kind == "sink":
        bench.chain._events.add(Broken())
    reached_the_end = False
    async with bench.chain as chain:
        assert await chain.choose(call(), Toy()) == BEST
        assert await chain.choose(call(16), Toy()) == BEST
        reached_the_end = True
    assert reached_the_end
    assert "autotune_finish" in names


class Odd(BaseException):
    """An unexpected BaseException."""


def in_the_measure(error):
    class Broken:
        async def compile(self, trial):
            raise error

    return {"tuner": Tuner(0, 1, measure=Broken())}


def in_a_sample(error):
    async def sample():
        raise error

    class Broken:
        async def compile(self, trial):
            return sample

    return {"tuner": Tuner(0, 1, measure=Broken())}


def in_the_strategy(error):
    class Broken:
        def plan(self, board):
            raise error

    return {"tuner": Tuner(0, 1, measure=ScriptedMeasure(COSTS), strategy=Broken())}


def in_the_tuner(error):
    class Broken:
        async def autotune(self, *given):
            raise error

    return {"tuner": Broken()}


def in_the_store(error):
    class Broken:
        async def get(self, *key):
            raise error

        async def put(self, *key_and_cfg):
            raise error

    return {"persistent": Broken()}


@pytest.mark.anyio
@pytest.mark.parametrize("is_open", [True, False], ids=["open", "without async with"])
@pytest.mark.parametrize("error", [asyncio.CancelledError(), Odd("odd")], ids=["CancelledError", "Odd"])
@pytest.mark.parametrize("where", [in_the_measure, in_a_sample, in_the_strategy, in_the_tuner, in_the_store])
async def test_base_exceptions_of_tuners_and_stores_are_failures(where, error, is_open):
    """If a client library's own task is cancelled, the operation has failed; its caller is not cancelled."""
    bench = Bench(**where(error))

    async def scene(chain):
        answers = [await chain.choose(call(size), Toy()) for size in (8, 16)]
        await chain.settled()
        return answers

    if is_open:
        async with bench.chain as chain:
            answers = await scene(chain)
    else:
        answers = await scene(bench.chain)
    assert answers == [BEST if where is in_the_store else GUESS] * 2
    error_types = {event.error_type for name in ("autotune_failed", "store_error") for event in bench.sink.named(name)}
    assert error_types <= {type(error).__name__, "RuntimeError"}
    assert error_types


@pytest.mark.anyio
@pytest.mark.parametrize("error", [asyncio.CancelledError(), Odd("odd")], ids=["CancelledError", "Odd"])
@pytest.mark.parametrize("method", ["heuristic_cfg", "candidate_cfgs", "candidate_priority", "key_builder"])
async def test_base_exceptions_of_a_kernel_are_failures(method, error):
    """A tier declines because of it. An error in a key builder is raised to the caller."""

    def broken(*given):
        raise error

    toy, bench = Toy(), Bench()
    setattr(toy, method, broken)
    async with bench.chain as chain:
        if method == "key_builder":
            with pytest.raises(RuntimeError, match=type(error).__name__):
                await chain.choose(call(), toy)
        else:
            selection = await chain.select(call(), toy)
            assert selection.tier == ("autotune" if method == "heuristic_cfg" else "heuristics")


@pytest.mark.anyio
@pytest.mark.parametrize("how", ["scope", "deadline", "native"])
async def test_cancelling_a_caller_cancels_it(how, anyio_backend_name):
    """By a scope around the caller, by a deadline, or by asyncio itself."""
    bench = Bench(persistent=Never())
    outcome = []

    async def ask(scope):
        with scope:
            try:
                await bench.chain.choose(call(), Toy())
            except anyio.get_cancelled_exc_class():
                outcome.append("cancelled")
                raise
        outcome.append("went on")

    async with bench.chain:
        if how == "native" and anyio_backend_name == "asyncio":
            task = asyncio.create_task(ask(anyio.CancelScope()))
            await anyio.wait_all_tasks_blocked()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert outcome == ["cancelled"]
            return
        scope = anyio.CancelScope(deadline=anyio.current_time() + (1 if how == "deadline" else math.inf))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask, scope)
            await anyio.wait_all_tasks_blocked()
            if how != "deadline":
                scope.cancel()
        assert outcome == ["cancelled", "went on"]


class Never:
    """A store that does not answer."""

    async def get(self, *key):
        await anyio.sleep_forever()

    async def put(self, *key_and_cfg):
        await anyio.sleep_forever()


@pytest.mark.parametrize(("here", "there"), [("asyncio", "trio"), ("trio", "asyncio")])
def test_choose_nowait_in_another_loop_has_the_chain_tune(here, there):
    """The tune runs in the chain's loop and belongs to it, for each pair of async libraries."""

    async def main():
        bench = Bench(costs=QUICK)

        async def ask():
            assert bench.chain.choose_nowait(call(), Toy()) == GUESS

        async with bench.chain as chain:
            thread, raised = in_a_thread(there, ask)
            await anyio.to_thread.run_sync(thread.join)
            assert raised == []
            await chain.settled()
            assert await chain.choose(call(), Toy()) == BEST

    anyio.run(main, backend=here)
