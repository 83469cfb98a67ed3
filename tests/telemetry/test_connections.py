"""Collectors that refuse, are slow or go away, over the wire; and programs that fork or close meanwhile."""

from __future__ import annotations

import logging
import os
import threading
import warnings

import pytest
from opentelemetry import trace
from opentelemetry.trace import Status, StatusCode
from support.exports import (
    _nothing_is_set_up,  # noqa: F401 - a fixture
    dropped,
    dropped_in,
    one_tune,
)
from support.otlp_receiver import receiving

import asel.telemetry.configuration as setup
from asel.telemetry import configure, shared_pipeline
from asel.testing import run_in_virtual_time


def only_traces(monkeypatch):
    for signal in ("METRICS", "LOGS"):
        monkeypatch.setenv(f"OTEL_{signal}_EXPORTER", "none")


def fail_a_request():
    span = trace.get_tracer("test").start_span("a failed request")
    span.set_status(Status(StatusCode.ERROR))
    span.end()


@pytest.mark.timeout(60)
def test_a_forked_child_opens_its_own_connections(monkeypatch):
    """Requests of two processes on one connection would be mixed up. For every signal."""
    with receiving() as receiver, configure("service", receiver.endpoint) as telemetry:
        run_in_virtual_time(one_tune)
        assert telemetry.flush(20)
        ours = set(receiver.ports)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # this process has threads, which is the point
            child = os.fork()
        if not child:
            os._exit(0 if send_one_of_each(telemetry) else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        sent = list(zip(receiver.ports, receiver.paths, strict=True))
        assert {path for port, path in sent if port not in ours} == {"/v1/traces", "/v1/metrics", "/v1/logs"}
        fail_a_request()
        assert telemetry.flush(20)
        assert receiver.ports[-1] in ours
        assert [span.name for span in receiver.spans].count("a failed request") == 2


def send_one_of_each(telemetry) -> bool:
    fail_a_request()
    logging.disable()
    import structlog

    structlog.get_logger().warning("in the child")
    return telemetry.flush(20)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("status", "requests", "why"),
    [
        (200, 3, "the collector does not answer in time"),
        (400, 1, "the collector refuses them"),
        (401, 1, "the collector refuses them"),
        (503, 5, "the collector cannot be reached or is not ready"),
    ],
)
def test_a_batch_is_sent_again_only_if_that_may_help(monkeypatch, caplog, status, requests, why):
    """A refusal is final. A collector that is slower than the timeout gets a batch three times at most."""
    only_traces(monkeypatch)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.2")
    before = dropped("traces", "export_failed")
    with receiving() as receiver:
        receiver.status = status
        if status == 200:
            receiver.gate.clear()
        telemetry = configure("service", receiver.endpoint, close_timeout_s=40)
        fail_a_request()
        assert telemetry.close() is False
        assert len(receiver.paths) == requests
    assert dropped("traces", "export_failed") - before == 1
    assert [record.getMessage() for record in caplog.records if record.name == "asel"] == [
        f"dropping spans: {why} (asel.telemetry.dropped has the count)",
        "1 spans were dropped before telemetry was closed",
    ]


@pytest.mark.timeout(60)
def test_items_lost_at_closing_are_in_the_last_metrics(monkeypatch):
    """Metrics are sent after the queues were abandoned, with time of their own."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "60")
    with receiving() as receiver:
        receiver.gated = {"/v1/traces"}
        receiver.gate.clear()
        telemetry = configure("service", receiver.endpoint, close_timeout_s=6)
        run_in_virtual_time(one_tune)
        assert shared_pipeline().flush(10)
        before = dropped("traces", "closed")
        assert telemetry.close() is False
        assert dropped("traces", "closed") > before
        assert dropped_in(receiver, "traces") == dropped("traces", "queue_full", "export_failed", "closed")


@pytest.mark.timeout(60)
def test_a_second_thread_that_closes_waits_and_gets_the_same_answer(monkeypatch):
    """It does not return True while the first thread is still sending."""
    only_traces(monkeypatch)
    results = []
    with receiving() as receiver:
        receiver.gate.clear()
        telemetry = configure("service", receiver.endpoint, close_timeout_s=1)
        fail_a_request()
        threads = [threading.Thread(target=lambda: results.append(telemetry.close())) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
    assert results == [False, False]
    assert telemetry.close() is False


@pytest.mark.timeout(60)
def test_log_filters_are_removed_after_a_close_that_failed(monkeypatch):
    """When the last request has ended: until then its failure may be logged, with the URL."""
    only_traces(monkeypatch)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "60")
    before = {name: list(logging.getLogger(name).filters) for name in setup._LOGGERS}
    with receiving() as receiver:
        receiver.gate.clear()
        telemetry = configure("service", receiver.endpoint, close_timeout_s=0.2)
        fail_a_request()
        assert telemetry.close() is False
        assert {name: list(logging.getLogger(name).filters) for name in setup._LOGGERS} != before
        receiver.gate.set()
        for thread in threading.enumerate():
            if thread.name == setup._CLOSING:
                thread.join(20)
    assert {name: list(logging.getLogger(name).filters) for name in setup._LOGGERS} == before
