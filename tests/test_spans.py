"""Whole trees of spans, in virtual time on both backends."""

from __future__ import annotations

import threading
from contextvars import copy_context

import anyio
import pytest
from kernels import BEST, COSTS, Bench, Blocks, NoHeuristic, Toy, call, scripted
from opentelemetry import trace
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, use_span

from asel import AutotunePolicy, ConfigCache, ConfigSelectorChain, NoConfigError, TuningError
from asel.calls import Asked, asking
from asel.events import CacheHit, ClaimWait
from asel.keys import CacheKey
from asel.loop import LoopHandle
from asel.telemetry import OpenTelemetrySink, Pipeline
from asel.telemetry.names import ATTRIBUTES, SPANS
from asel.testing import CapturedTelemetry
from asel.tuning import _inside

pytestmark = pytest.mark.anyio
TOY = Toy()
KEY = CacheKey("dev", "op@v1", "key")
DECLINED = ("override: no override", "overlay: no overlay has the key")


def chain_of(captured: CapturedTelemetry, cache=None, *, script=None, **chain) -> ConfigSelectorChain:
    tuner, _ = scripted(COSTS, **(script or {}))
    chain.setdefault("tuner", tuner)
    return ConfigSelectorChain(ConfigCache() if cache is None else cache, sinks=captured.sinks, **chain)


async def request(captured, chain, name="request", after_s=0.0, kernel=TOY, inv=None):
    await anyio.sleep(after_s)
    with captured.tracer.start_as_current_span(name):
        return await chain.choose(inv or call(), kernel)


def outlines(captured: CapturedTelemetry) -> list[str]:
    return [tree.outline() for tree in sorted(captured.trees, key=lambda tree: tree.name)]


class Store:
    """A store in memory; `seconds` is how long it takes to answer."""

    def __init__(self, seconds: float = 0.0, error: Exception | None = None) -> None:
        self.kept: dict = {}
        self.seconds, self.error = seconds, error

    async def get(self, *key):
        await anyio.sleep(self.seconds)
        if self.error is not None:
            raise self.error
        return self.kept.get(key)

    async def put(self, device, op_id, call_key, cfg):
        await anyio.sleep(self.seconds)
        self.kept[device, op_id, call_key] = cfg


