"""Cold, warm, crowded, traced, restarted: the main job, step by step, on this machine's own device."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anyio
from opentelemetry import trace
from rich.console import Console

from asel.answers import Selection
from asel.cache import ConfigCache
from asel.events import CacheHit, CandidateFailed, CandidateMeasured, Event
from asel.kernel import Invocation
from asel.outcomes import in_words
from asel.persistent import PersistentCache
from asel.selection import ConfigSelectorChain
from asel.telemetry import default_sinks

__all__ = ["tell"]

_tracer = trace.get_tracer("asel.demo")


async def tell(console: Console) -> None:
    """Select configs for two kernels and show what every tier had to say."""
    with tempfile.TemporaryDirectory() as folder:
        await _tell(console, PersistentCache("demo", Path(folder) / "cache"))


async def _tell(console: Console, persistent: PersistentCache[Any]) -> None:
    import jax.numpy as jnp

    from asel.demo.kernels import BlockedMatMul, ChunkedAttention

    matmul, attention = BlockedMatMul(), ChunkedAttention()
    a = jnp.ones((512, 512))
    multiply: Invocation[Any, Any] = Invocation("demo.matmul", (a, a), {})
    q = jnp.ones((512, 64))
    attend: Invocation[Any, Any] = Invocation("demo.attention", (q, jnp.ones((1024, 64)), jnp.ones((1024, 64))), {})
    tunes = _TuneEvents()

    sinks = (*default_sinks(), tunes)
    async with ConfigSelectorChain[Any, Any](ConfigCache(), persistent=persistent, sinks=sinks) as selector:
        console.rule("cold: nothing is known, so the key is tuned")
        console.print(str(await selector.explain(multiply, matmul)), markup=False, highlight=False)
        with _tracer.start_as_current_span("demo: a cold request"):
            cold = await _timed(console, selector, multiply, matmul)
            await selector.choose(multiply, matmul)  # a hit, beside what it cost to find it
        _show_candidates(console, cold, tunes.events)

        console.rule("warm: memory answers")
        with _tracer.start_as_current_span("demo: a warm request"):
            await _timed(console, selector, multiply, matmul)
        await _time_hits(console, selector, multiply, matmul)

        console.rule("crowded: 1,000 callers of one cold key share one tune")
        await _crowd(console, selector, attend, attention, tunes.events)

        console.rule("traced: inside jax.jit there is no waiting, and nothing is measured")
        await _traced(console, selector, matmul)

    console.rule("restarted: what was tuned is on disk")
    async with ConfigSelectorChain[Any, Any](ConfigCache(), persistent=persistent, sinks=sinks) as selector:
        with _tracer.start_as_current_span("demo: a request after a restart"):
            await _timed(console, selector, multiply, matmul)
    count = sum([1 async for _ in persistent.records()])
    console.print(f"{count} records, each with its whole tune; the demo's are removed now")


@contextmanager
def _unsampled() -> Iterator[None]:
    """Be in a request whose trace is not recorded, as most are."""
    context = trace.SpanContext(trace_id=1, span_id=1, is_remote=False)
    with trace.use_span(trace.NonRecordingSpan(context)):
        yield


class _TuneEvents:
    """Keeps what tunes tell, and leaves hits alone: an event per hit is made only where someone wants it."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def wants(self, kind: type[Event]) -> bool:
        return kind is not CacheHit

    def emit(self, event: Event) -> None:
        self.events.append(event)


async def _timed(console: Console, selector: Any, inv: Any, kernel: Any) -> Selection[Any]:
    start = time.perf_counter()
    selection: Selection[Any] = await selector.select(inv, kernel)
    seconds = time.perf_counter() - start
    console.print(f"[bold]{selection.cfg}[/] from tier [bold]{selection.tier}[/] in {in_words(seconds)}")
    return selection


def _show_candidates(console: Console, cold: Selection[Any], events: list[Event]) -> None:
    console.print(str(cold.report), markup=False, highlight=False, soft_wrap=True)
    seen = sum(isinstance(event, CandidateMeasured | CandidateFailed) for event in events)
    console.print(f"{seen} candidates told as events while they ran")


async def _time_hits(console: Console, selector: Any, inv: Any, kernel: Any, hits: int = 2000) -> None:
    with _unsampled():
        start = time.perf_counter()
        for _ in range(hits):
            await selector.choose(inv, kernel)
    console.print(f"{hits:,} more hits, telemetry included: {in_words((time.perf_counter() - start) / hits)} each")


async def _crowd(console: Console, selector: Any, inv: Any, kernel: Any, events: list[Event]) -> None:
    answers: list[Any] = []
    lags: list[float] = []

    async def ask(number: int) -> None:
        # Of a thousand traces one looks at three: the caller that begins the tune, and two that wait for it.
        request = _tracer.start_as_current_span(f"demo: request {number}") if number < 3 else _unsampled()
        with request:
            answers.append(await selector.choose(inv, kernel))

    async def heartbeat(scope: anyio.CancelScope) -> None:
        with scope:
            while True:
                start = time.perf_counter()
                await anyio.sleep(0.005)
                lags.append(time.perf_counter() - start - 0.005)

    def tunes() -> int:
        return sum(event.name == "autotune_start" for event in events)

    before = tunes()
    scope = anyio.CancelScope()
    async with anyio.create_task_group() as outer:
        outer.start_soon(heartbeat, scope)
        async with anyio.create_task_group() as callers:
            for number in range(3):
                callers.start_soon(ask, number)
            await anyio.wait_all_tasks_blocked()  # so that one of them begins it, in whatever order tasks run
            for number in range(3, 1000):
                callers.start_soon(ask, number)
        scope.cancel()
    console.print(
        f"{len(answers):,} callers, {tunes() - before} tune, {len(set(answers))} answer: [bold]{answers[0]}[/]"
    )
    typical = sorted(lags)[len(lags) // 2]
    console.print(f"the event loop kept turning: median lateness of a 5 ms heartbeat {in_words(typical)}")


async def _traced(console: Console, selector: Any, kernel: Any) -> None:
    import jax
    import jax.numpy as jnp

    def multiply(a: Any, b: Any) -> Any:
        cfg = selector.choose_nowait(Invocation("demo.matmul", (a, b), {}), kernel)
        console.print(f"traced with [bold]{cfg}[/]")
        return kernel.run(a, b, cfg=cfg)

    small = jnp.ones((512, 256))
    with _tracer.start_as_current_span("demo: a traced request"):
        jax.jit(multiply)(small, small.T)
    await selector.settled()
    console.print("the background tune is done; the next trace uses it:")
    jax.jit(lambda a, b: multiply(a, b))(small, small.T)
