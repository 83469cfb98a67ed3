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
    answer_of,
    find_entry,
    is_better,
    sorted_by_age,
)
from asel.selection.overlays import overlaid
from asel.selection.quarantine import Quarantine
from asel.tuning.outcomes import TuneReport

__all__ = ["ConfigCache"]


_MISS: Miss[Any] = Miss()


class ConfigCache(Generic[Cfg]):
    """The answers and pending tunes of this process, by key and checksum. Any thread may read and write it.

    `max_entries` bounds the number of answers; the least recently used are evicted first. Tunes in flight do not
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
        # Least recently used first; empty without `max_entries`.
        self._recency: OrderedDict[tuple[CacheKey, Checksum], None] = OrderedDict()
        # The keys that `clear` removed and that have no config since: `forbid_reautotune` applies to them.
        self._cleared: BoundedMemo[bool] = BoundedMemo(65_536)
        # The configs that failed in real calls; neither a stored record nor a tune brings them back while barred.
        self.quarantine: Quarantine[Cfg] = Quarantine()
        # Increases with every change of an answer; a `MemoryAnswer` compares it.
        self.generation = 0
        renew_after_fork(self)

    def renew(self) -> None:
        """In the child of a fork: make a new lock, and drop pending tunes, which only the parent could end."""
        self._lock = threading.RLock()
        for key, checksum, tune in self.pending():
            self.finish(key, checksum, tune, None)

    def get(self, dev: str, op_id: str, call_key: str) -> Cfg | None:
        """Return the config of an active overlay for a key, or else the newest in memory, or None."""
        key = CacheKey(dev, op_id, call_key)
        if (cfg := overlaid(key)) is not None:
            return cfg  # type: ignore[no-any-return]
        with self._lock:
            answers = [(checksum, answer_of(entry)) for checksum, entry in self._table.get(key, {}).items()]
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
                else:  # the tune continues, but the old answer from before it is dropped
                    self._drop_previous(key, checksum, entry)
            self._write(key, None, Done(cfg, Match(), Provenance("put")))

    def keys(self) -> list[CacheKey]:
        """Return the keys that have a config."""
        with self._lock:
            return [key for key, slots in self._table.items() if any(map(answer_of, slots.values()))]

    def size(self) -> int:
        """Return the number of configs held."""
        with self._lock:
            return sum(answer_of(entry) is not None for slots in self._table.values() for entry in slots.values())

    def key_count(self) -> int:
        """Return the number of keys that have a config or a tune in flight, without counting them one by one."""
        return len(self._table)

    def holds(self, key: CacheKey) -> bool:
        """Return whether a key has an entry, for any checksum."""
        return key in self._table

    def clear(self) -> None:
        """Forget every config. Tunes in flight continue, and their results are kept."""
        with self._lock:
            for key, slots in list(self._table.items()):
                for checksum, entry in list(slots.items()):
                    if answer_of(entry) is not None:
                        self._cleared.put(key, True)
                    if isinstance(entry, Pending):
                        self._drop_previous(key, checksum, entry)
                    else:
                        self._forget(key, checksum)
            self.generation += 1

    def lookup(
        self, key: tuple[str, str, str], checksum: str | None = None, among: tuple[Cfg, ...] = ()
    ) -> Lookup[Cfg]:
        """Return the entry of a key; the first look-up with a checksum verifies loaded entries.

        `among` has the candidates; a loaded config counts only if it is one of them.
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
                if (done := answer_of(entry)) is None:
                    return entry  # type: ignore[return-value]
                if not isinstance(done.cfg, Unread):
                    if not isinstance(done.state, Match):
                        self._settle(key, slot, entry, replace(done, state=Match()))
                    self.touch(key, slot)
                    return Hit(done.cfg, done.provenance)
            cfg = done.cfg.read(among)  # outside the lock, since it may call a user's loader
            with self._lock:
                if self._table.get(key, {}).get(slot) is entry:
                    self._settle(key, slot, entry, None if cfg is None else replace(done, cfg=cfg, state=Match()))

    def peek(self, key: tuple[str, str, str], checksum: str, among: tuple[Cfg, ...] | None = None) -> Lookup[Cfg]:
        """Return the result of `lookup`, changing nothing. Without `among`, an `Unread` is `Unchecked`."""
        with self._lock:
            _, entry = find_entry(self._table.get(_as_key(key), {}), checksum)
        done = answer_of(entry)
        if done is None:
            return _MISS if entry is None else entry  # type: ignore[return-value]
        if not isinstance(done.cfg, Unread):
            return Hit(done.cfg, done.provenance)
        if among is None:
            return Unchecked(done.cfg.value, checksum)
        cfg = done.cfg.read(among)
        return _MISS if cfg is None else Hit(cfg, done.provenance)

    def load(self, key: tuple[str, str, str], checksum: str | None, cfg: Any, *, foreign: bool = False) -> bool:
        """Add a stored config, unless memory has a better one; return whether there is room for more.

        It may be an `Unread`. A look-up will verify its checksum; without a checksum, it matches any. Nothing is
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
                    self._table[key] = sorted_by_age(self._table[key])
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
        """Keep a verified record of a store and return it; or return the answer that memory has got meanwhile."""
        with self._lock:
            entry = self._table.get(key, {}).get(checksum)
            done = answer_of(entry)
            lacks_report = done is not None and done.provenance == Provenance("persistent", None, foreign)
            is_settled = done is not None and isinstance(done.state, Match) and done.provenance.foreign <= foreign
            if done is not None and is_settled and not (lacks_report and same_config(done.cfg, cfg)):
                return done
            done = Done(cfg, Match(), Provenance("persistent", report, foreign))
            if isinstance(entry, Pending):  # a tune in flight stays in flight
                self._table[key][checksum] = replace(entry, previous=done)
                self.generation += 1  # not in `_recency`: the tune will replace it
            else:
                self._write(key, checksum, done)
            return done

    def adopt(self, key: CacheKey, checksum: str, cfg: Cfg, report: TuneReport[Cfg] | None = None) -> None:
        """Replace the result of this process's tune by another process's answer, if the result is still in force."""
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
        """Remove a key's answer if it is `cfg`; return whether it was, and the answer that replaces it.

        The check and the removal are one step, so if several callers saw the config fail, one of them withdraws it.
        Unlike after `clear`, the key may be tuned again.
        """
        with self._lock:
            slot, entry = find_entry(self._table.get(key, {}), checksum, answered=True)
            done = answer_of(entry)
            if entry is None or done is None or not same_config(done.cfg, cfg):
                return False, None
            self.quarantine.bar(key, cfg, for_s)
            instead = successor(done)
            self._replace(key, slot, entry, instead)
            return True, instead

    def try_again(self, key: CacheKey) -> None:
        """Have the next call of a key begin a tune of it, because its config is no longer barred."""
        self.quarantine.mark_due(key)
        with self._lock:
            self.generation += 1

    def begin(self, key: CacheKey, checksum: str, tune: Shared[Any]) -> Shared[Any]:
        """Add a tune and return it; if the key has one in flight, return that one instead."""
        with self._lock:
            entry = self._table.setdefault(key, {}).get(checksum)
            if isinstance(entry, Pending):
                return entry.tune
            self._table[key][checksum] = Pending(tune, entry)
            return tune

    def tune_of(self, key: CacheKey, checksum: str) -> Shared[Any] | None:
        """Return the tune in flight, even if an older config still answers."""
        entry = self._table.get(key, {}).get(checksum)
        return entry.tune if isinstance(entry, Pending) else None

    def finish(
        self, key: CacheKey, checksum: str, tune: Shared[Any], done: Done[Cfg] | None, *, replace_put: bool = False
    ) -> None:
        """Replace a tune in flight by its answer; without one, by the answer from before the tune.

        A config that a user put meanwhile stays in force, unless `replace_put` is set, as for a retune.
        """
        with self._lock:
            entry = self._table.get(key, {}).get(checksum)
            if not isinstance(entry, Pending) or entry.tune is not tune:
                return
            if done is None and entry.previous is not None:
                self._table[key][checksum] = entry.previous  # its age does not change
                return
            if replace_put and done is not None:
                self._forget(key, None)
            self._forget(key, checksum)
            if done is not None:
                self._write(key, checksum, done)

    def reports(self, key: CacheKey) -> list[TuneReport[Cfg]]:
        """Return the reports of this key's tunes for all checksums, oldest first."""
        with self._lock:
            answers = [answer_of(entry) for entry in self._table.get(key, {}).values()]
        return [done.provenance.report for done in answers if done is not None and done.provenance.report is not None]

    def was_cleared(self, key: CacheKey) -> bool:
        """Return whether `clear` removed a key and it has had no config since."""
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
        """Mark the answer for a key and checksum as just used."""
        if self.max_entries is not None:
            with self._lock:
                for slot in ((key, None), (key, checksum)):
                    if slot in self._recency:
                        self._recency.move_to_end(slot)

    def _newest(self, key: CacheKey, slots: dict[Checksum, Entry[Cfg]]) -> Lookup[Cfg]:
        for checksum, entry in reversed(slots.items()):
            done = answer_of(entry)
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
            done = answer_of(entry)
            if done is not None and isinstance(done.state, ToBeVerified):
                stale.append((done.state.checksum, done.cfg.value if isinstance(done.cfg, Unread) else done.cfg))
                self._settle(key, checksum, entry, replace(done, state=NoMatch()))
        return Miss(tuple(stale)) if stale else _MISS

    def _settle(self, key: CacheKey, checksum: Checksum, entry: Entry[Cfg], settled: Done[Cfg] | None) -> None:
        """Replace a loaded entry by its verified answer, or remove it if it cannot be used."""
        if settled is None:
            self._replace(key, checksum, entry, None)
        else:
            self._table[key][checksum] = settled if isinstance(entry, Done) else replace(entry, previous=settled)
            self.generation += 1

    def _write(self, key: CacheKey, checksum: Checksum, done: Done[Cfg]) -> None:
        slots = self._table.setdefault(key, {})
        slots.pop(checksum, None)  # the newest entry is last
        slots[checksum] = done
        self._cleared.forget(key)
        self.generation += 1
        if self.max_entries is not None:
            self._recency[(key, checksum)] = None
            self._recency.move_to_end((key, checksum))
            while len(self._recency) > self.max_entries:
                self._evict(*next(iter(self._recency)))

    def _replace(self, key: CacheKey, checksum: Checksum, entry: Entry[Cfg], done: Done[Cfg] | None) -> None:
        """Replace an entry's answer, or remove it if `done` is None; a tune in flight continues."""
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
        entry = self._table.get(key, {}).get(checksum)  # missing if a fork copied the table during `_forget`
        if isinstance(entry, Pending):  # during a retune, only the old answer is evicted
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
