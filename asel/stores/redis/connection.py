"""A connection to Redis that is opened when needed, shared by many tasks, and reopened when lost.

coredis has a pool, but it loses a slot whenever a connection fails or its caller is cancelled at the wrong moment, and
after 64 losses it hangs. So asel uses coredis's single connections.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

import anyio
from anyio.abc import ByteStream, TaskGroup
from coredis.connection import BaseConnection, TCPLocation
from coredis.exceptions import ConnectionError

from asel.stores.redis.url import Target

__all__ = ["ConnectAttempt", "Dialer", "RedisConnection"]


class RedisConnection(BaseConnection):
    """A connection over a stream that is already open, so that coredis never has to clean up a half-open one."""

    def __init__(self, stream: ByteStream, target: Target) -> None:
        location = TCPLocation(target.host, target.port)
        super().__init__(location, username=target.username, password=target.password, db=target.db)
        self._open_stream = stream

    async def _connect(self) -> ByteStream:
        return self._open_stream

    def describe(self) -> str:
        return f"RedisConnection<{self.location}>"

    def drop(self, reason: str) -> None:
        # coredis logs an error if a handshake ends without an exception of its own.
        self._last_error = self._last_error or ConnectionError(reason)
        self.invalidate(reason)


AnyConnection = TypeVar("AnyConnection", bound=RedisConnection)


class ConnectAttempt(Generic[AnyConnection]):
    """One attempt to connect, and its result. Any number of tasks may wait for it."""

    def __init__(self) -> None:
        self.settled = anyio.Event()
        self.lost = anyio.Event()
        self.scope = anyio.CancelScope(shield=True)
        self.connection: AnyConnection | None = None
        self.error: Exception | None = None
        self.dropped = False
        self.greeted = False

    @property
    def usable(self) -> bool:
        return self.settled.is_set() and self.connection is not None and self.connection.usable

    def started(self, _: object = None) -> None:
        """Note that the connection can be used; coredis calls this."""
        self.greeted = True
        self.settled.set()

    def drop(self, reason: str) -> None:
        self.dropped = True
        if self.connection is not None:
            self.connection.drop(reason)
        else:
            self.scope.cancel()


class Dialer(Generic[AnyConnection]):
    """Connects to one Redis in one event loop, and reconnects when the connection is lost.

    Its tasks are shielded from cancellation of their task group, and end when the dialer is closed: a claim
    is released after its holder was cancelled, which needs the connection.
    """

    def __init__(self, target: Target, tasks: TaskGroup, make: Callable[[ByteStream, Target], AnyConnection]) -> None:
        self.latest: ConnectAttempt[AnyConnection] | None = None
        self.closed = False
        self._target = target
        self._tasks = tasks
        self._make = make

    def close(self) -> None:
        self.closed = True
        if self.latest is not None:
            self.latest.drop("the store was closed")

    async def connected(self, used: list[ConnectAttempt[AnyConnection]]) -> AnyConnection:
        """Return a usable connection, and append the attempts to connect to `used`.

        Raises:
            Exception: the error of the attempt to connect.
        """
        while not self.closed:
            attempt = self.latest
            if attempt is None or (attempt.settled.is_set() and not attempt.usable):
                attempt = self.latest = ConnectAttempt()
                self._tasks.start_soon(self._open, attempt)
            used.append(attempt)
            await attempt.settled.wait()
            if attempt.connection is not None and attempt.usable and not attempt.dropped:
                return attempt.connection
            if attempt.error is not None and not attempt.dropped:
                raise attempt.error
        raise ConnectionError("the store was closed")

    async def until_lost(self) -> None:
        """Wait until the current connection is lost; for ever, if there is none."""
        if self.latest is None or not self.latest.usable:
            await anyio.sleep_forever()
        else:
            await self.latest.lost.wait()

    async def _open(self, attempt: ConnectAttempt[AnyConnection]) -> None:
        target = self._target
        try:
            with attempt.scope:
                stream: ByteStream
                if target.tls is None:
                    stream = await anyio.connect_tcp(target.host, target.port)
                else:
                    stream = await anyio.connect_tcp(
                        target.host, target.port, ssl_context=target.tls, tls_standard_compatible=False
                    )
                attempt.connection = self._make(stream, target)
                await attempt.connection.run(task_status=attempt)
        except Exception as error:  # a host name that cannot be encoded is a UnicodeError
            attempt.error = error
        finally:
            attempt.error = attempt.error or ConnectionError("the connection was closed")
            attempt.settled.set()
            attempt.lost.set()
