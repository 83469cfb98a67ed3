"""Reads OpenTelemetry's environment variables, as far as they apply to `configure`.

An empty variable counts as unset, as OpenTelemetry specifies. An invalid value is refused before anything is built:
the SDK would log a line and use a default, or raise an error halfway.
"""

from __future__ import annotations

import base64
import math
import os
import re
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint, entry_points
from typing import Literal
from urllib.parse import SplitResult, unquote, urlsplit, urlunsplit

from asel.errors import InvalidRequestError
from asel.redaction import redact

__all__ = [
    "Destination",
    "Limits",
    "Plan",
    "Signal",
    "check_endpoint",
    "check_resource",
    "destinations",
    "planned",
    "setting",
    "without_blanks",
]

Signal = Literal["traces", "metrics", "logs"]

_HTTP = "http/protobuf"
# OpenTelemetry's default, for an exporter that the environment names without an endpoint.
_DEFAULT_ENDPOINT = "http://localhost:4318"
_SAMPLERS = (
    "parentbased_always_on",
    "parentbased_always_off",
    "parentbased_traceidratio",
    "always_on",
    "always_off",
    "traceidratio",
)
_METRICS = "OTEL_EXPORTER_OTLP_METRICS_"
_HISTOGRAMS = ("explicit_bucket_histogram", "base2_exponential_bucket_histogram")
# Limits that the SDK's providers read from the environment.
_COUNTS: dict[Signal, tuple[str, ...]] = {
    "traces": (
        "OTEL_ATTRIBUTE_COUNT_LIMIT",
        "OTEL_ATTRIBUTE_VALUE_LENGTH_LIMIT",
        "OTEL_EVENT_ATTRIBUTE_COUNT_LIMIT",
        "OTEL_LINK_ATTRIBUTE_COUNT_LIMIT",
        "OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT",
        "OTEL_SPAN_ATTRIBUTE_VALUE_LENGTH_LIMIT",
        "OTEL_SPAN_EVENT_COUNT_LIMIT",
        "OTEL_SPAN_LINK_COUNT_LIMIT",
    ),
    "metrics": (),
    "logs": (
        "OTEL_ATTRIBUTE_COUNT_LIMIT",
        "OTEL_ATTRIBUTE_VALUE_LENGTH_LIMIT",
        "OTEL_LOGRECORD_ATTRIBUTE_COUNT_LIMIT",
        "OTEL_LOGRECORD_ATTRIBUTE_VALUE_LENGTH_LIMIT",
    ),
}
# The longest timeout of a socket: poll() counts milliseconds in an int.
_MAX_S = min(threading.TIMEOUT_MAX, (2**31 - 1) // 1000)
# The exporter would log a header that does not match, with its credentials.
_HEADER = re.compile(r"\s*[^\s\"(),/:;<=>?@\[\\\]{}]+\s*=[^\",;\\\x00-\x1f\x7f-\U0010ffff]*")


@dataclass(frozen=True, slots=True)
class Destination:
    """A place to export a signal to: a collector, over HTTP, or the console."""

    kind: Literal["otlp", "console"]
    endpoint: str = field(default="", repr=False)
    """The URL of the signal, without user and password: those are in `headers`."""
    headers: dict[str, str] = field(default_factory=dict, repr=False)
    secrets: tuple[str, ...] = field(default=(), repr=False)
    credential_provider: EntryPoint | None = None
    """The entry point that makes the HTTP session, instead of the exporter."""

    def __str__(self) -> str:
        if self.kind == "console":
            return "the console (stderr)"
        url, mark, query = self.endpoint.partition("?")
        # All values are hidden: the parameter with the token may have any name.
        names = [name + ("=***" if given else "") for name, given, _ in (p.partition("=") for p in query.split("&"))]
        return redact(url) + mark + "&".join(names)


@dataclass(frozen=True, slots=True)
class Limits:
    """The size of a queue and of its batches, and the longest time to collect a batch."""

    queue_size: int
    batch_size: int
    delay_s: float


@dataclass(frozen=True, slots=True)
class Plan:
    """The settings of the provider of one signal. Its text is the destinations of the signal."""

    signal: Signal
    destinations: list[Destination]
    limits: Limits = Limits(2048, 512, 5.0)
    sampler: str = ""
    share: float = 1.0
    """The share of traces kept, if the sampler has one."""
    exemplar_filter: str = ""
    interval_ms: float = 60_000
    timeout_ms: float = 30_000

    def __str__(self) -> str:
        text = f"{self.signal}: to {' and '.join(map(str, self.destinations))}"
        if self.signal == "metrics":
            text += f", every {self.interval_ms / 1000:g} s"
        if self.signal == "traces":
            text += f", sampled {self.sampler}" + (f" {self.share:g}" if self.sampler.endswith("ratio") else "")
        return text


def planned(signal: Signal, found: list[Destination]) -> Plan:
    """Return the plan for a signal with these destinations, with settings from the environment.

    Raises:
        InvalidRequestError: a variable has a value that cannot be used.
    """
    for name in _COUNTS[signal]:
        _number(name, 0, minimum=0)
    _choice("OTEL_PYTHON_SDK_INTERNAL_METRICS_ENABLED", "false", "true")
    if signal == "traces":
        name, share = _sampler()
        return Plan(signal, found, _queue_limits("OTEL_BSP"), name, share)
    if signal == "logs":
        return Plan(signal, found, _queue_limits("OTEL_BLRP"))
    _choice(f"{_METRICS}TEMPORALITY_PREFERENCE", "cumulative", "delta", "lowmemory")
    _choice(f"{_METRICS}DEFAULT_HISTOGRAM_AGGREGATION", *_HISTOGRAMS)
    return Plan(
        signal,
        found,
        exemplar_filter=_choice("OTEL_METRICS_EXEMPLAR_FILTER", "trace_based", "always_on", "always_off"),
        interval_ms=_number("OTEL_METRIC_EXPORT_INTERVAL", 60_000, unit="milliseconds"),
        timeout_ms=_number("OTEL_METRIC_EXPORT_TIMEOUT", 30_000, unit="milliseconds"),
    )


def setting(name: str) -> str:
    """Return a variable's value; empty if it is unset."""
    return os.environ.get(name, "").strip()


@contextmanager
def without_blanks() -> Iterator[None]:
    """Hide blank variables of OpenTelemetry, because parts of the SDK do not treat them as unset."""
    blank = {name: text for name, text in os.environ.items() if name.startswith("OTEL_") and not text.strip()}
    for name in blank:
        del os.environ[name]
    try:
        yield
    finally:
        os.environ.update(blank)


def check_resource() -> None:
    """Check the attributes that the SDK adds to each resource.

    Raises:
        InvalidRequestError: they are not a list of names and values.
    """
    pieces = [piece for piece in setting("OTEL_RESOURCE_ATTRIBUTES").split(",") if piece.strip()]
    if not all(piece.partition("=")[0].strip() and "=" in piece for piece in pieces):
        raise InvalidRequestError(
            "configure: OTEL_RESOURCE_ATTRIBUTES must be a list of name=value, separated by commas"
        )


def _number(name: str, default: float, *, unit: str = "", minimum: int | None = None) -> float:
    """Return a variable's number: with `minimum`, an integer of at least that; otherwise a time above zero in `unit`.

    Raises:
        InvalidRequestError: it is not such a number.
    """
    text = setting(name)
    if not text:
        return default
    try:
        value = float(text) if minimum is None else float(int(text))
    except (ValueError, OverflowError):
        value = math.nan
    largest = _MAX_S * (1000 if unit == "milliseconds" else 1)
    if 0 < value <= largest if minimum is None else minimum <= value < math.inf:
        return value
    kind = f"a number of {unit} above 0" if minimum is None else f"a whole number, {minimum} or more"
    if minimum is None and value > largest:
        kind += f", and at most {largest}"
    raise _refused(name, text, f"must be {kind}")


def _choice(name: str, *choices: str) -> str:
    """Return a variable's value, the first of the choices if it is unset.

    Raises:
        InvalidRequestError: it is none of them.
    """
    text = setting(name)
    if text and text.lower() not in choices:
        raise _refused(name, text, f"must be one of {', '.join(choices)}")
    return text.lower() or choices[0]


def _sampler() -> tuple[str, float]:
    """Return the sampler's name, and the share of traces that it keeps."""
    name = _choice("OTEL_TRACES_SAMPLER", *_SAMPLERS)
    if not name.endswith("traceidratio"):
        return name, 1.0
    share = setting("OTEL_TRACES_SAMPLER_ARG")
    try:
        value = float(share or 1.0)
    except ValueError:
        value = math.nan
    if not 0.0 <= value <= 1.0:
        raise _refused("OTEL_TRACES_SAMPLER_ARG", share, "must be a share of traces, from 0 to 1")
    return name, value


def _queue_limits(prefix: Literal["OTEL_BSP", "OTEL_BLRP"]) -> Limits:
    """Return the limits that the variables of a batch processor set: BSP for spans, BLRP for log records."""
    size = int(_number(f"{prefix}_MAX_QUEUE_SIZE", 2048, minimum=1))
    batch = int(_number(f"{prefix}_MAX_EXPORT_BATCH_SIZE", min(512, size), minimum=1))
    # Checked but not used, as in the SDK: an exporter has its own timeout, OTEL_EXPORTER_OTLP_TIMEOUT.
    _number(f"{prefix}_EXPORT_TIMEOUT", 30_000, unit="milliseconds")
    if batch > size:
        name = f"{prefix}_MAX_EXPORT_BATCH_SIZE"
        raise _refused(name, setting(name), f"must not be above {prefix}_MAX_QUEUE_SIZE, {size}")
    delay_ms = _number(f"{prefix}_SCHEDULE_DELAY", 5000 if prefix == "OTEL_BSP" else 1000, unit="milliseconds")
    return Limits(size, batch, delay_ms / 1000)


def check_endpoint(given: str) -> None:
    """Check an endpoint that a caller names.

    Raises:
        InvalidRequestError: it is not a URL.
    """
    _split("the endpoint", given)


def destinations(signal: Signal, given: str | None) -> list[Destination]:
    """Return a signal's destinations, from the caller's endpoint and the environment; empty if there is none.

    Raises:
        InvalidRequestError: a variable names an exporter or protocol that asel lacks, or the endpoint is not a URL.
    """
    variable = f"OTEL_{signal.upper()}_EXPORTER"
    named = [name.strip().lower() for name in setting(variable).split(",") if name.strip()]
    unknown = [name for name in named if name not in ("otlp", "console", "none")]
    if unknown or ("none" in named and len(named) > 1):
        raise _refused(variable, setting(variable), "must be otlp, console or none, or otlp,console")
    found = []
    if "otlp" in (named or ["otlp"]) and (otlp := _otlp(signal, given, asked_for=bool(named))) is not None:
        found.append(otlp)
    if "console" in named:
        found.append(Destination("console"))
    return found


def _otlp(signal: Signal, given: str | None, *, asked_for: bool) -> Destination | None:
    own, shared = f"OTEL_EXPORTER_OTLP_{signal.upper()}_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT"
    if given is not None:
        parts = _with_path(_split("the endpoint", given), signal)
    elif setting(own):
        parts = _split(own, setting(own))
    elif setting(shared):
        parts = _with_path(_split(shared, setting(shared)), signal)
    elif asked_for:
        parts = _with_path(urlsplit(_DEFAULT_ENDPOINT), signal)
    else:
        return None
    for name in (f"OTEL_EXPORTER_OTLP_{signal.upper()}_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"):
        if setting(name) and setting(name).lower() != _HTTP:
            advice = f"set it to {_HTTP} and the endpoint to the collector's port for HTTP, usually 4318"
            raise InvalidRequestError(f"configure: {name}={redact(setting(name))!r} is not supported: {advice}")
        if setting(name):
            break  # the signal's own variable takes precedence
    for middle in ("", f"{signal.upper()}_"):
        _number(f"OTEL_EXPORTER_OTLP_{middle}TIMEOUT", 10, unit="seconds")
        _choice(f"OTEL_EXPORTER_OTLP_{middle}COMPRESSION", "none", "gzip", "deflate")
    user_info, _, host = parts.netloc.rpartition("@")
    headers = _basic_authorization(user_info) if user_info else {}
    sent = [part for value in headers.values() for part in (value, *value.split()[1:])]
    secrets = (*sent, *_passwords(user_info), *_values(parts.query), *_header_values(signal))
    endpoint = urlunsplit(parts._replace(netloc=host))
    return Destination("otlp", endpoint, headers, secrets, _credential_provider(signal))


def _credential_provider(signal: Signal) -> EntryPoint | None:
    for middle in ("", f"{signal.upper()}_"):  # in the order in which the exporter asks
        variable = f"OTEL_PYTHON_EXPORTER_OTLP_HTTP_{middle}CREDENTIAL_PROVIDER"
        if name := setting(variable):
            found = tuple(entry_points(group="opentelemetry_otlp_credential_provider", name=name))
            if not found:
                raise _refused(variable, name, "must be the name of an installed credential provider")
            return found[0]
    return None


def _split(name: str, url: str) -> SplitResult:
    """Split a URL. No message repeats it: in a misspelt URL, any part may hold the password."""
    try:
        parts = urlsplit(url.strip())
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:  # its text may hold the password
        is_url = False
    if not is_url or "@" in parts.path + parts.query or parts.fragment:
        raise InvalidRequestError(
            f"configure: {name} must be a URL like {_DEFAULT_ENDPOINT}, with / ? # @ in a password"
            " written as %2F %3F %23 %40"
        )
    return parts


def _with_path(parts: SplitResult, signal: Signal) -> SplitResult:
    return parts._replace(path=f"{parts.path.rstrip('/')}/v1/{signal}")


def _basic_authorization(user_info: str) -> dict[str, str]:
    # Sent as a header, because an exporter's log messages repeat its URL.
    user, _, password = user_info.partition(":")
    encoded = base64.b64encode(f"{unquote(user)}:{unquote(password)}".encode()).decode()
    return {"authorization": f"Basic {encoded}"}


def _passwords(user_info: str) -> Iterable[str]:
    user, _, password = user_info.partition(":")
    secret = password or user  # a token may stand alone
    return secret, unquote(secret)


def _values(query: str) -> Iterable[str]:
    # Of all parameters, since any may be a token.
    values = [piece.partition("=")[2] for piece in query.split("&")]
    return [*values, *map(unquote, values)]


def _header_values(signal: Signal) -> Iterable[str]:
    found: list[str] = []
    for name in (f"OTEL_EXPORTER_OTLP_{signal.upper()}_HEADERS", "OTEL_EXPORTER_OTLP_HEADERS"):
        for header in filter(None, (piece.strip() for piece in setting(name).split(","))):
            if not _HEADER.fullmatch(header):
                raise InvalidRequestError(f"configure: {name} must be a list of name=value, separated by commas")
            value = header.partition("=")[2].strip()
            sent = unquote(value).split()
            found += [value, unquote(value), *sent[1:]]
            if sent and sent[0].lower() == "basic":
                found += _basic_passwords(sent[-1])
    return found


def _basic_passwords(encoded: str) -> Iterable[str]:
    with suppress(ValueError):  # not base64, or not text
        return _passwords(base64.b64decode(encoded).decode())
    return ()


def _refused(name: str, value: str, why: str) -> InvalidRequestError:
    return InvalidRequestError(f"configure: {name}={redact(value)!r} {why}; correct it, or unset it")
