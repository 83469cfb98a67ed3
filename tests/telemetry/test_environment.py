"""OpenTelemetry's environment variables: used, or refused in one sentence before anything is set up."""

from __future__ import annotations

import json
import logging
import os
import re
import threading
import time
from datetime import datetime

import anyio
import opentelemetry._logs._internal as logs_globals
import opentelemetry.metrics._internal as metrics_globals
import pytest
import structlog
from opentelemetry import _logs, metrics, trace
from support.exports import _nothing_is_set_up, one_tune_and_hits  # noqa: F401 - a fixture
from support.kernels import COSTS, Toy, call, scripted
from support.otlp_receiver import receiving
from support.pipelines import Gated, tune

import asel.telemetry.configuration as setup
import asel.telemetry.environment as environment
import asel.telemetry.providers as providers
from asel import ConfigCache, ConfigSelectorChain, InvalidRequestError
from asel.events import Closed
from asel.telemetry import DeferredSinks, StructlogSink, configure, shared_pipeline
from asel.testing import run_in_virtual_time

NOBODY = "http://127.0.0.1:1"
MILLISECONDS = [
    "OTEL_BSP_SCHEDULE_DELAY",
    "OTEL_BSP_EXPORT_TIMEOUT",
    "OTEL_BLRP_SCHEDULE_DELAY",
    "OTEL_BLRP_EXPORT_TIMEOUT",
    "OTEL_METRIC_EXPORT_INTERVAL",
    "OTEL_METRIC_EXPORT_TIMEOUT",
    "OTEL_EXPORTER_OTLP_TIMEOUT",
    "OTEL_EXPORTER_OTLP_TRACES_TIMEOUT",
    "OTEL_EXPORTER_OTLP_METRICS_TIMEOUT",
    "OTEL_EXPORTER_OTLP_LOGS_TIMEOUT",
]
SIZES = [
    "OTEL_BSP_MAX_QUEUE_SIZE",
    "OTEL_BSP_MAX_EXPORT_BATCH_SIZE",
    "OTEL_BLRP_MAX_QUEUE_SIZE",
    "OTEL_BLRP_MAX_EXPORT_BATCH_SIZE",
]
COUNTS = [
    "OTEL_ATTRIBUTE_COUNT_LIMIT",
    "OTEL_ATTRIBUTE_VALUE_LENGTH_LIMIT",
    "OTEL_EVENT_ATTRIBUTE_COUNT_LIMIT",
    "OTEL_LINK_ATTRIBUTE_COUNT_LIMIT",
    "OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT",
    "OTEL_SPAN_ATTRIBUTE_VALUE_LENGTH_LIMIT",
    "OTEL_SPAN_EVENT_COUNT_LIMIT",
    "OTEL_SPAN_LINK_COUNT_LIMIT",
    "OTEL_LOGRECORD_ATTRIBUTE_COUNT_LIMIT",
    "OTEL_LOGRECORD_ATTRIBUTE_VALUE_LENGTH_LIMIT",
]
CHOICES = [
    "OTEL_TRACES_SAMPLER",
    "OTEL_METRICS_EXEMPLAR_FILTER",
    "OTEL_EXPORTER_OTLP_COMPRESSION",
    "OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE",
    "OTEL_EXPORTER_OTLP_METRICS_DEFAULT_HISTOGRAM_AGGREGATION",
    "OTEL_PYTHON_SDK_INTERNAL_METRICS_ENABLED",
    "OTEL_PYTHON_EXPORTER_OTLP_HTTP_CREDENTIAL_PROVIDER",
    "OTEL_PYTHON_EXPORTER_OTLP_HTTP_LOGS_CREDENTIAL_PROVIDER",
]
# Those of which a blank value is no more than that.
OTHERS = [
    "OTEL_TRACES_SAMPLER_ARG",
    "OTEL_PYTHON_METER_PROVIDER",
    "OTEL_RESOURCE_ATTRIBUTES",
    "OTEL_EXPORTER_OTLP_HEADERS",
]
SIGNALS = ["TRACES", "METRICS", "LOGS"]


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch):
    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        monkeypatch.delenv(name)


