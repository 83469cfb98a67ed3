"""The tiers, one by one: who answers, what is written, what is told."""

from __future__ import annotations

import anyio
import pytest
from kernels import BEST, GUESS, TUNE_S, Bench, Blocks, NoHeuristic, Toy, call

from asel import (
    AutotunePolicy,
    ConfigCache,
    InvalidRequestError,
    NoConfigError,
    TuningError,
    overlay_cache,
    policy_override,
)
from asel.persistence import Stored

pytestmark = pytest.mark.anyio


class DictStore:
    """A store in memory that knows checksums."""

    def __init__(self) -> None:
        self.records = {}
        self.loads = 0
        self.load_s = 0.0
        self.fails = None

    async def load(self, key, checksum):
        self.loads += 1
        await anyio.sleep(self.load_s)
        if self.fails:
            raise self.fails
        return self.records.get((key, checksum))

    async def save(self, report, *, replace):
        if self.fails:
            raise self.fails
        address = (report.key, report.checksum)
        if address in self.records and not replace:
            return Stored(self.records[address].cfg, None, adopted=True)
        self.records[address] = Stored(report.winner, report)
        return self.records[address]


class GetPut:
    """A cache as users know it: get and put, no checksums."""

    def __init__(self) -> None:
        self.data = {}

    async def get(self, device, op_id, call_key):
        return self.data.get((device, op_id, call_key))

    async def put(self, device, op_id, call_key, cfg):
        self.data[device, op_id, call_key] = cfg


async def test_override_answers_first_and_is_written_nowhere():
    """An override is the caller's business alone: neither memory nor the store hears of it."""
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


async def test_memory_answers_what_a_tune_found():
    """The second caller of a key is answered from memory, with the report of the tune."""
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


async def test_persistent_answers_what_another_process_found_and_fills_memory():
    """A record of the right key and checksum is loaded once, then memory has it."""
    store = DictStore()
    async with Bench(persistent=store).chain as earlier:
        await earlier.choose(call(), Toy())
    bench = Bench(persistent=store)
    async with bench.chain as chain:
        assert (await chain.select(call(), Toy())).tier == "persistent"
        assert (await chain.select(call(), Toy())).tier == "memory"
    assert bench.tunes == 0
    assert [hit.level for hit in bench.sink.named("cache_hit")] == ["persistent", "memory"]


async def test_a_record_of_another_checksum_is_not_an_answer():
    """Other candidates mean another checksum, so the stored record does not count."""

    class Wider(Toy):
        candidates = (*Toy.candidates, Blocks(4))

    store = DictStore()
    async with Bench(persistent=store).chain as chain:
        await chain.choose(call(), Toy())
    bench = Bench(persistent=store, costs=lambda cfg: 1 / cfg.m)
    async with bench.chain as chain:
        selection = await chain.select(call(), Wider())
    assert (selection.cfg, selection.tier) == (Blocks(4), "autotune")
    assert len(store.records) == 2


async def test_a_tune_is_stored_unless_told_otherwise():
    """persist_autotune decides whether a tune's result reaches the store."""
    kept, unkept = DictStore(), DictStore()
    async with Bench(persistent=kept).chain as chain:
        await chain.choose(call(), Toy())
    async with Bench(persistent=unkept, persist_autotune=False).chain as chain:
        await chain.choose(call(), Toy())
    assert [stored.cfg for stored in kept.records.values()] == [BEST]
    assert not unkept.records


async def test_plain_get_and_put_are_enough_for_a_store():
    """Any object with get and put can stand behind the persistent tier."""
    cache = GetPut()
    async with Bench(persistent=cache).chain as chain:
        assert await chain.choose(call(), Toy()) == BEST
    assert list(cache.data.values()) == [BEST]
    async with Bench(persistent=cache).chain as chain:
        assert (await chain.select(call(), Toy())).tier == "persistent"


async def test_an_object_that_is_no_store_is_refused_by_name():
    """Bad input is refused where it enters."""
    with pytest.raises(InvalidRequestError, match="neither get and put nor load and save"):
        Bench(persistent=object())
    with pytest.raises(InvalidRequestError, match="pass a Tuner"):
        Bench(tuner=object())


