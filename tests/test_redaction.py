"""No text contains a secret: one function removes them from everything that is shown."""

from __future__ import annotations

import ast
import base64
import copy
import logging
import pickle
import socket
import time
import traceback
import warnings
from pathlib import Path

import anyio
import pytest
from opentelemetry import trace
from support.command_line import asel as run
from support.exports import _nothing_is_set_up, one_tune_and_hits  # noqa: F401 - a fixture
from support.kernels import BEST, COSTS, Blocks, Toy, call, scripted
from support.otlp_receiver import receiving
from support.redis_server import RedisServer

import asel
import asel.cli.demo.story
from asel import (
    AselError,
    ConfigCache,
    ConfigSelectorChain,
    InvalidRequestError,
    NoConfigError,
    PersistentCache,
    StoreError,
)
from asel.redaction import SecretFilter, redact
from asel.stores import DirectoryStore, open_store
from asel.telemetry import configure
from asel.testing import CapturedTelemetry, RecordingSink, run_in_virtual_time

SECRET = "hunter2"
ENCODED = base64.b64encode(f"me:{SECRET}".encode()).decode()
ROOT = Path(asel.__file__).parent


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("http://me:hunter2@host:4318/x", "http://***@host:4318/x"),
        ("redis://:hunter2@host", "redis://***@host"),
        ("redis://hunter2@host", "redis://***@host"),
        ("rediss://me:hun/ter?2#hunter2@host/0", "rediss://***@host/0"),
        ("redis://me:hunter2@other@host", "redis://***@host"),
        ("redis:/me:hunter2@host", "redis:/***@host"),
        ("HTTPS://me:hunter2@host?TOKEN=hunter2", "HTTPS://***@host?TOKEN=***"),
        ("http://host/?api_key=hunter2&n=1&access-token=hunter2#x", "http://host/?api_key=***&n=1&access-token=***#x"),
        ("exceeded with url: /v1/traces?sig=hunter2 (Caused by", "exceeded with url: /v1/traces?sig=*** (Caused by"),
        ("two: http://a:hunter2@b and redis://c:hunter2@d.", "two: http://***@b and redis://***@d."),
        ("'http://me:hunter2@host'", "'http://***@host'"),
        ("matmul@v1 on http://host/path?n=1", "matmul@v1 on http://host/path?n=1"),
        ("C:/Users/me@home, /home/me@home, a:b@c", "C:/Users/me@home, /home/me@home, a:b@c"),
        ("1redis://me:hunter2@host", "1redis://***@host"),
        ("a.b/redis://me:hun'ter2@host", "a.b/redis://***@host"),
        ("redis:////me:hunter2@host", "redis:///***@host"),
        *((f"/x?{name}=hunter2&n=1", f"/x?{name}=***&n=1") for name in ("code", "pass", "pw", "jwt", "session")),
        *(
            (f"/x?n=1&{name}=hunter2", f"/x?n=1&{name}=***")
            for name in ("passphrase", "accessToken", "X-Amz-Signature")
        ),
        ("http://host/#token=hunter2", "http://host/#token=***"),
        ("/x?token=ab;hunter2", "/x?token=***"),
        ("/x?a=1,token=hunter2,more", "/x?a=1,token=***"),
        ("(see /x?key='hunter2').", "(see /x?key=***')."),
        ("file:/data/op@v1/records.json", "file:/data/op@v1/records.json"),
        ("file:///data/op@v1.json", "file:///data/op@v1.json"),
        ("x = y;keys=[1] if a?monkey=5", "x = y;keys=[1] if a?monkey=5"),
        ("?max_tokens=5&encode=utf8", "?max_tokens=5&encode=utf8"),
        ("", ""),
    ],
)
def test_a_redacted_url_keeps_its_public_parts(text, shown):
    """User, password and the values of parameters that sound like credentials are removed, and nothing else."""
    assert redact(text) == shown
    assert redact(shown) == shown


