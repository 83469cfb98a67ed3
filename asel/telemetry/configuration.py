"""`configure`: sets up the SDK, its exporters and structlog in one call, for applications without a setup.

Anything that the application has set up itself stays in place.
"""

from __future__ import annotations

import atexit
import functools
import logging
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import structlog

from asel.errors import InvalidRequestError
from asel.events.deferred_sinks import listen_again
from asel.events.pipeline import shared_pipeline
from asel.redaction import SecretFilter, redact
from asel.runtime.threads import run_in_thread
from asel.telemetry.environment import (
    Plan,
    Signal,
    check_resource,
    destinations,
    planned,
    setting,
    without_blanks,
)
from asel.telemetry.export_queue import ExportQueue
from asel.telemetry.global_providers import GLOBAL_PROVIDERS
from asel.telemetry.names import VERSION
from asel.telemetry.outputs import Output, configure_structlog, printed, sent

__all__ = ["Telemetry", "configure"]

logger = logging.getLogger("asel")
_OFF = "OTEL_SDK_DISABLED is set"
_CLOSING = "asel telemetry: closing"
# The part of the closing time after which queued spans and log records are dropped and the metrics are sent.
_QUEUES_SHARE = 0.7
# Loggers whose messages may repeat the URL of a request or a collector's answer.
_LOGGERS = (
    "opentelemetry.exporter.otlp.common.http",
    "opentelemetry.exporter.otlp.proto.http._common",
    "opentelemetry.exporter.otlp.proto.http._log_exporter",
    "opentelemetry.exporter.otlp.proto.http.metric_exporter",
    "opentelemetry.exporter.otlp.proto.http.trace_exporter",
    "opentelemetry.sdk.metrics._internal.export",
    "opentelemetry.sdk.resources",
    "urllib3.connectionpool",
)