async def test_three_callers_share_a_tune_in_which_one_candidate_fails():
    """The tune is under the call that began it, who else waits has a link, and only the culprit is an error."""
    captured = CapturedTelemetry()
    script = {"run_errors": {Blocks(2): ValueError("too large")}, "compile_s": 1.0}
    async with chain_of(captured, script=script) as chain:
        async with anyio.create_task_group() as tasks:
            for n in range(3):
                tasks.start_soon(request, captured, chain, f"request {n}", n * 0.5)
        await request(captured, chain, "request 3")
    first, *waiters, hit = sorted(captured.trees, key=lambda tree: tree.name)
    assert first.outline() == (
        "request 0\n"
        "  asel.choose 0-3.8\n"
        "    asel.autotune 0-3.8\n"
        "      asel.candidate 0-3.6\n"
        "        asel.candidate.compile 0-1\n"
        "        asel.candidate.measure 3-3.6\n"
        "      asel.candidate 1-3.6 ERROR\n"
        "        asel.candidate.compile 1-2\n"
        "        asel.candidate.measure 3.6-3.6\n"
        "      asel.candidate 2-3.8\n"
        "        asel.candidate.compile 2-3\n"
        "        asel.candidate.measure 3.6-3.8"
    )
    assert [tree.outline() for tree in waiters] == [
        "request 1\n  asel.choose 0.5-3.8 -> asel.autotune",
        "request 2\n  asel.choose 1-3.8 -> asel.autotune",
    ]
    assert hit.outline() == "request 3\n  asel.choose 3.8-3.8"

    [choose] = first.children
    [tune] = choose.children
    about = {name: choose.attributes[name] for name in ("asel.op", "asel.device", "asel.key")}
    assert about["asel.op"] == "toy@v1"
    assert choose.attributes == {
        **about,
        "asel.tier": "autotune",
        "asel.declined": (*DECLINED, "memory: memory missed", "persistent: there is no store"),
        "asel.config": "Blocks(m=3, n=1)",
        "asel.tune.id": tune.attributes["asel.tune.id"],
        "asel.wait": pytest.approx(3.8),
    }
    assert tune.attributes == {
        **about,
        "asel.tune.id": tune.attributes["asel.tune.id"],
        "asel.objective": "forward",
        "asel.candidate.count": 3,
        "asel.candidate.measured": 2,
        "asel.candidate.failed": 1,
        "asel.candidate.skipped": 0,
        "asel.config": "Blocks(m=3, n=1)",
        "asel.margin": pytest.approx(2 / 3),
        "asel.waiters": 3,
    }
    assert [waiter.children[0].attributes["asel.wait"] for waiter in waiters] == pytest.approx([3.3, 2.8])
    assert {waiter.children[0].attributes["asel.tune.id"] for waiter in waiters} == {tune.attributes["asel.tune.id"]}
    slow, broken, best = tune.children
    one = {**about, "asel.tune.id": tune.attributes["asel.tune.id"]}
    assert slow.attributes == {
        **one,
        "asel.candidate.index": 0,
        "asel.config": "Blocks(m=1, n=1)",
        "asel.median": 0.3,
        "asel.samples": 1,
    }
    assert broken.attributes == {
        **one,
        "asel.candidate.index": 1,
        "asel.config": "Blocks(m=2, n=1)",
        "asel.stage": "measure",
        "error.type": "ValueError",
    }
    assert best.children[0].attributes == {**one, "asel.config": "Blocks(m=3, n=1)"}
    assert hit.children[0].attributes == {
        **about,
        "asel.tier": "memory",
        "asel.declined": DECLINED,
        "asel.config": "Blocks(m=3, n=1)",
    }
    failed = next(span for span in captured.spans if span.status.status_code.name == "ERROR")
    assert failed.status.description == "too large"
    # What OpenTelemetry deprecates is not used, and nothing has a name that dashboards do not know.
    assert not any(span.events for span in captured.spans)
    asels = [span for span in captured.spans if span.name.startswith("asel.")]
    assert {span.name for span in asels} <= set(SPANS)
    assert {name for span in asels for name in span.attributes} <= set(ATTRIBUTES)


async def test_links_are_given_when_a_span_is_made():
    """Samplers see them only then: also where the store was asked before it was known that there is a tune."""
    captured = CapturedTelemetry()
    seen = []
    sampler = captured.tracer.sampler
    decide = sampler.should_sample

    def look(parent, trace_id, name, kind=None, attributes=None, links=None, trace_state=None):
        seen.append((name, len(links or ())))
        return decide(parent, trace_id, name, kind, attributes, links, trace_state)

    sampler.should_sample = look
    try:
        async with (
            chain_of(captured, persistent=Store(seconds=0.25)) as chain,
            anyio.create_task_group() as tasks,
        ):
            tasks.start_soon(request, captured, chain, "request 0")
            tasks.start_soon(request, captured, chain, "request 1", 0.5)
            tasks.start_soon(request, captured, chain, "request 2", 0.1)
    finally:
        del sampler.should_sample
    assert sorted(links for name, links in seen if name == "asel.choose") == [0, 1, 1]
    # The first two to come share a read of the store; the third finds the tune.
    assert outlines(captured) == [
        "request 0\n"
        "  asel.choose 0-1.7\n"
        "    asel.store.get 0-0.25\n"
        "    asel.autotune 0.25-1.7\n"
        + "".join(
            f"      asel.candidate 0.25-{end}\n"
            "        asel.candidate.compile 0.25-0.25\n"
            f"        asel.candidate.measure {start}-{end}\n"
            for start, end in ((0.25, 0.85), (0.85, 1.25), (1.25, 1.45))
        )
        + "      asel.store.put 1.45-1.7",
        "request 1\n  asel.choose 0.5-1.7 -> asel.autotune",
        "request 2\n  asel.choose 0.1-1.7 -> asel.autotune",
    ]


