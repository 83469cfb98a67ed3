"""One test per await point: cancelling a caller there harms neither the other callers nor the cache.

Each collaborator below stops at one named step. A caller is cancelled while it is there. Then the step is
released, and everything must be as if that caller had never existed.
"""

from __future__ import annotations

import anyio
import anyio.lowlevel
import pytest
from support.kernels import BEST, COSTS, Bench, Toy, call

from asel import Tuner
from asel.stores.config_store import Stored

pytestmark = pytest.mark.anyio


class Gate:
    """A step that blocks every caller until it is opened."""

    def __init__(self) -> None:
        self.reached = anyio.Event()
        self.opened = anyio.Event()
        self.passed = 0

    async def __call__(self) -> None:
        self.reached.set()
        await self.opened.wait()
        self.passed += 1


class World:
    """A chain whose collaborators stop at `step`: load, compile, sample or save."""

    def __init__(self, step: str, **allow) -> None:
        self.gate = Gate()
        self.step = step
        self.records = {}
        self.compiled = []
        self.bench = Bench(tuner=Tuner(0, 1, measure=self), persistent=self, allow=allow)
        self.chain = self.bench.chain

    async def _at(self, step: str) -> None:
        if step == self.step:
            await self.gate()

    async def load(self, key, checksum):
        await self._at("load")
        return self.records.get((key, checksum))

    async def save(self, report, *, replace):
        await self._at("save")
        self.records[report.key, report.checksum] = Stored(report.winner, report)
        return self.records[report.key, report.checksum]

    async def compile(self, trial):
        await self._at("compile")
        self.compiled.append(trial.cfg)

        async def sample():
            await self._at("sample")
            return COSTS[trial.cfg]

        return sample


STEPS = ["load", "compile", "sample", "save"]


async def cancelled_at(world: World, tasks, ask) -> None:
    """Start a caller, wait until it is at the step, cancel it, and check that it ends immediately."""
    gone = anyio.Event()

    async def caller():
        with scope:
            await ask(call(), Toy())
        gone.set()

    scope = anyio.CancelScope()
    tasks.start_soon(caller)
    await world.gate.reached.wait()
    scope.cancel()
    with anyio.fail_after(1):
        await gone.wait()


@pytest.mark.parametrize("step", STEPS)
async def test_cancelled_first_caller_leaves_the_tune_running(step):
    """A tune belongs to the chain, so it outlives the caller that began it."""
    world = World(step)
    async with world.chain, anyio.create_task_group() as tasks:
        await cancelled_at(world, tasks, world.chain.choose)
        world.gate.opened.set()
        await world.chain.settled()
        selection = await world.chain.select(call(), Toy())
        # Cancelled while it read the store, it had begun nothing yet.
        assert selection.tier == ("autotune" if step == "load" else "memory")
        assert selection.cfg == BEST
    assert world.bench.tunes == 1
    assert len(world.compiled) == 3
    assert len(world.records) == 1


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("is_open", [True, False], ids=["open", "without async with"])
async def test_cancelled_first_caller_harms_no_other_waiter(step, is_open):
    """The other waiters get their answer from the same tune."""
    world = World(step)
    answers = []

    async def other():
        answers.append(await world.chain.choose(call(), Toy()))

    async def scene():
        async with anyio.create_task_group() as tasks:
            await cancelled_among(tasks)

    async def cancelled_among(tasks):
        gone = anyio.Event()
        scope = anyio.CancelScope()

        async def first():
            with scope:
                await world.chain.choose(call(), Toy())
            gone.set()

        tasks.start_soon(first)
        await world.gate.reached.wait()
        for _ in range(3):
            tasks.start_soon(other)
        await anyio.wait_all_tasks_blocked()
        scope.cancel()
        if step != "save":  # a paid-for result is being stored: the one shield
            with anyio.fail_after(1):
                await gone.wait()
        await anyio.wait_all_tasks_blocked()
        assert answers == []
        world.gate.opened.set()

    if is_open:
        async with world.chain:
            await scene()
    else:
        await scene()
    assert answers == [BEST] * 3
    assert world.bench.tunes == 1
    assert world.bench.cache.pending() == []
    assert len(world.compiled) == 3


@pytest.mark.parametrize("step", STEPS)
async def test_a_cancelled_waiter_does_not_affect_the_others(step):
    """Cancelling any waiter changes nothing for the first caller and the others."""
    world = World(step)
    answers = []

    async def ask(cancelled_by=None):
        with cancelled_by or anyio.CancelScope():
            answers.append(await world.chain.choose(call(), Toy()))

    async with world.chain, anyio.create_task_group() as tasks:
        tasks.start_soon(ask)
        await world.gate.reached.wait()
        scope = anyio.CancelScope()
        tasks.start_soon(ask, scope)
        tasks.start_soon(ask)
        await anyio.wait_all_tasks_blocked()
        scope.cancel()
        await anyio.wait_all_tasks_blocked()
        world.gate.opened.set()
    assert answers == [BEST, BEST]
    assert world.bench.tunes == 1


