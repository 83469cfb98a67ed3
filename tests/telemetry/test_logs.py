"""Whole log entries, with each configuration of logging."""

from __future__ import annotations

import dataclasses
import json
import logging

import anyio
import pytest
import structlog
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, use_span
from support.kernels import BEST, COSTS, Blocks, Toy, call, scripted

from asel import AutotunePolicy, ConfigCache, ConfigSelectorChain, NoConfigError, events
from asel.events import AutotuneStart, CacheHit
from asel.kernels.keys import CacheKey
from asel.telemetry import DeferredSinks, Pipeline, StructlogSink
from asel.telemetry.sentences import MAX_SENTENCE_CHARS, _predicate, sentence
from asel.testing import CapturedTelemetry, run_in_virtual_time

TOY = Toy()
REQUEST = SpanContext(trace_id=0xABC, span_id=0xDEF, is_remote=True, trace_flags=TraceFlags(TraceFlags.SAMPLED))
DECLINED = {"override": "no override", "overlay": "no overlay has the key"}


@pytest.fixture(autouse=True)
def _structlog_as_it_comes():
    structlog.reset_defaults()
    yield
    structlog.reset_defaults()
    structlog.contextvars.clear_contextvars()


async def tune_and_hit(sinks, errors=None):
    tuner, _ = scripted(COSTS, compile_s=1.0, compile_errors=errors)
    async with ConfigSelectorChain(ConfigCache(), tuner=tuner, sinks=sinks) as chain:
        with structlog.contextvars.bound_contextvars(request="r1"):
            await chain.choose(call(), TOY)
        with structlog.contextvars.bound_contextvars(request="r2"):
            await chain.choose(call(), TOY)


@pytest.mark.anyio
@pytest.mark.parametrize("way", ["at once", "through a pipeline"])
async def test_every_entry_of_a_tune_and_a_hit(way):
    """Each kind of event has its name, facts as keys, the caller's context variables and a suitable level."""
    captured = CapturedTelemetry(pipeline=Pipeline() if way == "through a pipeline" else None)
    with use_span(NonRecordingSpan(REQUEST)):
        await tune_and_hit(captured.sinks, {Blocks(2): ValueError("too large")})
    entries = captured.entries
    spans = {f"{span.context.span_id:016x}": span for span in captured.spans}
    [tune_id] = {entry["tune_id"] for entry in entries if "tune_id" in entry}
    key = {name: entries[0][name] for name in ("device", "op_id", "call_key", "call")}
    assert (key["device"], key["op_id"], key["call"]) == ("NVIDIA H100|fake", "toy@v1", "x=f32[8,128]")
    told = [{name: value for name, value in entry.items() if name != "span_id"} for entry in entries]
    first = {**key, "tune_id": tune_id, "request": "r1", "trace_id": f"{0xABC:032x}"}

    def candidate(name, index, level="debug", **facts):
        return {**first, "event": f"asel.{name}", "level": level, "index": index, "cfg": Blocks(index + 1), **facts}

    assert told == [
        {
            **first,
            "event": "asel.autotune_start",
            "level": "info",
            "candidates": 3,
            "objective": "forward",
            "background": False,
            "duration_s": 0.0,
        },
        candidate("candidate_start", 0, duration_s=0.0),
        candidate("candidate_start", 1, duration_s=0.0),
        candidate(
            "candidate_failed",
            1,
            "warning",
            stage="compile",
            error_type="ValueError",
            message="too large",
            still_busy=False,
            duration_s=1.0,
        ),
        candidate("candidate_start", 2, duration_s=0.0),
        candidate(
            "candidate_measured",
            0,
            median_s=0.3,
            ranked_s=0.3,
            compile_s=1.0,
            samples=1,
            winner=False,
            duration_s=pytest.approx(3.6),
        ),
        candidate(
            "candidate_measured",
            2,
            median_s=0.1,
            ranked_s=0.1,
            compile_s=1.0,
            samples=1,
            winner=True,
            duration_s=pytest.approx(1.8),
        ),
        {
            **first,
            "event": "asel.autotune_finish",
            "level": "info",
            "cfg": BEST,
            "measured": 2,
            "failed": 1,
            "skipped": 0,
            "margin": pytest.approx(2 / 3),
            "waiters": 1,
            "duration_s": pytest.approx(3.8),
        },
        {
            **first,
            "event": "asel.autotuned",
            "level": "debug",
            "tier": "autotune",
            "declined": {**DECLINED, "memory": "memory missed", "persistent": "there is no store"},
            "cfg": BEST,
            "began": True,
            "wait_s": pytest.approx(3.8),
            "duration_s": pytest.approx(3.8),
        },
        {
            **key,
            "event": "asel.cache_hit",
            "level": "debug",
            "tier": "memory",
            "declined": DECLINED,
            "cfg": BEST,
            "duration_s": 0.0,
            "request": "r2",
            "trace_id": f"{0xABC:032x}",
        },
        {
            "event": "asel.closed",
            "level": "info",
            "cancelled": 0,
            "abandoned": (),
            "unsaved": 0,
            "duration_s": 0.0,
            "trace_id": f"{0xABC:032x}",
        },
    ]
    # An entry has the id of the span that tells the same.
    assert [spans[entry["span_id"]].name for entry in entries[:-1]] == [
        "asel.autotune",
        "asel.autotune",
        "asel.autotune",
        "asel.candidate",
        "asel.autotune",
        "asel.candidate",
        "asel.candidate",
        "asel.autotune",
        "asel.choose",
        "asel.choose",
    ]


