"""Winners that fail in real calls: removed from memory and the store, replaced, and reported once."""

from __future__ import annotations

from dataclasses import replace

import anyio
import pytest
import structlog  # noqa: F401 - capturing logs imports it, and reads files: no business of the event loop
from support.kernels import BEST, COSTS, GUESS, Bench, Blocks, NoHeuristic, Toy, call
from support.store_doubles import DictStore, GetPut, Removing, directory
from support.traces import chain_of

from asel import ConfigCache, Failed, Measured, Skipped, TuneReport
from asel.kernels.keys import CacheKey
from asel.stores.config_store import Stored
from asel.testing import CapturedTelemetry

SECOND = Blocks(2)
QUICK = {cfg: cost / 1000 for cfg, cost in COSTS.items()}
OOM = MemoryError("too large for this device")
KEY = CacheKey("dev", "op@v1", "key")


async def tuned(chain, kernel=None, **inv):
    """Return the selection of a tuned call."""
    return await chain.choose(call(**inv), kernel or Toy())


# ---------------------------------------------------------------------------------------------
# What answers next.


@pytest.mark.anyio
@pytest.mark.parametrize("is_open", [True, False], ids=["open", "without async with"])
async def test_after_a_withdrawal_the_next_best_answers_from_memory(is_open):
    """Nothing is tuned again, and the report shows the winner's failure."""
    bench = Bench()

    async def scene(chain):
        assert await tuned(chain) == BEST
        assert await chain.withdraw(call(), Toy(), BEST, OOM, tier="autotune")
        selection = await chain.select(call(), Toy())
        assert (selection.cfg, selection.tier, selection.report.winner) == (SECOND, "memory", SECOND)
        assert selection.report.outcomes[2] == Failed(BEST, "run", "MemoryError", "too large for this device")
        assert selection.report.margin == pytest.approx(1 / 3)
        assert await chain.choose(call(), Toy()) == chain.choose_nowait(call(), Toy()) == SECOND

    if is_open:
        async with bench.chain as chain:
            await scene(chain)
    else:
        await scene(bench.chain)
    assert bench.tunes == 1
    [event] = bench.sink.named("winner_failed")
    facts = event.fields()
    assert {name: facts[name] for name in ("op_id", "cfg", "tier", "instead", "error_type", "message")} == {
        "op_id": "toy@v1",
        "cfg": BEST,
        "tier": "autotune",
        "instead": SECOND,
        "error_type": "MemoryError",
        "message": "too large for this device",
    }


@pytest.mark.anyio
async def test_a_config_is_withdrawn_once():
    """A second withdrawal returns False, and so does that of a config that answers nowhere."""
    bench = Bench(persistent=Removing())
    async with bench.chain as chain:
        assert not await chain.withdraw(call(), Toy(), GUESS, OOM), "nobody has answered with anything yet"
        await tuned(chain)
        assert not await chain.withdraw(call(), Toy(), SECOND, OOM), "this is not what it answers with"
        assert await chain.withdraw(call(), Toy(), BEST, OOM)
        assert not await chain.withdraw(call(), Toy(), BEST, OOM)
    assert len(bench.sink.named("winner_failed")) == 1


@pytest.mark.anyio
async def test_withdrawing_every_measured_config_leaves_the_heuristic():
    """The key is then untuned, but all candidates are barred, so the heuristic answers."""
    bench = Bench()
    async with bench.chain as chain:
        await tuned(chain)
        for cfg in (BEST, SECOND, GUESS):
            assert (await chain.select(call(), Toy())).cfg == cfg
            assert await chain.withdraw(call(), Toy(), cfg, OOM)
        selection = await chain.select(call(), Toy())
        assert (selection.cfg, selection.tier) == (GUESS, "heuristics")
        assert "none of the 3 candidates" in selection.declined["autotune"]
    assert bench.measure.compiled == [GUESS, SECOND, BEST], "each was compiled by the first tune, and by no other"
    assert [event.instead for event in bench.sink.named("winner_failed")] == [SECOND, GUESS, None]


