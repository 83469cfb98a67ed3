"""Events as sentences: the bodies of log records, for people who read them without their attributes."""

from __future__ import annotations

from collections.abc import Mapping
from functools import singledispatch
from typing import Any

from asel import events
from asel.events import Event
from asel.kernels.config_text import config_text, one_line
from asel.redaction import redact
from asel.tuning.outcomes import in_words

__all__ = ["MAX_SENTENCE_CHARS", "sentence"]

MAX_SENTENCE_CHARS = 480
_MAX_MESSAGE_CHARS = 160


def sentence(event: Event) -> str:
    """Return a sentence with the call, the device and the event. The details are the record's attributes."""
    return one_line(_subject(event) + _predicate(event), MAX_SENTENCE_CHARS)


def _subject(event: Event) -> str:
    if event.key is None:
        return ""
    call = f"({event.call})" if event.call else f" (key {event.key.call_key[:8]})"
    return f"{event.key.op_id}{call} on {event.key.device.partition('|')[0]}: "


@singledispatch
def _predicate(event: Event) -> str:
    return event.name.replace("_", " ")


def _error(event: Any) -> str:
    return f"{event.error_type}: {one_line(event.message, _MAX_MESSAGE_CHARS)}"


def _reasons(declined: Mapping[str, str]) -> str:
    return one_line("; ".join(f"{tier}: {why}" for tier, why in declined.items()), _MAX_MESSAGE_CHARS)


# Answers.


@_predicate.register
def _(event: events.Override) -> str:
    return f"the caller brought {config_text(event.cfg)}"


@_predicate.register
def _(event: events.OverlayHit) -> str:
    return f"an overlay has {config_text(event.cfg)}"


@_predicate.register
def _(event: events.CacheHit) -> str:
    return f"{'memory' if event.level == 'memory' else 'the store'} has {config_text(event.cfg)}"


@_predicate.register
def _(event: events.Autotuned) -> str:
    return f"{config_text(event.cfg)} from its tune, after waiting {in_words(event.wait_s)}"


@_predicate.register
def _(event: events.Heuristics) -> str:
    why = event.declined.get("autotune")
    return f"the heuristic {config_text(event.cfg)}" + (f", since {one_line(why, _MAX_MESSAGE_CHARS)}" if why else "")


@_predicate.register
def _(event: events.CallerLeft) -> str:
    return f"the caller left without an answer: {event.reason}"


@_predicate.register
def _(event: events.NoAnswer) -> str:
    return f"no tier had an answer ({_reasons(event.declined)})"


# Tunes.


@_predicate.register
def _(event: events.PendingJoin) -> str:
    return f"waits for a tune that is under way, with {event.waiters - 1} others"


@_predicate.register
def _(event: events.AutotuneStart) -> str:
    behind = " in the background" if event.background else ""
    return f"a tune of {event.candidates} candidates began{behind}"


@_predicate.register
def _(event: events.AutotuneFinish) -> str:
    took = in_words(event.end - event.start)
    counts = f"{event.measured} measured, {event.failed} failed, {event.skipped} skipped"
    return f"{config_text(event.cfg)} won the tune, which took {took} ({counts})"


@_predicate.register
def _(event: events.AutotuneFailed) -> str:
    again = "" if event.retry_at is None else f"; it is tuned again in {in_words(event.retry_at - event.end)}"
    return f"the tune failed: {_error(event)}{again}"


@_predicate.register
def _(event: events.CandidateStart) -> str:
    return f"candidate {event.index}, {config_text(event.cfg)}, is being compiled"


@_predicate.register
def _(event: events.CandidateMeasured) -> str:
    won = " and wins" if event.winner else ""
    seconds = event.median_s if event.ranked_s is None else event.ranked_s
    return f"candidate {event.index}, {config_text(event.cfg)}, takes {in_words(seconds)}{won}"


@_predicate.register
def _(event: events.CandidateFailed) -> str:
    busy = "; its thread is still busy" if event.still_busy else ""
    return (
        f"candidate {event.index}, {config_text(event.cfg)}, failed in the {event.stage} stage: {_error(event)}{busy}"
    )


@_predicate.register
def _(event: events.CandidateEliminated) -> str:
    when = f"in round {event.round}" if event.round else "at its warm-up"
    return f"candidate {event.index}, {config_text(event.cfg)}, was eliminated {when}"


@_predicate.register
def _(event: events.CandidateSkipped) -> str:
    return (
        f"candidate {event.index}, {config_text(event.cfg)}, was skipped: {one_line(event.reason, _MAX_MESSAGE_CHARS)}"
    )


@_predicate.register
def _(event: events.LateTune) -> str:
    return "it is not tuned, since the selector is frozen"


@_predicate.register
def _(event: events.WinnerFailed) -> str:
    instead = "the key is open again" if event.instead is None else f"{config_text(event.instead)} answers instead"
    return f"{config_text(event.cfg)} failed in a real call and was withdrawn: {_error(event)}; {instead}"


@_predicate.register
def _(event: events.OutOfRange) -> str:
    return f"{event.dimension} is {event.size}, outside the kernel's buckets from {event.low} to {event.high}"


@_predicate.register
def _(event: events.KeyChurn) -> str:
    return f"{event.keys} keys of this op differ only in {event.argument}, and each is tuned separately"


@_predicate.register
def _(event: events.Stale) -> str:
    return f"{config_text(event.cfg)} was chosen among other candidates, so it does not count"


# Stores.


@_predicate.register
def _(event: events.StoreRead) -> str:
    return f"the store {'has a record' if event.found else 'has no record'}"


@_predicate.register
def _(event: events.Persisted) -> str:
    if event.adopted:
        return f"another process was first to store its result, {config_text(event.cfg)}"
    return f"{config_text(event.cfg)} was stored"


@_predicate.register
def _(event: events.RecordRejected) -> str:
    place, reason = (one_line(redact(text), _MAX_MESSAGE_CHARS) for text in (event.where, event.reason))
    return f"the record at {place} was rejected: {reason}"


@_predicate.register
def _(event: events.ClaimWait) -> str:
    became = {
        "held": "this process tunes",
        "record": "another process stored its result",
        "timed_out": "the holder of the claim did not answer, so this process tunes, too",
    }
    return f"{became[event.outcome]}, after waiting {in_words(event.waited_s)} for the claim"


@_predicate.register
def _(event: events.StoreFailed) -> str:
    return f"the store failed to {event.operation}: {_error(event)}"


@_predicate.register
def _(event: events.StoreRetry) -> str:
    return f"the store failed to {event.operation} again: {_error(event)}"


@_predicate.register
def _(event: events.StoreRecovered) -> str:
    return f"the store answers again, after {in_words(event.failing_s)}"


# The selector and its telemetry.


@_predicate.register
def _(event: events.Closed) -> str:
    left = [
        f"{event.cancelled} tunes were cut short" if event.cancelled else "",
        f"{event.unsaved} results were not stored" if event.unsaved else "",
        f"still busy: {', '.join(event.abandoned)}" if event.abandoned else "",
    ]
    return "the selector closed" + "".join(f"; {text}" for text in left if text)


@_predicate.register
def _(event: events.SheddingStarted) -> str:
    return f"{event.queued} events are waiting to be recorded, so hits are dropped for now"


@_predicate.register
def _(event: events.SheddingStopped) -> str:
    return f"every event is recorded again, after {event.shed} were dropped"
