"""The demo's three acts: a crowd on cold keys, a tune beside traffic, a second start."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
from opentelemetry import trace

from asel.cli.demo.service import Request, Scene, Service, unsampled
from asel.events import Sink
from asel.selection.cache import ConfigCache
from asel.selection.policy import policy_override
from asel.selection.selector import ConfigSelectorChain
from asel.stores.persistent_cache import PersistentCache
from asel.telemetry.names import VERSION

__all__ = ["CALLERS", "Demo", "Facts", "run_demo"]

CALLERS = 200
"""The number of concurrent clients for each cold key."""
_TRACED = 3
"""The number of those with a trace: the caller that begins the tune, and two that wait for it."""
_CALM_S = 1.5
_WARM_REQUESTS = 20


@dataclass(slots=True)
class Facts:
    """Figures for the summary, besides those in the scene and in the cache."""

    callers: int = 0
    cold_keys: int = 0
    shared_tunes: int = 0
    new_key: str = ""
    new_key_first_s: float = 0.0
    new_key_tune_s: float = 0.0
    second_start_requests: int = 0
    second_start_first_s: float = 0.0
    second_start_tunes: int = 0
    second_start_tiers: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class Demo:
    """One run of the demo: its cache, its sinks, its state and its figures."""

    cache: Path
    sinks: Sequence[Sink]
    tracer: trace.Tracer = field(default_factory=lambda: trace.get_tracer("asel.demo", VERSION))
    scene: Scene = field(default_factory=Scene)
    on_step: Callable[[str], object] = lambda title: None
    facts: Facts = field(default_factory=Facts)
    selector: ConfigSelectorChain[Any, Any] | None = None

    def start(self) -> ConfigSelectorChain[Any, Any]:
        """Return a selector as in a new process: an empty memory and the same store."""
        persistent: PersistentCache[Any] = PersistentCache("demo", self.cache)
        self.scene.tiers.clear()
        self.selector = ConfigSelectorChain(
            ConfigCache(), persistent=persistent, sinks=(*self.sinks, self.scene), close_grace_s=1.0
        )
        return self.selector

    def step(self, title: str) -> None:
        self.scene.title = title
        self.on_step(title)


async def run_demo(demo: Demo) -> None:
    """Serve requests on cold and warm keys, while tunes run and after a restart."""
    cold, new = await anyio.to_thread.run_sync(_requests)
    demo.step(f"first start, cold: {CALLERS} callers for each of {len(cold)} keys without a record")
    async with demo.start() as selector:
        service = Service(selector, demo.scene)
        await _crowd(demo, service, cold)
        with policy_override(selector, cache_miss_fallback="background"):
            await _beside_traffic(demo, service, cold, new)
    demo.step("second start, as after a restart: memory is filled from the store")
    async with demo.start() as selector:
        await _second_start(demo, Service(selector, demo.scene), [*cold, new])


def _requests() -> tuple[list[Request], Request]:
    """Return two kinds of requests for the first crowd, and a third that comes later."""
    import jax.numpy as jnp

    from asel.cli.demo.kernels import BlockedMatMul, ChunkedAttention

    matmul, attention = BlockedMatMul(), ChunkedAttention()
    a = jnp.ones((512, 512))
    q = jnp.ones((512, 64))
    keys, more_keys = jnp.ones((1024, 64)), jnp.ones((2048, 64))
    return [Request(matmul, (a, a)), Request(attention, (q, keys, keys))], Request(attention, (q, more_keys, more_keys))


async def _crowd(demo: Demo, service: Service, requests: list[Request]) -> None:
    """Serve many concurrent callers for the same cold keys."""

    async def ask(request: Request, number: int) -> None:
        traced = number < _TRACED
        with demo.tracer.start_as_current_span(f"demo: cold request {number}") if traced else unsampled():
            await service.handle(request, "cold")

    before = len(demo.scene.progress.tunes)
    async with anyio.create_task_group() as callers:
        for number in range(CALLERS):
            for request in requests:
                callers.start_soon(ask, request, number)
            if number + 1 == _TRACED:
                await anyio.wait_all_tasks_blocked()  # so that a traced caller begins the tune
    demo.facts.callers, demo.facts.cold_keys = CALLERS * len(requests), len(requests)
    demo.facts.shared_tunes = len(demo.scene.progress.tunes) - before


async def _beside_traffic(demo: Demo, service: Service, warm: list[Request], new: Request) -> None:
    """Serve warm keys without a tune, and then while a new key is tuned in the background."""
    facts = demo.facts
    demo.step(f"warm keys, no tune: {len(warm) * 2} clients for {_CALM_S:g} s")
    over = anyio.Event()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(service.serve_clients, warm * 2, "calm", over)
        await anyio.sleep(_CALM_S)
        over.set()

    demo.step("a new key among them: its callers get the default at once, and it is tuned in the background")
    over = anyio.Event()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(service.serve_clients, warm * 2, "tuning", over)
        with demo.tracer.start_as_current_span("demo: a request with a new key"):
            facts.new_key_first_s = await service.handle(new, "new")
        began = time.perf_counter()
        await service.selector.settled()
        facts.new_key_tune_s = time.perf_counter() - began
        over.set()
    facts.new_key = list(demo.scene.progress.tunes.values())[-1].name
    with demo.tracer.start_as_current_span("demo: the new key, tuned"):
        await service.handle(new, "new")


async def _second_start(demo: Demo, service: Service, requests: list[Request]) -> None:
    facts = demo.facts
    before = len(demo.scene.progress.tunes)
    with demo.tracer.start_as_current_span("demo: a request after a restart"):
        facts.second_start_first_s = await service.handle(requests[0], "restarted")
    for _ in range(_WARM_REQUESTS):
        for request in requests:
            with unsampled():
                await service.handle(request, "restarted")
    facts.second_start_requests = 1 + _WARM_REQUESTS * len(requests)
    facts.second_start_tunes = len(demo.scene.progress.tunes) - before
    facts.second_start_tiers = dict(demo.scene.tiers)
