"""Memory: states, answers, bounds, threads."""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from asel import ConfigCache, InvalidRequestError, overlay_cache
from asel.kernels.keys import CacheKey
from asel.runtime.shared_work import Shared as Tune
from asel.selection.cache_entries import Done, Hit, Match, Miss, Pending, Provenance, Unchecked

KEY = CacheKey("dev1", "op1", "key1")


def begun(cache: ConfigCache, checksum: str = "a") -> Tune:
    tune = Tune()
    assert cache.begin(KEY, checksum, tune) is tune
    return tune


def done(cfg: object) -> Done:
    return Done(cfg, Match(), Provenance("autotune"))


def test_get_returns_the_config_that_was_put():
    """A config is found under its device, op and call, and under no other key."""
    cache = ConfigCache()
    assert cache.get(*KEY) is None
    cache.put(*KEY, {"block": 128})
    assert cache.get(*KEY) == {"block": 128}
    assert cache.get("dev2", "op1", "key1") is None
    assert cache.keys() == [("dev1", "op1", "key1")]
    assert cache.size() == 1
    cache.put(*KEY, {"block": 256})
    assert (cache.get(*KEY), cache.size()) == ({"block": 256}, 1)
    cache.clear()
    assert (cache.get(*KEY), cache.keys(), cache.size()) == (None, [], 0)


def test_none_is_not_a_config():
    """A None in the cache would look like a miss, so it is refused and changes nothing."""
    cache = ConfigCache()
    with pytest.raises(InvalidRequestError, match="None"):
        cache.put(*KEY, None)
    assert cache.size() == 0


def test_a_put_config_matches_any_checksum():
    """A put has no checksum and answers every look-up of its key."""
    cache = ConfigCache()
    cache.put(*KEY, 1)
    for checksum in (None, "a", "b"):
        assert cache.lookup(KEY, checksum) == Hit(1, Provenance("put"))


def test_lookup_has_four_kinds_of_results():
    """Hit, Unchecked, Pending and Miss."""
    cache = ConfigCache()
    assert isinstance(cache.lookup(KEY, "a"), Miss)
    tune = begun(cache)
    assert cache.lookup(KEY, "a") == Pending(tune)
    cache.finish(KEY, "a", tune, done(1))
    assert cache.lookup(KEY, "a") == Hit(1, Provenance("autotune"))
    cache.load(KEY, "b", 2)
    assert cache.lookup(KEY) == Unchecked(2, "b")


def test_a_loaded_entry_is_verified_once():
    """The first look-up with a checksum verifies the entry; later ones do not change the cache."""
    cache = ConfigCache()
    cache.load(KEY, "a", 1)
    assert isinstance(cache.lookup(KEY), Unchecked)
    assert cache.lookup(KEY, "a").cfg == 1
    generation = cache.generation
    assert cache.lookup(KEY, "a").cfg == 1
    assert cache.lookup(KEY).cfg == 1
    assert cache.generation == generation


def test_a_loaded_entry_of_another_checksum_is_a_miss_reported_once():
    """Every such look-up misses, but only the first one reports the stale entry."""
    cache = ConfigCache()
    cache.load(KEY, "a", 1)
    ((checksum, entry),) = cache.lookup(KEY, "b").stale
    assert (checksum, entry) == ("a", 1)
    assert cache.lookup(KEY, "b") == Miss()
    assert cache.lookup(KEY) == Miss()
    assert cache.get(*KEY) is None


def test_a_stale_entry_still_answers_calls_with_its_checksum():
    """Two versions of a program may share loaded entries: each finds its own."""
    cache = ConfigCache()
    cache.load(KEY, "old", 1)
    assert isinstance(cache.lookup(KEY, "new"), Miss)
    assert cache.lookup(KEY, "old").cfg == 1


def test_loading_never_replaces_an_entry_of_this_process():
    """A loaded entry is older than any answer of this process."""
    cache = ConfigCache()
    tune = begun(cache)
    cache.load(KEY, "a", 9)
    assert cache.lookup(KEY, "a") == Pending(tune)
    cache.finish(KEY, "a", tune, done(1))
    cache.load(KEY, "a", 9)
    assert cache.lookup(KEY, "a").cfg == 1


