"""A small OTLP receiver: what arrives over HTTP is parsed with OpenTelemetry's own protocol definitions."""

from __future__ import annotations

import gzip
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

__all__ = ["Receiver", "receiving"]

_REQUESTS: dict[str, Any] = {
    "/v1/traces": ExportTraceServiceRequest,
    "/v1/metrics": ExportMetricsServiceRequest,
    "/v1/logs": ExportLogsServiceRequest,
}


class Receiver:
    """What has arrived so far. While `gate` is closed, requests to the paths in `gated` get no answer."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.gated = {*_REQUESTS}
        self.asked = threading.Event()
        self.spans: list[Any] = []
        self.metrics: list[Any] = []
        self.logs: list[Any] = []
        self.resources: list[dict[str, Any]] = []
        self.scopes: set[tuple[str, str, str]] = set()
        """Which signal came from which instrumentation scope, of which version."""
        self.headers: list[dict[str, str]] = []
        self.paths: list[str] = []
        self.ports: list[int] = []
        """The client's, for each request."""
        self.status = 200
        """What requests are answered with; what comes with another is not kept."""
        self.reason: Callable[[Any], str | None] = lambda headers: None
        """The text beside the status, from a request's headers."""
        self.endpoint = ""

    def take(self, path: str, body: bytes) -> None:
        request = _REQUESTS[path]()
        request.ParseFromString(body)
        for signal, within, kept in (
            ("resource_spans", "scope_spans", "spans"),
            ("resource_metrics", "scope_metrics", "metrics"),
            ("resource_logs", "scope_logs", "log_records"),
        ):
            for resource in getattr(request, signal, ()):
                self.resources.append(attributes(resource.resource))
                for scope in getattr(resource, within):
                    self.scopes.add((kept, scope.scope.name, scope.scope.version))
                    found = {"spans": self.spans, "metrics": self.metrics, "log_records": self.logs}[kept]
                    found.extend(getattr(scope, kept))


def attributes(thing: Any) -> dict[str, Any]:
    """Return the attributes of a resource, a span, a link or a log record as plain values."""
    return {pair.key: _plain(pair.value) for pair in thing.attributes}


def _plain(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_plain(item) for item in value.array_value.values]
    return getattr(value, kind) if kind else None


@contextmanager
def receiving() -> Iterator[Receiver]:
    """Listen on a port of this machine, in threads, for as long as the block runs."""
    receiver = Receiver()
    connections = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"  # connections are kept and used again, as with real collectors

        def setup(self) -> None:
            super().setup()
            connections.append(self.connection)

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            receiver.headers.append({name.lower(): value for name, value in self.headers.items()})
            receiver.paths.append(self.path)
            receiver.ports.append(self.client_address[1])
            receiver.asked.set()
            path = self.path.partition("?")[0]
            if path in receiver.gated:
                receiver.gate.wait(30)
            if receiver.status == 200:
                receiver.take(path, gzip.decompress(body) if self.headers["Content-Encoding"] == "gzip" else body)
            self.send_response(receiver.status, receiver.reason(self.headers))
            self.send_header("Content-Type", "application/x-protobuf")
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    receiver.endpoint = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield receiver
    finally:
        receiver.gate.set()
        server.shutdown()
        server.server_close()
        for connection in connections:
            with suppress(OSError):  # closed already
                connection.shutdown(socket.SHUT_RDWR)
        thread.join(10)