@pytest.mark.parametrize(
    "piece", ["key", "?key", "a://", "s3://bucket/x|", "http://x,", "a.", "?", "@", ";a=b", "'", "a:/@", "token=x;"]
)
def test_it_takes_linear_time(piece):
    """Sixteen times the text takes about sixteen times as long, and never 256 times."""

    def best_of_three(text):
        times = []
        for _ in range(3):
            start = time.thread_time()  # does not depend on other programs
            redact(text)
            times.append(time.thread_time() - start)
        return min(times)

    for before, after in (("", ""), ("?", ""), ("http://", "@h"), ("?", "=1"), ("http://x?token=", "@")):
        short, long = (before + piece * number + after for number in (4_000, 64_000))
        assert best_of_three(long) < 16 * 6 * max(best_of_three(short), 1e-4)


def test_errors_contain_no_secret():
    """Every error of asel is redacted; copies and pickles keep their message."""
    error = StoreError("no answer from redis://me:hunter2@host", location="redis://me:hunter2@host")
    for each in (error, copy.copy(error), pickle.loads(pickle.dumps(error))):
        assert (str(each), each.location) == ("no answer from redis://***@host", "redis://***@host")
    assert SECRET not in repr(InvalidRequestError("http://me:hunter2@host")) + repr(AselError("http://x:hunter2@host"))
    assert str(AselError(OSError("no answer from redis://me:hunter2@host"))) == "no answer from redis://***@host"
    declined = NoConfigError("no config", declined={"persistent": "redis://me:hunter2@host failed"}).declined
    assert declined == {"persistent": "redis://***@host failed"}


# ---------------------------------------------------------------------------------------------
# Every message of every module.

# What may hold a URL, or an error that words one; by the last part of a dotted name.
SUSPECTS = {"url", "uri", "endpoint", "location", "otlp", "dsn", "netloc", "user_info", "password", "headers"}
SUSPECTS |= {"error", "exc", "exception", "fault", "where"}
SHOWN_BY = {"debug", "info", "warning", "error", "exception", "critical", "log", "warn", "print", "echo"}
ERRORS = {
    name for name in dir(asel) if isinstance(getattr(asel, name), type) and issubclass(getattr(asel, name), AselError)
}

ALLOWED = {
    # A store's own: `Target.location` has neither user nor password, a file's is its path.
    ("stores.redis.store", "self.location"),
    ("stores.redis.connection", "self.location"),
    ("stores.redis.wakeups", "self._target.location"),
    ("stores.file_ops", "location"),
    ("stores.jax_cluster", "self.location"),  # a scheme and a name
    ("stores.jax_cluster", "str(error)"),  # compared, and not shown
    (
        "stores.document_file",
        "str(error)",
    ),  # all of these become a `Rejected`, whose reason is redacted where it is reported
    ("stores.record_stream", "str(error)"),
    ("stores.document_format", "where"),
    ("stores.document_format", "str(error)"),
    ("stores.document_format", "error or 'nested too deeply'"),
    ("stores.document_format", "error"),
    ("stores.directory", "str(error)"),
    ("stores.transfer", "where"),  # the path of a file
    ("stores.redis.store", "str(error)"),
    ("stores.records", "error"),
    ("stores.records", "error or 'nested too deeply'"),
    ("stores.records", "where"),
    ("selection.shared_tunes", "str(error)"),  # a TuningError by then, or TunedElsewhere
    ("cli", "str(error)"),  # an InvalidRequestError
    ("telemetry.environment", "unquote(password)"),  # the header it is sent in
}


