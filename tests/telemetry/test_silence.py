"""The default sinks without a listener: hits are only counted, until there is one."""

from __future__ import annotations

import logging

import pytest
import structlog
from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from support.kernels import BEST, COSTS, Toy, call, scripted

from asel import ConfigCache, ConfigSelectorChain
from asel.telemetry import DeferredSinks, MetricsSink, OpenTelemetrySink, StructlogSink

pytestmark = pytest.mark.anyio
TOY = Toy()
SOON = 64
"""Hits after which a new configuration is noticed, at the latest."""


@pytest.fixture(autouse=True)
def _structlog_as_it_comes():
    structlog.reset_defaults()
    yield
    structlog.reset_defaults()


class Asked:
    """Counts how often a sink is asked whether it wants a hit."""

    def __init__(self, *args) -> None:
        super().__init__(*args)
        self.questions = 0

    def wants_hit(self) -> bool:
        self.questions += 1
        return super().wants_hit()


class Spans(Asked, OpenTelemetrySink):
    pass


class Logs(Asked, StructlogSink):
    pass


def sinks() -> tuple[Spans, MetricsSink, Logs, DeferredSinks]:
    spans, metrics, logs = Spans(), MetricsSink(), Logs()
    return spans, metrics, logs, DeferredSinks([spans, metrics, logs], None)


async def test_sinks_are_not_asked_about_hits_while_nothing_listens():
    """Without a provider and a logger, a hit is only counted."""
    spans, metrics, logs, deferred = sinks()
    async with ConfigSelectorChain(ConfigCache(), tuner=scripted(COSTS)[0], sinks=[deferred]) as chain:
        for _ in range(1001):
            assert await chain.choose(call(), TOY) == BEST
    assert spans.questions + logs.questions <= 2 * (1000 // SOON + 1)
    assert metrics.counters.read() == {("toy@v1", "autotune"): 1, ("toy@v1", "memory"): 1000}, "and the count is exact"


async def test_a_provider_that_is_set_later_gets_the_hits(monkeypatch):
    """Applications may set up OpenTelemetry after the selector has answered calls."""
    *_, deferred = sinks()
    exporter = InMemorySpanExporter()
    provider = TracerProvider(resource=Resource.get_empty(), shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    async with ConfigSelectorChain(ConfigCache(), tuner=scripted(COSTS)[0], sinks=[deferred]) as chain:
        for _ in range(10):
            await chain.choose(call(), TOY)
        assert exporter.get_finished_spans() == ()
        monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
        for _ in range(SOON + 10):
            await chain.choose(call(), TOY)
        assert len(exporter.get_finished_spans()) >= 10
        exporter.clear()
        await chain.choose(call(), TOY)
        assert [span.name for span in exporter.get_finished_spans()] == ["asel.choose"]


@pytest.mark.parametrize("way", ["structlog", "logging"])
async def test_logging_that_is_configured_later_gets_the_hits(way, caplog):
    """With structlog and with the standard library."""
    *_, deferred = sinks()
    entries = []

    def keep(logger, level, entry):
        entries.append(entry["event"])
        raise structlog.DropEvent

    async with ConfigSelectorChain(ConfigCache(), tuner=scripted(COSTS)[0], sinks=[deferred]) as chain:
        for _ in range(10):
            await chain.choose(call(), TOY)
        if way == "structlog":
            structlog.configure(processors=[keep], wrapper_class=structlog.make_filtering_bound_logger(logging.DEBUG))
        else:
            caplog.set_level(logging.DEBUG, logger="asel")
        for _ in range(SOON + 10):
            await chain.choose(call(), TOY)
        told = entries or [record.getMessage().partition(":")[0] for record in caplog.records]
        assert told.count("asel.cache_hit") >= 10


async def test_another_event_detects_a_new_listener_immediately():
    """A miss asks every sink, so all later hits are delivered."""
    *_, deferred = sinks()
    entries = []

    def keep(logger, level, entry):
        entries.append(entry["event"])
        raise structlog.DropEvent

    async with ConfigSelectorChain(ConfigCache(), tuner=scripted(COSTS)[0], sinks=[deferred]) as chain:
        for _ in range(2):
            await chain.choose(call(), TOY)
        structlog.configure(processors=[keep], wrapper_class=structlog.make_filtering_bound_logger(logging.DEBUG))
        await chain.choose(call(16), TOY)
        del entries[:]
        await chain.choose(call(), TOY)
    assert entries[0] == "asel.cache_hit"
