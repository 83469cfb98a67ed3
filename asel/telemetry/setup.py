"""`configure`: the SDK, its exporters and structlog in one call, for people who have set up nothing.

The only part of asel that uses OpenTelemetry's SDK. What the application has set up already is left alone.
"""

from __future__ import annotations

import atexit
import functools
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any, Self

import opentelemetry._logs._internal as logs_globals
import opentelemetry.metrics._internal as metrics_globals
import structlog
from opentelemetry import _logs, context, metrics, trace
from opentelemetry.util._once import Once

from asel.errors import InvalidRequestError
from asel.telemetry.pipeline import shared_pipeline
from asel.threads import run_in_thread

if TYPE_CHECKING:
    from opentelemetry.sdk.resources import Resource

__all__ = ["Telemetry", "configure"]

_SEVERITIES = {"debug": 5, "info": 9, "warning": 13, "error": 17, "critical": 21}
_OFF = "OTEL_SDK_DISABLED is set"


class Telemetry:
    """What `configure` set up: `print` it to see; closing it sends what is left and undoes all of it.

    Closing takes `close_timeout_s` seconds at the most, whatever becomes of the collector. On an event
    loop use `async with` or `await aclose()`.
    """

    def __init__(self, service_name: str, close_timeout_s: float) -> None:
        self.service_name = service_name
        self.close_timeout_s = close_timeout_s
        self.did: list[str] = []
        self._providers: list[Any] = []
        self._undo: list[Callable[[], object]] = []
        self._closed = False

    def __str__(self) -> str:
        return "\n".join([f"telemetry of {self.service_name!r}", *(f"  {line}" for line in self.did)])

    def flush(self, timeout_s: float = 5.0) -> bool:
        """Send what there is; False if the collector does not take it in time. Blocks: not for event loops."""
        deadline = time.monotonic() + timeout_s
        flushed = shared_pipeline().flush(timeout_s)
        return _all_within(deadline, [provider.force_flush for provider in self._providers]) and flushed

    def close(self) -> bool:
        """Send what is left, and undo what was set up; False if there was not enough time to send it."""
        if self._closed:
            return True
        self._closed = True
        atexit.unregister(self.close)
        deadline = time.monotonic() + self.close_timeout_s
        flushed = shared_pipeline().flush(self.close_timeout_s)
        while self._undo:
            self._undo.pop()()
        return _all_within(deadline, [provider.shutdown for provider in self._providers]) and flushed

    async def aclose(self) -> bool:
        """Close, without holding up the event loop."""
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


def configure(
    service_name: str,
    otlp_endpoint: str | None = None,
    console: bool = False,
    file: str | Path | None = None,
    *,
    close_timeout_s: float = 5.0,
) -> Telemetry:
    """Send traces, metrics and logs to a collector, and log entries to the console or a file, as asked.

    OpenTelemetry's environment variables count: `OTEL_EXPORTER_OTLP_ENDPOINT` where no endpoint is given,
    `OTEL_SERVICE_NAME` before `service_name`, `OTEL_TRACES_SAMPLER`, `OTEL_SDK_DISABLED`, and those the SDK
    reads itself. Call it before there is an event loop: the SDK looks around for what it runs on. Tracers that
    were obtained meanwhile keep to it when it is closed.

    Raises:
        InvalidRequestError: there is an endpoint, and the exporter is not installed.
    """
    telemetry = Telemetry(os.environ.get("OTEL_SERVICE_NAME") or service_name, close_timeout_s)
    try:
        log_provider = _set_up_sdk(telemetry, otlp_endpoint)
        _set_up_structlog(telemetry, log_provider, console, None if file is None else Path(file))
    except BaseException:
        telemetry.close()
        raise
    atexit.register(telemetry.close)
    return telemetry


# ---------------------------------------------------------------------------------------------
# The SDK.


def _set_up_sdk(telemetry: Telemetry, otlp_endpoint: str | None) -> Any:
    """Set up what exports; return the provider that log entries go to, if any."""
    if os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        telemetry.did.append(f"traces, metrics, logs: off, {_OFF}")
        return None
    from opentelemetry.sdk.resources import Resource

    resource = Resource.create({"service.name": telemetry.service_name})
    _set_up_traces(telemetry, resource, _endpoint("traces", otlp_endpoint))
    _set_up_metrics(telemetry, resource, _endpoint("metrics", otlp_endpoint))
    return _set_up_logs(telemetry, resource, _endpoint("logs", otlp_endpoint))


def _endpoint(signal: str, given: str | None) -> str | None:
    """Return where a signal goes: given by the caller, else by the environment; None: nowhere."""
    if os.environ.get(f"OTEL_{signal.upper()}_EXPORTER", "otlp").strip().lower() == "none":
        return None
    if given is not None:
        return f"{given.rstrip('/')}/v1/{signal}"
    if own := os.environ.get(f"OTEL_EXPORTER_OTLP_{signal.upper()}_ENDPOINT"):
        return own
    shared = os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT")
    return f"{shared.rstrip('/')}/v1/{signal}" if shared else None


def _exporter(signal: str, kind: str, endpoint: str) -> Any:
    try:
        module = __import__(f"opentelemetry.exporter.otlp.proto.http.{signal}_exporter", fromlist=[kind])
    except ImportError as error:
        raise InvalidRequestError(
            f"configure: to send {signal} to {endpoint} takes an exporter; install it with: pip install 'asel[otlp]'"
        ) from error
    return getattr(module, kind)(endpoint=endpoint)


