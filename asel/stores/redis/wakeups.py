"""Wake-ups for callers that wait for a claim, published when a record is stored or a claim is released.

Subscriptions have a connection of their own. Redis confirms a SUBSCRIBE with a push message but refuses it with a plain
reply, which on a shared connection would be matched to another request.
"""

from __future__ import annotations

import logging
from collections import Counter
from contextlib import aclosing

import anyio
from anyio.abc import ByteStream, TaskGroup
from coredis.exceptions import ConnectionError

from asel.stores.redis.connection import Dialer, RedisConnection
from asel.stores.redis.refusals import CHANNEL_RIGHTS
from asel.stores.redis.url import Target

__all__ = ["Bell", "ChannelRights", "Wakeups"]

logger = logging.getLogger("asel")


class ChannelRights:
    """Whether this user may publish and subscribe. The first refusal is logged; asel polls from then on."""

    def __init__(self, target: Target) -> None:
        self.refused = False
        self._target = target

    def refuse(self) -> None:
        if not self.refused:
            self.refused = True
            logger.warning(
                "Redis at %s does not allow this user to publish and subscribe, so asel polls while another process"
                " tunes, up to once a second. For wake-ups, grant the user: %s",
                self._target.location,
                CHANNEL_RIGHTS.format(prefix=self._target.prefix),
            )


class Bell:
    """Rings when a message is published on its channel, or when the subscription is lost."""

    def __init__(self, channel: bytes) -> None:
        self.channel = channel
        self.rung = anyio.Event()
        self.settled = anyio.Event()
        # True iff Redis confirmed the subscription, and the connection is still there.
        self.is_subscribed = False
        self._connection: _Subscriber | None = None

    def subscribe(self, connection: _Subscriber) -> None:
        self._connection = connection
        connection.subscribe(self)

    def unsubscribe(self) -> None:
        if self._connection is not None:
            self._connection.unsubscribe(self)

    def rearm(self) -> None:
        """Forget earlier messages."""
        self.rung = anyio.Event()

    def confirm(self) -> None:
        self.is_subscribed = True
        self.settled.set()

    def lose(self) -> None:
        self.is_subscribed = False
        self.settled.set()
        self.rung.set()


class _Subscriber(RedisConnection):
    """A connection without requests, so every reply that is not a push message is a refusal."""

    def __init__(self, stream: ByteStream, target: Target) -> None:
        super().__init__(stream, target)
        self.listening = False
        self._bells: dict[bytes, set[Bell]] = {}
        # Redis confirms in order, so a channel's latest SUBSCRIBE is confirmed when its count is back to zero.
        self._unconfirmed: Counter[bytes] = Counter()

    def subscribe(self, bell: Bell) -> None:
        if bell.channel not in self._bells:
            self.send_command(b"SUBSCRIBE", bell.channel)
            self._unconfirmed[bell.channel] += 1
        self._bells.setdefault(bell.channel, set()).add(bell)
        if not self._unconfirmed[bell.channel]:
            bell.confirm()

    def unsubscribe(self, bell: Bell) -> None:
        bells = self._bells.get(bell.channel, set())
        bells.discard(bell)
        if not bells and self._bells.pop(bell.channel, None) is not None and self.usable:
            self.send_command(b"UNSUBSCRIBE", bell.channel)

    async def listen(self) -> None:
        """Ring the bells until the connection is lost."""
        try:
            async with aclosing(self.push_messages) as messages:
                async for kind, channel, *_ in messages:
                    assert isinstance(channel, bytes)
                    if kind == b"subscribe":
                        self._confirm(channel)
                    elif kind == b"message":
                        for bell in self._bells.get(channel, ()):
                            bell.rung.set()
        except ConnectionError:
            pass
        finally:
            for bells in self._bells.values():
                for bell in bells:
                    bell.lose()

    def _confirm(self, channel: bytes) -> None:
        self._unconfirmed[channel] -= 1
        if not self._unconfirmed[channel]:
            del self._unconfirmed[channel]
            for bell in self._bells.get(channel, ()):
                bell.confirm()

    async def until_refused(self, rights: ChannelRights) -> None:
        try:
            async with aclosing(self.streamed_messages) as replies:
                async for _ in replies:
                    rights.refuse()
                    self.drop("Redis refused to subscribe")
        except ConnectionError:
            pass


class Wakeups:
    """The subscriptions of one link. It connects when the first caller waits."""

    def __init__(self, target: Target, tasks: TaskGroup, rights: ChannelRights) -> None:
        self.rights = rights
        self._timeout_s = target.timeout_s
        self._tasks = tasks
        self._dialer = Dialer(target, tasks, _Subscriber)

    def close(self) -> None:
        self._dialer.close()

    async def subscribe(self, bell: Bell) -> bool:
        """Subscribe a bell; return False if that is not possible, so that the caller has to poll."""
        if self.rights.refused:
            return False
        with anyio.move_on_after(self._timeout_s):
            try:
                connection = await self._dialer.connected([])
                bell.subscribe(connection)
            except Exception:  # the request connection reports what is wrong, if anything is
                return False
            if not connection.listening:
                connection.listening = True
                self._tasks.start_soon(connection.listen)
                self._tasks.start_soon(connection.until_refused, self.rights)
            await bell.settled.wait()
        if not bell.is_subscribed:  # a late confirmation would not say what was missed before it
            bell.unsubscribe()
        return bell.is_subscribed
