"""Traces of a fleet and of a store that fails: in virtual time, on both backends."""

from __future__ import annotations

import anyio
import pytest
from support.kernels import Toy, call
from support.store_doubles import Place, bench_over
from support.traces import chain_of, outlines, request

from asel import AutotunePolicy
from asel.testing import CapturedTelemetry

pytestmark = pytest.mark.anyio


async def test_a_wait_for_another_process_has_its_own_span():
    """Its record was the answer, and there was no tune in this process."""
    place, captured = Place(), CapturedTelemetry()
    async with bench_over(place).chain as chain:
        await chain.choose(call(), Toy())
    record, place.kept = place.kept, {}
    place.claimed_elsewhere = anyio.Event()

    async def finish():
        await anyio.sleep(7)
        place.kept = record
        place.claimed_elsewhere.set()

    start = anyio.current_time()
    async with chain_of(captured, persistent=place) as chain, anyio.create_task_group() as tasks:
        tasks.start_soon(finish)
        await request(captured, chain)
    [tree] = captured.trees
    assert [(span.name, span.attributes.get("asel.outcome")) for span in tree.children[0].children] == [
        ("asel.store.get", None),
        ("asel.store.claim", "record"),
    ]
    choose = tree.children[0]
    assert choose.attributes["asel.tier"] == "persistent"
    assert choose.attributes["asel.wait_s"] == pytest.approx(7.0)
    assert choose.children[1].attributes["asel.wait_s"] == pytest.approx(7.0)
    assert anyio.current_time() - start == pytest.approx(7.0)


async def test_the_holder_of_a_claim_shows_it_before_its_tune():
    """A claim that was free took no time, and the tune follows it."""
    place, captured = Place(), CapturedTelemetry()
    async with chain_of(captured, persistent=place) as chain:
        await request(captured, chain)
    [tree] = captured.trees
    names = [span.name for span in tree.children[0].children]
    assert names == ["asel.store.get", "asel.store.claim", "asel.autotune"]
    [*_, put] = tree.children[0].children[2].children
    assert put.name == "asel.store.put"


async def test_a_claim_for_a_tune_in_the_background_is_under_that_tune():
    """The call was answered before, so later spans are not part of it."""
    place, captured = Place(), CapturedTelemetry()
    policy = AutotunePolicy(cache_miss_fallback="background")
    async with chain_of(captured, persistent=place, policy=policy) as chain:
        await request(captured, chain)
        await chain.settled()
    tune, asked = sorted(captured.trees, key=lambda tree: tree.name)
    assert asked.outline() == "request\n  asel.choose 0-0\n    asel.store.get 0-0"
    assert (tune.name, tune.links) == ("asel.autotune", ("asel.choose",))
    assert [span.name for span in tune.children] == ["asel.store.claim", *["asel.candidate"] * 3, "asel.store.put"]


async def test_a_store_that_fails_is_an_error_on_its_span_and_on_no_other():
    """The call is answered, and later probes are not part of the request."""
    place, captured = Place(), CapturedTelemetry()
    place.broken = {"get"}
    async with chain_of(captured, persistent=place) as chain:
        await request(captured, chain)
    [asked] = [outline for outline in outlines(captured) if outline.startswith("request")]
    errors = [line.strip() for line in asked.splitlines() if line.endswith("ERROR")]
    assert errors == ["asel.store.get 0-0 ERROR"]
    elsewhere = [outline for outline in outlines(captured) if "ERROR" in outline and outline != asked]
    assert elsewhere == ["asel.store.get 1-1 ERROR"]


async def test_every_attempt_at_a_dead_store_is_recorded():
    """The outage is reported once, but an alert needs every failed attempt."""
    place = Place()
    place.broken = {"get"}
    bench = bench_over(place, allow={"cache_miss_fallback": "heuristics"})
    async with bench.chain as chain:
        for size in range(1, 100):
            await chain.choose(call(size), Toy())
            await anyio.sleep(1)
    assert len(bench.sink.named("store_error")) == 1
    assert len(bench.sink.named("store_retry")) == len(place.asked) - 1 > 3
