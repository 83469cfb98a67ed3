"""Over the wire: `configure`, real exporters, a real receiver, and faulty collectors."""

from __future__ import annotations

import json
import logging
import socket
import subprocess
import sys
import threading
import time
from importlib import metadata

import anyio
import pytest
import structlog
from opentelemetry import trace
from support.exports import one_tune_and_hits
from support.kernels import BEST, COSTS, Blocks, Toy, call, scripted
from support.otlp_receiver import attributes, receiving

from asel import ConfigCache, ConfigSelectorChain
from asel.telemetry import DeferredSinks, configure, default_sinks, shared_pipeline
from asel.telemetry.names import METRICS, SPANS
from asel.testing import run_in_virtual_time

TOY = Toy()
# Anything a machine may have set for its own telemetry.


async def three_callers_and_a_hit():
    """3 callers, 1 tune, 2 of them wait for it, 3 candidates of which 1 fails; then a hit."""
    tracer = trace.get_tracer("test")
    tuner, _ = scripted(COSTS, run_errors={Blocks(2): ValueError("too large")})

    async def request(chain, n):
        await anyio.sleep(0.1 * n)
        with tracer.start_as_current_span(f"request {n}"):
            assert await chain.choose(call(), TOY) == BEST

    async with ConfigSelectorChain(ConfigCache(), tuner=tuner) as chain:
        async with anyio.create_task_group() as tasks:
            for n in range(3):
                tasks.start_soon(request, chain, n)
        await request(chain, 3)


@pytest.mark.timeout(60)
def test_traces_arrive_with_links_attributes_and_times():
    """A tune, its waiters and a hit, through all the parts that production uses."""
    with receiving() as receiver:
        with configure("service", receiver.endpoint) as telemetry:
            run_in_virtual_time(three_callers_and_a_hit)
            assert telemetry.close() is True
        spans = {span.span_id: span for span in receiver.spans}
        named = {name: [s for s in receiver.spans if s.name == name] for name in {*SPANS, "request 0"}}
        assert [len(named[name]) for name in ("asel.choose", "asel.autotune", "asel.candidate")] == [4, 1, 3]
        assert len(named["asel.candidate.compile"]) == len(named["asel.candidate.measure"]) == 3

        [tune] = named["asel.autotune"]
        began = spans[tune.parent_span_id]
        assert spans[began.parent_span_id].name == "request 0"
        assert {span.parent_span_id for span in named["asel.candidate"]} == {tune.span_id}
        assert not any(span.status.code == 2 for span in receiver.spans), "a trace with a winner is not an error"
        failed = [attributes(span) for span in named["asel.candidate"] if "asel.failed" in attributes(span)]
        assert [(told["error.type"], told["exception.message"]) for told in failed] == [("ValueError", "too large")]
        waiters = [span for span in named["asel.choose"] if span.links]
        assert sorted(spans[span.parent_span_id].name for span in waiters) == ["request 1", "request 2"]
        for span in waiters:
            [link] = span.links
            assert (link.trace_id, link.span_id) == (tune.trace_id, tune.span_id)
        assert sorted(round(attributes(span)["asel.wait_s"], 6) for span in waiters) == [0.6, 0.7]
        [hit] = [span for span in named["asel.choose"] if attributes(span)["asel.tier"] == "memory"]
        assert spans[hit.parent_span_id].name == "request 3"
        assert not any(span.events for span in receiver.spans)
        seconds = (tune.end_time_unix_nano - tune.start_time_unix_nano) / 1e9
        assert seconds == pytest.approx(0.8)

        assert {resource["service.name"] for resource in receiver.resources} == {"service"}
        assert {metric.name for metric in receiver.metrics} <= set(METRICS)
        [selections] = [metric for metric in receiver.metrics if metric.name == "asel.selections"]
        ours = [p for p in selections.sum.data_points if attributes(p)["asel.op"] == "toy@v1"]
        assert {attributes(point)["asel.tier"] for point in ours} >= {"autotune", "memory"}
        entries = {record.event_name: record for record in receiver.logs}
        assert {"asel.autotune_start", "asel.candidate_failed", "asel.autotune_finish"} <= entries.keys()
        assert entries["asel.autotune_finish"].span_id == tune.span_id
        bodies = {name: record.body.string_value for name, record in entries.items()}
        assert bodies["asel.candidate_failed"] == (
            "toy@v1(x=f32[8,128]) on NVIDIA H100: candidate 1, Blocks(m=2, n=1), failed in the measure stage: "
            "ValueError: too large"
        )
        assert all(bodies.values())
        told = attributes(entries["asel.candidate_failed"])
        assert (told["error.type"], told["exception.message"]) == ("ValueError", "too large")
        assert {key for record in receiver.logs for key in attributes(record)} - {
            "error.type",
            "exception.message",
        } == {key for record in receiver.logs for key in attributes(record) if key.startswith("asel.")}
        version = metadata.version("asel")
        assert {scope for scope in receiver.scopes if scope[1] != "test"} == {
            (kept, "asel", version) for kept in ("spans", "metrics", "log_records")
        }