async def test_a_failing_store_makes_its_tier_decline():
    """The chain keeps answering while the store is down, and says so once, not at every step."""
    store = DictStore()
    store.fails = OSError("disk on fire")
    bench = Bench(persistent=store)
    async with bench.chain as chain:
        selection = await chain.select(call(), Toy())
    assert (selection.cfg, selection.tier) == (BEST, "autotune")
    assert "disk on fire" in selection.declined["persistent"]
    assert [e.operation for e in bench.sink.named("store_error")] == ["get"]


async def test_a_hanging_store_does_not_hang_the_tune():
    """What was found is handed out although the store takes longer than it may."""

    class Hangs(DictStore):
        async def save(self, report, *, replace):
            await anyio.sleep_forever()

    bench = Bench(persistent=Hangs(), store_timeout_s=5.0)
    async with bench.chain as chain:
        start = anyio.current_time()
        assert await chain.choose(call(), Toy()) == BEST
        assert anyio.current_time() - start == pytest.approx(TUNE_S + 5.0)
    assert [e.error_type for e in bench.sink.named("store_error")] == ["TimeoutError"]


async def test_a_loser_adopts_what_the_first_writer_stored():
    """Everyone gets the same answer, also where two processes tuned at once."""

    class OtherWasFirst(DictStore):
        async def save(self, report, *, replace):
            return Stored(Blocks(2), None, adopted=True)

    bench = Bench(persistent=OtherWasFirst())
    async with bench.chain as chain:
        assert await chain.choose(call(), Toy()) == Blocks(2)
        assert await chain.choose(call(), Toy()) == Blocks(2)
    assert [e.adopted for e in bench.sink.named("persisted")] == [True]


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
    """A guess reaches neither memory nor a store, so the first call that may tune does (ejKernel's defect 9)."""
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
    """The heuristics tier remembers its guesses; they cost the kernel one call each."""

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


async def test_no_answer_names_what_every_tier_said_and_what_to_do():
    """The error tells what happened, to what, and the next step; its attributes hold the same facts."""
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
    """With both autotuning and heuristics off there is nothing left to answer with."""
    bench = Bench(allow={"allow_autotune": False, "allow_heuristics": False})
    with pytest.raises(NoConfigError, match=r"AutotunePolicy\(allow_heuristics=True\)"):
        await bench.chain.choose(call(), Toy())


async def test_background_answers_at_once_and_swaps_the_winner_in():
    """`background`: the heuristic now, the winner later, no request ever waits."""
    bench = Bench(allow={"cache_miss_fallback": "background"})
    async with bench.chain as chain:
        start = anyio.current_time()
        selections = [await chain.select(call(), Toy()) for _ in range(3)]
        assert anyio.current_time() == start
        assert [s.tier for s in selections] == ["heuristics"] * 3
        assert selections[0].declined["autotune"] == "tuning in the background"
        await chain.settled()
        assert anyio.current_time() - start == pytest.approx(TUNE_S)
        assert (await chain.select(call(), Toy())).cfg == BEST
    assert bench.tunes == 1
    assert bench.sink.named("autotune_start")[0].background is True


async def test_background_needs_an_open_chain():
    """Without `async with` nobody owns a background tune, so none begins and the reason is given."""
    bench = Bench(allow={"cache_miss_fallback": "background"})
    selection = await bench.chain.select(call(), Toy())
    assert selection.tier == "heuristics"
    assert "async with" in selection.declined["autotune"]
    assert bench.tunes == 0


async def test_on_pending_heuristics_takes_the_guess_while_another_tunes():
    """Only the first caller waits; those who find a tune pending need not."""
    bench = Bench(allow={"on_pending": "heuristics"})
    async with bench.chain as chain, anyio.create_task_group() as tasks:
        tiers = []

        async def ask():
            tiers.append((await chain.select(call(), Toy())).tier)

        for _ in range(3):
            tasks.start_soon(ask)
    assert tiers == ["heuristics", "heuristics", "autotune"]


async def test_wait_s_bounds_the_wait_and_the_tune_goes_on():
    """A caller waits no longer than it said; the answer is there for the next one."""
    bench = Bench(allow={"wait_s": 0.5})
    async with bench.chain as chain:
        start = anyio.current_time()
        selection = await chain.select(call(), Toy())
        assert anyio.current_time() - start == pytest.approx(0.5)
        assert selection.tier == "heuristics"
        assert selection.declined["autotune"] == "no answer within wait_s=0.5"
        await chain.settled()
        assert (await chain.select(call(), Toy())).tier == "memory"
    assert bench.tunes == 1