class Telemetry:
    """The set-up that `configure` made. Printing it lists the destinations; closing it sends the queues and undoes it.

    Closing takes at most `close_timeout_s` seconds, even if the collector is down. On an event
    loop use `async with` or `await aclose()`.
    """

    def __init__(self, service_name: str, close_timeout_s: float) -> None:
        self.service_name = service_name
        self.close_timeout_s = close_timeout_s
        self.lines: list[str] = []
        self._providers: dict[Signal, Any] = {}
        self._queues: list[ExportQueue[Any]] = []
        self._undo: list[Callable[[], object]] = []
        # Run when no request is in flight any more.
        self._undo_last: list[Callable[[], object]] = []
        self._closing = threading.RLock()
        self._closed = False
        self._sent_all = False

    def __str__(self) -> str:
        return "\n".join([f"telemetry of {redact(self.service_name)!r}", *(f"  {line}" for line in self.lines)])

    def flush(self, timeout_s: float = 5.0) -> bool:
        """Send everything queued; return False if that takes longer. Blocks, so do not call it on an event loop."""
        deadline = time.monotonic() + timeout_s
        flushed = shared_pipeline().flush(timeout_s)
        left_ms = max(0, round((deadline - time.monotonic()) * 1000))
        calls = [functools.partial(provider.force_flush, left_ms) for provider in self._providers.values()]
        return _all_within(deadline, calls) and flushed

    def close(self) -> bool:
        """Send everything queued and undo the set-up; return False if not everything could be sent.

        Unsent spans and log records are counted in `asel.telemetry.dropped`, and a warning has their number.
        """
        if not self._closing.acquire(timeout=2 * self.close_timeout_s):  # another thread is closing it
            return False
        try:
            if not self._closed:
                self._closed = True
                self._sent_all = self._close()
            return self._sent_all
        finally:
            self._closing.release()

    def _close(self) -> bool:
        atexit.unregister(self.close)
        begun = time.monotonic()
        flushed = shared_pipeline().flush(self.close_timeout_s)
        _run_all(self._undo)
        lost = sum(queue.lost for queue in self._queues)
        # Metrics last, and with time of their own: they report the losses of the queues.
        queued = [provider.shutdown for signal, provider in self._providers.items() if signal != "metrics"]
        threads: list[threading.Thread] = []
        closed = _all_within(begun + _QUEUES_SHARE * self.close_timeout_s, queued, threads)
        for queue in self._queues:
            queue.abandon()
        sums = [provider.shutdown for signal, provider in self._providers.items() if signal == "metrics"]
        closed = _all_within(begun + self.close_timeout_s, sums, threads) and closed
        if closed:
            _run_all(self._undo_last)
        else:  # a request may be in flight, and its failure is logged later
            threading.Thread(target=self._undo_after, args=[threads], name=_CLOSING, daemon=True).start()
        return closed and flushed and lost == sum(queue.lost for queue in self._queues)

    def _undo_after(self, threads: list[threading.Thread]) -> None:
        for queue in self._queues:
            queue.join()
        for thread in threads:
            thread.join()
        _run_all(self._undo_last)

    async def aclose(self) -> bool:
        """Close without blocking the event loop."""
        return await run_in_thread("closing telemetry", self.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    def _discard(self) -> None:
        """Undo a set-up that failed half-way."""
        self._closed = True
        for queue in self._queues:
            queue.abandon()
        _run_all(self._undo)
        _all_within(time.monotonic() + self.close_timeout_s, [p.shutdown for p in self._providers.values()])
        _run_all(self._undo_last)


def _run_all(undo: list[Callable[[], object]]) -> None:
    while undo:
        undo.pop()()


def configure(
    service_name: str,
    otlp_endpoint: str | None = None,
    console: bool = False,
    file: str | Path | None = None,
    *,
    close_timeout_s: float = 5.0,
) -> Telemetry:
    """Send traces, metrics and logs to a collector, and log entries to the console or a file, as asked.

    OpenTelemetry's environment variables count: `OTEL_EXPORTER_OTLP_ENDPOINT` if no endpoint is given,
    `OTEL_SERVICE_NAME` before `service_name`, `OTEL_TRACES_EXPORTER` and its siblings (`otlp`, `console`, `none`),
    `OTEL_TRACES_SAMPLER`, `OTEL_SDK_DISABLED`, and those the SDK reads itself. Call it before there is an event loop:
    the SDK detects its host in threads. Tracers obtained meanwhile keep using it after it is closed.

    Raises:
        InvalidRequestError: a variable has an invalid value, the endpoint is not a URL, or the exporter is not
            installed. Nothing was set up.
    """
    telemetry = Telemetry(setting("OTEL_SERVICE_NAME") or service_name, close_timeout_s)
    plans = _plans(telemetry, otlp_endpoint)
    try:
        _make(telemetry, plans)
        log_provider = telemetry._providers.get("logs")
        outputs = _make_outputs(telemetry, log_provider, console, None if file is None else Path(file))
        _make_global(telemetry)
        if outputs:
            telemetry._undo.append(structlog.reset_defaults)
            configure_structlog(outputs)
    except BaseException:
        telemetry._discard()
        raise
    atexit.register(telemetry.close)
    listen_again()  # selectors that have found all sinks silent
    return telemetry


# ---------------------------------------------------------------------------------------------
# The SDK. First the environment is checked, then everything is built, and last the providers become global.


def _plans(telemetry: Telemetry, otlp_endpoint: str | None) -> list[Plan]:
    """Return a plan for each signal that is exported, and note the destination of each signal.

    Raises:
        InvalidRequestError: a variable has a value that cannot be used.
    """
    if setting("OTEL_SDK_DISABLED").lower() == "true":
        telemetry.lines.append(f"traces, metrics, logs: off, {_OFF}")
        return []
    plans = []
    for signal, place in GLOBAL_PROVIDERS.items():
        if (provider := place.current) is not None:
            by = "an earlier configure" if provider in _made_here else "the application"
            telemetry.lines.append(f"{signal}: left to the provider that {by} has set")
        elif found := destinations(signal, otlp_endpoint):
            plans.append(planned(signal, found))
            telemetry.lines.append(str(plans[-1]))
        else:
            variable = f"OTEL_{signal.upper()}_EXPORTER"
            why = f"{variable} is none" if setting(variable) else "there is no endpoint"
            telemetry.lines.append(f"{signal}: nowhere, {why}")
    if plans:
        check_resource()
    return plans


def _make(telemetry: Telemetry, plans: list[Plan]) -> None:
    """Make a provider for each plan, without making it global."""
    if not plans:
        return
    from asel.telemetry.providers import make_providers

    _hide(telemetry, [secret for plan in plans for to in plan.destinations for secret in to.secrets])
    with without_blanks():
        make_providers(telemetry.service_name, plans, telemetry._providers, telemetry._queues)


def _hide(telemetry: Telemetry, secrets: list[str]) -> None:
    hidden = SecretFilter(secrets)
    for name in _LOGGERS:
        logging.getLogger(name).addFilter(hidden)
        telemetry._undo_last.append(functools.partial(logging.getLogger(name).removeFilter, hidden))


def _make_global(telemetry: Telemetry) -> None:
    for signal, provider in telemetry._providers.items():
        place = GLOBAL_PROVIDERS[signal]
        # Appended before the setter is called, which may fail after it has set the provider.
        telemetry._undo.append(functools.partial(place.unset, provider))
        _made_here.add(provider)
        place.set(provider)
        if place.current is not provider:  # OpenTelemetry only logs such a refusal
            raise InvalidRequestError(
                f"configure: another provider for {signal} was set at the same moment; call configure before it"
            )


_made_here: weakref.WeakSet[Any] = weakref.WeakSet()


def _all_within(
    deadline: float, calls: Sequence[Callable[[], object]], started: list[threading.Thread] | None = None
) -> bool:
    """Make calls that may block, each in a thread; return whether all ended in time and none returned False.

    The threads are added to `started`.
    """
    results: list[object] = []

    def run(call: Callable[[], object]) -> None:
        results.append(call())

    threads = [threading.Thread(target=run, args=[call], name=_CLOSING, daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    if started is not None:
        started += threads
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return len(results) == len(calls) and False not in results


# ---------------------------------------------------------------------------------------------
# structlog.


def _make_outputs(telemetry: Telemetry, log_provider: Any, console: bool, file: Path | None) -> list[Output]:
    """Return the outputs of structlog's entries; empty if structlog is not to be configured."""
    if structlog.is_configured():
        telemetry.lines.append("structlog: left as the application has configured it")
        return []
    outputs: list[Output] = []
    if log_provider is not None:
        outputs.append(sent(log_provider.get_logger("asel", VERSION)))
    if console:
        telemetry.lines.append("structlog: to the console, from info on")
        outputs.append(printed())
    if file is not None:
        stream = file.open("a", encoding="utf-8", buffering=1)
        telemetry._undo.append(stream.close)
        telemetry.lines.append(f"structlog: as JSON to {redact(file)}, from info on")
        outputs.append(printed(stream))
    if not outputs:
        telemetry.lines.append("structlog: not configured, neither console nor file was asked for")
    return outputs
