"""Memory: one table of what is known and what is on its way."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Generic, Literal

from asel.errors import InvalidRequestError
from asel.kernel import Cfg
from asel.keys import CacheKey, alike
from asel.memo import Memo
from asel.outcomes import TuneReport
from asel.pending import Shared
from asel.scopes import Scope, Stack, any_scope_here

__all__ = [
    "ChecksumState",
    "ConfigCache",
    "Done",
    "Hit",
    "Match",
    "Miss",
    "NoMatch",
    "Pending",
    "Provenance",
    "ToBeVerified",
    "Unchecked",
    "overlay_cache",
]


@dataclass(frozen=True, slots=True)
class Match:
    """The entry's checksum is the one that was asked for."""


@dataclass(frozen=True, slots=True)
class NoMatch:
    """The entry was loaded, and then asked for with another checksum."""


@dataclass(frozen=True, slots=True)
class ToBeVerified:
    """The entry was loaded; the first look-up that knows the checksum settles it."""

    checksum: str


ChecksumState = Match | NoMatch | ToBeVerified


@dataclass(frozen=True, slots=True)
class Provenance(Generic[Cfg]):
    """Where an entry came from."""

    source: Literal["put", "autotune", "persistent"]
    report: TuneReport[Cfg] | None = None
    foreign: bool = False
    """It was measured with other software than there is here."""


@dataclass(frozen=True, slots=True)
class Done(Generic[Cfg]):
    """An entry with an answer."""

    cfg: Cfg
    state: ChecksumState
    provenance: Provenance[Cfg]


@dataclass(frozen=True, slots=True)
class Pending(Generic[Cfg]):
    """An entry whose answer is on its way: the shared tune itself.

    `previous` is what a retune is about to replace; until then it goes on answering.
    """

    tune: Shared[Any]
    previous: Done[Cfg] | None = None


@dataclass(frozen=True, slots=True)
class Hit(Generic[Cfg]):
    cfg: Cfg
    provenance: Provenance[Cfg]


@dataclass(frozen=True, slots=True)
class Unchecked(Generic[Cfg]):
    """There is a loaded entry, and the look-up did not say which checksum it expects."""

    cfg: Cfg
    checksum: str


@dataclass(frozen=True, slots=True)
class Miss(Generic[Cfg]):
    """`stale` are the loaded entries this look-up found to be of another checksum, told once."""

    stale: tuple[tuple[str, Done[Cfg]], ...] = ()


Lookup = Hit[Cfg] | Unchecked[Cfg] | Pending[Cfg] | Miss[Cfg]
Entry = Done[Cfg] | Pending[Cfg]
Checksum = str | None
"""None is the checksum of what a user put: it matches any."""

_MISS: Miss[Any] = Miss()
_overlays: Stack[Mapping[tuple[str, str, str], Any]] = Stack()
without_overlays = _overlays.cleared


class overlay_cache(Scope[Mapping[tuple[str, str, str], Any]]):
    """Answer some keys with given configs, for the current task and those it starts.

    Overlays nest, the innermost that holds a key wins, and nothing is written anywhere. Values of
    None count as absent.
    """

    _stack = _overlays

    def __init__(self, mapping: Mapping[tuple[str, str, str], Any]) -> None:
        self._mapping = dict(mapping)

    def _value(self) -> Mapping[tuple[str, str, str], Any]:
        return self._mapping


def overlaid(key: tuple[str, str, str]) -> Any:
    """Return the config the innermost active overlay has for `key`, or None."""
    if any_scope_here():
        for mapping in reversed(_overlays.values()):
            if (cfg := mapping.get(key)) is not None:
                return cfg
    return None


