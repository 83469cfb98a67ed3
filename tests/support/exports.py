"""Programs that export telemetry, and the results."""

from __future__ import annotations

import threading

import opentelemetry.metrics._internal as metrics_globals
import pytest
import structlog
from opentelemetry import trace

from asel import ConfigCache, ConfigSelectorChain
from asel.telemetry.export_queue import dropped_exports
from support.kernels import BEST, COSTS, Toy, call, scripted
from support.otlp_receiver import attributes
from support.traces import TOY

VARIABLES = [
    f"OTEL_{name}"
    for name in (
        "SDK_DISABLED",
        "SERVICE_NAME",
        "RESOURCE_ATTRIBUTES",
        "TRACES_SAMPLER",
        "TRACES_SAMPLER_ARG",
        "TRACES_EXPORTER",
        "METRICS_EXPORTER",
        "LOGS_EXPORTER",
        "EXPORTER_OTLP_ENDPOINT",
        "EXPORTER_OTLP_TRACES_ENDPOINT",
        "EXPORTER_OTLP_METRICS_ENDPOINT",
        "EXPORTER_OTLP_LOGS_ENDPOINT",
    )
]


@pytest.fixture(autouse=True)
def _nothing_is_set_up(monkeypatch):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    structlog.reset_defaults()
    yield
    for thread in threading.enumerate():  # abandoned threads log errors when they end
        if thread.name == "asel telemetry: closing":
            thread.join(15)
    assert trace._TRACER_PROVIDER is None
    assert metrics_globals._METER_PROVIDER is None  # reading it by the API would set the provider that a variable names
    assert not structlog.is_configured()


async def one_tune_and_hits(hits=200):
    tracer = trace.get_tracer("test")
    tuner, _ = scripted(COSTS)
    async with ConfigSelectorChain(ConfigCache(), tuner=tuner) as chain:
        with tracer.start_as_current_span("request"):
            for _ in range(hits):
                assert await chain.choose(call(), TOY) == BEST


def dropped(signal, *reasons):
    return sum(number for (of, reason), number in dropped_exports().items() if of == signal and reason in reasons)


def dropped_in(receiver, signal):
    """Return the last value of `asel.telemetry.dropped` that arrived."""
    metric = [metric for metric in receiver.metrics if metric.name == "asel.telemetry.dropped"][-1]
    points = {tuple(sorted(attributes(point).items())): point.as_int for point in metric.sum.data_points}
    return sum(number for labels, number in points.items() if ("asel.signal", signal) in labels)


async def one_tune():
    tuner, _ = scripted(COSTS)
    async with ConfigSelectorChain(ConfigCache(), tuner=tuner) as chain:
        await chain.choose(call(), Toy())
