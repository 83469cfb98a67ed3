"""Memory: one table of answers and pending tunes."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Generic

from asel.errors import InvalidRequestError
from asel.kernels.candidates import same_config
from asel.kernels.kernel import Cfg
from asel.kernels.keys import CacheKey
from asel.runtime.bounded_memo import BoundedMemo
from asel.runtime.fork import renew_after_fork
from asel.runtime.shared_work import Shared
from asel.selection.cache_entries import (
    Checksum,
    Done,
    Entry,
    Hit,
    Lookup,
    Match,
    Miss,
    NoMatch,
    Pending,
    Provenance,
    ToBeVerified,
    Unchecked,
    Unread,
    answering,
    by_age,
    find_entry,
    is_better,
)
from asel.selection.overlays import overlaid
from asel.selection.quarantine import Quarantine
from asel.tuning.outcomes import TuneReport

__all__ = ["ConfigCache"]


_MISS: Miss[Any] = Miss()


class ConfigCache(Generic[Cfg]):
    """The answers and pending tunes of this process, by key and checksum. Any thread may read and write it.

    `max_entries` bounds the answers held; the least recently used go first. Tunes in flight do not
    count and are never evicted.
    """

    def __init__(self, max_entries: int | None = None) -> None:
        if max_entries is not None and max_entries < 1:
            raise InvalidRequestError(
                f"ConfigCache: max_entries={max_entries} must be at least 1, or None for no bound"
            )
        self.max_entries = max_entries
        self._lock = threading.RLock()
        self._table: dict[CacheKey, dict[Checksum, Entry[Cfg]]] = {}
        # Least recently used first; kept only if there is a bound.
        self._recency: OrderedDict[tuple[CacheKey, Checksum], None] = OrderedDict()
        # The keys `clear` removed and nothing has replaced: a chain may have been told not to tune them again.
        self._cleared: BoundedMemo[bool] = BoundedMemo(65_536)
        # The configs that failed in a real call: while barred, neither a stored record nor a tune brings them back.
        self.quarantine: Quarantine[Cfg] = Quarantine()
        # Moves with every change of an answer, so that a remembered answer is known to be stale.
        self.generation = 0
        renew_after_fork(self)

    def renew(self) -> None:
        """In the child of a fork: a new lock, and no tune that only the parent could end."""
        self._lock = threading.RLock()
        for key, checksum, tune in self.pending():
            self.finish(key, checksum, tune, None)

    def get(self, dev: str, op_id: str, call_key: str) -> Cfg | None:
        """Return the newest config for a key, an active overlay's before all, or None."""
        key = CacheKey(dev, op_id, call_key)
        if (cfg := overlaid(key)) is not None:
            return cfg  # type: ignore[no-any-return]
        with self._lock:
            answers = [(checksum, answering(entry)) for checksum, entry in self._table.get(key, {}).items()]
        for checksum, done in reversed(answers):
            if done is not None and not isinstance(done.state, NoMatch):
                found: Cfg | None = done.cfg.read(()) if isinstance(done.cfg, Unread) else done.cfg
                if found is not None:
                    self.touch(key, checksum)
                    return found
        return None

    def put(self, dev: str, op_id: str, call_key: str, cfg: Cfg) -> None:
        """Set the config for a key, for every checksum, replacing earlier answers."""
        if cfg is None:
            raise InvalidRequestError(f"ConfigCache.put: cfg for {op_id!r} is None, which means no config")
        key = CacheKey(dev, op_id, call_key)
        with self._lock:
            for checksum, entry in list(self._table.get(key, {}).items()):
                if isinstance(entry, Done):
                    self._forget(key, checksum)
                else:  # the tune goes on for its waiters, but no longer answers with an older config
                    self._drop_previous(key, checksum, entry)
            self._write(key, None, Done(cfg, Match(), Provenance("put")))

    def keys(self) -> list[CacheKey]:
        """Return the keys that have a config."""
        with self._lock:
            return [key for key, slots in self._table.items() if any(map(answering, slots.values()))]

    def size(self) -> int:
        """Return the number of configs held."""
        with self._lock:
            return sum(answering(entry) is not None for slots in self._table.values() for entry in slots.values())

    def key_count(self) -> int:
        """Return the number of keys that have a config or a tune in flight, without counting them one by one."""
        return len(self._table)

    def holds(self, key: CacheKey) -> bool:
        """Tell whether a key has an entry, for any checksum."""
        return key in self._table

    def clear(self) -> None:
        """Forget every config. Tunes in flight go on and will be remembered."""
        with self._lock:
            for key, slots in list(self._table.items()):
                for checksum, entry in list(slots.items()):
                    if answering(entry) is not None:
                        self._cleared.put(key, True)
                    if isinstance(entry, Pending):
                        self._drop_previous(key, checksum, entry)
                    else:
                        self._forget(key, checksum)
            self.generation += 1

    def lookup(
        self, key: tuple[str, str, str], checksum: str | None = None, among: tuple[Cfg, ...] = ()
    ) -> Lookup[Cfg]:
        """Return the entry of a key; the first look-up with a checksum settles loaded entries.

        `among` are the candidates, one of which a loaded config has to be.
        """
        key = _as_key(key)
        while True:
            with self._lock:
                slots = self._table.get(key)
                if not slots:
                    return _MISS
                if checksum is None:
                    return self._newest(key, slots)
                slot, entry = find_entry(slots, checksum)
                if entry is None:
                    return self._missed(key, slots)
                if (done := answering(entry)) is None:
                    return entry  # type: ignore[return-value]
                if not isinstance(done.cfg, Unread):
                    if not isinstance(done.state, Match):
                        self._settle(key, slot, entry, replace(done, state=Match()))
                    self.touch(key, slot)
                    return Hit(done.cfg, done.provenance)
            cfg = done.cfg.read(among)  # without the lock: it may call a user's loader
            with self._lock:
                if self._table.get(key, {}).get(slot) is entry:
                    self._settle(key, slot, entry, None if cfg is None else replace(done, cfg=cfg, state=Match()))

    def peek(self, key: tuple[str, str, str], checksum: str, among: tuple[Cfg, ...] | None = None) -> Lookup[Cfg]:
        """Return what `lookup` would, changing nothing; without `among`, an unread entry is `Unchecked`."""
        with self._lock:
            _, entry = find_entry(self._table.get(_as_key(key), {}), checksum)
        done = answering(entry)
        if done is None:
            return _MISS if entry is None else entry  # type: ignore[return-value]
        if not isinstance(done.cfg, Unread):
            return Hit(done.cfg, done.provenance)
        if among is None:
            return Unchecked(done.cfg.value, checksum)
        cfg = done.cfg.read(among)
        return _MISS if cfg is None else Hit(cfg, done.provenance)

    def load(self, key: tuple[str, str, str], checksum: str | None, cfg: Any, *, foreign: bool = False) -> bool:
        """Take in a config from elsewhere, if nothing better is known; return whether there is room for more.

        It may be an `Unread` one. Its checksum is still to be verified; without one, it matches any. Nothing is
        evicted for it.
        """
        key = _as_key(key)
        loaded = Done(cfg, ToBeVerified(checksum or ""), Provenance("persistent", foreign=foreign))
        with self._lock:
            has_room = self.max_entries is None or len(self._recency) < self.max_entries
            before = self._table.get(key, {}).get(checksum)
            if before is None:
                if has_room:
                    self._write(key, checksum, loaded)
                    self._table[key] = by_age(self._table[key])
            elif isinstance(before, Done) and is_better(loaded, before):
                self._write(key, checksum, loaded)
            return has_room

    def remember(
        self,
        key: CacheKey,
        checksum: str,
        cfg: Cfg,
        report: TuneReport[Cfg] | None = None,
        *,
        foreign: bool = False,
    ) -> Done[Cfg]:
        """Keep what a store had, verified; or return what has become known since it was asked."""
        with self._lock:
            entry = self._table.get(key, {}).get(checksum)
            done = answering(entry)
            lacks_report = done is not None and done.provenance == Provenance("persistent", None, foreign)
            is_settled = done is not None and isinstance(done.state, Match) and done.provenance.foreign <= foreign
            if done is not None and is_settled and not (lacks_report and same_config(done.cfg, cfg)):
                return done
            done = Done(cfg, Match(), Provenance("persistent", report, foreign))
            if isinstance(entry, Pending):  # a tune in flight stays in flight
                self._table[key][checksum] = replace(entry, previous=done)
                self.generation += 1  # no place in the order of use: it lasts until the tune ends
            else:
                self._write(key, checksum, done)
            return done

    def adopt(self, key: CacheKey, checksum: str, cfg: Cfg, report: TuneReport[Cfg] | None = None) -> None:
        """Take another process's answer in the place of what a tune of ours found, if that still stands."""
        with self._lock:
            entry = self._table.get(key, {}).get(checksum)
            if isinstance(entry, Done) and entry.provenance.source == "autotune":
                self._write(key, checksum, Done(cfg, Match(), Provenance("persistent", report)))

    def withdraw(
        self,
        key: CacheKey,
        checksum: str,
        cfg: Cfg,
        successor: Callable[[Done[Cfg]], Done[Cfg] | None],
        for_s: float = 300.0,
    ) -> tuple[bool, Done[Cfg] | None]:
        """Take out what answers for a key if it is `cfg`; return whether it was, and what took its place.

        Looking and replacing are one step, so of all callers that saw it fail, one withdraws it. Unlike `clear`, this
        does not keep a key from being tuned again.
        """
        with self._lock:
            slot, entry = find_entry(self._table.get(key, {}), checksum, answered=True)
            done = answering(entry)
            if entry is None or done is None or not same_config(done.cfg, cfg):
                return False, None
            self.quarantine.bar(key, cfg, for_s)
            instead = successor(done)
            self._succeed(key, slot, entry, instead)
            return True, instead

    def try_again(self, key: CacheKey) -> None:
        """Have the next walk for a key begin a tune of it: a config that was barred may run again."""
        self.quarantine.mark_due(key)
        with self._lock:
            self.generation += 1

    def begin(self, key: CacheKey, checksum: str, tune: Shared[Any]) -> Shared[Any]:
        """Take in a tune, and return it; or the one that is in flight already, since a key never has two."""
        with self._lock:
            entry = self._table.setdefault(key, {}).get(checksum)
            if isinstance(entry, Pending):
                return entry.tune
            self._table[key][checksum] = Pending(tune, entry)
            return tune

    def tune_of(self, key: CacheKey, checksum: str) -> Shared[Any] | None:
        """Return the tune in flight, also if an older config still answers."""
        entry = self._table.get(key, {}).get(checksum)
        return entry.tune if isinstance(entry, Pending) else None

    def finish(
        self, key: CacheKey, checksum: str, tune: Shared[Any], done: Done[Cfg] | None, *, replace_put: bool = False
    ) -> None:
        """Replace a tune in flight by its answer, or by what was there before it.

        What a user put meanwhile stays in force, unless the tune was asked for on purpose
        (`replace_put`).
        """
        with self._lock:
            entry = self._table.get(key, {}).get(checksum)
            if not isinstance(entry, Pending) or entry.tune is not tune:
                return
            if done is None and entry.previous is not None:
                self._table[key][checksum] = entry.previous  # in its old place: it is no newer than it was
                return
            if replace_put and done is not None:
                self._forget(key, None)
            self._forget(key, checksum)
            if done is not None:
                self._write(key, checksum, done)

    def reports(self, key: CacheKey) -> list[TuneReport[Cfg]]:
        """Return the reports of this key's tunes, oldest first, whatever their checksum."""
        with self._lock:
            answers = [answering(entry) for entry in self._table.get(key, {}).values()]
        return [done.provenance.report for done in answers if done is not None and done.provenance.report is not None]

    def was_cleared(self, key: CacheKey) -> bool:
        """Tell whether the user removed a key and nothing has replaced it."""
        return self._cleared.get(key) is not None

    def pending(self) -> list[tuple[CacheKey, str, Shared[Any]]]:
        """Return the tunes in flight."""
        with self._lock:
            return [
                (key, checksum or "", entry.tune)
                for key, slots in self._table.items()
                for checksum, entry in slots.items()
                if isinstance(entry, Pending)
            ]

    def touch(self, key: CacheKey, checksum: Checksum) -> None:
        """Count what answers for a key and checksum as used just now."""
        if self.max_entries is not None:
            with self._lock:
                for slot in ((key, None), (key, checksum)):
                    if slot in self._recency:
                        self._recency.move_to_end(slot)

    def _newest(self, key: CacheKey, slots: dict[Checksum, Entry[Cfg]]) -> Lookup[Cfg]:
        for checksum, entry in reversed(slots.items()):
            done = answering(entry)
            if done is None:
                return entry  # type: ignore[return-value]
            if isinstance(done.state, Match):
                self.touch(key, checksum)
                return Hit(done.cfg, done.provenance)
            if isinstance(done.state, ToBeVerified):
                cfg = done.cfg.value if isinstance(done.cfg, Unread) else done.cfg
                return Unchecked(cfg, done.state.checksum)
        return _MISS

    def _missed(self, key: CacheKey, slots: dict[Checksum, Entry[Cfg]]) -> Miss[Cfg]:
        stale = []
        for checksum, entry in list(slots.items()):
            done = answering(entry)
            if done is not None and isinstance(done.state, ToBeVerified):
                stale.append((done.state.checksum, done.cfg.value if isinstance(done.cfg, Unread) else done.cfg))
                self._settle(key, checksum, entry, replace(done, state=NoMatch()))
        return Miss(tuple(stale)) if stale else _MISS

    def _settle(self, key: CacheKey, checksum: Checksum, entry: Entry[Cfg], settled: Done[Cfg] | None) -> None:
        """Put a loaded entry's verified answer in its place, or nothing, if it cannot be used."""
        if settled is None:
            self._succeed(key, checksum, entry, None)
        else:
            self._table[key][checksum] = settled if isinstance(entry, Done) else replace(entry, previous=settled)
            self.generation += 1

    def _write(self, key: CacheKey, checksum: Checksum, done: Done[Cfg]) -> None:
        slots = self._table.setdefault(key, {})
        slots.pop(checksum, None)  # so that the newest is last
        slots[checksum] = done
        self._cleared.forget(key)
        self.generation += 1
        if self.max_entries is not None:
            self._recency[(key, checksum)] = None
            self._recency.move_to_end((key, checksum))
            while len(self._recency) > self.max_entries:
                self._evict(*next(iter(self._recency)))

    def _succeed(self, key: CacheKey, checksum: Checksum, entry: Entry[Cfg], done: Done[Cfg] | None) -> None:
        """Put what comes after an answer in its place, or nothing; a tune in flight stays in flight."""
        if isinstance(entry, Done) and done is None:
            self._forget(key, checksum)
        elif isinstance(entry, Done) and done is not None:
            self._write(key, checksum, done)
        elif isinstance(entry, Pending) and done is None:
            self._drop_previous(key, checksum, entry)
        elif isinstance(entry, Pending):
            self._table[key][checksum] = replace(entry, previous=done)
            self.generation += 1

    def _evict(self, key: CacheKey, checksum: Checksum) -> None:
        entry = self._table.get(key, {}).get(checksum)  # gone, if a fork copied the table within `_forget`
        if isinstance(entry, Pending):  # a retune is under way: its old answer goes, the tune stays
            self._drop_previous(key, checksum, entry)
        else:
            self._forget(key, checksum)

    def _drop_previous(self, key: CacheKey, checksum: Checksum, entry: Pending[Cfg]) -> None:
        self._table[key][checksum] = replace(entry, previous=None)
        self._recency.pop((key, checksum), None)
        self.generation += 1

    def _forget(self, key: CacheKey, checksum: Checksum) -> None:
        slots = self._table.get(key, {})
        if slots.pop(checksum, None) is not None:
            self.generation += 1
        self._recency.pop((key, checksum), None)
        if not slots:
            self._table.pop(key, None)


def _as_key(key: tuple[str, str, str]) -> CacheKey:
    return key if type(key) is CacheKey else CacheKey(*key)
