"""A connection to Redis that is made when needed, shared by many tasks, and made again when lost.

coredis has a pool, but a place in it is lost whenever a connection fails or its caller is cancelled in the
wrong moment, and after 64 of those it hangs. So asel keeps one connection of coredis's and has all
requests share it: Redis answers in order, and (RESP3) wake-ups come over the same connection.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any

import anyio
from anyio.abc import ByteStream, TaskGroup
from coredis.connection import BaseConnection, TCPLocation
from coredis.exceptions import BusyLoadingError, ConnectionError, NoScriptError

from asel.errors import StoreError
from asel.loop import in_a_task_of_its_own
from asel.stores.refusals import explain
from asel.stores.scripts import Script
from asel.stores.targets import Target

__all__ = ["KeptLink", "Link", "Wire", "helpers", "linked"]


@asynccontextmanager
async def helpers() -> AsyncIterator[TaskGroup]:
    """Have tasks that end with the block; the block's own error leaves as it is, not in a group."""
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
async def linked(target: Target) -> AsyncIterator[Link]:
    """Have a link while the block runs; nothing is connected before it is used."""
    async with helpers() as tasks:
        link = Link(target, tasks)
        try:
            yield link
        finally:
            link.close()


class KeptLink:
    """A link that tasks of one event loop share, until the last of them lets go.

    It lives in a task of its own, because those who keep it come and go in any order, and none of
    them is to take the connection from the others.
    """

    def __init__(self, target: Target) -> None:
        self.keepers = 0
        self.link: Link
        self._target = target
        self._ready, self._over, self._gone = anyio.Event(), anyio.Event(), anyio.Event()
        self._task = in_a_task_of_its_own(self._live)

    async def _live(self) -> None:
        try:
            async with linked(self._target) as self.link:
                self._ready.set()
                await self._over.wait()
        finally:
            self._gone.set()

    @property
    def is_ready(self) -> bool:
        return self._ready.is_set()

    async def ready(self) -> None:
        await self._ready.wait()

    async def end(self) -> None:
        """Close the connection, within the time an exchange may take."""
        self._over.set()
        with anyio.move_on_after(self._target.timeout_s, shield=True):
            await self._gone.wait()


class Wire(BaseConnection):
    """One connection, whose stream is made before it: so coredis has no half-made one to clean up."""

    def __init__(self, stream: ByteStream, target: Target) -> None:
        location = TCPLocation(target.host, target.port)
        super().__init__(location, username=target.username, password=target.password, db=target.db)
        self._made = stream
        self._bells: dict[bytes, set[anyio.Event]] = {}
        self.listening = False

    async def _connect(self) -> ByteStream:
        return self._made

    def describe(self) -> str:
        return f"Wire<{self.location}>"

    def drop(self, reason: str) -> None:
        # coredis writes an error to its log where a handshake ends without one of its own.
        self._last_error = self._last_error or ConnectionError(reason)
        self.invalidate(reason)

    def hang(self, bell: anyio.Event, channel: bytes) -> None:
        """Ring the bell when something is published, or the connection is lost.

        Whatever is requested after this is seen by Redis after it, too: no wake-up falls between.
        """
        if channel not in self._bells:
            self.send_command(b"SUBSCRIBE", channel)
        self._bells.setdefault(channel, set()).add(bell)

    def unhang(self, bell: anyio.Event, channel: bytes) -> None:
        bells = self._bells.get(channel, set())
        bells.discard(bell)
        if not bells and self._bells.pop(channel, None) is not None and self.usable:
            self.send_command(b"UNSUBSCRIBE", channel)

    async def listen(self) -> None:
        try:
            async with aclosing(self.push_messages) as messages:
                async for message in messages:
                    if message[0] == b"message" and isinstance(message[1], bytes):
                        self._ring(message[1])
        except ConnectionError:
            pass
        finally:
            for channel in self._bells:
                self._ring(channel)

    def _ring(self, channel: bytes) -> None:
        for bell in self._bells.get(channel, ()):
            bell.set()


class _Opening:
    """One attempt to connect, and how it ended; the link makes it, and any number wait for it."""

    def __init__(self) -> None:
        self.over = anyio.Event()
        self.scope = anyio.CancelScope(shield=True)
        self.wire: Wire | None = None
        self.error: Exception | None = None
        self.dropped = False
        self.welcome = False

    @property
    def ended(self) -> bool:
        """Whether it failed, or what it made was lost."""
        return self.over.is_set() and not (self.wire is not None and self.wire.usable)

    def started(self, _: object = None) -> None:
        """What a connection calls once it can be used."""
        self.welcome = True
        self.over.set()

    def drop(self, reason: str) -> None:
        self.dropped = True
        if self.wire is not None:
            self.wire.drop(reason)
        else:
            self.scope.cancel()


