"""The tiers, one by one: their answers, writes and events."""

from __future__ import annotations

import anyio
import pytest
from support.kernels import BEST, COSTS, GUESS, TUNE_S, Bench, Blocks, NoHeuristic, Toy, call
from support.store_doubles import DictStore

from asel import (
    AutotunePolicy,
    InvalidRequestError,
    NoConfigError,
    overlay_cache,
    policy_override,
)

pytestmark = pytest.mark.anyio
QUICK = {cfg: cost / 1000 for cfg, cost in COSTS.items()}


async def test_override_answers_first_and_is_written_nowhere():
    """An override reaches neither memory nor the store."""
    store = DictStore()
    bench = Bench(persistent=store)
    async with bench.chain as chain:
        with overlay_cache({(await chain.explain(call(), Toy())).key: Blocks(7)}):
            selection = await chain.select(call(override_cfg=Blocks(9)), Toy())
    assert (selection.cfg, selection.tier, selection.declined) == (Blocks(9), "override", {})
    assert bench.cache.size() == 0
    assert not store.records
    assert bench.sink.names == ["override", "closed"]


async def test_overlay_answers_before_memory_and_is_written_nowhere():
    """An overlay hides memory while it is active, and leaves no trace."""
    bench = Bench(persistent=DictStore())
    async with bench.chain as chain:
        await chain.choose(call(), Toy())
        key = bench.cache.keys()[0]
        with overlay_cache({tuple(key): Blocks(7)}):
            selection = await chain.select(call(), Toy())
            assert chain.choose_nowait(call(), Toy()) == Blocks(7)
        assert (selection.cfg, selection.tier) == (Blocks(7), "overlay")
        assert list(selection.declined) == ["override"]
        assert await chain.choose(call(), Toy()) == BEST
    assert len(bench.sink.named("overlay_hit")) == 2


async def test_memory_answers_with_the_winner_of_a_tune():
    """The second caller of a key gets the config from memory, with the report of the tune."""
    bench = Bench()
    async with bench.chain as chain:
        first = await chain.select(call(), Toy())
        second = await chain.select(call(), Toy())
    assert (first.tier, second.tier) == ("autotune", "memory")
    assert first.cfg == second.cfg == BEST
    assert first.report is second.report
    assert first.report.winner == BEST
    assert bench.tunes == 1
    (hit,) = bench.sink.named("cache_hit")
    assert hit.level == "memory"
    assert hit.key == first.key
    assert hit.fields()["call_key"] == first.key.call_key


async def test_autotune_reports_every_candidate():
    """A selection from a tune carries its report, and why the tiers before it declined."""
    bench = Bench(policy=AutotunePolicy(tune_budget_s=50, candidate_timeout_s=7))
    async with bench.chain as chain:
        selection = await chain.select(call(), Toy())
    report = selection.report
    assert [outcome.cfg for outcome in report.outcomes] == list(Toy.candidates)
    assert report.incumbent == GUESS
    assert report.key == selection.key
    assert report.checksum == selection.checksum
    assert (report.tune_budget_s, report.candidate_timeout_s) == (50, 7)
    assert report.seconds == pytest.approx(TUNE_S)
    assert selection.declined == {
        "override": "no override",
        "overlay": "no overlay has the key",
        "memory": "memory missed",
        "persistent": "there is no store",
    }


async def test_heuristics_answer_is_written_nowhere_and_never_hides_a_tune():
    """It reaches neither memory nor a store, so the first call that may tune does (ejKernel's defect 9)."""
    store = DictStore()
    bench = Bench(persistent=store)
    async with bench.chain as chain:
        with policy_override(chain, cache_miss_fallback="heuristics"):
            for _ in range(2):
                assert (await chain.select(call(), Toy())).tier == "heuristics"
        assert bench.cache.size() == 0
        assert not store.records
        assert (await chain.select(call(), Toy())).tier == "autotune"


async def test_heuristic_is_asked_for_once_per_signature():
    """The heuristic's config is kept, so it costs the kernel one call for each signature."""

    class Counting(Toy):
        asked = 0

        def heuristic_cfg(self, inv):
            Counting.asked += 1
            return GUESS

    bench = Bench(allow={"allow_autotune": False})
    kernel = Counting()
    for _ in range(5):
        assert await bench.chain.choose(call(), kernel) == GUESS
    assert Counting.asked == 1


