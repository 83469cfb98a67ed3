"""A small async service: every request is a kernel call whose config asel chooses."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar

import anyio
from opentelemetry import trace

from asel.cli.progress import TuneWatch
from asel.events import Answer, Event
from asel.runtime.threads import run_in_thread
from asel.selection.selector import ConfigSelectorChain
from asel.serving.executor import Executor

__all__ = ["Request", "Scene", "Service", "unsampled"]


@dataclass(frozen=True, slots=True)
class Request:
    """A client's request: a kernel and its arguments."""

    kernel: Any
    args: tuple[Any, ...]


@dataclass(slots=True)
class Scene:
    """The state that the demo shows while it runs. It is also a sink, which counts answers by tier."""

    on_loop: ClassVar[bool] = True
    title: str = ""
    began: float = field(default_factory=time.monotonic)
    tiers: Counter[str] = field(default_factory=Counter)
    served: int = 0
    waiting: int = 0
    latencies_s: dict[str, list[float]] = field(default_factory=dict)
    """By phase."""
    lateness_s: dict[str, list[float]] = field(default_factory=dict)
    """The delays of a 5 ms timer of the event loop, by phase."""
    progress: TuneWatch = field(default_factory=TuneWatch)

    def wants(self, kind: type[Event]) -> bool:
        return issubclass(kind, Answer) or self.progress.wants(kind)

    def emit(self, event: Event) -> None:
        if isinstance(event, Answer):
            self.tiers[event.tier] += 1
        else:
            self.progress.emit(event)


class Service:
    """Answers requests, and records their latencies in the scene."""

    def __init__(self, selector: ConfigSelectorChain[Any, Any], scene: Scene) -> None:
        self.selector = selector
        self._execute: Executor[Any, Any] = Executor(selector)
        self._scene = scene

    async def handle(self, request: Request, during: str) -> float:
        """Handle a request; return the seconds until its result."""
        self._scene.waiting += 1
        start = time.perf_counter()
        try:
            out = await self._execute(request.kernel, *request.args)
            await run_in_thread("waiting for a result", out.block_until_ready)
        finally:
            self._scene.waiting -= 1
        seconds = time.perf_counter() - start
        self._scene.served += 1
        self._scene.latencies_s.setdefault(during, []).append(seconds)
        return seconds

    @contextmanager
    def _beating(self, tasks: anyio.abc.TaskGroup, during: str) -> Iterator[None]:
        scope = anyio.CancelScope()
        late = self._scene.lateness_s.setdefault(during, [])

        async def beat() -> None:
            with scope:
                while True:
                    start = time.perf_counter()
                    await anyio.sleep(0.005)
                    late.append(time.perf_counter() - start - 0.005)

        tasks.start_soon(beat)
        try:
            yield
        finally:
            scope.cancel()

    async def serve_clients(self, requests: list[Request], during: str, until: anyio.Event) -> None:
        """Run a client for each request, which repeats it until an event is set."""

        async def client(request: Request) -> None:
            while not until.is_set():
                with unsampled():
                    await self.handle(request, during)
                await anyio.sleep(0.01)

        async with anyio.create_task_group() as tasks:
            with self._beating(tasks, during):
                async with anyio.create_task_group() as clients:
                    for request in requests:
                        clients.start_soon(client, request)


@contextmanager
def unsampled() -> Iterator[None]:
    """Run the block in a trace that is not sampled, like most requests."""
    context = trace.SpanContext(trace_id=1, span_id=1, is_remote=False)
    with trace.use_span(trace.NonRecordingSpan(context)):
        yield