class ConfigCache(Generic[Cfg]):
    """What this process knows, by key and checksum. Safe to read and write from any thread.

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
        # Least recently used first; kept only where there is a bound.
        self._recency: OrderedDict[tuple[CacheKey, Checksum], None] = OrderedDict()
        # The keys `clear` removed and nothing has replaced: a chain may have been told not to tune them again.
        self._cleared: Memo[bool] = Memo(65_536)
        # The configs that failed in a real call, by key: what others stored or a tune would find is held against them.
        self._withdrawn: Memo[tuple[Cfg, ...]] = Memo(65_536)
        # Moves with every change of an answer, so that whoever remembers one knows when to look again.
        self.generation = 0

    # What users know.

    def get(self, dev: str, op_id: str, call_key: str) -> Cfg | None:
        """Return the newest config for a key, an active overlay's before all, or None."""
        key = CacheKey(dev, op_id, call_key)
        if (cfg := overlaid(key)) is not None:
            return cfg  # type: ignore[no-any-return]
        with self._lock:
            for checksum, entry in reversed(self._table.get(key, {}).items()):
                done = _answering(entry)
                if done is not None and not isinstance(done.state, NoMatch):
                    self.touch(key, checksum)
                    return done.cfg
        return None

    def put(self, dev: str, op_id: str, call_key: str, cfg: Cfg) -> None:
        """Set the config for a key, whatever its checksum, replacing what was known."""
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
            return [key for key, slots in self._table.items() if any(map(_answering, slots.values()))]

    def size(self) -> int:
        """Return the number of configs held."""
        with self._lock:
            return sum(_answering(entry) is not None for slots in self._table.values() for entry in slots.values())

    def clear(self) -> None:
        """Forget every config. Tunes in flight go on and will be remembered."""
        with self._lock:
            for key, slots in list(self._table.items()):
                for checksum, entry in list(slots.items()):
                    if _answering(entry) is not None:
                        self._cleared.put(key, True)
                    if isinstance(entry, Pending):
                        self._drop_previous(key, checksum, entry)
                    else:
                        self._forget(key, checksum)
            self.generation += 1

    # What the chain asks.

    def lookup(self, key: tuple[str, str, str], checksum: str | None = None) -> Lookup[Cfg]:
        """Return what is known of a key, settling loaded entries the first time a checksum is known."""
        key = _as_key(key)
        with self._lock:
            slots = self._table.get(key)
            if not slots:
                return _MISS
            if checksum is None:
                return self._newest(key, slots)
            for candidate in (None, checksum):  # what a user put comes first
                entry = slots.get(candidate)
                if entry is None:
                    continue
                done = _answering(entry)
                if done is None:
                    return entry  # type: ignore[return-value]
                if not isinstance(done.state, Match):
                    done = self._settle(key, checksum, entry, Match())
                self.touch(key, candidate)
                return Hit(done.cfg, done.provenance)
            return self._missed(key, slots)

    def peek(self, key: tuple[str, str, str], checksum: str) -> Lookup[Cfg]:
        """Return what `lookup` would, changing nothing."""
        with self._lock:
            slots = self._table.get(_as_key(key), {})
            entry = slots.get(None) or slots.get(checksum)
            done = None if entry is None else _answering(entry)
            if done is not None:
                return Hit(done.cfg, done.provenance)
            return _MISS if entry is None else entry  # type: ignore[return-value]

    def load(self, key: tuple[str, str, str], checksum: str, cfg: Cfg, report: TuneReport[Cfg] | None = None) -> None:
        """Take in an entry from elsewhere; its checksum is still to be verified."""
        key = CacheKey(*key)
        with self._lock:
            if self._table.get(key, {}).get(checksum) is None:
                self._write(key, checksum, Done(cfg, ToBeVerified(checksum), Provenance("persistent", report)))

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
            known = None if entry is None else _answering(entry)
            if known is not None and isinstance(known.state, Match) and known.provenance.foreign <= foreign:
                return known
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
        self, key: CacheKey, checksum: str, cfg: Cfg, successor: Callable[[Done[Cfg]], Done[Cfg] | None]
    ) -> tuple[bool, Done[Cfg] | None]:
        """Take out what answers for a key if it is `cfg`; return whether it was, and what took its place.

        Looking and replacing are one step, so of all who saw it fail one withdraws it. Unlike `clear`, this
        does not keep a key from being tuned again.
        """
        with self._lock:
            for slot in (None, checksum):  # in the order in which they answer
                entry = self._table.get(key, {}).get(slot)
                done = None if entry is None else _answering(entry)
                if entry is None or done is None:
                    continue
                if not alike(done.cfg, cfg):
                    break
                self.bar(key, cfg)
                instead = successor(done)
                self._succeed(key, slot, entry, instead)
                return True, instead
            return False, None

    def bar(self, key: CacheKey, cfg: Cfg) -> bool:
        """Have no tune try `cfg` for this key again, and no store bring it back; False where that was so already."""
        with self._lock:
            if self.is_barred(key, cfg):
                return False
            self._withdrawn.put(key, (*self.withdrawn(key), cfg))
            return True

    def is_barred(self, key: CacheKey, cfg: Cfg) -> bool:
        return any(alike(failed, cfg) for failed in self.withdrawn(key))

    def withdrawn(self, key: CacheKey) -> tuple[Cfg, ...]:
        """Return the configs of a key that failed in a real call; `clear` does not forget them."""
        return self._withdrawn.get(key) or ()

    def begin(self, key: CacheKey, checksum: str, make: Callable[[], Shared[Any]]) -> tuple[Shared[Any], bool]:
        """Return the tune in flight for a key, and whether it was begun just now.

        Looking and inserting are one step, so a key never has two.
        """
        with self._lock:
            entry = self._table.setdefault(key, {}).get(checksum)
            if isinstance(entry, Pending):
                return entry.tune, False
            tune = make()
            self._table[key][checksum] = Pending(tune, entry)
            return tune, True

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
            answers = [_answering(entry) for entry in self._table.get(key, {}).values()]
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
            done = _answering(entry)
            if done is None:
                return entry  # type: ignore[return-value]
            if isinstance(done.state, Match):
                self.touch(key, checksum)
                return Hit(done.cfg, done.provenance)
            if isinstance(done.state, ToBeVerified):
                return Unchecked(done.cfg, done.state.checksum)
        return _MISS

    def _missed(self, key: CacheKey, slots: dict[Checksum, Entry[Cfg]]) -> Miss[Cfg]:
        stale = []
        for checksum, entry in list(slots.items()):
            done = _answering(entry)
            if done is not None and isinstance(done.state, ToBeVerified):
                stale.append((done.state.checksum, done))
                self._settle(key, checksum, entry, NoMatch())
        return Miss(tuple(stale)) if stale else _MISS

    def _settle(self, key: CacheKey, checksum: Checksum, entry: Entry[Cfg], state: ChecksumState) -> Done[Cfg]:
        done = _answering(entry)
        assert done is not None
        settled = replace(done, state=state)
        self._table[key][checksum] = settled if isinstance(entry, Done) else replace(entry, previous=settled)
        self.generation += 1
        return settled

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
        entry = self._table[key][checksum]
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


def _answering(entry: Entry[Cfg]) -> Done[Cfg] | None:
    return entry if isinstance(entry, Done) else entry.previous