async def test_a_failed_tune_waits_before_it_is_tried_again():
    """After a tune in which all failed the heuristic answers for retry_after_s, then one more tune begins."""
    bench = Bench(
        allow={"retry_after_s": 100.0}, script={"run_errors": lambda cfg: ValueError("bad") if bench.broken else None}
    )
    bench.broken = True
    async with bench.chain as chain:
        first = await chain.select(call(), Toy())
        assert first.tier == "heuristics"
        assert "none of the 3 candidates" in first.declined["autotune"]
        await anyio.sleep(99)
        again = await chain.select(call(), Toy())
        assert again.tier == "heuristics"
        assert "tried again in 1 s" in again.declined["autotune"]
        assert bench.tunes == 1
        bench.broken = False
        await anyio.sleep(2)
        assert (await chain.select(call(), Toy())).cfg == BEST
    assert bench.tunes == 2


async def test_waiters_of_a_failed_tune_get_an_error_of_their_own_where_heuristics_are_off():
    """Each waiter raises its own copy; calls during the pause get NoConfigError saying so."""
    bench = Bench(allow={"allow_heuristics": False}, script={"run_errors": lambda cfg: ValueError("bad")})
    errors = []

    async def ask(chain):
        with pytest.raises(TuningError) as caught:
            await chain.choose(call(), Toy())
        errors.append(caught.value)

    async with bench.chain as chain:
        async with anyio.create_task_group() as tasks:
            for _ in range(3):
                tasks.start_soon(ask, chain)
        with pytest.raises(NoConfigError, match="the last tune failed"):
            await chain.choose(call(), Toy())
    assert len({id(error) for error in errors}) == 3
    for error in errors:
        assert error.key == bench.sink.events[0].key
        assert len(error.outcomes) == 3
        assert [type(e) for e in error.__cause__.__cause__.exceptions] == [ValueError] * 3
    assert bench.tunes == 1


async def test_a_tuner_that_breaks_is_a_failed_tune():
    """Whatever a tuner raises ends the tune, wakes the waiters and becomes a TuningError."""

    class Broken:
        async def tune(self, job):
            raise ZeroDivisionError("oops")

    bench = Bench(tuner=Broken(), allow={"allow_heuristics": False})
    async with bench.chain as chain:
        with pytest.raises(TuningError, match="ZeroDivisionError: oops"):
            await chain.choose(call(), Toy())
    assert bench.sink.named("autotune_failed")[0].error_type == "ZeroDivisionError"
    assert bench.cache.pending() == []


async def test_candidates_that_cannot_be_listed_make_autotune_decline():
    """A kernel whose candidate_cfgs raises is answered by its heuristic."""

    class Broken(Toy):
        def candidate_cfgs(self, inv):
            raise KeyError("no table for this shape")

    selection = await Bench().chain.select(call(), Broken())
    assert selection.tier == "heuristics"
    assert "candidate_cfgs raised KeyError" in selection.declined["autotune"]


async def test_a_cleared_key_is_not_tuned_again_unless_asked():
    """forbid_reautotune: what the user removed stays removed, until `retune` (ejKernel's defect 6 cannot happen)."""
    bench = Bench()
    async with bench.chain as chain:
        await chain.choose(call(), Toy())
        bench.cache.clear()
        selection = await chain.select(call(), Toy())
        assert selection.tier == "heuristics"
        assert "use retune" in selection.declined["autotune"]
        assert await chain.retune(call(), Toy()) == BEST
        assert (await chain.select(call(), Toy())).tier == "memory"
    assert bench.tunes == 2


async def test_a_cleared_key_is_tuned_again_where_that_is_allowed():
    """forbid_reautotune=False: clearing the cache is enough."""
    bench = Bench(forbid_reautotune=False)
    async with bench.chain as chain:
        await chain.choose(call(), Toy())
        bench.cache.clear()
        assert (await chain.select(call(), Toy())).tier == "autotune"