def leaks(tree: ast.AST, module: str) -> list[str]:
    """Return the expressions that reach a text unredacted, although they may hold a secret."""
    found = []

    def visit(node: ast.AST, is_safe: bool) -> None:
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func).rpartition(".")[2]
            if name == "redact" or name in ERRORS:
                is_safe = True
            elif name in ("str", "repr", "format") and not is_safe:
                for argument in node.args:
                    judge(argument, ast.unparse(node))
            elif name in SHOWN_BY and not is_safe:
                for argument in node.args:
                    judge(argument, ast.unparse(argument))
        elif isinstance(node, ast.FormattedValue) and not is_safe:
            judge(node.value, ast.unparse(node.value))
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod) and isinstance(node.left, ast.Constant):
            if isinstance(node.left.value, str) and not is_safe:
                judge(node.right, ast.unparse(node.right))
        elif isinstance(node, ast.Attribute) and node.attr == "__name__":
            return  # the name of an error's type
        for child in ast.iter_child_nodes(node):
            visit(child, is_safe)

    def judge(value: ast.expr, shown: str) -> None:
        if isinstance(value, ast.JoinedStr) or (module, shown) in ALLOWED:
            return
        for part in mentioned(value):
            if part.lower() in SUSPECTS:
                found.append(f"{module}:{value.lineno}: {shown}")
                return

    visit(tree, False)
    return sorted(set(found))


def mentioned(value: ast.AST):
    """Yield the names used in an expression, except inside `redact` or `type`."""
    if isinstance(value, ast.Call):
        name = ast.unparse(value.func)
        if name in ("redact", "type", "len", "text_of"):
            return
        if isinstance(value.func, ast.Attribute):
            yield from mentioned(value.func.value)
        for argument in value.args:
            yield from mentioned(argument)
    elif isinstance(value, ast.Attribute):
        if value.attr in SUSPECTS:
            yield value.attr
        elif value.attr in ("name", "__name__"):
            return
        yield from (part for part in mentioned(value.value) if value.attr in ("args", "message", "reason"))
    elif isinstance(value, ast.Name):
        yield value.id
    elif not isinstance(value, ast.JoinedStr):
        for child in ast.iter_child_nodes(value):
            yield from mentioned(child)


def sources() -> dict[str, str]:
    names = {path: ".".join(path.relative_to(ROOT).with_suffix("").parts) for path in ROOT.rglob("*.py")}
    return {
        name.removesuffix(".__init__").replace("__init__", "asel"): path.read_text() for path, name in names.items()
    }


@pytest.mark.parametrize("module", sorted(sources()))
def test_no_message_contains_a_secret(module):
    """No f-string, log call, warning or print contains an unredacted URL or error from other code."""
    assert leaks(ast.parse(sources()[module]), module) == []


@pytest.mark.parametrize(
    "leak",
    [
        'raise RuntimeError(f"cannot reach {self.url}")',
        'raise RuntimeError("cannot reach " + str(endpoint))',
        'raise RuntimeError("cannot reach %s" % url)',
        'raise RuntimeError("cannot reach {}".format(url))',
        'logger.warning("cannot reach %s", store.location)',
        'logger.debug("it failed: %s", error)',
        'warnings.warn(f"{otlp} is slow")',
        "print(endpoint)",
        "def __repr__(self): return f'Store({self.location!r})'",
        "def __str__(self): return f'to {self.endpoint.rstrip()}'",
        'event(message=f"{type(error).__name__}: {error}")',
    ],
)
def test_a_leak_is_found(leak):
    """The test above can fail."""
    assert leaks(ast.parse(leak), "planted") != []


@pytest.mark.parametrize(
    "fine",
    [
        'raise RuntimeError(f"cannot reach {redact(self.url)}")',
        'raise StoreError(f"cannot reach {self.url}")',  # which redacts its message
        'logger.warning("cannot reach %s", redact(store.location))',
        'raise RuntimeError(f"{type(error).__name__}")',
    ],
)
def test_redacted_text_passes_the_leak_check(fine):
    """Nor is the name of a type."""
    assert leaks(ast.parse(fine), "planted") == []


# ---------------------------------------------------------------------------------------------
# A secret in every place that a URL can be given.