def state():
    """Return all that `configure` may change in a process."""
    return {
        "threads": set(threading.enumerate()),
        "providers": (trace._TRACER_PROVIDER, metrics_globals._METER_PROVIDER, logs_globals._LOGGER_PROVIDER),
        "set once": tuple(
            once._done
            for once in (
                trace._TRACER_PROVIDER_SET_ONCE,
                metrics_globals._METER_PROVIDER_SET_ONCE,
                logs_globals._LOGGER_PROVIDER_SET_ONCE,
            )
        ),
        "structlog": (structlog.is_configured(), structlog.get_config()),
        "filters": {name: list(logging.getLogger(name).filters) for name in setup._LOGGERS},
        "files": {os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if fd_is_a_file(fd)},
    }


def assert_nothing_is_left(before):
    now = state()
    assert now.pop("threads") <= before["threads"]  # one of an earlier test's may have ended meanwhile
    assert now == {name: value for name, value in before.items() if name != "threads"}


def fd_is_a_file(fd):
    try:
        return os.readlink(f"/proc/self/fd/{fd}").endswith(".jsonl")
    except OSError:  # that of the listing itself
        return False


def refused(*arguments, **options):
    """Return why `configure` refuses, having checked that it left nothing behind."""
    before = state()
    with pytest.raises(InvalidRequestError) as caught:
        configure("service", *arguments, **options)
    assert_nothing_is_left(before)
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith("configure: ")
    return message


@pytest.mark.parametrize("name", [*MILLISECONDS, *SIZES, *COUNTS, *CHOICES, *OTHERS])
@pytest.mark.parametrize("empty", ["", "  "])
def test_an_empty_variable_counts_as_unset(monkeypatch, caplog, name, empty):
    """As OpenTelemetry specifies, and without a log message."""
    with configure("service", NOBODY) as telemetry:
        unset = str(telemetry)
    monkeypatch.setenv(name, empty)
    if name == "OTEL_TRACES_SAMPLER_ARG":
        monkeypatch.setenv("OTEL_TRACES_SAMPLER", "traceidratio")
        unset = unset.replace("parentbased_always_on", "traceidratio 1")
    caplog.clear()
    with configure("service", NOBODY) as telemetry:
        assert str(telemetry) == unset
        assert caplog.messages == []
        assert os.environ[name] == empty


@pytest.mark.parametrize("exporter", ["otlp", "none"])
@pytest.mark.parametrize("value", ["", "nonsense", "sdk_meter_provider"])
def test_a_meter_provider_in_the_environment_does_not_replace_ours(monkeypatch, exporter, value):
    """The SDK would set it as a side effect of making the other providers."""
    monkeypatch.setenv("OTEL_PYTHON_METER_PROVIDER", value)
    monkeypatch.setenv("OTEL_METRICS_EXPORTER", exporter)
    before = state()
    with configure("service", NOBODY) as telemetry:
        assert metrics_globals._METER_PROVIDER is telemetry._providers.get("metrics")
        assert ("metrics" in telemetry._providers) is (exporter == "otlp")
    assert_nothing_is_left(before)


def test_a_provider_that_is_set_concurrently_is_an_error(monkeypatch):
    """OpenTelemetry would only log it, and metrics would be lost."""
    monkeypatch.setattr(metrics, "set_meter_provider", lambda provider: None)
    assert "another provider for metrics was set" in refused(NOBODY)


def test_a_credential_provider_makes_the_session(monkeypatch):
    """Its headers arrive; a provider that fails or returns something else is refused."""
    import requests

    def signing():
        session = requests.Session()
        session.headers["x-signed"] = "yes"
        return session

    def failing():
        raise OSError("no answer from http://me:hunter2@host")

    found = {"signing": signing, "failing": failing, "wrong": dict}
    monkeypatch.setattr(
        environment, "entry_points", lambda group, name: [Found(name, found[name])] if name in found else []
    )
    variable = "OTEL_PYTHON_EXPORTER_OTLP_HTTP_TRACES_CREDENTIAL_PROVIDER"
    monkeypatch.setenv(variable, "failing")
    assert refused(NOBODY) == (
        "configure: the credential provider 'failing' failed: OSError: no answer from http://***@host"
    )
    monkeypatch.setenv(variable, "wrong")
    assert "returned dict, and should return a requests.Session" in refused(NOBODY)
    monkeypatch.setenv(variable, "signing")
    with receiving() as receiver, configure("service", receiver.endpoint) as telemetry:
        trace.get_tracer("test").start_span("one").end()
        assert telemetry.flush(10)
        signed = {path for path, sent in zip(receiver.paths, receiver.headers, strict=True) if "x-signed" in sent}
        assert signed == {"/v1/traces"}