async def test_eviction_does_not_forbid_a_tune():
    """A key that made room for others is tuned again: nobody removed it on purpose."""
    bench = Bench(cache=ConfigCache(max_entries=1))
    async with bench.chain as chain:
        for size in (8, 16, 8):
            assert (await chain.select(call(size), Toy())).tier == "autotune"
    assert bench.tunes == 3


async def test_retune_replaces_the_record_and_the_old_answer_serves_meanwhile():
    """`retune` measures again on purpose; until it is done everyone gets what was known."""
    store = DictStore()
    bench = Bench(costs=lambda cfg: bench.costs[cfg.m], persistent=store)
    bench.costs = {1: 0.3, 2: 0.2, 3: 0.1}
    async with bench.chain as chain, anyio.create_task_group() as tasks:
        await chain.choose(call(), Toy())
        bench.costs = {1: 0.3, 2: 0.1, 3: 0.2}
        tasks.start_soon(chain.retune, call(), Toy())
        await anyio.wait_all_tasks_blocked()
        assert await chain.choose(call(), Toy()) == Blocks(3)
        assert chain.choose_nowait(call(), Toy()) == Blocks(3)
        await chain.settled()
        assert await chain.choose(call(), Toy()) == Blocks(2)
    assert [stored.cfg for stored in store.records.values()] == [Blocks(2)]


async def test_a_failed_retune_loses_nothing():
    """What was known before a retune that failed is known after it."""
    bench = Bench(script={"run_errors": lambda cfg: bench.error})
    bench.error = None
    async with bench.chain as chain:
        await chain.choose(call(), Toy())
        bench.error = ValueError("bad")
        with pytest.raises(TuningError):
            await chain.retune(call(), Toy())
        assert await chain.choose(call(), Toy()) == BEST


async def test_retune_where_tuning_is_not_allowed_says_so():
    """`retune` does not go against the policy, the environment or a freeze."""
    bench = Bench()
    async with bench.chain as chain:
        with policy_override(chain, allow_autotune=False), pytest.raises(NoConfigError, match="autotuning is off"):
            await chain.retune(call(), Toy())
        chain.freeze()
        with pytest.raises(NoConfigError, match="frozen"):
            await chain.retune(call(), Toy())


@pytest.mark.parametrize("value", ["off", "OFF", "0", "false", "no"])
async def test_the_environment_turns_tuning_off_everywhere(monkeypatch, value):
    """ASEL_AUTOTUNE=off: no chain tunes, whatever its policy says."""
    monkeypatch.setenv("ASEL_AUTOTUNE", value)
    bench = Bench()
    async with bench.chain as chain:
        selection = await chain.select(call(), Toy())
        assert selection.tier == "heuristics"
        assert "ASEL_AUTOTUNE" in selection.declined["autotune"]
        chain.choose_nowait(call(), Toy())
        await chain.settled()
        with pytest.raises(NoConfigError, match="ASEL_AUTOTUNE"):
            await chain.retune(call(), Toy())
    assert bench.tunes == 0


async def test_a_frozen_chain_tunes_nothing_and_flags_what_came_late():
    """After `freeze` a new key is answered by heuristics and told as `late_tune`; known keys are as before."""
    bench = Bench()
    async with bench.chain as chain:
        await chain.choose(call(), Toy())
        chain.freeze()
        assert await chain.choose(call(), Toy()) == BEST
        selection = await chain.select(call(16), Toy())
    assert selection.tier == "heuristics"
    assert [e.key for e in bench.sink.named("late_tune")] == [selection.key]


async def test_choose_nowait_never_waits_and_queues_a_background_tune():
    """A plain function: what is known now, and the rest in the background."""
    bench = Bench()
    async with bench.chain as chain:
        assert [chain.choose_nowait(call(), Toy()) for _ in range(3)] == [GUESS] * 3
        assert bench.measure.compiled == []
        await chain.settled()
        assert chain.choose_nowait(call(), Toy()) == BEST
        assert chain.choose_nowait(call(override_cfg=Blocks(9)), Toy()) == Blocks(9)
    assert bench.tunes == 1