class Link:
    """The way to one Redis, in one event loop.

    Its tasks are shielded from the cancellation of the block they live in, and end when the block does: a
    claim is given back after its holder was cancelled, and needs the connection for that.
    """

    def __init__(self, target: Target, tasks: TaskGroup) -> None:
        self.timeout_s = target.timeout_s
        self._target = target
        self._tasks = tasks
        self._latest: _Opening | None = None
        self._closed = False

    def close(self) -> None:
        self._closed = True
        if self._latest is not None:
            self._latest.drop("the store was closed")

    async def run(
        self,
        script: Script,
        keys: list[bytes],
        *args: bytes | str | int,
        ready: Callable[[Wire], None] | None = None,
        once: bool = False,
    ) -> Any:
        """Return what a script returns; `ready` is called with the connection just before it is sent.

        Where a connection turns out to be dead, the script is sent again over a new one, unless `once`.
        """

        async def request(wire: Wire) -> Any:
            if ready is not None:
                ready(wire)
                if not wire.listening:
                    wire.listening = True
                    self._tasks.start_soon(wire.listen)
            rest = (len(keys), *keys, *args)
            try:
                return await wire.create_request(b"EVALSHA", script.sha, *rest, decode=False)
            except NoScriptError:  # a new Redis, or one that was restarted
                return await wire.create_request(b"EVAL", script.text, *rest, decode=False)

        return await self._within_time(request, once=once)

    async def call(self, command: bytes, *args: bytes | str | int) -> Any:
        """Return what a command returns."""

        async def request(wire: Wire) -> Any:
            return await wire.create_request(command, *args, decode=False)

        return await self._within_time(request)

    async def _within_time(self, request: Callable[[Wire], Any], *, once: bool = False) -> Any:
        target, trouble = self._target, f"did not answer within {self._target.timeout_s:g} s: is it up, and near?"
        used: list[_Opening] = []
        with anyio.move_on_after(target.timeout_s) as scope:
            try:
                return await self._on_a_live_wire(request, used, once)
            except Exception as error:
                trouble = explain(error, target, is_greeting=not any(one.welcome for one in used[-1:]))
        if scope.cancelled_caught:
            # It may never answer, and what it answers late is not wanted. The next call makes a new one.
            used[-1].drop(f"no answer within {target.timeout_s:g} s")
        # Outside the handler: what Redis said may repeat the password, and would be this error's context.
        raise StoreError(f"Redis at {target.location} {trouble}", location=target.location)

    async def _on_a_live_wire(self, request: Callable[[Wire], Any], used: list[_Opening], once: bool) -> Any:
        latest = self._latest
        wire = await self._connected(used)
        try:
            return await request(wire)
        except BusyLoadingError:
            raise
        except ConnectionError:
            # An old connection may have died unnoticed, before Redis heard of this or after; or another
            # caller's time was up.
            is_old = used[-1] is latest or used[-1].dropped
            if once or self._closed or not is_old:
                raise
        return await request(await self._connected(used))

    async def _connected(self, used: list[_Opening]) -> Wire:
        while not self._closed:
            opening = self._latest
            if opening is None or opening.ended:
                opening = self._latest = _Opening()
                self._tasks.start_soon(self._open, opening)
            used.append(opening)
            await opening.over.wait()
            if opening.wire is not None and opening.wire.usable and not opening.dropped:
                return opening.wire
            if opening.error is not None and not opening.dropped:
                raise opening.error
        raise ConnectionError("the store was closed")

    async def _open(self, opening: _Opening) -> None:
        target = self._target
        try:
            with opening.scope:
                stream: ByteStream
                if target.tls is None:
                    stream = await anyio.connect_tcp(target.host, target.port)
                else:
                    stream = await anyio.connect_tcp(
                        target.host, target.port, ssl_context=target.tls, tls_standard_compatible=False
                    )
                opening.wire = Wire(stream, target)
                await opening.wire.run(task_status=opening)
        except Exception as error:  # a host that cannot be spelt is a UnicodeError
            opening.error = error
        finally:
            opening.error = opening.error or ConnectionError("the connection was closed")
            opening.over.set()