LEVELS = {
    "debug": "override overlay_hit cache_hit autotuned caller_left pending_join candidate_start candidate_measured "
    "candidate_eliminated candidate_skipped persisted heuristics store_read claim_wait store_retry",
    "info": "autotune_start autotune_finish stale store_recovered closed",
    "warning": "candidate_failed autotune_failed out_of_range key_churn late_tune winner_failed record_rejected "
    "store_error shedding_started shedding_stopped",
    "error": "error",
}


def test_levels_follow_the_kind_of_event():
    """Hits are debug, tunes info, failures warning, and calls without an answer error."""
    found = {kind.name: kind.severity for kind in kinds_of_events()}
    assert found == {name: level for level, names in LEVELS.items() for name in names.split()}


def test_nothing_is_printed_without_configuration(capfd):
    """If neither structlog nor the standard library is configured."""
    run_in_virtual_time(tune_and_hit, None)
    out, err = capfd.readouterr()
    assert (out, err) == ("", "")


def test_the_standard_logger_gets_entries_once_its_level_is_set(caplog):
    """If structlog is not configured, entries go to logging.getLogger("asel")."""
    caplog.set_level(logging.DEBUG, logger="asel")
    run_in_virtual_time(tune_and_hit, [DeferredSinks([StructlogSink()], None)])
    records = [record for record in caplog.records if record.name == "asel"]
    assert [record.getMessage() for record in records][-2:] == [
        "asel.cache_hit: toy@v1(x=f32[8,128]) on NVIDIA H100: memory has Blocks(m=3, n=1)",
        "asel.closed: the selector closed",
    ]
    assert records[0].levelno == logging.INFO
    assert records[0].asel["candidates"] == 3


def kinds_of_events() -> list[type[events.Event]]:
    found = [kind for kind in vars(events).values() if isinstance(kind, type) and issubclass(kind, events.Event)]
    return [kind for kind in found if hasattr(kind, "name")]


DEVICE = "NVIDIA H100|fake"
FACTS = {
    "cfg": Blocks(1),
    "message": "no room for a tile of 4096 x 4096 " * 40,
    "abandoned": ("compiling Blocks(m=1, n=1)",),
    "instead": Blocks(2),
    "declined": {"memory": "memory missed", "autotune": "autotuning is off"},
}


def made(kind: type[events.Event], key: CacheKey | None) -> events.Event:
    """Return an event of a kind, with something in every field."""
    by_type = {"str": "text", "int": 3, "float": 0.5, "bool": True, "float | None": 0.25, "str | None": "text"}
    facts = {}
    for field in dataclasses.fields(kind):
        if field.name in FACTS:
            facts[field.name] = FACTS[field.name]
        elif field.name not in ("key", "start", "end") and field.type in by_type:
            facts[field.name] = by_type[field.type]
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            facts[field.name] = "held"
    return kind(**{**facts, "key": key, "start": 1.0, "end": 1.5})