@pytest.mark.anyio
async def test_a_withdrawn_config_is_not_a_candidate_of_later_tunes():
    """Neither in a retune, nor after memory was cleared, nor with its old timings."""

    class Wider(Toy):
        candidates = (*Toy.candidates, Blocks(4))

    costs = {**COSTS, Blocks(4): 0.15}
    bench = Bench(costs=costs, forbid_reautotune=False)
    async with bench.chain as chain:
        await tuned(chain)
        await chain.withdraw(call(), Toy(), BEST, OOM)
        del bench.measure.compiled[:]
        assert await chain.retune(call(), Toy()) == SECOND
        bench.cache.clear()
        assert await tuned(chain) == SECOND
        selection = await chain.select(call(), Wider())
    assert selection.cfg == Blocks(4)
    assert isinstance(selection.report.outcomes[2], Skipped)
    assert selection.report.outcomes[2].reason == "it failed in a real call"
    assert BEST not in bench.measure.compiled


@pytest.mark.anyio
async def test_a_withdrawal_does_not_forbid_a_tune():
    """`forbid_reautotune` applies only to keys that a user cleared."""
    bench = Bench()
    async with bench.chain as chain:
        key = (await chain.explain(call(), Toy())).key
        bench.cache.put(*key, BEST)
        assert await chain.withdraw(call(), Toy(), BEST, OOM)
        selection = await chain.select(call(), Toy())
        assert (selection.cfg, selection.tier) == (SECOND, "autotune")
    [event] = bench.sink.named("winner_failed")
    assert event.instead is None


@pytest.mark.anyio
async def test_a_user_may_put_a_withdrawn_config_back():
    """A config that a user puts is in force, and can be withdrawn again."""
    bench = Bench()
    async with bench.chain as chain:
        await tuned(chain)
        await chain.withdraw(call(), Toy(), BEST, OOM)
        bench.cache.put(*bench.cache.keys()[0], BEST)
        assert await tuned(chain) == BEST
        assert await chain.withdraw(call(), Toy(), BEST, OOM)
    assert len(bench.sink.named("winner_failed")) == 2


@pytest.mark.anyio
async def test_a_frozen_chain_withdraws_and_tunes_nothing():
    """The next best answers, or else the heuristic."""
    bench = Bench()
    async with bench.chain as chain:
        await tuned(chain)
        chain.freeze()
        await chain.withdraw(call(), Toy(), BEST, OOM)
        assert (await chain.select(call(), Toy())).cfg == SECOND
        for cfg in (SECOND, GUESS):
            await chain.withdraw(call(), Toy(), cfg, OOM)
        assert (await chain.select(call(), Toy())).tier == "heuristics"
    assert bench.tunes == 1


@pytest.mark.anyio
async def test_a_retune_in_flight_goes_on_and_the_next_best_answers_meanwhile():
    """A withdrawal removes the old answer, not the tune that is about to replace it."""
    bench = Bench()
    async with bench.chain as chain, anyio.create_task_group() as tasks:
        await tuned(chain)
        tasks.start_soon(chain.retune, call(), Toy())
        await anyio.sleep(0.1)
        assert await chain.withdraw(call(), Toy(), BEST, OOM)
        assert await chain.choose(call(), Toy()) == SECOND
        assert len(bench.cache.pending()) == 1
    assert bench.tunes == 2


@pytest.mark.anyio
async def test_unhashable_configs_can_be_withdrawn():
    """A dict is withdrawn, recognised again and skipped like any config."""

    class Dicts(Toy):
        candidates = ({"m": 1}, {"m": 2}, {"m": 3})

        def heuristic_cfg(self, inv):
            return {"m": 1}

    bench = Bench(costs=lambda cfg: 0.4 - cfg["m"] / 10)
    async with bench.chain as chain:
        assert await chain.choose(call(), Dicts()) == {"m": 3}
        assert await chain.withdraw(call(), Dicts(), {"m": 3}, OOM)
        assert await chain.choose(call(), Dicts()) == {"m": 2}
        assert await chain.retune(call(), Dicts()) == {"m": 2}