def test_peek_changes_nothing():
    """After a peek, a loaded entry still has to be verified."""
    cache = ConfigCache()
    cache.load(KEY, "a", 1)
    generation = cache.generation
    assert cache.peek(KEY, "a").cfg == 1
    assert isinstance(cache.peek(KEY, "b"), Miss)
    assert cache.generation == generation
    assert isinstance(cache.lookup(KEY), Unchecked)


def test_entries_of_other_checksums_live_side_by_side():
    """One key, two checksums, two answers; `get` gives the newest."""
    cache = ConfigCache()
    for checksum, cfg in (("a", 1), ("b", 2)):
        cache.finish(KEY, checksum, begun(cache, checksum), done(cfg))
    assert [cache.lookup(KEY, c).cfg for c in "ab"] == [1, 2]
    assert cache.get(*KEY) == 2
    assert (cache.size(), cache.keys()) == (2, [KEY])


def test_a_key_has_one_tune():
    """Looking up and inserting are one step, so a second `begin` returns the first tune."""
    cache = ConfigCache()
    tune = begun(cache)
    assert cache.begin(KEY, "a", Tune()) is tune
    assert cache.pending() == [(KEY, "a", tune)]


def test_a_tune_without_a_result_leaves_no_entry():
    """After a tune without an answer, the key is as if it had never been tuned."""
    cache = ConfigCache()
    cache.finish(KEY, "a", begun(cache), None)
    assert cache.lookup(KEY, "a") == Miss()
    assert (cache.pending(), cache.keys()) == ([], [])


def test_only_the_tune_in_flight_can_finish_an_entry():
    """An older tune that finishes late changes nothing."""
    cache = ConfigCache()
    old = begun(cache)
    cache.finish(KEY, "a", old, None)
    new = begun(cache)
    cache.finish(KEY, "a", old, done(1))
    assert cache.lookup(KEY, "a") == Pending(new)


def test_the_old_answer_serves_until_a_retune_is_done():
    """During a retune, look-ups return the old answer, which stays in force if the retune fails."""
    cache = ConfigCache()
    cache.finish(KEY, "a", begun(cache), done(1))
    retune = begun(cache)
    assert cache.lookup(KEY, "a").cfg == 1
    assert cache.size() == 1
    cache.finish(KEY, "a", retune, None)
    assert cache.lookup(KEY, "a").cfg == 1


def test_a_put_during_a_tune_stays_in_force():
    """The tune's waiters get its answer, later callers the user's, unless the tune was a retune."""
    cache = ConfigCache()
    tune = begun(cache)
    cache.put(*KEY, 7)
    cache.finish(KEY, "a", tune, done(1))
    assert cache.lookup(KEY, "a").cfg == 7
    cache.finish(KEY, "a", begun(cache), done(2), replace_put=True)
    assert cache.lookup(KEY, "a").cfg == 2


def test_clearing_forgets_answers_and_spares_tunes():
    """A tune in flight continues, and its answer is kept."""
    cache = ConfigCache()
    tune = begun(cache)
    cache.finish(KEY, "b", begun(cache, "b"), done(2))
    cache.clear()
    assert cache.was_cleared(KEY)
    assert cache.lookup(KEY, "a") == Pending(tune)
    cache.finish(KEY, "a", tune, done(1))
    assert cache.lookup(KEY, "a").cfg == 1


def test_clearing_during_a_retune_also_forgets_the_old_answer():
    """A cleared answer does not return, not even if the retune fails."""
    cache = ConfigCache()
    cache.finish(KEY, "a", begun(cache), done(1))
    retune = begun(cache)
    cache.clear()
    assert cache.lookup(KEY, "a") == Pending(retune)
    cache.finish(KEY, "a", retune, None)
    assert cache.lookup(KEY, "a") == Miss()


def test_get_asks_overlays_before_memory():
    """The innermost overlay that has the key answers, then the next, then memory."""
    cache = ConfigCache()
    cache.put(*KEY, 1)
    with overlay_cache({KEY: 2}), overlay_cache({("dev1", "op1", "other"): 3}):
        assert cache.get(*KEY) == 2
        with overlay_cache({tuple(KEY): 4}):
            assert cache.get(*KEY) == 4
        assert cache.get(*KEY) == 2
    assert cache.get(*KEY) == 1