@pytest.fixture(autouse=True)
def _nothing_shows_it(caplog, capfd):
    """Check the logs of all libraries at every level, warnings and printed text."""
    caplog.set_level(logging.DEBUG)
    with warnings.catch_warnings(record=True) as warned:
        yield
    out, err = capfd.readouterr()
    logged = "\n".join(logging.Formatter().format(record) for record in caplog.get_records("call"))
    for shown in (out, err, logged, *(str(warning.message) for warning in warned)):
        assert SECRET not in shown
        assert ENCODED not in shown


def refusal(work, *arguments, **options) -> str:
    """Return the error of a refused call, after searching its whole traceback for the secret."""
    with pytest.raises(InvalidRequestError) as caught:
        work(*arguments, **options)
    lines = traceback.TracebackException.from_exception(caught.value).format(chain=True)
    shown = "".join(line for line in lines if "tests/test_redaction" not in line)
    shown += repr(caught.value) + repr(caught.value.__context__) + repr(caught.value.__cause__)
    assert SECRET not in shown
    return str(caught.value)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("by", ["argument", "OTEL_EXPORTER_OTLP_ENDPOINT", "each signal's own"])
def test_a_collectors_password_is_sent_and_not_shown(monkeypatch, by):
    """It is sent as a header; `print(telemetry)` shows neither it nor a token in the query."""
    with receiving() as receiver:
        url = f"{receiver.endpoint.replace('//', f'//me:{SECRET}@')}?token={SECRET}"
        if by == "OTEL_EXPORTER_OTLP_ENDPOINT":
            monkeypatch.setenv(by, url)
        elif by == "each signal's own":
            for signal in ("traces", "metrics", "logs"):
                monkeypatch.setenv(f"OTEL_EXPORTER_OTLP_{signal.upper()}_ENDPOINT", url.replace("?", f"/v1/{signal}?"))
        with configure("service", url if by == "argument" else None) as telemetry:
            assert f"traces: to {receiver.endpoint}/v1/traces?token=***, sampled" in str(telemetry)
            assert SECRET not in repr(telemetry) + str(telemetry) + repr(telemetry.lines) + str(vars(telemetry))
            run_in_virtual_time(one_tune_and_hits, 3)
            assert telemetry.close() is True
        assert receiver.spans
        assert {headers["authorization"] for headers in receiver.headers} == {f"Basic {ENCODED}"}
        assert {path.partition("?")[2] for path in receiver.paths} == {f"token={SECRET}"}