@pytest.mark.anyio
async def test_a_sink_that_raises_does_not_stop_a_withdrawal():
    """The sink is called and raises, and the withdrawal continues."""

    def on_event(event):
        raise ValueError("not today")

    bench = Bench(on_event=on_event)
    async with bench.chain as chain:
        await tuned(chain)
        assert await chain.withdraw(call(), Toy(), BEST, OOM)
        assert await tuned(chain) == SECOND


def test_an_alias_of_a_failed_config_is_not_a_runner_up():
    """It would fail as well. Candidates timed in the winner's mode come before those of a lesser mode."""
    outcomes = (
        Measured(1, 0.4, (0.4,), 0.0),
        Measured(2, 0.3, (0.3,), 0.0, alias_of=3),
        Measured(3, 0.3, (0.3,), 0.0),
        Measured(4, 0.2, (0.2,), 0.0, how="eager"),
        Measured(5, 0.35, (0.35,), 0.0),
        Failed(6, "compile", "ValueError", "no"),
    )
    report = TuneReport(KEY, 3, outcomes, 1.0, {}, incumbent=1)
    assert report.runners_up([3]) == report.runners_up([2]) == [5, 1, 4]
    assert report.runners_up([3, 5]) == [1, 4]
    assert report.runners_up([7]) == [2, 3, 5, 1, 4]


def test_finalists_come_before_eliminated_candidates():
    """One lucky sample beats no finalist: an eliminated candidate was slower in its rounds."""
    outcomes = (
        Measured(1, 0.1, (0.1,), 0.0, eliminated=1),
        Measured(2, 0.3, (0.3,) * 3, 0.0, eliminated=3),
        Measured(3, 0.5, (0.5,) * 9, 0.0),
        Measured(4, 0.4, (0.4,) * 9, 0.0),
    )
    report = TuneReport(KEY, 4, outcomes, 1.0, {})
    assert report.runners_up([4]) == [3, 2, 1]


# ---------------------------------------------------------------------------------------------
# The store.


def test_the_next_process_gets_the_next_best_config(tmp_path, real_backend):
    """The next best replaces the winner in the store too, so no process tunes or fails again."""

    async def scene():
        here, elsewhere = (Bench(persistent=directory(tmp_path), costs=QUICK) for _ in range(2))
        async with here.chain as chain:
            assert await tuned(chain) == BEST
            await chain.withdraw(call(), Toy(), BEST, OOM)
        async with elsewhere.chain as chain:
            selection = await chain.select(call(), Toy())
        assert (selection.cfg, selection.tier, elsewhere.tunes) == (SECOND, "persistent", 0)
        assert selection.report.outcomes[2] == Failed(BEST, "run", "MemoryError", "too large for this device")

    anyio.run(scene, backend=real_backend)


def test_only_the_withdrawn_record_is_removed(tmp_path, real_backend):
    """A record that another process stored in its place stays, and so do the records of other keys."""

    async def scene():
        bench, store = Bench(persistent=directory(tmp_path), costs=QUICK), directory(tmp_path)
        async with bench.chain as chain:
            for size in (8, 16, 24):
                await tuned(chain, size=size)
            first = (await chain.select(call(8), Toy())).report
            await store.keep(replace(first, winner=GUESS), replace=True)
            for size in (8, 16):
                assert await chain.withdraw(call(size), Toy(), BEST, OOM)
                assert await chain.choose(call(size), Toy()) == SECOND
        found = sorted([record.cfg["m"] async for record in store.records()])
        assert found == [GUESS.m, SECOND.m, BEST.m]

    anyio.run(scene, backend=real_backend)


