"""A connection to Redis that is opened when needed, shared by many tasks, and reopened when lost.

coredis has a pool, but a place in it is lost whenever a connection fails or its caller is cancelled in the
wrong moment, and after 64 of those it hangs. So asel keeps single connections of coredis's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

import anyio
from anyio.abc import ByteStream, TaskGroup
from coredis.connection import BaseConnection, TCPLocation
from coredis.exceptions import ConnectionError

from asel.stores.redis.url import Target

__all__ = ["Dialer", "Opening", "RedisConnection"]


class RedisConnection(BaseConnection):
    """One connection over a stream that is open already, so that coredis never has to clean up a half-open one."""

    def __init__(self, stream: ByteStream, target: Target) -> None:
        location = TCPLocation(target.host, target.port)
        super().__init__(location, username=target.username, password=target.password, db=target.db)
        self._made = stream

    async def _connect(self) -> ByteStream:
        return self._made

    def describe(self) -> str:
        return f"RedisConnection<{self.location}>"

    def drop(self, reason: str) -> None:
        # coredis logs an error if a handshake ends without an exception of its own.
        self._last_error = self._last_error or ConnectionError(reason)
        self.invalidate(reason)


AnyConnection = TypeVar("AnyConnection", bound=RedisConnection)


class Opening(Generic[AnyConnection]):
    """One attempt to connect, and its result; the dialer makes it, and any number of tasks wait for it."""

    def __init__(self) -> None:
        self.over = anyio.Event()
        self.gone = anyio.Event()
        self.scope = anyio.CancelScope(shield=True)
        self.connection: AnyConnection | None = None
        self.error: Exception | None = None
        self.dropped = False
        self.welcome = False

    @property
    def usable(self) -> bool:
        return self.over.is_set() and self.connection is not None and self.connection.usable

    def started(self, _: object = None) -> None:
        """Called by a connection once it can be used."""
        self.welcome = True
        self.over.set()

    def drop(self, reason: str) -> None:
        self.dropped = True
        if self.connection is not None:
            self.connection.drop(reason)
        else:
            self.scope.cancel()


class Dialer(Generic[AnyConnection]):
    """Connects to one Redis in one event loop, and reconnects when the connection is lost.

    Its tasks are shielded from the cancellation of the block they live in, and end when the dialer is closed: a
    claim is given back after its holder was cancelled, and needs the connection for that.
    """

    def __init__(self, target: Target, tasks: TaskGroup, make: Callable[[ByteStream, Target], AnyConnection]) -> None:
        self.latest: Opening[AnyConnection] | None = None
        self.closed = False
        self._target = target
        self._tasks = tasks
        self._make = make

    def close(self) -> None:
        self.closed = True
        if self.latest is not None:
            self.latest.drop("the store was closed")

    async def connected(self, used: list[Opening[AnyConnection]]) -> AnyConnection:
        """Return a usable connection, and append the attempts it took to `used`.

        Raises:
            Exception: the error of the attempt to connect.
        """
        while not self.closed:
            opening = self.latest
            if opening is None or (opening.over.is_set() and not opening.usable):
                opening = self.latest = Opening()
                self._tasks.start_soon(self._open, opening)
            used.append(opening)
            await opening.over.wait()
            if opening.connection is not None and opening.usable and not opening.dropped:
                return opening.connection
            if opening.error is not None and not opening.dropped:
                raise opening.error
        raise ConnectionError("the store was closed")

    async def until_lost(self) -> None:
        """Return when the current connection is lost; never, if there is none."""
        if self.latest is None or not self.latest.usable:
            await anyio.sleep_forever()
        else:
            await self.latest.gone.wait()

    async def _open(self, opening: Opening[AnyConnection]) -> None:
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
                opening.connection = self._make(stream, target)
                await opening.connection.run(task_status=opening)
        except Exception as error:  # a host name that cannot be encoded is a UnicodeError
            opening.error = error
        finally:
            opening.error = opening.error or ConnectionError("the connection was closed")
            opening.over.set()
            opening.gone.set()