async def test_choose_nowait_takes_the_stored_record_before_it_tunes():
    """The background asks the store first: a warm restart tunes nothing."""
    store = DictStore()
    async with Bench(persistent=store).chain as chain:
        await chain.choose(call(), Toy())
    bench = Bench(persistent=store)
    async with bench.chain as chain:
        assert chain.choose_nowait(call(), Toy()) == GUESS
        await chain.settled()
        assert chain.choose_nowait(call(), Toy()) == BEST
    assert bench.tunes == 0


async def test_choose_nowait_queues_nothing_where_tuning_is_not_allowed():
    """The policy holds in the background too."""
    bench = Bench(allow={"allow_autotune": False})
    async with bench.chain as chain:
        assert chain.choose_nowait(call(), Toy()) == GUESS
        await chain.settled()
        assert bench.tunes == 0
        with pytest.raises(NoConfigError, match="cannot wait"):
            chain.choose_nowait(call(), NoHeuristic())


def test_choose_nowait_works_without_an_event_loop():
    """Scripts may ask, too: the answer is memory's or the kernel's."""
    bench = Bench()
    assert bench.chain.choose_nowait(call(), Toy()) == GUESS
    assert bench.sink.names == ["heuristics"]
    bench.cache.put(*bench.sink.events[0].key, Blocks(5))
    assert bench.chain.choose_nowait(call(), Toy()) == Blocks(5)