def test_a_chain_that_stores_nothing_still_withdraws_from_the_store(tmp_path, real_backend):
    """The record is removed, but its replacement is not stored."""

    async def scene():
        async with Bench(persistent=directory(tmp_path), costs=QUICK).chain as chain:
            await tuned(chain)
        reader = Bench(persistent=directory(tmp_path), costs=QUICK, persist_autotune=False)
        async with reader.chain as chain:
            assert (await chain.select(call(), Toy())).tier == "persistent"
            await chain.withdraw(call(), Toy(), BEST, OOM)
            assert await tuned(chain) == SECOND
        assert [record async for record in directory(tmp_path).records()] == []

    anyio.run(scene, backend=real_backend)


def test_a_shipped_record_is_covered_by_the_next_best(tmp_path, real_backend):
    """The read-only record stays, and the layer above it gets the next best."""

    async def scene():
        async with Bench(persistent=directory(tmp_path / "shipped"), costs=QUICK).chain as chain:
            await tuned(chain)
        for cfg in (BEST, SECOND):
            layered = directory(tmp_path / "own", shipped=[tmp_path / "shipped"])
            async with Bench(persistent=layered, costs=QUICK).chain as chain:
                assert await tuned(chain) == cfg
                if cfg == BEST:
                    await chain.withdraw(call(), Toy(), cfg, OOM)
        assert [record.cfg["m"] async for record in directory(tmp_path / "shipped").records()] == [BEST.m]

    anyio.run(scene, backend=real_backend)


@pytest.mark.anyio
async def test_a_stored_record_of_a_withdrawn_config_is_not_an_answer():
    """Another process stores it again; this one ignores that record and tunes without the config."""
    place = Removing()
    bench = Bench(persistent=place)
    async with bench.chain as chain:
        await tuned(chain)
        [address] = place.kept
        bad = place.kept[address]
        await chain.withdraw(call(), Toy(), BEST, OOM)
        place.kept[address] = bad
        bench.cache.clear()
        chain.forbid_reautotune = False
        assert (await chain.explain(call(), Toy())).tiers[3].says == "store missed"
        for tier in ("autotune", "memory"):
            selection = await chain.select(call(), Toy())
            assert (selection.cfg, selection.tier) == (SECOND, tier)


@pytest.mark.anyio
async def test_a_withdrawn_config_is_not_adopted_from_the_claim_holder():
    """This process waits for another's tune, gets the record of what failed here, and tunes for itself."""
    place = Removing()
    bench = Bench(persistent=place, forbid_reautotune=False)
    async with bench.chain as chain:
        await tuned(chain)
        [address] = place.kept
        bad = place.kept.pop(address)
        await chain.withdraw(call(), Toy(), BEST, OOM)
        bench.cache.clear()
        place.kept.clear()
        place.claimed_elsewhere = anyio.Event()

        async def other_process():
            await anyio.sleep(10.0)
            place.kept[address] = bad
            place.claimed_elsewhere.set()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(other_process)
            selection = await chain.select(call(), Toy())
        assert (selection.cfg, selection.tier) == (SECOND, "autotune")


@pytest.mark.anyio
async def test_a_record_that_does_not_answer_is_not_withdrawn():
    """A user's own config answered from memory, so the store's config was not run."""
    place = Removing()
    bench = Bench(persistent=place)
    async with bench.chain as chain:
        await tuned(chain)
        bench.cache.put(*bench.cache.keys()[0], Blocks(7))
        assert not await chain.withdraw(call(), Toy(), BEST, OOM)
    assert place.configs == [BEST]
    assert not bench.sink.named("winner_failed")