@pytest.mark.parametrize("step", ["compile", "sample"])
async def test_without_async_with_the_tune_ends_with_its_last_caller(step):
    """No task owns the tune, so nothing stays pending, and the next caller begins a new tune."""
    world = World(step)
    async with anyio.create_task_group() as tasks:
        await cancelled_at(world, tasks, world.chain.choose)
    assert world.bench.cache.pending() == []
    world.gate.opened.set()
    assert await world.chain.choose(call(), Toy()) == BEST
    assert world.bench.tunes == 2


async def test_without_async_with_the_next_waiter_continues_the_tune():
    """Candidates that the cancelled caller had measured are not measured again."""
    bench = Bench()
    answers = []

    async def ask(scope):
        with scope:
            answers.append(await bench.chain.choose(call(), Toy()))

    async with anyio.create_task_group() as tasks:
        first = anyio.CancelScope()
        tasks.start_soon(ask, first)
        await anyio.sleep(0.7)  # the first candidate takes 0.6 s
        tasks.start_soon(ask, anyio.CancelScope())
        await anyio.wait_all_tasks_blocked()
        first.cancel()
    assert answers == [BEST]
    assert bench.tunes == 1
    assert [cfg.m for cfg in bench.measure.compiled] == [1, 2, 3]
    # A warm-up and a sample each; the second candidate was at its warm-up when its carrier went.
    assert [cfg.m for cfg in bench.measure.sampled] == [1, 1, 2, 2, 2, 3, 3]


@pytest.mark.parametrize("step", STEPS[1:])  # a retune does not read the store
async def test_a_cancelled_retune_is_finished_and_stored(step):
    """A retune belongs to the chain like any tune."""
    world = World("nowhere")
    async with world.chain, anyio.create_task_group() as tasks:
        await world.chain.choose(call(), Toy())
        world.step = step
        await cancelled_at(world, tasks, world.chain.retune)
        world.gate.opened.set()
        await world.chain.settled()
        assert await world.chain.choose(call(), Toy()) == BEST
    assert world.bench.tunes == 2
    assert world.bench.cache.pending() == []


@pytest.mark.parametrize("step", STEPS)
async def test_closing_at_any_await_leaves_nothing_pending(step):
    """At each step of a tune, closing ends the tune and every wait for it."""
    world = World(step)
    outcomes = []

    async def ask():
        try:
            outcomes.append(await world.chain.choose(call(), Toy()))
        except Exception as error:
            outcomes.append(type(error).__name__)

    async with anyio.create_task_group() as tasks, world.chain:
        tasks.start_soon(ask)
        await world.gate.reached.wait()
        tasks.start_soon(ask)
        await anyio.wait_all_tasks_blocked()
    assert world.bench.cache.pending() == []
    assert outcomes == ["SelectorClosedError"] * 2


async def test_cancelling_settled_and_the_event_stream_is_harmless():
    """Cancelling an observer changes nothing."""
    world = World("sample", cache_miss_fallback="background")
    async with world.chain, anyio.create_task_group() as tasks:

        async def watch():
            async with world.chain.events() as stream:
                async for _ in stream:
                    pass

        tasks.start_soon(watch)
        tasks.start_soon(world.chain.settled)
        await world.chain.choose(call(), Toy())
        tasks.start_soon(world.chain.settled)
        await world.gate.reached.wait()
        tasks.cancel_scope.cancel()
    world = World("sample", cache_miss_fallback="background")
    async with world.chain:
        await world.chain.choose(call(), Toy())
        with anyio.move_on_after(0.1):
            await world.chain.settled()
        world.gate.opened.set()
        await world.chain.settled()
        assert await world.chain.choose(call(), Toy()) == BEST


async def test_cancelled_explain_changes_nothing():
    """`explain` reads the store by itself, so cancelling it affects no other caller."""
    world = World("load")
    async with world.chain, anyio.create_task_group() as tasks:
        await cancelled_at(world, tasks, world.chain.explain)
        world.gate.opened.set()
        assert await world.chain.choose(call(), Toy()) == BEST
    assert world.bench.tunes == 1


@pytest.mark.parametrize("step", STEPS)
async def test_closing_while_queued_calls_are_handled_leaves_nothing_pending(step):
    """Calls queued by `choose_nowait` end with the chain, at each of their steps."""
    world = World(step)
    async with world.chain:
        world.chain.choose_nowait(call(), Toy())
        await world.gate.reached.wait()
    assert world.bench.cache.pending() == []
    with anyio.fail_after(1):
        await world.chain.settled()


@pytest.mark.parametrize("step", STEPS[1:])
async def test_a_chain_that_is_cancelled_while_it_closes_still_ends(step):
    """The grace for storing a result is bounded, and the cancellation is raised afterwards."""
    world = World(step)
    with anyio.CancelScope() as outer:
        async with world.chain:
            world.chain.choose_nowait(call(), Toy())
            await world.gate.reached.wait()
            outer.cancel()
        await anyio.lowlevel.checkpoint()
        pytest.fail("the cancellation was lost")
    assert world.bench.cache.pending() == []
    assert world.bench.sink.names[-1] == "closed"