async def test_no_config_error_names_every_tiers_reason_and_the_next_step():
    """The error's attributes have the same facts as its message."""
    bench = Bench(allow={"allow_autotune": False})
    async with bench.chain as chain:
        with pytest.raises(NoConfigError) as caught:
            await chain.choose(call(), NoHeuristic())
    assert str(caught.value) == (
        f"no config for 'toy@v1' on 'NVIDIA H100|fake' (key {caught.value.key.call_key[:8]}): memory missed, "
        "there is no store, autotuning is off, kernel has no heuristic. Give the kernel a heuristic_cfg, or "
        "allow autotuning with AutotunePolicy(allow_autotune=True)."
    )
    assert isinstance(caught.value, RuntimeError)
    assert list(caught.value.declined) == ["override", "overlay", "memory", "persistent", "autotune", "heuristics"]
    assert bench.sink.names == ["error", "closed"]


async def test_forbidden_heuristics_are_not_used():
    """With both autotuning and heuristics off, every tier declines."""
    bench = Bench(allow={"allow_autotune": False, "allow_heuristics": False})
    with pytest.raises(NoConfigError, match=r"AutotunePolicy\(allow_heuristics=True\)"):
        await bench.chain.choose(call(), Toy())


async def test_the_error_for_a_kernel_without_candidates_asks_for_some():
    """Its calls cannot be tuned, and there may be no heuristic."""

    class Bare(Toy):
        def candidate_cfgs(self, inv):
            return []

    bench = Bench(allow={"allow_heuristics": False})
    with pytest.raises(NoConfigError, match=r"no candidates, heuristics are off\. Give the kernel candidate_cfgs"):
        await bench.chain.choose(call(), Bare())


async def test_candidates_that_cannot_be_listed_make_autotune_decline():
    """If candidate_cfgs raises, the heuristic answers."""

    class Broken(Toy):
        def candidate_cfgs(self, inv):
            raise KeyError("no table for this shape")

    selection = await Bench().chain.select(call(), Broken())
    assert selection.tier == "heuristics"
    assert "candidate_cfgs raised KeyError" in selection.declined["autotune"]


async def test_explain_shows_every_tiers_answer_and_changes_nothing():
    """`explain` is a dry run: no tune, no event, no entry, no verified checksum."""
    bench = Bench(persistent=DictStore())
    async with bench.chain as chain:
        cold = await chain.explain(call(), Toy())
        assert cold.answered_by == "autotune"
        assert [answer.tier for answer in cold.tiers] == [
            "override",
            "overlay",
            "memory",
            "persistent",
            "autotune",
            "heuristics",
        ]
        assert (cold.tiers[4].says, cold.tiers[5].cfg) == ("would tune 3 candidates", GUESS)
        assert bench.cache.size() == 0
        await chain.choose(call(), Toy())
        warm = await chain.explain(call(), Toy())
        assert (warm.answered_by, warm.tiers[2].cfg, warm.tiers[3].cfg) == ("memory", BEST, BEST)
        with overlay_cache({warm.key: Blocks(7)}):
            assert (await chain.explain(call(), Toy())).answered_by == "overlay"
            assert (await chain.explain(call(override_cfg=Blocks(9)), Toy())).answered_by == "override"
        with policy_override(chain, cache_miss_fallback="background"):
            assert (await chain.explain(call(16), Toy())).answered_by == "heuristics"
        with policy_override(chain, allow_autotune=False, allow_heuristics=False):
            nothing = await chain.explain(call(16), Toy())
    assert nothing.answered_by is None
    assert str(nothing).splitlines()[-1] == "> error      every tier declines"
    assert str(warm).splitlines()[3] == f"> memory     in memory: {BEST!r}"
    assert bench.tunes == 1


async def test_explain_names_the_tune_in_flight():
    """`explain` names a pending tune and does not wait for it."""
    bench = Bench(allow={"cache_miss_fallback": "background"})
    async with bench.chain as chain:
        await chain.choose(call(), Toy())
        texts = {s.tier: s.says for s in (await chain.explain(call(), Toy())).tiers}
    assert texts["memory"] == "a tune is pending"
    assert texts["autotune"] == f"tune {bench.sink.events[0].tune_id} is in flight"


async def test_stale_entries_are_reported_once_and_lead_to_one_tune():
    """A loaded entry of another checksum is a miss with one `stale` event and exactly one new tune."""
    bench = Bench()
    async with bench.chain as chain:
        key = (await chain.explain(call(), Toy())).key
        bench.cache.load(key, "another checksum", Blocks(2))
        tiers = [(await chain.select(call(), Toy())).tier for _ in range(3)]
    assert tiers == ["autotune", "memory", "memory"]
    (stale,) = bench.sink.named("stale")
    assert (stale.cfg, stale.checksum) == (Blocks(2), "another checksum")