def _set_up_traces(telemetry: Telemetry, resource: Resource, endpoint: str | None) -> None:
    if _already_set("traces", telemetry, trace, "_TRACER_PROVIDER", endpoint):
        return
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    assert endpoint is not None
    # Nothing at exit: the SDK would wait for a dead collector for long. `Telemetry.close` does not.
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(_exporter("trace", "OTLPSpanExporter", endpoint)))
    trace.set_tracer_provider(provider)
    sampler = os.environ.get("OTEL_TRACES_SAMPLER", "parentbased_always_on")  # which the SDK reads, too
    told = f"traces: to {endpoint}, sampled {sampler}"
    _note(telemetry, provider, trace, "_TRACER_PROVIDER", told)


def _set_up_metrics(telemetry: Telemetry, resource: Resource, endpoint: str | None) -> None:
    if _already_set("metrics", telemetry, metrics_globals, "_METER_PROVIDER", endpoint):
        return
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader

    assert endpoint is not None
    reader = PeriodicExportingMetricReader(_exporter("metric", "OTLPMetricExporter", endpoint))
    provider = MeterProvider([reader], resource=resource, shutdown_on_exit=False)
    metrics.set_meter_provider(provider)
    interval_ms = float(os.environ.get("OTEL_METRIC_EXPORT_INTERVAL", "60000"))  # which the SDK reads, too
    told = f"metrics: to {endpoint}, every {interval_ms / 1000:g} s"
    _note(telemetry, provider, metrics_globals, "_METER_PROVIDER", told)


def _set_up_logs(telemetry: Telemetry, resource: Resource, endpoint: str | None) -> Any:
    if _already_set("logs", telemetry, logs_globals, "_LOGGER_PROVIDER", endpoint):
        return None
    from opentelemetry.sdk._logs import LoggerProvider
    from opentelemetry.sdk._logs.export import BatchLogRecordProcessor

    assert endpoint is not None
    provider = LoggerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_log_record_processor(BatchLogRecordProcessor(_exporter("_log", "OTLPLogExporter", endpoint)))
    _logs.set_logger_provider(provider)
    _note(telemetry, provider, logs_globals, "_LOGGER_PROVIDER", f"logs: to {endpoint}")
    return provider


def _already_set(signal: str, telemetry: Telemetry, module: Any, name: str, endpoint: str | None) -> bool:
    """Tell whether there is nothing to do for a signal, and note why."""
    if endpoint is None:
        telemetry.did.append(f"{signal}: nowhere, there is no endpoint")
        return True
    if getattr(module, name, None) is not None:
        telemetry.did.append(f"{signal}: left to the provider that the application has set")
        return True
    return False


def _note(telemetry: Telemetry, provider: Any, module: Any, name: str, told: str) -> None:
    telemetry.did.append(told)
    telemetry._providers.append(provider)
    telemetry._undo.append(functools.partial(_unset, module, name, provider))


def _unset(module: Any, name: str, provider: Any) -> None:
    """Let the application set a provider again. OpenTelemetry has no public way to do so."""
    if getattr(module, name, None) is provider:
        setattr(module, name, None)
        setattr(module, f"{name}_SET_ONCE", Once())


def _all_within(deadline: float, calls: list[Callable[[], object]]) -> bool:
    """Make calls that may block for long, side by side; tell whether all were over in time."""
    threads = [threading.Thread(target=call, name="asel telemetry: closing", daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return not any(thread.is_alive() for thread in threads)


# ---------------------------------------------------------------------------------------------
# structlog.


def _set_up_structlog(telemetry: Telemetry, log_provider: Any, console: bool, file: Path | None) -> None:
    if structlog.is_configured():
        telemetry.did.append("structlog: left as the application has configured it")
        return
    outputs: list[Callable[[dict[str, Any]], object]] = []
    if log_provider is not None:
        outputs.append(functools.partial(_send, log_provider.get_logger("asel")))
    if console:
        telemetry.did.append("structlog: to the console, from info on")
        outputs.append(functools.partial(_print, structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty()), None))
    if file is not None:
        telemetry.did.append(f"structlog: as JSON to {file}, from info on")
        stream = file.open("a", encoding="utf-8", buffering=1)
        telemetry._undo.append(stream.close)
        outputs.append(functools.partial(_print, structlog.processors.JSONRenderer(default=str), stream))
    if not outputs:
        telemetry.did.append("structlog: not configured, neither console nor file was asked for")
        return

    def hand_out(logger: Any, level: str, entry: Any) -> Any:
        for output in outputs:
            output(dict(entry))
        raise structlog.DropEvent

    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            hand_out,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
    )
    telemetry._undo.append(structlog.reset_defaults)


def _print(render: Callable[..., Any], stream: IO[str] | None, entry: dict[str, Any]) -> None:
    print(render(None, entry["level"], entry), file=stream or sys.stderr)


def _send(logger: _logs.Logger, entry: dict[str, Any]) -> None:
    """Hand an entry to OpenTelemetry, with the span that is current."""
    level, name = entry.pop("level"), entry.pop("event")
    for redundant in ("timestamp", "trace_id", "span_id"):  # the record has its own
        entry.pop(redundant, None)
    logger.emit(
        _logs.LogRecord(
            timestamp=time.time_ns(),
            severity_text=level.upper(),
            severity_number=_logs.SeverityNumber(_SEVERITIES.get(level, 9)),
            body=name,
            attributes={key: _plain(value) for key, value in entry.items()},
            context=context.get_current(),
        )
    )


def _plain(value: Any) -> Any:
    if isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, Mapping):
        return [f"{key}: {said}" for key, said in value.items()]
    return str(value)