async def test_a_background_tune_has_a_trace_of_its_own_and_a_link_to_its_cause():
    """A child would outlive its parent: the request was answered long before."""
    captured = CapturedTelemetry()
    policy = AutotunePolicy(cache_miss_fallback="background")
    async with chain_of(captured, policy=policy) as chain:
        assert await request(captured, chain) == Blocks(1)
        await chain.settled()
    tune, asked = outlines(captured)
    assert asked == "request\n  asel.choose 0-0"
    assert tune.splitlines()[0] == "asel.autotune 0-1.2 -> asel.choose"
    [tree] = [tree for tree in captured.trees if tree.name == "request"]
    [choose] = tree.children
    assert choose.attributes["asel.tier"] == "heuristics"
    assert choose.attributes["asel.declined"][-1] == "autotune: tuning in the background"
    assert choose.attributes["asel.wait"] == 0.0


async def test_a_background_tune_that_begins_after_the_answer_still_links_to_the_call():
    """With a store the claim comes first, and by then the call has its answer: it is not told twice."""
    captured = CapturedTelemetry()
    policy = AutotunePolicy(cache_miss_fallback="background")
    async with chain_of(captured, policy=policy, persistent=Store()) as chain:
        await request(captured, chain)
        await chain.settled()
    tune, asked = outlines(captured)
    assert asked == "request\n  asel.choose 0-0\n    asel.store.get 0-0"
    assert tune.splitlines()[0] == "asel.autotune 0-1.2 -> asel.choose"
    assert sum(span.name == "asel.choose" for span in captured.spans) == 1


async def test_a_claim_that_ended_with_anothers_record_is_under_the_call():
    """There is no tune in this process to put it under."""
    captured = CapturedTelemetry()
    [tap] = captured.sinks
    tap.watch(LoopHandle(), None)
    with captured.tracer.start_as_current_span("request"):
        asking.set(Asked(-1, 0.0))
        inside = copy_context()
        inside.run(_inside.set, "t1")
        claim = ClaimWait(key=KEY, start=0.5, end=2.0, waited_s=1.5, outcome="record")
        inside.run(tap.emit, claim)
        tap.emit(
            CacheHit(key=KEY, start=0.0, end=2.0, level="persistent", cfg=BEST, tune_id="t1", began=True, wait_s=1.5)
        )
        asking.set(None)
    [tree] = captured.trees
    assert tree.outline() == "request\n  asel.choose 0-2\n    asel.store.claim 0.5-2"
    assert tree.children[0].children[0].attributes["asel.outcome"] == "record"


async def test_a_tune_that_a_call_could_not_wait_for_links_to_that_request():
    """choose_nowait leaves the tune to the loop, which knows who asked."""
    captured = CapturedTelemetry()
    async with chain_of(captured) as chain:
        with captured.tracer.start_as_current_span("request"):
            chain.choose_nowait(call(), TOY)
        await chain.settled()
    tune, asked = outlines(captured)
    assert asked == "request\n  asel.choose 0-0"
    assert tune.splitlines()[0] == "asel.autotune 0-1.2 -> request"


async def test_a_tune_in_which_all_fail_is_an_error_and_so_is_a_call_without_an_answer():
    """Where another candidate wins the tune is fine; here none does."""
    captured = CapturedTelemetry()
    errors = {Blocks(n): ValueError("no") for n in (1, 2, 3)}
    async with chain_of(
        captured, script={"run_errors": errors}, policy=AutotunePolicy(allow_heuristics=False)
    ) as chain:
        with pytest.raises(TuningError):
            await request(captured, chain, "first")
        with pytest.raises(NoConfigError):
            await request(captured, chain, "second")
    [first, second] = [tree.children[0] for tree in captured.trees]
    assert (first.status, first.attributes["asel.tier"], first.attributes["error.type"]) == (
        "ERROR",
        "error",
        "TuningError",
    )
    assert (second.status, second.attributes["error.type"]) == ("ERROR", "NoConfigError")
    [tune] = first.children
    assert (tune.status, tune.attributes["error.type"]) == ("ERROR", "ValueError")
    assert [candidate.status for candidate in tune.children] == ["ERROR"] * 3


