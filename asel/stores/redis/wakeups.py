"""Wake-ups for callers that wait for a claim, published when a record is stored or a claim is released.

Subscriptions have their own connection. Redis confirms a SUBSCRIBE with a push message but refuses it with a plain
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

__all__ = ["ChannelRights", "Subscription", "Wakeups"]

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


class Subscription:
    """Sets `notified` when a message is published on its channel, or when the subscription is lost."""

    def __init__(self, channel: bytes) -> None:
        self.channel = channel
        self.notified = anyio.Event()
        self.settled = anyio.Event()
        # True iff Redis has confirmed the subscription and the connection still exists.
        self.is_subscribed = False
        self._connection: _Subscriber | None = None

    def subscribe(self, connection: _Subscriber) -> None:
        self._connection = connection
        connection.subscribe(self)

    def unsubscribe(self) -> None:
        if self._connection is not None:
            self._connection.unsubscribe(self)

    def clear(self) -> None:
        """Forget earlier messages."""
        self.notified = anyio.Event()

    def confirm(self) -> None:
        self.is_subscribed = True
        self.settled.set()

    def lose(self) -> None:
        self.is_subscribed = False
        self.settled.set()
        self.notified.set()


class _Subscriber(RedisConnection):
    """A connection without requests: every reply that is not a push message is a refusal."""

    def __init__(self, stream: ByteStream, target: Target) -> None:
        super().__init__(stream, target)
        self.listening = False
        self._subscriptions: dict[bytes, set[Subscription]] = {}
        # Redis confirms in order, so a channel's latest SUBSCRIBE is confirmed when its count is zero again.
        self._unconfirmed: Counter[bytes] = Counter()

    def subscribe(self, subscription: Subscription) -> None:
        if subscription.channel not in self._subscriptions:
            self.send_command(b"SUBSCRIBE", subscription.channel)
            self._unconfirmed[subscription.channel] += 1
        self._subscriptions.setdefault(subscription.channel, set()).add(subscription)
        if not self._unconfirmed[subscription.channel]:
            subscription.confirm()

    def unsubscribe(self, subscription: Subscription) -> None:
        subscriptions = self._subscriptions.get(subscription.channel, set())
        subscriptions.discard(subscription)
        if not subscriptions and self._subscriptions.pop(subscription.channel, None) is not None and self.usable:
            self.send_command(b"UNSUBSCRIBE", subscription.channel)

    async def listen(self) -> None:
        """Notify the subscriptions of messages until the connection is lost."""
        try:
            async with aclosing(self.push_messages) as messages:
                async for kind, channel, *_ in messages:
                    assert isinstance(channel, bytes)
                    if kind == b"subscribe":
                        self._confirm(channel)
                    elif kind == b"message":
                        for subscription in self._subscriptions.get(channel, ()):
                            subscription.notified.set()
        except ConnectionError:
            pass
        finally:
            for subscriptions in self._subscriptions.values():
                for subscription in subscriptions:
                    subscription.lose()

    def _confirm(self, channel: bytes) -> None:
        self._unconfirmed[channel] -= 1
        if not self._unconfirmed[channel]:
            del self._unconfirmed[channel]
            for subscription in self._subscriptions.get(channel, ()):
                subscription.confirm()

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

    async def subscribe(self, subscription: Subscription) -> bool:
        """Activate a subscription; return False if that is not possible, so that the caller has to poll."""
        if self.rights.refused:
            return False
        with anyio.move_on_after(self._timeout_s):
            try:
                connection = await self._dialer.connected([])
                subscription.subscribe(connection)
            except Exception:  # if Redis is unreachable, the connection for requests reports it
                return False
            if not connection.listening:
                connection.listening = True
                self._tasks.start_soon(connection.listen)
                self._tasks.start_soon(connection.until_refused, self.rights)
            await subscription.settled.wait()
        if not subscription.is_subscribed:  # messages before a late confirmation would be missed
            subscription.unsubscribe()
        return subscription.is_subscribed
