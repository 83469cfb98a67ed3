"""Whole trees of spans, in virtual time on both backends."""

from __future__ import annotations

import threading
from contextvars import copy_context

import anyio
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, use_span
from support.kernels import BEST, COSTS, Bench, Blocks, NoHeuristic, Toy, call, scripted
from support.traces import TOY, Store, chain_of, outlines, request

from asel import AutotunePolicy, Kernel, NoConfigError, Tuner, TuningError
from asel.events import CacheHit, ClaimWait
from asel.events.context import Asked, asking, tune_context
from asel.kernels.config_text import MAX_CONFIG_CHARS
from asel.kernels.keys import CacheKey
from asel.runtime.loop import LoopHandle
from asel.telemetry import OpenTelemetrySink, Pipeline
from asel.telemetry.names import ATTRIBUTES, SPANS
from asel.testing import CapturedTelemetry, ScriptedMeasure
from asel.tuning.measure import Lowered

pytestmark = pytest.mark.anyio
KEY = CacheKey("dev", "op@v1", "key")
DECLINED = ("override: no override", "overlay: no overlay has the key")


async def test_three_callers_share_a_tune_in_which_one_candidate_fails():
    """The tune is under its first call, the other calls link to it, and there is no error: another candidate won."""
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
        "      asel.candidate 1-3.6\n"
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
    about = {name: choose.attributes[name] for name in ("asel.op", "asel.call", "asel.device", "asel.key")}
    assert (about["asel.op"], about["asel.call"]) == ("toy@v1", "x=f32[8,128]")
    assert choose.attributes == {
        **about,
        "asel.tier": "autotune",
        "asel.declined": (*DECLINED, "memory: memory missed", "persistent: there is no store"),
        "asel.config": "Blocks(m=3, n=1)",
        "asel.tune.id": tune.attributes["asel.tune.id"],
        "asel.wait_s": pytest.approx(3.8),
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
    assert [waiter.children[0].attributes["asel.wait_s"] for waiter in waiters] == pytest.approx([3.3, 2.8])
    assert {waiter.children[0].attributes["asel.tune.id"] for waiter in waiters} == {tune.attributes["asel.tune.id"]}
    slow, broken, best = tune.children
    one = {**about, "asel.tune.id": tune.attributes["asel.tune.id"]}
    assert slow.attributes == {
        **one,
        "asel.candidate.index": 0,
        "asel.config": "Blocks(m=1, n=1)",
        "asel.median_s": 0.3,
        "asel.ranked_s": 0.3,
        "asel.samples": 1,
    }
    assert broken.attributes == {
        **one,
        "asel.candidate.index": 1,
        "asel.config": "Blocks(m=2, n=1)",
        "asel.failed": True,
        "asel.stage": "measure",
        "error.type": "ValueError",
        "exception.message": "too large",
    }
    assert best.attributes == {
        **one,
        "asel.candidate.index": 2,
        "asel.config": "Blocks(m=3, n=1)",
        "asel.winner": True,
        "asel.median_s": 0.1,
        "asel.ranked_s": 0.1,
        "asel.samples": 1,
    }
    # The config comes first, since all candidates' spans have the same name.
    assert {next(iter(candidate.attributes)) for candidate in tune.children} == {"asel.config"}
    assert best.children[0].attributes == {**one, "asel.config": "Blocks(m=3, n=1)"}
    assert hit.children[0].attributes == {
        **about,
        "asel.tier": "memory",
        "asel.declined": DECLINED,
        "asel.config": "Blocks(m=3, n=1)",
    }
    assert {span.status.status_code.name for span in captured.spans} == {"UNSET"}
    # What OpenTelemetry deprecates is not used, and nothing has a name that dashboards do not know.
    assert not any(span.events for span in captured.spans)
    asels = [span for span in captured.spans if span.name.startswith("asel.")]
    assert {span.name for span in asels} <= set(SPANS)
    assert {name for span in asels for name in span.attributes} <= set(ATTRIBUTES)


class LongName(Toy):
    """Configs that would fill a screen."""

    candidates = tuple({"block": n, "notes": "long " * 200} for n in (1, 2))
    heuristic_cfg = Kernel.heuristic_cfg


async def test_a_long_config_is_shortened_on_spans():
    """Traces are read row by row, and exporters cut long values anywhere."""
    captured = CapturedTelemetry()
    async with chain_of(captured, tuner=scripted(0.1)[0]) as chain:
        await request(captured, chain, kernel=LongName())
    shown = [span.attributes["asel.config"] for span in captured.spans if "asel.config" in span.attributes]
    assert {name for span in captured.spans for name in span.attributes} >= {"asel.config", "asel.call"}
    assert max(map(len, shown)) <= MAX_CONFIG_CHARS
    assert all(text.startswith("{'block': ") and text.endswith("...") for text in shown)


class TriedTwice(ScriptedMeasure):
    """A measure for which the second candidate cannot be lowered, and has to be run to see whether it can."""

    async def lower(self, trial):
        if trial.cfg == Blocks(2):
            return Lowered(None, lambda: self.compile(trial), runs=True)
        return Lowered(str(trial.cfg), lambda: self.compile(trial))


@pytest.mark.parametrize("fails", [False, True])
async def test_separate_compile_attempts_are_separate_spans(fails):
    """A candidate that is tried again after the others was not compiling all the time."""
    errors = {Blocks(2): ValueError("no")} if fails else {}
    measure = TriedTwice(COSTS, compile_s=1.0, compile_errors=errors)
    captured = CapturedTelemetry()
    tuner = Tuner(warmup=1, iters=1, measure=measure, strategy="exhaustive")
    async with chain_of(captured, tuner=tuner) as chain:
        await request(captured, chain)
    [tree] = captured.trees
    [tune] = tree.children[0].children
    [candidate] = [child for child in tune.children if child.attributes["asel.config"] == "Blocks(m=2, n=1)"]
    steps = [(step.name, step.start, step.end) for step in candidate.children if step.name.endswith("compile")]
    others = [child for child in tune.children if child is not candidate]
    first, second = steps
    assert first[1] == first[2], "it could not be lowered, which was seen at once"
    assert second[2] - second[1] == 1.0
    assert second[1] >= max(child.end for child in others)
    labels = {"asel.op": "toy@v1", "asel.stage": "compile", **({"error.type": "ValueError"} if fails else {})}
    number, seconds = captured.metrics()["asel.candidate.duration"][tuple(sorted(labels.items()))]
    assert (number, seconds) == ((1, 1.0) if fails else (3, 3.0)), "what is measured is the work, without the wait"


async def test_links_are_given_when_a_span_is_made():
    """Samplers see only those links, so the span of a call waits for its answer."""
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


async def test_a_background_tune_has_its_own_trace_with_a_link_to_its_cause():
    """As a child it would outlive its parent, which was answered long before."""
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
    assert choose.attributes["asel.wait_s"] == 0.0


async def test_a_background_tune_that_begins_after_the_answer_still_links_to_the_call():
    """With a store the claim comes first, and the call has its answer by then. The call has one span."""
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
    """There is no tune in this process."""
    captured = CapturedTelemetry()
    [deferred] = captured.sinks
    deferred.watch(LoopHandle(), None)
    with captured.tracer.start_as_current_span("request"):
        asking.set(Asked(-1, 0.0))
        inside = copy_context()
        inside.run(tune_context.set, "t1")
        claim = ClaimWait(key=KEY, start=0.5, end=2.0, waited_s=1.5, outcome="record")
        inside.run(deferred.emit, claim)
        deferred.emit(
            CacheHit(key=KEY, start=0.0, end=2.0, level="persistent", cfg=BEST, tune_id="t1", began=True, wait_s=1.5)
        )
        asking.set(None)
    [tree] = captured.trees
    assert tree.outline() == "request\n  asel.choose 0-2\n    asel.store.claim 0.5-2"
    assert tree.children[0].children[0].attributes["asel.outcome"] == "record"


async def test_a_tune_after_choose_nowait_links_to_its_request():
    """choose_nowait passes the tune to the event loop with its context."""
    captured = CapturedTelemetry()
    async with chain_of(captured) as chain:
        with captured.tracer.start_as_current_span("request"):
            chain.choose_nowait(call(), TOY)
        await chain.settled()
    tune, asked = outlines(captured)
    assert asked == "request\n  asel.choose 0-0"
    assert tune.splitlines()[0] == "asel.autotune 0-1.2 -> request"


async def test_a_failed_tune_and_a_call_without_an_answer_are_errors():
    """The failed candidates themselves are not errors."""
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
    assert [(one.status, one.attributes["asel.failed"]) for one in tune.children] == [("UNSET", True)] * 3


@pytest.mark.parametrize(
    ("errors", "named"),
    [((ValueError, ValueError, ValueError), "ValueError"), ((ValueError, OSError, ValueError), "TuningError")],
)
async def test_a_failed_tune_has_the_error_type_its_candidates_share(errors, named):
    """The reason is the candidates' error, not the group around it."""
    captured = CapturedTelemetry()
    script = {"run_errors": {Blocks(n): error("no") for n, error in zip((1, 2, 3), errors, strict=True)}}
    async with chain_of(captured, script=script) as chain:
        await request(captured, chain)
    [tune] = [span for span in captured.spans if span.name == "asel.autotune"]
    assert tune.attributes["error.type"] == named


async def test_a_failing_store_is_an_error_on_its_own_span():
    """The call is answered, so it is not an error."""
    captured = CapturedTelemetry()
    policy = AutotunePolicy(allow_autotune=False)
    async with chain_of(captured, policy=policy, persistent=Store(0.5, OSError("gone"))) as chain:
        await request(captured, chain)
    assert outlines(captured) == ["request\n  asel.choose 0-0.5\n    asel.store.get 0-0.5 ERROR"]


async def test_a_store_read_is_under_its_call():
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


async def test_a_call_that_timed_out_has_its_waiting_time():
    """The heuristic's answer after wait_s includes the wait."""
    captured = CapturedTelemetry()
    async with chain_of(captured, policy=AutotunePolicy(wait_s=0.5)) as chain:
        await request(captured, chain)
        await chain.settled()
    choose = captured.trees[0].children[0]
    assert (choose.start, choose.end, choose.attributes["asel.wait_s"]) == (0.0, 0.5, 0.5)
    assert choose.attributes["asel.tier"] == "heuristics"


async def test_the_callers_sampling_decision_is_respected():
    """In a trace that is not sampled, nothing is recorded, even by a sampler that would."""
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


async def test_outside_of_a_trace_the_providers_sampler_decides():
    """A hit begins its own trace, if the sampler takes it."""
    captured, silent = CapturedTelemetry(), CapturedTelemetry(sampler=ALWAYS_OFF)
    for telemetry in (captured, silent):
        async with chain_of(telemetry, policy=AutotunePolicy(allow_autotune=False)) as chain:
            await chain.choose(call(override_cfg=BEST), TOY)
    assert outlines(captured) == ["asel.choose 0-0"]
    assert silent.spans == []


async def test_a_hit_from_another_thread_has_that_threads_parent():
    """The context is taken in the thread of the call."""
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
    """Its span is made later, in another thread."""
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


async def test_without_a_provider_no_span_is_made():
    """And no event is queued."""
    assert OpenTelemetrySink().wants(CacheHit) is False
    assert type(trace.get_tracer_provider()).__name__ == "ProxyTracerProvider"


async def test_a_chain_without_async_with_is_traced_as_well():
    """The tune runs inside its first caller, and continues in the next if that one leaves."""
    captured = CapturedTelemetry()
    chain = chain_of(captured)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(request, captured, chain, "request 1", 0.1)
        with anyio.move_on_after(0.35):
            await request(captured, chain, "request 0")
    first, second = outlines(captured)
    assert first.splitlines()[:3] == ["request 0", "  asel.choose 0-0.35", "    asel.autotune 0-1.25"]
    assert second == "request 1\n  asel.choose 0.1-1.25 -> asel.autotune"


async def test_a_retune_has_a_span_like_any_call():
    """The tune is under the call."""
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
    """The numbers of kept calls and tunes are bounded."""
    bench, captured = Bench(), CapturedTelemetry()
    [deferred] = captured.sinks
    spans = deferred.routes[0].sink
    async with chain_of(captured) as chain:
        for size in range(8, 8 + 20):
            await chain.choose(call(size), TOY)
    assert not spans._calls
    assert not spans._held
    assert not spans._tunes
    assert len(spans._ended) == 20
    assert bench.tunes == 0