@pytest.mark.parametrize(
    ("errors", "named"),
    [((ValueError, ValueError, ValueError), "ValueError"), ((ValueError, OSError, ValueError), "TuningError")],
)
async def test_a_failed_tune_is_named_after_what_all_its_candidates_failed_with(errors, named):
    """That they were a group says nothing to whoever looks for the reason."""
    captured = CapturedTelemetry()
    script = {"run_errors": {Blocks(n): error("no") for n, error in zip((1, 2, 3), errors, strict=True)}}
    async with chain_of(captured, script=script) as chain:
        await request(captured, chain)
    [tune] = [span for span in captured.spans if span.name == "asel.autotune"]
    assert tune.attributes["error.type"] == named


async def test_a_failing_store_is_an_error_on_its_own_span():
    """The store's trouble is the store's: the call is answered."""
    captured = CapturedTelemetry()
    policy = AutotunePolicy(allow_autotune=False)
    async with chain_of(captured, policy=policy, persistent=Store(0.5, OSError("gone"))) as chain:
        await request(captured, chain)
    assert outlines(captured) == ["request\n  asel.choose 0-0.5\n    asel.store.get 0-0.5 ERROR"]


async def test_what_the_store_had_is_under_the_call_that_asked():
    """A record that is found ends the walk there."""
    captured, store = CapturedTelemetry(), Store(0.5)
    async with chain_of(captured, persistent=store) as chain:
        store.kept[tuple(chain._keys.resolve(call(), TOY).key)] = BEST
        await request(captured, chain)
    [tree] = captured.trees
    assert tree.outline() == "request\n  asel.choose 0-0.5\n    asel.store.get 0-0.5"
    assert tree.children[0].attributes["asel.tier"] == "persistent"
    assert tree.children[0].children[0].attributes["asel.found"] is True


async def test_a_cancelled_first_caller_ends_its_span_and_the_tune_goes_on():
    """The span of a call ends with the call."""
    captured = CapturedTelemetry()
    async with chain_of(captured) as chain:
        with anyio.move_on_after(0.5):
            await request(captured, chain)
        await chain.settled()
    [tree] = captured.trees
    assert [line.strip() for line in tree.outline().splitlines()[:3]] == [
        "request",
        "asel.choose 0-0.5",
        "asel.autotune 0-1.2",
    ]
    assert tree.children[0].attributes["error.type"] == "cancelled"


async def test_a_caller_out_of_patience_shows_how_long_it_waited():
    """The heuristic after wait_s is told with the wait."""
    captured = CapturedTelemetry()
    async with chain_of(captured, policy=AutotunePolicy(wait_s=0.5)) as chain:
        await request(captured, chain)
        await chain.settled()
    choose = captured.trees[0].children[0]
    assert (choose.start, choose.end, choose.attributes["asel.wait"]) == (0.0, 0.5, 0.5)
    assert choose.attributes["asel.tier"] == "heuristics"


async def test_the_callers_sampling_decision_is_respected():
    """In a trace that is not sampled nothing is recorded, also not by a sampler that would."""
    captured = CapturedTelemetry()
    unsampled = SpanContext(trace_id=1, span_id=2, is_remote=True)
    sampled = SpanContext(trace_id=3, span_id=4, is_remote=True, trace_flags=TraceFlags(TraceFlags.SAMPLED))
    async with chain_of(captured) as chain:
        with use_span(NonRecordingSpan(unsampled)):
            await chain.choose(call(), TOY)
            await chain.choose(call(), TOY)
        assert captured.spans == []
        with use_span(NonRecordingSpan(sampled)):
            await chain.choose(call(), TOY)
        [span] = captured.spans
        assert (span.context.trace_id, span.parent.span_id) == (3, 4)
    assert captured.metrics()["asel.selections"] == {
        (("asel.op", "toy@v1"), ("asel.tier", "autotune")): 1,
        (("asel.op", "toy@v1"), ("asel.tier", "memory")): 2,
    }


