"""Checks of the OpenTelemetry collector."""

from __future__ import annotations

import os
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import TYPE_CHECKING, get_args
from urllib.parse import unquote

from asel.cli.doctor.findings import Finding, note, ok, problem
from asel.errors import InvalidRequestError
from asel.redaction import redact

if TYPE_CHECKING:
    from asel.telemetry.environment import Destination

__all__ = ["collector"]

_TIMEOUT_S = 3.0
_TOPIC = "otlp"


def collector(endpoint: str | None) -> Iterator[Finding]:
    """Send an empty request for each signal to `endpoint`, or to the endpoint in the environment."""
    from asel.telemetry.environment import Signal, destinations, planned

    nowhere = []
    for signal in get_args(Signal):
        try:
            found = destinations(signal, endpoint)
            planned(signal, found)
        except InvalidRequestError as error:
            yield problem(_TOPIC, f"{signal}: {redact(error)}", "correct the variable, or unset it")
            continue
        for destination in found:
            yield _checked(signal, destination)
        if not found:
            nowhere.append(signal)
    if nowhere:
        advice = "name a collector with --otlp URL or OTEL_EXPORTER_OTLP_ENDPOINT if you want them"
        yield note(_TOPIC, f"{', '.join(nowhere)}: sent nowhere", advice)


def _checked(signal: str, destination: Destination) -> Finding:
    if destination.kind == "console":
        return ok(_TOPIC, f"{signal} go to {destination}")
    request = urllib.request.Request(
        destination.endpoint,
        data=b"",  # an empty request is valid
        headers={"content-type": "application/x-protobuf", **_headers(signal), **destination.headers},
    )
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S, context=_tls()) as response:
            return ok(_TOPIC, f"{destination} takes {signal} (HTTP {response.status})")
    except urllib.error.HTTPError as error:
        error.close()
        return problem(
            _TOPIC, f"{destination} refuses {signal}: HTTP {error.code} {redact(error.reason)}", _advice(error.code)
        )
    except (OSError, ValueError) as error:
        why = redact(getattr(error, "reason", error))
        fix = "start the collector, or correct the endpoint: OTLP over HTTP usually has port 4318"
        return problem(_TOPIC, f"{destination} does not answer: {why}", fix)


def _advice(status: int) -> str:
    if status in (401, 403):
        return "set OTEL_EXPORTER_OTLP_HEADERS to the headers that the collector requires"
    if status in (404, 405):
        return "give the collector's receiver a pipeline for this signal, or set its exporter to none"
    return "see the collector's log"


def _headers(signal: str) -> dict[str, str]:
    given = os.environ.get(f"OTEL_EXPORTER_OTLP_{signal.upper()}_HEADERS") or os.environ.get(
        "OTEL_EXPORTER_OTLP_HEADERS", ""
    )
    pairs = (piece.partition("=") for piece in given.split(",") if "=" in piece)
    return {unquote(name).strip(): unquote(value).strip() for name, _, value in pairs}


def _tls() -> ssl.SSLContext:
    return ssl.create_default_context(cafile=os.environ.get("OTEL_EXPORTER_OTLP_CERTIFICATE") or None)