@pytest.mark.timeout(60)
def test_a_header_is_sent_and_not_shown(monkeypatch):
    """Headers may contain credentials, too."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", f"authorization=Bearer {SECRET},x-tenant=a")
    with receiving() as receiver:
        with configure("service", receiver.endpoint) as telemetry:
            assert SECRET not in str(telemetry)
            run_in_virtual_time(one_tune_and_hits, 3)
            assert telemetry.close() is True
        assert {headers["authorization"] for headers in receiver.headers} == {f"Bearer {SECRET}"}


@pytest.mark.parametrize("name", ["OTEL_EXPORTER_OTLP_HEADERS", "OTEL_EXPORTER_OTLP_LOGS_HEADERS"])
@pytest.mark.parametrize("headers", [SECRET, f"Authorization: Bearer {SECRET}", f"a=b,{SECRET}", f'a="{SECRET}"'])
def test_headers_that_are_not_headers_are_refused_without_them(monkeypatch, name, headers):
    """The exporter would ignore them, and log them."""
    monkeypatch.setenv(name, headers)
    assert refusal(configure, "service", "http://127.0.0.1:1") == (
        f"configure: {name} must be a list of name=value, separated by commas"
    )


MISSPELT = [
    f"me:{SECRET}@host:4318",
    f"htp://me:{SECRET}@host",
    f"http:/me:{SECRET}@host",
    f"http://me:{SECRET}@",
    f"http://me:{SECRET}",
    f"http://me:1#{SECRET}@host",
    f"http://me:1/{SECRET}@host",
    f"http://me:1?{SECRET}@host",
    f"http://me:{SECRET}@host:port",
    f"http://me:{SECRET}@[host",
    f"http://{SECRET}[@host",
]


@pytest.mark.parametrize("url", MISSPELT)
def test_a_misspelt_endpoint_is_refused_without_it(monkeypatch, url):
    """The password may be in any part of it."""
    refusal(configure, "service", url)
    for name in ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"):
        with monkeypatch.context() as patch:
            patch.setenv(name, url)
            refusal(configure, "service")


@pytest.mark.parametrize("name", ["OTEL_METRIC_EXPORT_INTERVAL", "OTEL_TRACES_SAMPLER", "OTEL_EXPORTER_OTLP_PROTOCOL"])
def test_a_url_in_the_wrong_variable_is_not_repeated(monkeypatch, name):
    """A common mistake."""
    monkeypatch.setenv(name, f"http://me:{SECRET}@host")
    assert "http://***@host" in refusal(configure, "service", "http://127.0.0.1:1")


@pytest.mark.timeout(60)
@pytest.mark.parametrize("collector", ["nobody", "bad request", "unavailable", "black hole"])
def test_an_exporters_log_has_no_secret(monkeypatch, caplog, collector):
    """Its errors repeat the URL with its query; urllib3 does at debug level."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.3")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", f"x-key={SECRET}")
    with receiving() as receiver, socket.socket() as hole:
        hole.bind(("127.0.0.1", 0))
        hole.listen()
        receiver.status = {"bad request": 400, "unavailable": 503}.get(collector, 200)
        port = {"nobody": 1, "black hole": hole.getsockname()[1]}.get(collector, receiver.endpoint.rpartition(":")[2])
        telemetry = configure("service", f"http://me:{SECRET}@127.0.0.1:{port}/?n={SECRET}", close_timeout_s=10)
        run_in_virtual_time(one_tune_and_hits, 3)
        assert telemetry.close() is False
    logged = [record.getMessage() for record in caplog.records if record.name.startswith("opentelemetry")]
    assert any("Failed to export" in message for message in logged)


def test_a_filter_cleans_messages_and_tracebacks():
    """Longest first, so that no piece of a secret is left behind."""
    hidden = SecretFilter(["hunter2", "hunter2-and-more", "ab"])
    with pytest.raises(ValueError, match="hunter2") as raised:
        int("hunter2-and-more")
    caught = (raised.type, raised.value, raised.tb)
    record = logging.LogRecord("x", logging.ERROR, "x.py", 1, "%s for %d, tab", ("hunter2-and-more", 3), caught)
    assert hidden.filter(record)
    shown = logging.Formatter().format(record)
    assert shown.startswith("*** for 3, tab\n")
    assert SECRET not in shown
    assert "ValueError: invalid literal for int() with base 10: '***'" in shown


def test_a_filter_does_not_raise_into_the_call_that_logs(caplog):
    """A format string that does not fit its arguments is shown unformatted, without secrets."""
    log = logging.getLogger("asel.test")
    hidden = SecretFilter(["hunter2"])
    log.addFilter(hidden)
    log.warning("%d of HUNTER2", "hunter2")
    log.removeFilter(hidden)
    assert caplog.messages == ["%d of *** ('***',)"]


