"""`asel trace`: waterfalls from files of OTLP JSON lines, good and bad."""

from __future__ import annotations

import io
import json
import re

import pytest
from google.protobuf import json_format
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.trace import Link, Status, StatusCode
from rich.console import Console
from support.command_line import asel

from asel.cli.trace.span_file import SpanFile
from asel.cli.trace.spans import read_spans
from asel.cli.trace.waterfall import print_trace, traces_of

_S = 1_000_000_000


@pytest.fixture
def path(tmp_path):
    """A request with a tune of two candidates, and a request that waited for it."""
    path = tmp_path / "spans.jsonl"
    provider = TracerProvider(resource=Resource({"service.name": "serving"}))
    provider.add_span_processor(SimpleSpanProcessor(SpanFile(path)))
    tracer = provider.get_tracer("asel", "0.1.0")

    def span(name, start_s, end_s, parent=None, **more):
        from opentelemetry.trace import set_span_in_context

        context = None if parent is None else set_span_in_context(parent)
        made = tracer.start_span(name, context, start_time=start_s * _S, **more)
        return made, lambda: made.end(end_s * _S)

    root, end_root = span("asel.choose", 10, 20, attributes={"asel.op": "matmul@v1", "asel.tier": "autotune"})
    tune, end_tune = span("asel.autotune", 11, 19, root, attributes={"asel.op": "matmul@v1", "asel.margin": 0.5})
    for number, facts in enumerate(({"asel.winner": True}, {"asel.failed": True, "error.type": "TypeError"})):
        one, end = span("asel.candidate", 12 + number, 15, tune, attributes={"asel.config": f"rows={number}", **facts})
        one.add_event("sampled", {"values": [1.5, 2]}, 13 * _S)
        end()
    waiter, end_waiter = span("asel.choose", 12, 20, links=[Link(tune.get_span_context())])
    waiter.set_attribute("asel.wait_s", 8.0)
    waiter.set_status(Status(StatusCode.ERROR, "gave up"))
    for end in (end_tune, end_root, end_waiter):
        end()
    provider.shutdown()
    return path


def test_a_waterfall_shows_the_tree_with_times(path):
    """One line for each span, indented below its parent, with a bar at its time."""
    lines = asel("trace", path).out.splitlines()
    assert lines[0].endswith("10 s  serving")
    root, tune, winner, failed = lines[1:5]
    assert root.startswith("asel.choose matmul@v1 autotune")
    assert tune.startswith("  asel.autotune matmul@v1")
    assert winner.startswith("    asel.candidate rows=0 winner")
    assert failed.startswith("    asel.candidate rows=1 failed: TypeError")
    bars = [line.count("\u2588") for line in (root, tune, winner, failed)]
    assert bars == sorted(bars, reverse=True)
    assert root.index("\u2588") < tune.index("\u2588") < winner.index("\u2588") < failed.index("\u2588")
    assert "waits for the tune in" in lines[7]


def test_bars_have_the_colours_of_their_outcomes(path):
    """The winner is green, a failed candidate yellow, an error red; the text shows the same without colours."""
    out = Console(file=io.StringIO(), force_terminal=True, color_system="standard", width=100)
    [trace] = traces_of(read_spans(path)[0])[:1]
    print_trace(out, trace)
    lines = out.file.getvalue().splitlines()
    colours = {line.split()[1]: re.findall(r"\x1b\[(3\d)m", line)[-1] for line in lines if "asel.candidate" in line}
    assert colours == {"rows=0": "32", "rows=1": "33"}
    assert "\x1b[36m" in lines[1]


def test_span_files_are_valid_otlp(path):
    """OpenTelemetry's own definitions read every line, and the contents are equal."""
    for line in path.read_text().splitlines():
        json_format.Parse(line, ExportTraceServiceRequest())
    spans, bad = read_spans(path)
    assert bad == []
    waiter = next(span for span in spans if span.links)
    assert waiter.failed
    assert waiter.attributes == {"asel.wait_s": 8.0}
    assert waiter.links[0][1] == next(span.span_id for span in spans if span.name == "asel.autotune")
    assert {span.service for span in spans} == {"serving"}


def test_bad_lines_are_named_and_other_lines_are_read(path):
    """The exit code is 1."""
    (first, *rest) = path.read_text().splitlines()
    broken = json.loads(first)
    span = broken["resourceSpans"][0]["scopeSpans"][0]["spans"][0]
    for number, (key, value) in enumerate([("traceId", 5), ("endTimeUnixNano", "0"), ("startTimeUnixNano", None)]):
        broken["resourceSpans"][0]["scopeSpans"][0]["spans"].append({**span, "spanId": f"0{number}", key: value})
    metrics = '{"resourceMetrics": []}'
    bad = [
        "{nonsense",
        "[1]",
        json.dumps(broken),
        "[" * 100_000,
        "\udc80".encode("utf-8", "surrogateescape").decode("latin1"),
    ]
    path.write_text("\n".join([*bad, metrics, "", *rest]), encoding="utf-8")
    ran = asel("trace", path)
    assert ran.code == 1
    assert "asel.autotune" in ran.out
    assert [line.partition("line ")[2].partition(":")[0] for line in ran.err.splitlines()] == ["1", "2", "3", "4", "5"]
    assert "5 is not an id (and 2 more)" in ran.err


def test_a_span_that_is_its_own_ancestor_is_shown_once(path):
    """A damaged file does not make an endless tree; a span without its parent is a root."""
    spans = [
        {
            "traceId": "aa",
            "spanId": one,
            "parentSpanId": parent,
            "startTimeUnixNano": "1",
            "endTimeUnixNano": 5,
            "name": one,
        }
        for one, parent in (("01", "02"), ("02", "01"), ("03", "03"), ("04", "99"), ("05", "01"))
    ]
    path.write_text(json.dumps({"resourceSpans": [{"scopeSpans": [{"spans": spans}]}]}, indent=1))
    shown = asel("trace", path).out
    assert all(shown.count(f"0{number} ") == 1 for number in range(1, 6))
    assert "\n  05 " in shown


def test_traces_are_chosen_by_text_and_number(path):
    """`--only` compares ids and texts, `--limit` keeps the longest."""
    assert "asel.autotune" in asel("trace", path, "--only", "matmul").out
    limited = asel("trace", path, "--limit", "1").out
    assert "1 shorter traces are not shown: --limit 2 shows all" in limited
    (waited,) = asel("trace", path, "--only", "waits for", "--json").json
    assert waited["spans"][0]["failed"]
    assert asel("trace", path, "--only", waited["trace"][:8], "--json").json == [waited]
    assert asel("trace", path, "--only", "nothing").code == 2


def test_a_narrow_window_keeps_every_line_within_it(path, monkeypatch):
    """Forty columns: labels are shortened, bars stay."""
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    lines = re.sub(r"\x1b\[[01]?m", "", asel("trace", path, terminal=True).out).splitlines()  # bold is not a colour
    assert max(len(line) for line in lines if not line.startswith("trace")) <= 40
    assert sum("\u2588" in line for line in lines) == 5


def test_a_file_without_spans_is_wrong_use(tmp_path):
    """The message describes the expected contents."""
    empty = tmp_path / "empty.jsonl"
    empty.write_text("hello\n")
    assert "resourceSpans" in asel("trace", empty).err
    assert asel("trace", tmp_path / "absent").code == 2