async def test_a_loaded_entry_of_the_right_checksum_is_verified_and_used():
    """A loaded entry whose checksum matches needs no tune."""
    bench = Bench()
    async with bench.chain as chain:
        explained = await chain.explain(call(), Toy())
        bench.cache.load(explained.key, explained.checksum, Blocks(2))
        selection = await chain.select(call(), Toy())
    assert (selection.cfg, selection.tier) == (Blocks(2), "memory")
    assert bench.tunes == 0


async def test_a_put_config_answers_every_checksum():
    """A config from ConfigCache.put is used with every candidate list, even after a tune."""
    bench = Bench()
    async with bench.chain as chain:
        await chain.choose(call(), Toy())
        bench.cache.put(*bench.cache.keys()[0], Blocks(5))
        assert await chain.choose(call(), Toy()) == Blocks(5)
        assert await chain.retune(call(), Toy()) == BEST
        assert await chain.choose(call(), Toy()) == BEST


async def test_out_of_range_shapes_are_reported_once():
    """A shape outside the declared buckets has its own key and one event."""

    class Bucketed(Toy):
        buckets = {"x.shape[0]": (8, 16, 32)}

    bench = Bench()
    kernel = Bucketed()
    async with bench.chain as chain:
        keys = [(await chain.select(call(size), kernel)).key for size in (9, 16, 10, 64, 64)]
    assert keys[0] == keys[1] == keys[2]
    assert keys[3] == keys[4] != keys[0]
    assert bench.tunes == 2
    (event,) = bench.sink.named("out_of_range")
    assert (event.dimension, event.size, event.low, event.high) == ("x.shape[0]", 64, 8, 32)


async def test_the_event_stream_gives_events_as_they_happen():
    """`events()` yields a stream that ends when the chain closes."""
    bench = Bench()
    seen = []

    async def read(chain):
        async with chain.events() as stream:
            ready.set()
            async for event in stream:
                seen.append(event)

    ready = anyio.Event()
    async with anyio.create_task_group() as tasks, bench.chain as chain:
        tasks.start_soon(read, chain)
        await ready.wait()
        await chain.choose(call(), Toy())
    assert seen == bench.sink.events
    assert seen[-1].name == "closed"


async def test_a_raising_callback_never_breaks_a_selection(caplog):
    """A sink that raises is reported once and isolated (ejKernel's defect 14)."""

    def broken(event):
        raise RuntimeError("sink on fire")

    bench = Bench(on_event=broken)
    async with bench.chain as chain:
        assert await chain.choose(call(), Toy()) == BEST
        assert await chain.choose(call(), Toy()) == BEST
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert "sink on fire" in caplog.text
    assert bench.sink.names[-2:] == ["cache_hit", "closed"]


async def test_explain_says_when_a_caller_would_not_wait():
    """on_pending="heuristics": with a tune in flight, `explain` shows that the heuristic answers."""
    bench = Bench(allow={"on_pending": "heuristics"})
    async with bench.chain as chain, anyio.create_task_group() as tasks:
        tasks.start_soon(chain.choose, call(), Toy())
        await anyio.wait_all_tasks_blocked()
        assert (await chain.explain(call(), Toy())).answered_by == "heuristics"
        assert (await chain.select(call(), Toy())).tier == "heuristics"


async def test_a_temporary_error_of_the_kernel_is_not_kept():
    """A candidate_cfgs that raised is called again by the next call."""

    class Moody(Toy):
        asked = 0

        def candidate_cfgs(self, inv):
            Moody.asked += 1
            if Moody.asked == 1:
                raise ConnectionError("table server is down")
            return super().candidate_cfgs(inv)

    kernel = Moody()
    async with Bench().chain as chain:
        assert (await chain.select(call(), kernel)).tier == "heuristics"
        assert (await chain.select(call(), kernel)).tier == "autotune"


@pytest.mark.parametrize(
    "wrong", [{"policy": {"allow_autotune": False}}, {"close_grace_s": -1}, {"store_timeout_s": "5"}]
)
async def test_a_chain_refuses_invalid_parameters(wrong):
    """The constructor's error names the parameter."""
    with pytest.raises(InvalidRequestError, match=next(iter(wrong))):
        Bench(**wrong)
