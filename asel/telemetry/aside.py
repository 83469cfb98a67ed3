"""Where a sink goes that was slow on the event loop: into a thread of its own."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextvars import copy_context
from typing import Any

from asel.events import Event
from asel.telemetry.pipeline import Pipeline, patience

__all__ = ["Aside"]

logger = logging.getLogger("asel")
_IDLE_S = 10.0


class Aside:
    """Calls `give(event)` from a thread that nobody shares, in order, each in its event's own context.

    The thread is a daemon, starts with the first event and ends with `end`, or after ten seconds without one.
    What cannot be queued is shed as a `Pipeline` sheds, counted, and reported once.
    """

    def __init__(
        self, name: str, give: Callable[[Event], object], now: Callable[[], float], *, ceiling: int = 65_536
    ) -> None:
        self.name = name
        self._give, self._now = give, now
        self._takers = (self._write,)
        self._pipeline = Pipeline(ceiling=ceiling, idle_s=_IDLE_S, name=f"asel sink: {name}")
        self._reported = False

    def emit(self, event: Event) -> None:
        """Queue an event for the sink, or shed it."""
        record = (self._takers, copy_context(), None, event)
        ceiling = self._pipeline.ceiling * patience(type(event))
        if not self._pipeline.offer(self, record, ceiling) and not self._reported:
            self._reported = True
            logger.warning(
                "the sink %s is too slow for what happens: %d events wait for it, and it is not told of every hit "
                "any more; make it quicker, or let its `wants(kind)` decline what it can do without",
                self.name,
                self._pipeline.statistics().queued,
            )

    def _write(self, event: Event, epoch_ns: int) -> None:
        self._give(event)

    def tell(self, kind: type[Event], **facts: Any) -> None:
        """Tell the sink that it is not told of everything, or is again."""
        now = self._now()
        self._give(kind(key=None, start=now, end=now, **facts))

    @property
    def shed(self) -> int:
        """The events the sink never got, since so many waited for it already."""
        return self._pipeline.statistics().shed["ceiling"]

    @property
    def is_over(self) -> bool:
        """True iff everything was told, and no thread is left."""
        return self._pipeline.is_flushed and not self._pipeline.is_running

    def end(self, timeout_s: float) -> int:
        """Wait until the sink was told, at most that long, and let the thread go; return how many it was not told of.

        Blocks: not for event loops. An event that comes later starts a thread again.
        """
        return self._pipeline.end(timeout_s)