class Found:
    """An entry point."""

    def __init__(self, name, kind):
        self.name, self.load = name, lambda: kind


@pytest.mark.parametrize("value", ["nonsense", "a=b,http://me:hunter2@host", "=1"])
def test_invalid_resource_attributes_are_refused(monkeypatch, value):
    """The SDK would omit an invalid one, and log its value."""
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", value)
    assert refused(NOBODY) == ("configure: OTEL_RESOURCE_ATTRIBUTES must be a list of name=value, separated by commas")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, value) for name in MILLISECONDS for value in ("soon", "0", "-1", "nan", "inf", "1e300")),
        *((name, value) for name in SIZES for value in ("many", "0", "-1", "1.5")),
        *((name, value) for name in COUNTS for value in ("many", "-1", "1.5")),
        *((name, "nonsense") for name in CHOICES),
        ("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "4096"),
    ],
)
def test_an_invalid_variable_is_refused_by_name(monkeypatch, name, value):
    """The message has the variable, its value and the valid values; nothing is set up."""
    monkeypatch.setenv(name, value)
    message = refused(NOBODY)
    assert message.startswith(f"configure: {name}={value!r} must ")
    assert message.endswith("; correct it, or unset it")


@pytest.mark.parametrize("value", ["some", "1.1", "-0.1", "nan"])
def test_an_invalid_share_of_traces_is_refused(monkeypatch, value):
    """The share is checked only if the sampler uses it."""
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", value)
    with configure("service", NOBODY):
        pass
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_traceidratio")
    assert f"OTEL_TRACES_SAMPLER_ARG={value!r} must be a share of traces, from 0 to 1" in refused(NOBODY)


def test_numbers_reach_their_components(monkeypatch):
    """Each valid number is used by the object that it configures."""
    monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "1500")
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "100")
    monkeypatch.setenv("OTEL_BLRP_SCHEDULE_DELAY", "250")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "traceidratio")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "0.25")
    with configure("service", NOBODY) as telemetry:
        assert "every 1.5 s" in str(telemetry)
        assert "sampled traceidratio 0.25" in str(telemetry)
        assert trace.get_tracer_provider().sampler.rate == 0.25
        spans, logs = telemetry._queues
        assert (spans._limits.queue_size, spans._limits.batch_size, spans._limits.delay_s) == (100, 100, 5.0)
        assert (logs._limits.queue_size, logs._limits.batch_size, logs._limits.delay_s) == (2048, 512, 0.25)


def test_variables_of_unsent_signals_are_not_checked(monkeypatch):
    """A signal without a destination, or with the application's provider, needs no valid variables."""
    monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "nonsense")
    monkeypatch.setenv("OTEL_METRICS_EXPORTER", "none")
    with configure("service", NOBODY) as telemetry:
        assert "metrics: nowhere, OTEL_METRICS_EXPORTER is none" in str(telemetry)


@pytest.mark.parametrize("protocol", ["grpc", "http/json"])
@pytest.mark.parametrize("middle", ["", "TRACES_", "METRICS_", "LOGS_"])
def test_another_protocol_is_refused_with_the_fix(monkeypatch, middle, protocol):
    """asel sends over HTTP; another protocol in the environment is refused, not ignored."""
    monkeypatch.setenv(f"OTEL_EXPORTER_OTLP_{middle}PROTOCOL", protocol)
    message = refused(NOBODY)
    assert message.startswith(f"configure: OTEL_EXPORTER_OTLP_{middle}PROTOCOL={protocol!r} ")
    assert "set it to http/protobuf" in message
    assert "4318" in message


