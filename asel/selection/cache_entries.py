"""The entries of memory, which are answers or pending tunes, and the results of a look-up."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Generic, Literal

from asel.kernels.kernel import Cfg
from asel.runtime.shared_work import Shared
from asel.tuning.outcomes import TuneReport

__all__ = [
    "Checksum",
    "ChecksumState",
    "Done",
    "Entry",
    "Hit",
    "Lookup",
    "Match",
    "Miss",
    "NoMatch",
    "Pending",
    "Provenance",
    "ToBeVerified",
    "Unchecked",
    "Unread",
    "answer_of",
    "find_entry",
    "is_better",
    "sorted_by_age",
]


class Unread(ABC):
    """A config that a store has listed. It is decoded once a call of its kernel brings the candidates."""

    __slots__ = ()

    @property
    @abstractmethod
    def created(self) -> float:
        """The time when it was stored, in seconds since the epoch."""

    @property
    @abstractmethod
    def value(self) -> Any:
        """The config as JSON."""

    @abstractmethod
    def read(self, among: tuple[Any, ...]) -> Any:
        """Return the config; None if it cannot be used, for instance because it is not among the candidates."""


@dataclass(frozen=True, slots=True)
class Match:
    """The entry's checksum is the expected one."""


@dataclass(frozen=True, slots=True)
class NoMatch:
    """The entry was loaded, and a look-up has found that its checksum is not the expected one."""


@dataclass(frozen=True, slots=True)
class ToBeVerified:
    """The entry was loaded; the first look-up with a checksum decides whether it matches."""

    checksum: str


ChecksumState = Match | NoMatch | ToBeVerified


@dataclass(frozen=True, slots=True)
class Provenance(Generic[Cfg]):
    """The origin of an entry."""

    source: Literal["put", "autotune", "persistent"]
    report: TuneReport[Cfg] | None = None
    foreign: bool = False
    """Whether it was measured in another software environment."""


@dataclass(frozen=True, slots=True)
class Done(Generic[Cfg]):
    """An entry with an answer. Until it is verified, its config may be an `Unread`."""

    cfg: Cfg
    state: ChecksumState
    provenance: Provenance[Cfg]


@dataclass(frozen=True, slots=True)
class Pending(Generic[Cfg]):
    """An entry whose answer is being tuned: the shared tune itself.

    During a retune, `previous` is the old answer, which remains in force until the tune ends.
    """

    tune: Shared[Any]
    previous: Done[Cfg] | None = None


@dataclass(frozen=True, slots=True)
class Hit(Generic[Cfg]):
    cfg: Cfg
    provenance: Provenance[Cfg]


@dataclass(frozen=True, slots=True)
class Unchecked(Generic[Cfg]):
    """There is a loaded entry, and the look-up had no checksum to verify it."""

    cfg: Cfg
    checksum: str


@dataclass(frozen=True, slots=True)
class Miss(Generic[Cfg]):
    """`stale` has the checksum and the config of each loaded entry that this look-up found to be stale.

    A stale entry is reported once.
    """

    stale: tuple[tuple[str, Any], ...] = ()


Lookup = Hit[Cfg] | Unchecked[Cfg] | Pending[Cfg] | Miss[Cfg]
Entry = Done[Cfg] | Pending[Cfg]
Checksum = str | None
"""None is the checksum of a config that a user put, which matches any checksum."""


def answer_of(entry: Entry[Cfg] | None) -> Done[Cfg] | None:
    """Return an entry's answer; during a retune, the old one."""
    return entry.previous if isinstance(entry, Pending) else entry


def find_entry(
    slots: dict[Checksum, Entry[Cfg]], checksum: Checksum, *, answered: bool = False
) -> tuple[Checksum, Entry[Cfg] | None]:
    """Return the entry that takes precedence for a checksum, and its slot.

    A config that a user put precedes a tuned one, unless it was put into a store and this process has tuned since.
    With `answered`, only entries that have an answer count.
    """
    put, tuned = slots.get(None), slots.get(checksum)
    if answered:
        put, tuned = put if answer_of(put) else None, tuned if answer_of(tuned) else None
    if put is not None:
        was_loaded = isinstance(put, Done) and put.provenance.source == "persistent"
        if not (was_loaded and isinstance(tuned, Done) and not tuned.provenance.foreign):
            return None, put
    return checksum, tuned


def is_better(new: Done[Any], old: Done[Any]) -> bool:
    """Return whether one loaded entry should replace another: this environment first, then the newest."""
    if not isinstance(old.state, ToBeVerified):
        return False
    return (not new.provenance.foreign, _created(new)) > (not old.provenance.foreign, _created(old))


def _created(entry: Entry[Any]) -> float:
    return entry.cfg.created if isinstance(entry, Done) and isinstance(entry.cfg, Unread) else 0.0


def sorted_by_age(slots: dict[Checksum, Entry[Cfg]]) -> dict[Checksum, Entry[Cfg]]:
    """Return a key's entries sorted by the time when they were stored, if all of them were loaded."""
    if len(slots) > 1 and all(isinstance(entry, Done) and isinstance(entry.cfg, Unread) for entry in slots.values()):
        return dict(sorted(slots.items(), key=lambda slot: _created(slot[1])))
    return slots