@pytest.mark.anyio
async def test_a_record_stored_between_removal_and_replacement_stays():
    """The next best is stored like any result, so it does not replace an earlier one."""

    class Overtaken(Removing):
        async def withdraw(self, stored):
            [address] = self.kept
            removed = await super().withdraw(stored)
            self.kept[address] = Stored(GUESS, stored.report)
            return removed

    place = Overtaken()
    async with Bench(persistent=place).chain as chain:
        await tuned(chain)
        assert await chain.withdraw(call(), Toy(), BEST, OOM)
        assert await tuned(chain) == SECOND
    assert place.configs == [GUESS]


@pytest.mark.anyio
async def test_an_evicted_config_is_withdrawn_from_the_store():
    """Memory has evicted the winner by the time it fails: its stored record is withdrawn, with one event."""
    place = Removing()
    bench = Bench(persistent=place, cache=ConfigCache(max_entries=1))
    async with bench.chain as chain:
        await tuned(chain, size=8)
        await tuned(chain, size=16)
        done = []

        async def fails():
            done.append(await chain.withdraw(call(8), Toy(), BEST, OOM))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(fails)
            tasks.start_soon(fails)
        assert sorted(done) == [False, True]
        assert (place.removed, place.configs) == ([BEST], [BEST])
        assert await tuned(chain, size=8) == SECOND
    assert len(bench.sink.named("winner_failed")) == 1


@pytest.mark.anyio
@pytest.mark.parametrize("make", [GetPut, DictStore])
async def test_a_store_that_cannot_remove_gets_the_next_best_instead(make):
    """A store needs only get and put, or load and save."""
    store = make()
    async with Bench(persistent=store).chain as chain:
        await tuned(chain)
        await chain.withdraw(call(), Toy(), BEST, OOM)
    async with Bench(persistent=store).chain as chain:
        selection = await chain.select(call(), Toy())
    assert (selection.cfg, selection.tier) == (SECOND, "persistent")


@pytest.mark.anyio
@pytest.mark.parametrize("operation", ["get", "delete"])
async def test_a_failing_store_does_not_prevent_a_withdrawal(operation):
    """Memory has the next best, and an event reports the store, whose record remains."""
    place = Removing()
    bench = Bench(persistent=place)
    async with bench.chain as chain:
        await tuned(chain)
        place.broken = {operation}
        assert await chain.withdraw(call(), Toy(), BEST, OOM)
        assert await tuned(chain) == SECOND
    assert place.configs == [BEST]
    assert [event.operation for event in bench.sink.named("store_error")] == ["put"]


@pytest.mark.anyio
async def test_a_withdrawal_waits_for_the_store_no_longer_than_its_timeout():
    """It waits for `store_timeout_s` once; then the store is skipped for a while."""
    place = Removing()
    bench = Bench(persistent=place, store_timeout_s=3.0)
    async with bench.chain as chain:
        await tuned(chain)
        place.hung = {"get"}
        start = anyio.current_time()
        assert await chain.withdraw(call(), Toy(), BEST, OOM)
        assert anyio.current_time() - start == pytest.approx(3.0)
        assert await chain.withdraw(call(), Toy(), SECOND, OOM)
        assert anyio.current_time() - start == pytest.approx(3.0)


@pytest.mark.anyio
async def test_a_withdrawn_winner_is_not_stored_later():
    """The store recovers after the withdrawal, and gets the next best."""
    place = Removing()
    place.broken = {"put"}
    bench = Bench(persistent=place)
    async with bench.chain as chain:
        await tuned(chain)
        await chain.withdraw(call(), Toy(), BEST, OOM)
        place.broken = set()
        await anyio.sleep(60)
        assert place.configs == [SECOND]


