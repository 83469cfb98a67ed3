"""A client of one Redis: operations that take turns on a shared connection, each within its time limit."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import anyio
from anyio.abc import TaskGroup
from coredis.exceptions import BusyLoadingError, ConnectionError, NoScriptError

from asel.errors import StoreError
from asel.runtime.limiter import Limiter
from asel.runtime.loop import spawn_loop_task
from asel.stores.redis.claim_queues import Queues
from asel.stores.redis.connection import ConnectAttempt, Dialer, RedisConnection
from asel.stores.redis.refusals import explain
from asel.stores.redis.scripts import Script
from asel.stores.redis.url import Target
from asel.stores.redis.wakeups import ChannelRights, Wakeups

__all__ = ["Link", "SharedLink", "Turn", "background_tasks", "linked"]

# Concurrent operations. 3,000 gets take 1.16 s with 4 in flight, 0.95 s with 16, 0.90 s with 64, and 1.0 s with 256 or
# with no limit: beyond 64, latency grows and throughput does not.
MAX_IN_FLIGHT = 64
# Ticks per `timeout_s`. A blocked event loop costs one tick, for any duration. Reading an answer that arrived meanwhile
# takes two or three rounds of the loop, so it is read before the ticks run out.
_TICKS = 8


@asynccontextmanager
async def background_tasks() -> AsyncIterator[TaskGroup]:
    """Run tasks that end with the block. An error of the block is raised itself, not in a group."""
    failure: Exception | None = None
    async with anyio.create_task_group() as tasks:
        try:
            yield tasks
        except Exception as error:
            failure = error
        finally:
            tasks.cancel_scope.cancel()
    if failure is not None:
        raise failure


@asynccontextmanager
async def linked(target: Target, rights: ChannelRights) -> AsyncIterator[Link]:
    """Give a link for the block; it connects on first use."""
    async with background_tasks() as tasks:
        link = Link(target, tasks, rights)
        try:
            yield link
        finally:
            link.close()


class SharedLink:
    """A link that the tasks of one event loop share; it is closed when the last of them leaves.

    It has its own task, because the tasks that share it may end in any order, and the end of one must not close the
    connection of the others.
    """

    def __init__(self, target: Target, rights: ChannelRights) -> None:
        self.users = 0
        self.link: Link
        self._target = target
        self._rights = rights
        self._ready, self._should_end, self._ended = anyio.Event(), anyio.Event(), anyio.Event()
        self._task = spawn_loop_task(self._run)

    async def _run(self) -> None:
        try:
            async with linked(self._target, self._rights) as self.link:
                self._ready.set()
                await self._should_end.wait()
        finally:
            self._ended.set()

    async def ready(self) -> None:
        if not self._ready.is_set():
            await self._ready.wait()

    async def end(self) -> None:
        """Close the connections, within the time limit of an operation."""
        self._should_end.set()
        with anyio.move_on_after(self._target.timeout_s, shield=True):
            await self._ended.wait()


class Link:
    """The client of one Redis, in one event loop."""

    def __init__(self, target: Target, tasks: TaskGroup, rights: ChannelRights) -> None:
        self.target = target
        self.timeout_s = target.timeout_s
        self.dialer: Dialer[RedisConnection] = Dialer(target, tasks, RedisConnection)
        self.wakeups = Wakeups(target, tasks, rights)
        self.queues: Queues = {}
        self._tasks = tasks
        self._limiter = Limiter(MAX_IN_FLIGHT)
        self._queued: set[anyio.CancelScope] = set()
        self._turns: set[Turn] = set()
        self._begun: anyio.Event | None = None

    def close(self) -> None:
        self.dialer.close()
        self.wakeups.close()

    @asynccontextmanager
    async def turn(self, *, urgent: bool = False) -> AsyncIterator[Turn]:
        """Run one operation within `timeout_s`, which begins when the operation leaves the queue.

        When an operation times out, those in the queue fail with it, because Redis would not answer them either.
        `urgent` operations skip the queue.
        """
        async with AsyncExitStack() as stack:
            if not urgent:
                await self._take_slot(stack)
            with anyio.CancelScope() as scope:
                turn = Turn(self, scope)
                self._watch(turn)
                try:
                    yield turn
                finally:
                    self._turns.discard(turn)
            if scope.cancelled_caught:
                turn.give_up()
                for waiting in self._queued:
                    waiting.cancel()
                raise self.failure(self._timeout_text) from None

    async def _take_slot(self, stack: AsyncExitStack) -> None:
        with anyio.CancelScope() as waiting:
            self._queued.add(waiting)
            try:
                await stack.enter_async_context(self._limiter.slot())
            finally:
                self._queued.discard(waiting)
        if waiting.cancelled_caught:
            raise self.failure(self._timeout_text)

    def _watch(self, turn: Turn) -> None:
        self._turns.add(turn)
        if self._begun is None:
            self._begun = anyio.Event()
            self._tasks.start_soon(self._end_late_turns)
        self._begun.set()

    async def _end_late_turns(self) -> None:
        while True:
            if not self._turns:
                self._begun = anyio.Event()
                await self._begun.wait()
            await anyio.sleep(self.timeout_s / _TICKS)
            for turn in self._turns:
                turn.count_down()

    @property
    def _timeout_text(self) -> str:
        question = "is it up, and near?" if self.target.tls is None else "is it up, near, and does it speak TLS?"
        return f"did not answer within {self.timeout_s:g} s: {question}"

    def failure(self, trouble: str) -> StoreError:
        return StoreError(f"Redis at {self.target.location} {trouble}", location=self.target.location)


class Turn:
    """One operation: one or a few requests to Redis."""

    def __init__(self, link: Link, scope: anyio.CancelScope) -> None:
        self._link = link
        self._scope = scope
        self._ticks_left = _TICKS
        self._used: list[ConnectAttempt[RedisConnection]] = []
        self._awaits_answer = False

    async def run(
        self,
        script: Script,
        keys: list[bytes],
        *args: bytes | str | int,
        before: Callable[[], object] = lambda: None,
        once: bool = False,
    ) -> Any:
        """Run a script and return its result; `before` is called immediately before it is sent.

        If the connection turns out to be dead, the script is sent again over a new one, unless `once`.
        """

        async def request(connection: RedisConnection) -> Any:
            before()
            arguments = (len(keys), *keys, *args)
            try:
                return await connection.create_request(b"EVALSHA", script.sha, *arguments, decode=False)
            except NoScriptError:  # a new or restarted Redis
                return await connection.create_request(b"EVAL", script.text, *arguments, decode=False)

        return await self._ask(request, once=once)

    async def call(self, command: bytes, *args: bytes | str | int) -> Any:
        """Run a command and return its result."""

        async def request(connection: RedisConnection) -> Any:
            return await connection.create_request(command, *args, decode=False)

        return await self._ask(request)

    def count_down(self) -> None:
        if self._ticks_left == 0:
            self._scope.cancel()
        self._ticks_left -= 1

    def give_up(self) -> None:
        """Drop the connection if an answer is outstanding: it may never arrive, and would be too late."""
        if self._awaits_answer and self._used:
            self._used[-1].drop(f"no answer within {self._link.timeout_s:g} s")

    async def _ask(self, request: Callable[[RedisConnection], Awaitable[Any]], *, once: bool = False) -> Any:
        self._awaits_answer = True
        try:
            answer = await self._on_a_live_connection(request, once)
        except Exception as error:
            trouble = explain(error, self._link.target, is_greeting=not any(one.greeted for one in self._used[-1:]))
        else:
            self._awaits_answer = False
            return answer
        self._awaits_answer = False
        # Outside the handler: Redis's answer may repeat the password, and would be this error's context.
        raise self._link.failure(trouble)

    async def _on_a_live_connection(self, request: Callable[[RedisConnection], Awaitable[Any]], once: bool) -> Any:
        dialer = self._link.dialer
        latest = dialer.latest
        connection = await dialer.connected(self._used)
        try:
            return await request(connection)
        except BusyLoadingError:
            raise
        except ConnectionError:
            # An old connection may have died unnoticed, before or after Redis received the request; or another caller
            # dropped it after a timeout.
            is_old = self._used[-1] is latest or self._used[-1].dropped
            if once or dialer.closed or not is_old:
                raise
        return await request(await dialer.connected(self._used))