def test_the_least_recently_used_go_first():
    """max_entries bounds the answers; get and lookup both count as use."""
    cache = ConfigCache(max_entries=2)
    for name in "ab":
        cache.put("dev", "op", name, name)
    cache.get("dev", "op", "a")
    cache.put("dev", "op", "c", "c")
    assert [key.call_key for key in cache.keys()] == ["a", "c"]
    cache.lookup(("dev", "op", "a"), "any")
    cache.put("dev", "op", "d", "d")
    assert [key.call_key for key in cache.keys()] == ["a", "d"]
    assert not cache.was_cleared(CacheKey("dev", "op", "c"))


def test_a_bound_never_evicts_a_tune():
    """Even in a full cache a tune in flight stays, and its answer is added."""
    cache = ConfigCache(max_entries=1)
    cache.finish(KEY, "a", begun(cache), done(1))
    retune = begun(cache)
    for name in "bcd":
        cache.put("dev", "op", name, name)
    assert cache.size() == 1
    assert cache.lookup(KEY, "a") == Pending(retune)
    cache.finish(KEY, "a", retune, done(2))
    assert (cache.lookup(KEY, "a").cfg, cache.size()) == (2, 1)


@pytest.mark.parametrize("bound", [0, -1])
def test_a_bound_is_at_least_one(bound):
    """A cache without room for any config is a mistake."""
    with pytest.raises(InvalidRequestError, match="max_entries"):
        ConfigCache(max_entries=bound)


@pytest.mark.parametrize("bound", [None, 50])
def test_many_threads_may_use_one_cache(bound):
    """get, put, keys, size, clear, lookup and tunes from eight threads: no error, no lost bound."""
    cache = ConfigCache(max_entries=bound)
    start = threading.Barrier(8)

    def hammer(seed: int) -> None:
        rng = random.Random(seed)
        start.wait()
        for _ in range(1500):
            key = CacheKey("dev", "op", str(rng.randrange(100)))
            match rng.randrange(7):
                case 0 | 1:
                    cache.put(*key, seed)
                case 2:
                    assert cache.get(*key) in (None, *range(8))
                case 3:
                    cache.lookup(key, "a")
                case 4:
                    assert len(cache.keys()) <= cache.size() + 100
                case 5:
                    tune = cache.begin(key, "a", object())
                    cache.finish(key, "a", tune, done(seed))
                case 6:
                    if rng.random() < 0.02:
                        cache.clear()

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(hammer, range(8)))
    assert cache.pending() == []
    assert cache.size() <= (bound or 200)


def test_a_slow_read_of_the_store_does_not_replace_a_newer_answer():
    """While the store was read, memory may have got a newer answer."""
    cache = ConfigCache()
    cache.finish(KEY, "a", begun(cache), done(2))
    assert cache.remember(KEY, "a", 1).cfg == 2
    assert cache.lookup(KEY, "a").cfg == 2
    assert cache.remember(KEY, "b", 1).cfg == 1


def test_a_put_during_a_retune_evicts_no_other_key():
    """The old answer of the key is dropped, which makes enough room."""
    cache = ConfigCache(max_entries=2)
    cache.put("dev", "op", "other", "other")
    cache.finish(KEY, "a", begun(cache), done(1))
    begun(cache)
    cache.put(*KEY, 9)
    assert cache.get("dev", "op", "other") == "other"
    assert cache.size() == 2


def test_a_failed_retune_does_not_make_its_old_answer_new():
    """`get` returns the newest answer, and a failed retune does not change the age of the old one."""
    cache = ConfigCache()
    for checksum, cfg in (("a", "old"), ("b", "new")):
        cache.finish(KEY, checksum, begun(cache, checksum), done(cfg))
    cache.finish(KEY, "a", begun(cache), None)
    assert cache.get(*KEY) == "new"


def test_the_memory_of_cleared_keys_is_bounded():
    """A cache that is filled and cleared again and again does not grow."""
    cache = ConfigCache(max_entries=10)
    for n in range(70_000):
        cache.put("dev", "op", str(n), n)
        if n % 10 == 9:
            cache.clear()
    assert cache.was_cleared(CacheKey("dev", "op", "69999"))
    assert len(cache._cleared) <= 65_536
