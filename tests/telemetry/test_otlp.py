"""Over the wire: `configure`, real exporters, a real receiver, and collectors that are none."""

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
def test_a_tune_its_waiters_and_a_hit_arrive_with_their_links_attributes_and_times():
    """What a collector gets is what happened, through every part that is used in production."""
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
def test_a_dead_collector_harms_no_selection_and_closing_keeps_its_deadline():
    """Nobody listens there."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{unused.getsockname()[1]}"
    _closed_within(endpoint, 5.0)


@pytest.mark.timeout(60)
def test_a_black_hole_harms_no_selection_and_closing_keeps_its_deadline():
    """Connections are taken, and nothing is ever said."""
    with socket.socket() as hole:
        hole.bind(("127.0.0.1", 0))
        hole.listen()
        assert _closed_within(f"http://127.0.0.1:{hole.getsockname()[1]}", 5.0) is False


@pytest.mark.timeout(60)
def test_a_slow_collector_harms_no_selection_and_gets_it_all_in_the_end():
    """An answer that takes longer than the deadline is not waited for; what was sent arrives."""
    with receiving() as receiver:
        receiver.gate.clear()
        assert _closed_within(receiver.endpoint, 5.0) is False
        assert receiver.asked.wait(10)
        receiver.gate.set()


@pytest.mark.timeout(60)
def test_a_slow_collector_behind_the_applications_own_processor_delays_no_selection():
    """asel waits for its own queue, within a bound, and never flushes or shuts down what is not its own."""
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
    """A person who set up nothing reads what is set up now, and afterwards nothing is."""
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


def test_it_can_be_set_up_again_after_it_was_closed():
    """Undone is undone: the second time is like the first."""
    for _ in range(2):
        with receiving() as receiver:
            with configure("service", receiver.endpoint) as telemetry:
                run_in_virtual_time(one_tune_and_hits)
                assert telemetry.close() is True
            assert {span.name for span in receiver.spans} >= {"request", "asel.choose", "asel.autotune"}
            assert sum(span.name == "asel.choose" for span in receiver.spans) == 200


def test_the_console_gets_readable_lines(capsys):
    """Without a collector, too."""
    with configure("service", console=True) as telemetry:
        assert "structlog: to the console, from info on" in str(telemetry)
        assert "traces: nowhere, there is no endpoint" in str(telemetry)
        run_in_virtual_time(one_tune_and_hits)
    assert "asel.autotune_finish" in capsys.readouterr().err


def test_the_environment_of_opentelemetry_counts(monkeypatch):
    """Endpoint, name, sampler and exporters are an operator's to choose."""
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
    """OTEL_SDK_DISABLED turns off whatever would leave the process."""
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    with receiving() as receiver:
        with configure("service", receiver.endpoint) as telemetry:
            assert "OTEL_SDK_DISABLED is set" in str(telemetry)
            run_in_virtual_time(one_tune_and_hits)
        assert not receiver.asked.is_set()


def test_the_applications_own_setup_is_left_alone():
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


def test_a_provider_of_the_applications_own_is_left_alone(monkeypatch):
    """And named as the application's."""
    from opentelemetry.sdk.trace import TracerProvider

    monkeypatch.setattr(trace, "_TRACER_PROVIDER", TracerProvider(shutdown_on_exit=False))
    with configure("service", "http://127.0.0.1:1") as telemetry:
        assert "traces: left to the provider that the application has set" in str(telemetry)
    monkeypatch.undo()


@pytest.mark.anyio
async def test_on_an_event_loop_it_is_closed_in_a_thread():
    """Closing may take as long as its deadline; the loop goes on meanwhile."""
    telemetry = await anyio.to_thread.run_sync(lambda: configure("service"))
    async with telemetry:
        assert shared_pipeline() is not None
    assert telemetry._closed


@pytest.mark.timeout(120)
def test_the_demo_can_be_seen_in_a_collector():
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


def test_a_missing_exporter_is_named_with_the_way_to_get_it(monkeypatch):
    """The extra is an extra."""
    from asel import InvalidRequestError

    # The last of the three, so that what was set up before it has to be undone.
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http._log_exporter", None)
    with pytest.raises(InvalidRequestError, match=r"asel\[otlp\]"):
        configure("service", "http://127.0.0.1:1")


@pytest.mark.timeout(60)
def test_configure_is_noticed_at_once_by_silent_selectors():
    """A chain may have answered thousands of calls before telemetry is set up."""
    with receiving() as receiver:
        deferred = DeferredSinks(default_sinks(), None)
        deferred._check_silence()
        assert deferred._is_silent
        with configure("service", receiver.endpoint):
            assert not deferred._is_silent
