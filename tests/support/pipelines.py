"""Pipelines under test: sinks that wait at a gate, and events to send through them."""

from __future__ import annotations

import threading

from asel.events import AutotuneStart, Event
from asel.events.deferred_sinks import DeferredSinks
from asel.events.pipeline import Pipeline
from asel.kernels.keys import CacheKey
from asel.testing import RecordingSink

KEY = CacheKey("dev", "op@v1", "key")


def tune() -> AutotuneStart:
    return AutotuneStart(key=KEY, start=0.0, end=0.0, tune_id="t", candidates=1, objective="forward", background=False)


class Gated(RecordingSink):
    """A sink that blocks until the gate is open."""

    on_loop = False

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.entered = threading.Event(), threading.Event()

    def emit(self, event: Event) -> None:
        self.entered.set()
        assert self.gate.wait(10)
        super().emit(event)


def held(ceiling: int) -> tuple[Gated, Pipeline, DeferredSinks]:
    """Return a pipeline whose thread is blocked while it delivers one event."""
    sink, pipeline = Gated(), Pipeline(ceiling=ceiling)
    deferred = DeferredSinks([sink], pipeline)
    deferred.emit(tune())
    assert sink.entered.wait(10)
    return sink, pipeline, deferred