def _closed_within(endpoint: str, limit_s: float) -> bool:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.5")  # by when the exporter gives up, which nobody waits for
        telemetry = configure("service", endpoint, close_timeout_s=0.2)
    run_in_virtual_time(one_tune_and_hits)
    start = time.perf_counter()
    flushed = telemetry.close()
    assert time.perf_counter() - start < limit_s
    return flushed


@pytest.mark.timeout(60)
def test_a_dead_collector_delays_no_selection_and_closing_is_bounded():
    """Connections are refused."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{unused.getsockname()[1]}"
    _closed_within(endpoint, 5.0)


@pytest.mark.timeout(60)
def test_a_silent_collector_delays_no_selection_and_closing_is_bounded():
    """Connections are accepted and never answered."""
    with socket.socket() as hole:
        hole.bind(("127.0.0.1", 0))
        hole.listen()
        assert _closed_within(f"http://127.0.0.1:{hole.getsockname()[1]}", 5.0) is False


@pytest.mark.timeout(60)
def test_a_slow_collector_delays_no_selection_and_gets_everything():
    """Closing does not wait for a late answer, and the data arrives."""
    with receiving() as receiver:
        receiver.gate.clear()
        assert _closed_within(receiver.endpoint, 5.0) is False
        assert receiver.asked.wait(10)
        receiver.gate.set()


@pytest.mark.timeout(60)
def test_a_slow_application_processor_delays_no_selection():
    """asel waits only for its own queue, within a bound, and neither flushes nor shuts down the application's."""
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import SpanProcessor, TracerProvider

    from asel.telemetry import DeferredSinks, OpenTelemetrySink, Pipeline

    gate, entered = threading.Event(), threading.Event()

    class Stuck(SpanProcessor):
        def on_end(self, span):
            entered.set()
            gate.wait(20)

        def shutdown(self):
            raise AssertionError("not ours to shut down")

        def force_flush(self, timeout_millis=0):
            raise AssertionError("not ours to flush")

    provider = TracerProvider(resource=Resource.get_empty(), shutdown_on_exit=False)
    provider.add_span_processor(Stuck())
    pipeline = Pipeline()
    sinks = [DeferredSinks([OpenTelemetrySink(provider.get_tracer("asel"))], pipeline)]

    async def main():
        tuner, _ = scripted(COSTS)
        async with ConfigSelectorChain(ConfigCache(), tuner=tuner, sinks=sinks, close_grace_s=0.1) as chain:
            for _ in range(100):
                assert await chain.choose(call(), TOY) == BEST

    start = time.perf_counter()
    run_in_virtual_time(main)
    assert time.perf_counter() - start < 10
    assert entered.is_set()
    assert not pipeline.is_flushed
    gate.set()
    assert pipeline.flush(10)


def test_configure_reports_its_changes_and_undoes_them(tmp_path):
    """Printing it lists the set-up, and closing removes all of it."""
    log = tmp_path / "asel.jsonl"
    with receiving() as receiver:
        telemetry = configure("service", receiver.endpoint, file=log)
        assert str(telemetry).splitlines() == [
            "telemetry of 'service'",
            f"  traces: to {receiver.endpoint}/v1/traces, sampled parentbased_always_on",
            f"  metrics: to {receiver.endpoint}/v1/metrics, every 60 s",
            f"  logs: to {receiver.endpoint}/v1/logs",
            f"  structlog: as JSON to {log}, from info on",
        ]
        assert structlog.is_configured()
        run_in_virtual_time(one_tune_and_hits)
        assert telemetry.flush(10) is True
        assert receiver.spans
        assert telemetry.close() is True
        assert telemetry.close() is True
    entries = [json.loads(line) for line in log.read_text().splitlines()]
    assert [entry["event"] for entry in entries] == ["asel.autotune_start", "asel.autotune_finish", "asel.closed"]
    assert {"trace_id", "span_id", "timestamp", "level", "op_id"} <= entries[0].keys()


def test_configure_works_again_after_closing():
    """Undone is undone: the second time is like the first."""
    for _ in range(2):
        with receiving() as receiver:
            with configure("service", receiver.endpoint) as telemetry:
                run_in_virtual_time(one_tune_and_hits)
                assert telemetry.close() is True
            assert {span.name for span in receiver.spans} >= {"request", "asel.choose", "asel.autotune"}
            assert sum(span.name == "asel.choose" for span in receiver.spans) == 200