async def test_explain_tells_what_every_tier_would_say_and_changes_nothing():
    """`explain` is a dry run: no tune, no event, no entry, no verified checksum."""
    bench = Bench(persistent=DictStore())
    async with bench.chain as chain:
        cold = await chain.explain(call(), Toy())
        assert cold.answered_by == "autotune"
        assert [said.tier for said in cold.tiers] == [
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
    assert str(warm).splitlines()[3] == f"> memory     known: {BEST!r}"
    assert bench.tunes == 1


async def test_explain_names_the_tune_in_flight():
    """A pending tune shows in the explanation, and explaining does not wait for it."""
    bench = Bench(allow={"cache_miss_fallback": "background"})
    async with bench.chain as chain:
        await chain.choose(call(), Toy())
        said = {s.tier: s.says for s in (await chain.explain(call(), Toy())).tiers}
    assert said["memory"] == "a tune is pending"
    assert said["autotune"] == f"tune {bench.sink.events[0].tune_id} is in flight"


async def test_stale_entries_are_told_once_and_lead_to_one_tune():
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


async def test_what_a_user_puts_answers_whatever_the_checksum():
    """ConfigCache.put is the user's word: it holds for every candidate list, also over a tune's result."""
    bench = Bench()
    async with bench.chain as chain:
        await chain.choose(call(), Toy())
        bench.cache.put(*bench.cache.keys()[0], Blocks(5))
        assert await chain.choose(call(), Toy()) == Blocks(5)
        assert await chain.retune(call(), Toy()) == BEST
        assert await chain.choose(call(), Toy()) == BEST


async def test_out_of_range_shapes_are_told_once():
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
    """`events()` is an anyio stream that ends when the chain closes."""
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


async def test_wait_s_counts_the_store_too():
    """A caller's patience is for all it waits for, the store and the tune together."""
    store = DictStore()
    store.load_s = 1000.0
    bench = Bench(persistent=store, allow={"wait_s": 0.5}, store_timeout_s=5000.0)
    async with bench.chain as chain:
        start = anyio.current_time()
        selection = await chain.select(call(), Toy())
        assert anyio.current_time() - start == pytest.approx(0.5)
    assert selection.tier == "heuristics"
    assert selection.declined["persistent"] == "no answer within wait_s=0.5"


async def test_a_store_that_does_not_answer_is_given_up():
    """A read is bounded by store_timeout_s, and then the tune begins."""
    store = DictStore()
    store.load_s = 1000.0
    bench = Bench(persistent=store, store_timeout_s=3.0)
    async with bench.chain as chain:
        start = anyio.current_time()
        selection = await chain.select(call(), Toy())
        assert anyio.current_time() - start == pytest.approx(3.0 + TUNE_S)
    assert selection.tier == "autotune"
    assert "within 3 s" in selection.declined["persistent"]
    assert [event.operation for event in bench.sink.named("store_error")] == ["get"]


async def test_a_slow_read_does_not_undo_a_retune():
    """What was stored when the read began is older than what the process has learned since."""
    store = DictStore()
    async with Bench(persistent=store, costs=lambda cfg: 1 / (5 - cfg.m)).chain as chain:
        assert await chain.choose(call(), Toy()) == Blocks(1)
    store.load_s = 50.0
    bench = Bench(persistent=store, store_timeout_s=100.0)
    answers = []

    async def ask(chain):
        answers.append(await chain.choose(call(), Toy()))

    async with bench.chain as chain, anyio.create_task_group() as tasks:
        tasks.start_soon(ask, chain)
        await anyio.sleep(1)
        assert await chain.retune(call(), Toy()) == BEST
        await anyio.sleep(100)
        assert await chain.choose(call(), Toy()) == BEST
    assert answers == [BEST]


async def test_a_tune_in_flight_is_joined_although_none_could_begin():
    """Frozen, or in the pause after a failure: what is under way is still an answer."""
    bench = Bench()
    tiers = []

    async def ask(chain):
        tiers.append((await chain.select(call(), Toy())).tier)

    async with bench.chain as chain, anyio.create_task_group() as tasks:
        tasks.start_soon(ask, chain)
        await anyio.wait_all_tasks_blocked()
        chain.freeze()
        tasks.start_soon(ask, chain)
    assert tiers == ["autotune", "autotune"]
    assert bench.sink.named("late_tune") == []


async def test_only_a_call_that_freezing_stopped_is_late():
    """`late_tune` flags what would have been tuned; a call whose policy forbids tuning would not."""
    bench = Bench(allow={"allow_autotune": False})
    async with bench.chain as chain:
        chain.freeze()
        await chain.choose(call(), Toy())
        chain.choose_nowait(call(), Toy())
    assert bench.sink.named("late_tune") == []


async def test_explain_knows_who_would_not_wait():
    """on_pending="heuristics": with a tune in flight the heuristic answers, and explain says so."""
    bench = Bench(allow={"on_pending": "heuristics"})
    async with bench.chain as chain, anyio.create_task_group() as tasks:
        tasks.start_soon(chain.choose, call(), Toy())
        await anyio.wait_all_tasks_blocked()
        assert (await chain.explain(call(), Toy())).answered_by == "heuristics"
        assert (await chain.select(call(), Toy())).tier == "heuristics"


async def test_clearing_what_a_user_put_over_a_tune_still_forbids_a_tune():
    """The key was tuned, and the user removed it: by which road does not matter."""
    bench = Bench()
    async with bench.chain as chain:
        await chain.choose(call(), Toy())
        bench.cache.put(*bench.cache.keys()[0], Blocks(9))
        bench.cache.clear()
        assert (await chain.select(call(), Toy())).tier == "heuristics"
    assert bench.tunes == 1


@pytest.mark.parametrize("answer", ["not a record", 7])
async def test_a_store_that_answers_nonsense_has_failed(answer):
    """Whatever a store returns, it costs its own tier and nothing else."""

    class Nonsense:
        async def load(self, key, checksum):
            return answer

        async def save(self, report, *, replace):
            return None

    bench = Bench(persistent=Nonsense())
    async with bench.chain as chain:
        assert (await chain.select(call(), Toy())).tier == "autotune"
        assert chain.choose_nowait(call(16), Toy()) == GUESS
        await chain.settled()
    assert [event.operation for event in bench.sink.named("store_error")] == ["get"]


async def test_a_get_that_returns_an_awaitable_is_awaited():
    """Not every awaitable method is a coroutine function."""

    class Wrapped(GetPut):
        def __init__(self):
            super().__init__()
            inner = super().get
            self.get = lambda *key: inner(*key)

    cache = Wrapped()
    async with Bench(persistent=cache).chain as chain:
        assert await chain.choose(call(), Toy()) == BEST
    async with Bench(persistent=cache).chain as chain:
        assert (await chain.select(call(), Toy())).cfg == BEST


async def test_a_passing_trouble_of_the_kernel_passes():
    """A candidate_cfgs that raised once is asked again at the next call."""

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
async def test_a_chain_refuses_what_it_cannot_use(wrong):
    """Arguments are checked where they enter, by name."""
    with pytest.raises(InvalidRequestError, match=next(iter(wrong))):
        Bench(**wrong)