# The environment's name, the URL's part: each secret has another value, so that each source is seen to be hidden.
ECHOED = {
    "password": "http://me:first-one@{host}",
    "user": "http://first-one@{host}",
    "encoded password": "http://me:first%2Done@{host}",
    "query": "http://{host}?n=first-one",
    "encoded query": "http://{host}?n=first%2Done",
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("change", [str, str.lower, str.upper])
@pytest.mark.parametrize("source", [*ECHOED, "bearer", "basic", "header", "signal's header", "encoded header"])
def test_a_collector_that_repeats_a_credential_does_not_get_it_into_the_log(monkeypatch, caplog, source, change):
    """A 401 whose text repeats the credential: as it was sent, decoded, or in part."""
    headers = {
        "bearer": ("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer first-one"),
        "basic": ("OTEL_EXPORTER_OTLP_HEADERS", f"authorization=Basic {base64.b64encode(b'first-one').decode()}"),
        "header": ("OTEL_EXPORTER_OTLP_HEADERS", "x-any=first-one"),
        "signal's header": ("OTEL_EXPORTER_OTLP_TRACES_HEADERS", "x-any=first-one"),
        "encoded header": ("OTEL_EXPORTER_OTLP_HEADERS", "x-any=first%2Done"),
    }
    if source in headers:
        monkeypatch.setenv(*headers[source])

    def echo(sent):
        credential = sent.get("authorization") or sent.get("x-any") or ""
        part = credential.split()[-1] if credential else ""
        decoded = base64.b64decode(part).decode() if credential.startswith("Basic") else ""
        return change(f"no: {credential} {part} {decoded} first-one")

    with receiving() as receiver:
        receiver.status, receiver.reason = 401, echo
        host = receiver.endpoint.removeprefix("http://")
        for signal in ("METRICS", "LOGS"):
            monkeypatch.setenv(f"OTEL_{signal}_EXPORTER", "none")
        with configure("service", ECHOED.get(source, "http://{host}").format(host=host)) as telemetry:
            trace.get_tracer("test").start_span("one").end()
            assert telemetry.close() is False
        assert receiver.paths
    assert any("no: ***" in message.lower() or "no:  " in message.lower() for message in caplog.messages)
    for secret in ("first-one", base64.b64encode(b"me:first-one").decode(), base64.b64encode(b"first-one").decode()):
        assert secret.lower() not in caplog.text.lower()


# Stores.

REDIS = [
    f"redis://me:{SECRET}@host:port",
    f"redis://me:{SECRET}@host/db",
    f"redis://me:{SECRET}@",
    f"redis://me:{SECRET}/@host",
    f"redis://me:{SECRET}?@host",
    f"redis://me:{SECRET}#@host",
    f"redis://me:{SECRET}@[host",
    f"redis://me:{SECRET}@host?nonsense=1",
    f"redis://me:{SECRET}@host?timeout_s=soon",
    f"redis://me:{SECRET}@host?prefix=*",
    f"rediss://me:{SECRET}@host?ssl_ca_certs=/nowhere",
    f"rediss://me:{SECRET}@host?ssl_certfile=/nowhere",
    f"mysql://me:{SECRET}@host",
    f"me:{SECRET}@redis://host",
    Path(f"redis://me:{SECRET}@host"),
    Path(f"redis://me:{SECRET}@host/records.json"),
]


@pytest.mark.parametrize("url", REDIS, ids=str)
def test_a_store_that_cannot_be_opened_is_refused_without_its_url(url):
    """As `path`, as a shipped document, and by the function that opens both."""
    refusal(open_store, url)
    refusal(PersistentCache, "op", url)
    refusal(PersistentCache, "op", "somewhere", shipped=[url])
    refusal(PersistentCache, str(url))


def watched(persistent, costs=COSTS, **script):
    """Return a selector, and the collector of its events, spans and logs."""
    captured, sink = CapturedTelemetry(), RecordingSink()
    tuner, _ = scripted(costs, **script)
    chain = ConfigSelectorChain(ConfigCache(), tuner=tuner, persistent=persistent, sinks=[*captured.sinks, sink])
    return chain, captured, sink


def told(captured, sink) -> str:
    spans = [(span.name, dict(span.attributes), span.status.description) for span in captured.spans]
    return repr([*sink.events, *captured.entries, *spans, captured.metrics()])


@pytest.mark.timeout(60)
@pytest.mark.parametrize("trouble", ["nobody", "wrong password", "not Redis", "no such database"])
def test_events_and_logs_of_a_failing_redis_have_no_secret(trouble, real_backend):
    """Errors, events, spans, log entries and explanations, of a selector and of a user's own calls."""
    with receiving() as http, RedisServer(password="another" if trouble == "wrong password" else SECRET) as server:
        ports = {"nobody": 1, "not Redis": http.endpoint.rpartition(":")[2]}
        db = 99 if trouble == "no such database" else 0
        user = "me" if trouble == "wrong password" else ""
        url = f"redis://{user}:{SECRET}@127.0.0.1:{ports.get(trouble, server.port)}/{db}?timeout_s=5"

        async def main():
            store = PersistentCache("op", url)
            chain, captured, sink = watched(store, costs=dict.fromkeys(COSTS, 0.0))
            async with chain:
                await chain.choose(call(), Toy())
                why = await chain.explain(call(16), Toy())
            assert {"store_error", "autotune_finish"} <= {event.name for event in sink.events}
            with pytest.raises(StoreError) as caught:
                await store.get("device", "op", "key")
            shown = told(captured, sink) + str(why) + repr(store) + store.path
            shown += "".join(traceback.format_exception(caught.value)) + caught.value.location
            assert SECRET not in shown

        anyio.run(main, backend=real_backend)


class Leaky(DirectoryStore):
    """A user's store with its password in its location and in its errors."""

    location = f"db://me:{SECRET}@host/table"

    async def get(self, address):
        raise OSError(f"no connection to {self.location}")

    async def records(self, key=None):
        raise OSError(f"no connection to {self.location}")
        yield

    async def put(self, record, *, replace=False, claim=None):
        raise StoreError(f"no connection to {self.location}", location=self.location)


@pytest.mark.anyio
async def test_a_users_own_store_shows_no_secret_through_asel(tmp_path):
    """Its location and its errors are redacted."""
    persistent = PersistentCache("op", Leaky(tmp_path))
    assert repr(persistent) == "PersistentCache('op', 'db://***@host/table')"
    assert persistent.path == "db://***@host/table"
    chain, captured, sink = watched(persistent)
    async with chain:
        assert await chain.choose(call(), Toy()) == BEST
        why = await chain.explain(call(16), Toy())
    assert "store_error" in {event.name for event in sink.events}
    assert SECRET not in told(captured, sink) + str(why)


@pytest.mark.anyio
async def test_a_candidates_error_shows_no_secret():
    """A kernel may read its tables from anywhere."""
    error = RuntimeError(f"cannot fetch https://me:{SECRET}@host/table?token={SECRET}")
    chain, captured, sink = watched(None, run_errors=dict.fromkeys([Blocks(1), Blocks(2), Blocks(3)], error))
    async with chain:
        selection = await chain.select(call(), Toy())
    shown = told(captured, sink) + repr(selection.declined)
    assert "https://***@host/table?token=***" in shown
    assert SECRET not in shown


# The command line.


@pytest.mark.timeout(60)
@pytest.mark.parametrize("url", [f"http://me:{SECRET}@127.0.0.1:1?token={SECRET}", *MISSPELT])
def test_the_command_line_shows_no_secret(monkeypatch, url):
    """Even if the collector does not answer, or the URL is refused."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.2")

    async def tell(demo):
        tuner, _ = scripted(dict.fromkeys(COSTS, 0.0))
        async with ConfigSelectorChain(ConfigCache(), tuner=tuner) as chain:
            await chain.choose(call(), Toy())

    monkeypatch.setattr(asel.cli.demo.story, "run_demo", tell)
    result = run("demo", "--otlp", url)
    printed = " ".join((result.out + result.err).split())
    assert SECRET not in printed
    if url in MISSPELT:
        assert result.code == 2
        assert "must be a URL like" in printed
    else:
        assert result.code == 0, printed
        assert "telemetry of 'asel-demo'" in printed
        assert "http://***@127.0.0.1:1?token=*** did not take all of it" in printed