@pytest.mark.anyio
@pytest.mark.parametrize("is_open", [True, False], ids=["open", "without async with"])
@pytest.mark.parametrize("step", ["get", "delete", "put"])
async def test_a_caller_cancelled_during_the_stores_part_has_changed_memory(step, is_open):
    """Memory and the event come first. An open chain finishes the store's part."""
    place = Removing()
    bench = Bench(persistent=place)

    async def scene(chain):
        await tuned(chain)
        place.hung = {step}
        with anyio.move_on_after(1.0) as scope:
            await chain.withdraw(call(), Toy(), BEST, OOM)
        assert scope.cancelled_caught or step == "put"
        assert await tuned(chain) == SECOND
        assert place.configs == ([] if step == "put" else [BEST])

    if is_open:
        async with bench.chain as chain:
            await scene(chain)
    else:
        await scene(bench.chain)
    assert len(bench.sink.named("winner_failed")) == 1


@pytest.mark.anyio
async def test_an_open_chain_finishes_a_withdrawal_for_a_cancelled_caller():
    """The store's part belongs to the chain."""

    class Slow(Removing):
        async def withdraw(self, stored):
            await anyio.sleep(2.0)
            return await super().withdraw(stored)

    place = Slow()
    async with Bench(persistent=place).chain as chain:
        await tuned(chain)
        with anyio.move_on_after(1.0):
            await chain.withdraw(call(), Toy(), BEST, OOM)
        await anyio.sleep(5.0)
        assert place.configs == [SECOND]


@pytest.mark.anyio
async def test_a_foreign_tuner_is_not_offered_withdrawn_configs():
    """A tuner that only has `autotune` chooses among the remaining candidates."""

    class Last:
        async def autotune(self, make_fn, args, kwargs, candidates):
            return candidates[-1]

    bench = Bench(tuner=Last())
    async with bench.chain as chain:
        assert await tuned(chain) == BEST
        assert await chain.withdraw(call(), Toy(), BEST, OOM)
        selection = await chain.select(call(), Toy())
        assert (selection.cfg, selection.tier) == (SECOND, "autotune"), "its report knows of no others"


@pytest.mark.anyio
async def test_without_heuristics_and_candidates_there_is_no_answer():
    """If every candidate failed in real calls, that is an error; none of them is used again."""

    class One(NoHeuristic):
        candidates = (BEST,)

    async with Bench().chain as chain:
        await chain.choose(call(), One())
        await chain.withdraw(call(), One(), BEST, OOM)
        with pytest.raises(RuntimeError, match="none of the 1 candidates"):
            await chain.choose(call(), One())


# ---------------------------------------------------------------------------------------------
# Telemetry.


@pytest.mark.anyio
async def test_a_withdrawal_is_an_error_span_a_warning_and_a_counted_failure():
    """The span is a child of the span of the request."""
    captured = CapturedTelemetry()
    async with chain_of(captured) as chain:
        await tuned(chain)
        with captured.tracer.start_as_current_span("request"):
            await chain.withdraw(call(), Toy(), BEST, OOM)
    [tree] = [tree for tree in captured.trees if tree.name == "request"]
    [span] = tree.children
    assert (span.name, span.status, span.children) == ("asel.withdraw", "ERROR", ())
    about = {name: span.attributes[name] for name in ("asel.call", "asel.device", "asel.key")}
    assert span.attributes == {
        **about,
        "asel.op": "toy@v1",
        "asel.config": str(BEST),
        "asel.instead": str(SECOND),
        "asel.tier": "memory",
        "error.type": "MemoryError",
    }
    [entry] = [entry for entry in captured.entries if entry["event"] == "asel.winner_failed"]
    ids = {name: entry[name] for name in ("device", "call_key", "call", "duration_s", "trace_id", "span_id")}
    assert entry == {
        **ids,
        "level": "warning",
        "event": "asel.winner_failed",
        "op_id": "toy@v1",
        "cfg": BEST,
        "tier": "memory",
        "instead": SECOND,
        "error_type": "MemoryError",
        "evidence": "reported by a caller of withdraw",
        "retry_after_s": 300.0,
        "message": "too large for this device",
    }
    labels = (("asel.op", "toy@v1"), ("asel.stage", "run"), ("error.type", "MemoryError"))
    assert captured.metrics()["asel.candidate.duration"][labels] == (1, 0.0)
