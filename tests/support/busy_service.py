"""A service that exercises everything on the dashboard: `cd tests; python -m support.busy_service`.

It has chains with real kernels on this machine's CPU, over a real directory and a real Redis. asel's own sinks export
its telemetry through OpenTelemetry's SDK. At the end it prints the metrics that Prometheus would scrape.
"""

from __future__ import annotations

import functools
import sys
import tempfile
from contextlib import suppress
from typing import Any

import anyio
import jax.numpy as jnp
from opentelemetry import metrics, trace
from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import CollectorRegistry, generate_latest

from asel import AutotunePolicy, ConfigCache, ConfigSelectorChain, Invocation, PersistentCache
from asel.cli.demo.kernels import BlockedMatMul, ChunkedAttention
from asel.errors import NoConfigError, TuningError
from asel.telemetry import DeferredSinks, Pipeline, default_sinks, shared_pipeline
from support.redis_server import RedisServer

CALLERS = 20
SHAPES = 40
HITS = 2000
# Long enough for whoever scrapes to see the queue.
STORE_TIMEOUT_S = 0.75

chain = functools.partial(ConfigSelectorChain[Any, Any], ConfigCache())
matmul, attention = BlockedMatMul(), ChunkedAttention()


@functools.cache
def multiply(rows: int) -> tuple[Invocation[Any, Any], BlockedMatMul]:
    return Invocation("demo.matmul", (jnp.ones((rows, 512)), jnp.ones((512, 512))), {}), matmul


@functools.cache
def attend(queries: int) -> tuple[Invocation[Any, Any], ChunkedAttention]:
    keys = jnp.ones((64, 16))
    return Invocation("demo.attention", (jnp.ones((queries, 16)), keys, keys), {}), attention


def set_up() -> tuple[CollectorRegistry, InMemorySpanExporter]:
    """Set up the SDK as an application does; return where its measurements can be scraped, and its spans found.

    As behind the collector, there are no labels of the instrumentation scope.
    """
    registry, spans = CollectorRegistry(), InMemorySpanExporter()
    reader = PrometheusMetricReader(scope_info_enabled=False, registry=registry)
    metrics.set_meter_provider(MeterProvider([reader], shutdown_on_exit=False))
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(spans))
    trace.set_tracer_provider(provider)
    return registry, spans


async def work() -> None:
    with tempfile.TemporaryDirectory() as folder, RedisServer() as redis:
        directory = PersistentCache[Any]("demo", f"{folder}/cache")
        await tune_for_a_crowd(directory)
        await restart(directory)
        await fail()
        await lose_the_store(redis)
        await shed()
    await anyio.to_thread.run_sync(shared_pipeline().flush)


async def tune_for_a_crowd(store: PersistentCache[Any]) -> None:
    """Tune some keys for many callers, one of which is cancelled, and another key for a caller that cannot wait."""
    async with chain(persistent=store) as selector, anyio.create_task_group() as callers:
        for rows in (256, 512):
            for _ in range(CALLERS):
                callers.start_soon(selector.choose, *multiply(rows))
        with anyio.move_on_after(0.1):
            await selector.choose(*multiply(512))
        await selector.settled()
        selector.choose_nowait(*attend(64))
        await selector.settled()
        for _ in range(HITS):
            await selector.choose(*multiply(512))


async def restart(store: PersistentCache[Any]) -> None:
    """Find the earlier configs in the store."""
    async with ConfigSelectorChain[Any, Any](ConfigCache(), persistent=store) as selector:
        await selector.choose(*multiply(512))


async def fail() -> None:
    """Tune calls without a working candidate: one runs on its heuristic, one without a heuristic raises."""
    only_96_rows_at_a_time = 90
    async with chain() as selector:
        await selector.choose(*multiply(only_96_rows_at_a_time))
        selector.policy = AutotunePolicy(allow_heuristics=False)
        with suppress(NoConfigError):
            await selector.choose(*multiply(only_96_rows_at_a_time))
        with suppress(TuningError):
            await selector.choose(*multiply(only_96_rows_at_a_time - 1))


async def lose_the_store(redis: RedisServer) -> None:
    """Make calls that cannot wait over a Redis that hangs, so that the queued reads fail."""
    policy = AutotunePolicy(cache_miss_fallback="heuristics")
    store = PersistentCache[Any]("demo", redis.url())
    async with chain(policy, persistent=store, store_timeout_s=STORE_TIMEOUT_S, close_grace_s=0.0) as selector:
        await selector.choose(*attend(128))
        with redis.paused():
            for queries in range(1, SHAPES + 1):
                selector.choose_nowait(*attend(queries))
            await selector.settled()


async def shed() -> None:
    """Emit events faster than they can be exported."""
    narrow = Pipeline(ceiling=64)
    async with chain(sinks=[DeferredSinks(default_sinks(), narrow)]) as selector:
        with trace.get_tracer("busy").start_as_current_span("a request"):
            for _ in range(HITS):
                await selector.choose(*multiply(512))


if __name__ == "__main__":
    registry, _ = set_up()
    anyio.run(work)
    sys.stdout.write(generate_latest(registry).decode())