async def test_outside_of_a_trace_the_providers_sampler_has_the_say():
    """A hit is a trace of its own, if the provider takes it."""
    captured, silent = CapturedTelemetry(), CapturedTelemetry(sampler=ALWAYS_OFF)
    for telemetry in (captured, silent):
        async with chain_of(telemetry, policy=AutotunePolicy(allow_autotune=False)) as chain:
            await chain.choose(call(override_cfg=BEST), TOY)
    assert outlines(captured) == ["asel.choose 0-0"]
    assert silent.spans == []


async def test_a_hit_from_another_thread_has_that_threads_parent():
    """The context is taken where the call is made."""
    captured = CapturedTelemetry()
    async with chain_of(captured) as chain:
        await chain.choose(call(), TOY)

        def ask():
            with captured.tracer.start_as_current_span("in a thread"):
                chain.choose_nowait(call(), TOY)

        thread = threading.Thread(target=ask)
        thread.start()
        thread.join()
    assert "in a thread\n  asel.choose 1.2-1.2" in outlines(captured)


async def test_a_hit_through_the_pipeline_has_its_callers_parent_and_its_own_times():
    """Made later, in a thread, and still where and when it was."""
    captured = CapturedTelemetry(pipeline=Pipeline())
    async with chain_of(captured) as chain:
        await chain.choose(call(), TOY)
        await anyio.sleep(10)
        for n in range(3):
            await anyio.sleep(1)
            await request(captured, chain, f"request {n}")
    assert [line for line in outlines(captured) if line.startswith("request")] == [
        f"request {n}\n  asel.choose {12.2 + n:g}-{12.2 + n:g}" for n in range(3)
    ]


async def test_without_a_provider_nothing_is_made():
    """A library that nobody asked for spans makes none, and queues nothing."""
    assert OpenTelemetrySink().wants(CacheHit) is False
    assert type(trace.get_tracer_provider()).__name__ == "ProxyTracerProvider"


async def test_a_chain_without_async_with_is_traced_as_well():
    """The tune runs inside its first caller, and is handed on when that one leaves."""
    captured = CapturedTelemetry()
    chain = chain_of(captured)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(request, captured, chain, "request 1", 0.1)
        with anyio.move_on_after(0.35):
            await request(captured, chain, "request 0")
    first, second = outlines(captured)
    assert first.splitlines()[:3] == ["request 0", "  asel.choose 0-0.35", "    asel.autotune 0-1.25"]
    assert second == "request 1\n  asel.choose 0.1-1.25 -> asel.autotune"


async def test_a_retune_is_a_call_like_any_other():
    """Measured again on purpose: the tune is under the call."""
    captured = CapturedTelemetry()
    async with chain_of(captured) as chain:
        with captured.tracer.start_as_current_span("retune"):
            await chain.retune(call(), NoHeuristic())
    assert [line.strip() for line in outlines(captured)[0].splitlines()[:3]] == [
        "retune",
        "asel.choose 0-1.2",
        "asel.autotune 0-1.2",
    ]


async def test_spans_that_never_end_do_not_pile_up():
    """What is remembered of calls and tunes is bounded."""
    bench, captured = Bench(), CapturedTelemetry()
    [tap] = captured.sinks
    spans = tap.sinks[0]
    async with chain_of(captured) as chain:
        for size in range(8, 8 + 20):
            await chain.choose(call(size), TOY)
    assert not spans._calls
    assert not spans._held
    assert not spans._tunes
    assert len(spans._ended) == 20
    assert bench.tunes == 0