def test_the_console_gets_readable_lines(capsys):
    """Also without a collector."""
    with configure("service", console=True) as telemetry:
        assert "structlog: to the console, from info on" in str(telemetry)
        assert "traces: nowhere, there is no endpoint" in str(telemetry)
        run_in_virtual_time(one_tune_and_hits)
    assert "asel.autotune_finish" in capsys.readouterr().err


def test_opentelemetrys_variables_are_used(monkeypatch):
    """An operator chooses endpoint, name, sampler and exporters."""
    with receiving() as receiver:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.endpoint)
        monkeypatch.setenv("OTEL_SERVICE_NAME", "from the environment")
        monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment=test")
        monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_off")
        monkeypatch.setenv("OTEL_LOGS_EXPORTER", "none")
        with configure("service") as telemetry:
            assert telemetry.service_name == "from the environment"
            assert "sampled always_off" in str(telemetry)
            assert "logs: nowhere" in str(telemetry)
            run_in_virtual_time(one_tune_and_hits)
            assert telemetry.close() is True
        assert receiver.spans == []
        assert receiver.logs == []
        assert receiver.metrics
        assert receiver.resources[0]["service.name"] == "from the environment"
        assert receiver.resources[0]["deployment.environment"] == "test"


def test_a_disabled_sdk_stays_disabled(monkeypatch):
    """OTEL_SDK_DISABLED turns off everything that would leave the process."""
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    with receiving() as receiver:
        with configure("service", receiver.endpoint) as telemetry:
            assert "OTEL_SDK_DISABLED is set" in str(telemetry)
            run_in_virtual_time(one_tune_and_hits)
        assert not receiver.asked.is_set()


def test_the_applications_setup_stays_in_place():
    """Its structlog, and its providers."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    before = structlog.get_config()
    with configure("service", console=True) as first:
        assert "structlog: left as the application has configured it" in str(first)
    assert structlog.get_config() == before
    structlog.reset_defaults()
    with receiving() as receiver, configure("first", receiver.endpoint):
        provider = trace.get_tracer_provider()
        with configure("second", receiver.endpoint) as second:
            assert "traces: left to the provider that an earlier configure has set" in str(second)
        assert trace.get_tracer_provider() is provider


def test_a_provider_of_the_application_stays_in_place(monkeypatch):
    """It is reported as the application's."""
    from opentelemetry.sdk.trace import TracerProvider

    monkeypatch.setattr(trace, "_TRACER_PROVIDER", TracerProvider(shutdown_on_exit=False))
    with configure("service", "http://127.0.0.1:1") as telemetry:
        assert "traces: left to the provider that the application has set" in str(telemetry)
    monkeypatch.undo()


@pytest.mark.anyio
async def test_aclose_does_not_block_the_event_loop():
    """Closing may take as long as its deadline; the loop goes on meanwhile."""
    telemetry = await anyio.to_thread.run_sync(lambda: configure("service"))
    async with telemetry:
        assert shared_pipeline() is not None
    assert telemetry._closed


@pytest.mark.timeout(120)
def test_the_demo_sends_its_telemetry_to_a_collector():
    """`asel demo --otlp URL`: a cold crowd, a tune beside traffic, a second start; on trio here."""
    with receiving() as receiver:
        options = ["--backend", "trio", "--otlp", receiver.endpoint]
        command = [sys.executable, "-c", "from asel.cli import main; main()", "demo", *options]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stderr
        assert "telemetry of 'asel-demo'" in result.stdout
        names = [span.name for span in receiver.spans]
        assert names.count("asel.autotune") == 3
        assert {"demo: cold request 0", "demo: a request with a new key", "asel.candidate.compile"} <= set(names)
        candidates = [span for span in receiver.spans if span.name == "asel.candidate"]
        assert any(attributes(span).get("asel.failed") for span in candidates)
        assert not any(span.status.code == 2 for span in candidates)
        assert {version for _, scope, version in receiver.scopes if scope.startswith("asel")} == {
            metadata.version("asel")
        }
        waiters = [span for span in receiver.spans if span.name == "asel.choose" and span.links]
        assert len(waiters) == 4  # two for each of the cold keys


def test_a_missing_exporter_is_named_with_its_extra(monkeypatch):
    """The extra is an extra."""
    from asel import InvalidRequestError

    # The last of the three, so that what was set up before it has to be undone.
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http._log_exporter", None)
    with pytest.raises(InvalidRequestError, match=r"asel\[otlp\]"):
        configure("service", "http://127.0.0.1:1")


@pytest.mark.timeout(60)
def test_silent_selectors_notice_configure_immediately():
    """A selector may have answered thousands of calls before telemetry is set up."""
    with receiving() as receiver:
        deferred = DeferredSinks(default_sinks(), None)
        deferred._check_silence()
        assert deferred._is_silent
        with configure("service", receiver.endpoint):
            assert not deferred._is_silent