@pytest.mark.parametrize("kind", kinds_of_events(), ids=lambda kind: kind.name)
def test_the_body_of_a_log_record_is_a_sentence(kind):
    """It has the call and the device, on one line of bounded length."""
    told = sentence(made(kind, CacheKey(DEVICE, "toy@v1", "abc", "x=f32[8,128]")))
    assert told.count("NVIDIA H100") == (1 if told.startswith("toy@v1(x=f32[8,128]) on NVIDIA H100: ") else 0)
    assert len(told) <= MAX_SENTENCE_CHARS
    assert "\n" not in told
    assert not {"{", "None", "asel."} & set(told.replace("(", " ").split())
    assert sentence(made(kind, None)).strip(), "also of an event that is about no key"
    assert kind in _predicate.registry


def test_structlog_over_the_standard_library_works(caplog):
    """The application's processors render, and its handlers write."""
    caplog.set_level(logging.INFO, logger="asel")
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.stdlib.add_logger_name,
            structlog.stdlib.add_log_level,
            structlog.processors.JSONRenderer(default=str),
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
    )
    run_in_virtual_time(tune_and_hit, [DeferredSinks([StructlogSink()], None)])
    entries = [json.loads(record.getMessage()) for record in caplog.records if record.name == "asel"]
    assert [entry["event"] for entry in entries] == ["asel.autotune_start", "asel.autotune_finish", "asel.closed"]
    assert (entries[0]["request"], entries[0]["level"], entries[0]["logger"]) == ("r1", "info", "asel")


def test_structlogs_configuration_is_followed_and_never_changed(capsys):
    """asel reads structlog's configuration, and never writes it."""
    sink = StructlogSink()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    before = structlog.get_config()
    run_in_virtual_time(tune_and_hit, [DeferredSinks([sink], None)])
    assert structlog.get_config() == before
    assert capsys.readouterr().out == ""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.INFO))
    run_in_virtual_time(tune_and_hit, [DeferredSinks([sink], None)])
    assert capsys.readouterr().out.count("asel.autotune_") == 2


def test_hits_are_logged_only_at_level_debug():
    """If no logger is enabled for them, they are not even queued."""
    entries = []
    for level, expected in ((logging.INFO, False), (logging.DEBUG, True)):
        wrapper = structlog.make_filtering_bound_logger(level)
        logger = structlog.wrap_logger(structlog.PrintLogger(), processors=[], wrapper_class=wrapper)
        sink = StructlogSink(logger)
        assert (sink.wants_hit(), sink.wants(CacheHit)) == (expected, expected)
        assert sink.wants(AutotuneStart)
    assert entries == []


@pytest.mark.anyio
async def test_an_error_is_logged_with_every_tiers_reason():
    """The entry of a call without an answer explains itself."""
    captured = CapturedTelemetry()
    policy = AutotunePolicy(allow_autotune=False, allow_heuristics=False)
    async with ConfigSelectorChain(ConfigCache(), policy, sinks=captured.sinks) as chain:
        with pytest.raises(NoConfigError):
            await chain.choose(call(), TOY)
    entry = captured.entries[0]
    assert (entry["event"], entry["level"], entry["reason"]) == ("asel.error", "error", "no_config")
    assert entry["declined"] == {
        **DECLINED,
        "memory": "memory missed",
        "persistent": "there is no store",
        "autotune": "autotuning is off",
        "heuristics": "heuristics are off",
    }


@pytest.mark.anyio
async def test_entries_outside_of_a_trace_have_no_ids():
    """There is nothing to point to."""
    entries = []

    def keep(logger, level, entry):
        entries.append(entry)
        raise structlog.DropEvent

    logger = structlog.wrap_logger(structlog.PrintLogger(), processors=[keep])
    async with ConfigSelectorChain(ConfigCache(), sinks=[DeferredSinks([StructlogSink(logger)], None)]) as chain:
        await chain.choose(call(override_cfg=BEST), TOY)
        await anyio.lowlevel.checkpoint()
    assert [entry["event"] for entry in entries] == ["asel.override", "asel.closed"]
    assert not any("trace_id" in entry or "span_id" in entry for entry in entries)
