"""The demo's summary, in plain words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from asel.cli.demo.service import Scene
from asel.cli.demo.story import Demo, Facts
from asel.cli.demo.view import percentile
from asel.tuning.outcomes import in_words
from asel.web.entries import Entry, config_words

__all__ = ["places", "sentences"]


def sentences(demo: Demo, entries: Sequence[Entry]) -> Iterator[str]:
    """Give one sentence for each result."""
    facts, scene = demo.facts, demo.scene
    tunes = "one tune for each key" if facts.shared_tunes == facts.cold_keys else f"{facts.shared_tunes} tunes"
    yield f"{facts.callers:,} callers asked for {facts.cold_keys} cold keys at once, and shared {tunes}."
    for entry in entries:
        yield _choice(entry)
    yield from _traffic(scene)
    yield (
        f"The first caller of the new key, {facts.new_key}, had its result after {in_words(facts.new_key_first_s)}; "
        f"the tune behind it took {in_words(facts.new_key_tune_s)}."
    )
    yield _second_start(facts)


def _choice(entry: Entry) -> str:
    report = entry.report
    assert report is not None
    if entry.speedup is None or report.incumbent is None:
        return f"{entry.name} runs with {entry.config}."
    default, noise = config_words(report.incumbent), f"{report.noise:.0%}"
    if default == entry.config:
        return f"{entry.name} keeps its default, {default}: nothing beat it by more than the noise of {noise}."
    return (
        f"{entry.name} runs with {entry.config}: {entry.speedup:.2f} times as fast as its default, {default} "
        f"(noise {noise})."
    )


def _traffic(scene: Scene) -> Iterator[str]:
    calm, tuning = scene.latencies_s.get("calm"), scene.latencies_s.get("tuning")
    if not calm or not tuning:
        return
    yield (f"Warm requests took {_times(calm)} without a tune; {_times(tuning)} while a tune ran in the background.")
    late = scene.lateness_s
    if late.get("calm") and late.get("tuning"):
        yield (
            f"A 5 ms timer of the event loop was late by {in_words(percentile(late['calm'], 0.99))} at p99, "
            f"and by {in_words(percentile(late['tuning'], 0.99))} while the tune ran."
        )


def _times(taken: Sequence[float]) -> str:
    return f"{in_words(percentile(taken, 0.5))} at the median and {in_words(percentile(taken, 0.99))} at p99"


def _second_start(facts: Facts) -> str:
    tunes = "no tune" if not facts.second_start_tunes else f"{facts.second_start_tunes} tunes"
    return (
        f"The second start answered {facts.second_start_requests} requests with {tunes}, from the records of the first "
        f"start; the first request took {in_words(facts.second_start_first_s)}, compiling included."
    )


def places(cache: Path, report: Path, trace: Path | None, otlp: str | None) -> list[tuple[str, str]]:
    """Return the demo's files: a name, and a path or the command that shows it."""
    found = [
        ("cache", f"asel cache ls --store {cache}"),
        ("a tune", f"asel cache show demo.matmul --store {cache}"),
        ("report", f"{report}, for a browser"),
    ]
    return [*found, ("telemetry", otlp or "") if trace is None else ("trace", f"asel trace {trace}")]