def test_a_signals_own_protocol_takes_precedence(monkeypatch):
    """If every signal has a supported protocol, the shared variable is ignored."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    for signal in SIGNALS:
        monkeypatch.setenv(f"OTEL_EXPORTER_OTLP_{signal}_PROTOCOL", "http/protobuf")
    with configure("service", NOBODY) as telemetry:
        assert f"traces: to {NOBODY}/v1/traces" in str(telemetry)


@pytest.mark.parametrize("exporter", ["zipkin", "otlp,none", "prometheus", "console,jaeger"])
@pytest.mark.parametrize("signal", SIGNALS)
def test_an_exporter_that_asel_does_not_have_is_refused(monkeypatch, signal, exporter):
    """With or without an endpoint."""
    monkeypatch.setenv(f"OTEL_{signal}_EXPORTER", exporter)
    sentence = f"configure: OTEL_{signal}_EXPORTER={exporter!r} must be otlp, console or none"
    assert refused(NOBODY).startswith(sentence)
    assert refused().startswith(sentence)


def test_the_console_exporters_write_to_stderr(monkeypatch, capsys):
    """Also without an endpoint. stdout belongs to the program."""
    for signal in SIGNALS:
        monkeypatch.setenv(f"OTEL_{signal}_EXPORTER", "console")
    with configure("service") as telemetry:
        assert [line for line in str(telemetry).splitlines() if "console" in line] == [
            "  traces: to the console (stderr), sampled parentbased_always_on",
            "  metrics: to the console (stderr), every 60 s",
            "  logs: to the console (stderr)",
        ]
        run_in_virtual_time(one_tune_and_hits)
        assert telemetry.close() is True
    out, err = capsys.readouterr()
    assert out == ""
    for expected in ('"name": "asel.autotune"', '"name": "asel.selections"', '"event_name": "asel.autotune_finish"'):
        assert expected in err


def test_two_exporters_get_the_same(monkeypatch, capsys):
    """`otlp,console`: the collector gets the telemetry that is printed."""
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "otlp,console")
    with receiving() as receiver:
        with configure("service", receiver.endpoint) as telemetry:
            assert f"traces: to {receiver.endpoint}/v1/traces and the console (stderr)" in str(telemetry)
            run_in_virtual_time(one_tune_and_hits, 3)
            assert telemetry.close() is True
        printed = re.findall(r'"name": "(asel\.[a-z.]+|request)"', capsys.readouterr().err)
        assert sorted(printed) == sorted(span.name for span in receiver.spans)


def test_an_exporter_by_name_needs_no_endpoint(monkeypatch):
    """`otlp` alone means the collector on this machine, as OpenTelemetry specifies."""
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "otlp")
    with configure("service") as telemetry:
        assert "traces: to http://localhost:4318/v1/traces" in str(telemetry)
        assert "metrics: nowhere, there is no endpoint" in str(telemetry)


@pytest.mark.parametrize(
    "endpoint",
    ["127.0.0.1:4318", "htp://host", "http://", "http://host:port", "http://host:70000", "http://[::1", "http://a/b@c"],
)
def test_an_endpoint_that_is_not_a_url_is_refused(monkeypatch, endpoint):
    """From the caller or from the environment."""
    assert refused(endpoint).startswith("configure: the endpoint must be a URL like http://")
    for name in ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT"):
        with monkeypatch.context() as patch:
            patch.setenv(name, endpoint)
            assert refused().startswith(f"configure: {name} must be a URL like http://")


def test_a_query_stays_behind_the_path():
    """The signal's path is inserted before the query. No value is shown, since it may be a token."""
    with receiving() as receiver, configure("service", f"{receiver.endpoint}/prefix/?tenant=a&x=1&flag") as telemetry:
        assert f"{receiver.endpoint}/prefix/v1/traces?tenant=***&x=***&flag" in str(telemetry)


class Broken(Exception):
    pass


# Everything that is made or set on the way, in the order in which it is.
STEPS = [
    (providers.Resource, "create", 1),
    (providers, "TracerProvider", 1),
    (providers, "_exporter", 1),
    (providers, "SpanQueue", 1),
    (providers, "_exporter", 2),
    (providers, "PeriodicExportingMetricReader", 1),
    (providers, "MeterProvider", 1),
    (providers, "LoggerProvider", 1),
    (providers, "_exporter", 3),
    (providers, "LogQueue", 1),
    (setup, "sent", 1),
    (setup, "printed", 1),
    (setup, "printed", 2),
    (trace, "set_tracer_provider", 1),
    (metrics, "set_meter_provider", 1),
    (_logs, "set_logger_provider", 1),
    (structlog, "configure", 1),
]


@pytest.mark.parametrize("when", ["before it", "after it"])
@pytest.mark.parametrize(("module", "name", "nth"), STEPS, ids=[f"{name} {nth}" for _, name, nth in STEPS])
def test_a_failure_at_any_step_undoes_everything(monkeypatch, tmp_path, module, name, nth, when):
    """No provider, thread, open file, structlog configuration or filter is left."""
    original, calls = getattr(module, name), []

    def failing(*arguments, **options):
        calls.append(arguments)
        if len(calls) < nth:
            return original(*arguments, **options)
        if when == "after it" and not isinstance(original, type):
            original(*arguments, **options)
        raise Broken

    before = state()
    with monkeypatch.context() as patch:
        patch.setattr(module, name, failing)
        with pytest.raises(Broken):
            configure("service", NOBODY, console=True, file=tmp_path / "asel.jsonl")
    assert_nothing_is_left(before)
    with configure("service", NOBODY, console=True, file=tmp_path / "asel.jsonl"):
        assert structlog.is_configured()
    assert_nothing_is_left(before)


def test_a_file_that_cannot_be_opened_undoes_everything(tmp_path):
    """Opening the file is the last step that may fail."""
    before = state()
    with pytest.raises(IsADirectoryError):
        configure("service", NOBODY, file=tmp_path)
    assert_nothing_is_left(before)


@pytest.mark.timeout(60)
def test_a_log_record_has_the_time_of_its_event(real_backend, tmp_path):
    """In OTLP and in the file, however late the telemetry thread writes it."""

    async def main():
        tuner, _ = scripted(dict.fromkeys(COSTS, 0.0))
        async with ConfigSelectorChain(ConfigCache(), tuner=tuner, close_grace_s=0.0) as chain:
            await chain.choose(call(), Toy())

    log = tmp_path / "asel.jsonl"
    with receiving() as receiver:
        with configure("service", receiver.endpoint, file=log, close_timeout_s=30) as telemetry:
            blocked = Gated()
            DeferredSinks([blocked], shared_pipeline()).emit(tune())
            assert blocked.entered.wait(10)
            started = time.time_ns()
            anyio.run(main, backend=real_backend)
            ended = time.time_ns()
            time.sleep(0.05)  # so that the time of the entry is another than that of the event
            blocked.gate.set()
            assert telemetry.close() is True
        assert len(receiver.logs) == 3
        for record in receiver.logs:
            # The wall's clock is read before the loop's: a pause in between makes the time too early, never too late.
            assert started - 1_000_000_000 <= record.time_unix_nano <= ended + 1_000_000
            assert record.observed_time_unix_nano >= ended + 40_000_000
        in_file = [datetime.fromisoformat(json.loads(line)["timestamp"]) for line in log.read_text().splitlines()]
        for record, stamp in zip(receiver.logs, in_file, strict=True):
            assert stamp.timestamp() == pytest.approx(record.time_unix_nano / 1e9, abs=1e-5)


def test_the_standard_logger_has_the_time_of_the_event(caplog):
    """In `created` and in the attributes derived from it."""
    caplog.set_level(logging.INFO, logger="asel")
    epoch_ns = 1_700_000_000_250_000_000
    StructlogSink().emit_at(Closed(key=None, start=1.5, end=1.5, cancelled=0, abandoned=()), epoch_ns)
    [record] = caplog.records
    assert record.created == pytest.approx(1_700_000_001.75)
    assert record.msecs == 750
    assert record.getMessage() == "asel.closed: the selector closed"


def test_an_applications_own_entries_stay_log_records():
    """They have a body and no event name: only asel's entries are events."""
    with receiving() as receiver:
        with configure("service", receiver.endpoint) as telemetry:
            structlog.get_logger().warning("disk is nearly full", free_bytes=7)
            assert telemetry.close() is True
        [record] = receiver.logs
        assert record.body.string_value == "disk is nearly full"
        assert record.event_name == ""
        assert record.severity_text == "WARN"
        assert [pair.key for pair in record.attributes] == ["free_bytes"]
