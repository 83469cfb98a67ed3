"""The entries of memory, an answer with its state or a pending tune, and the results of a look-up."""

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
    "answering",
    "by_age",
    "find_entry",
    "is_better",
]


class Unread(ABC):
    """A config as a store listed it. It is read when a call of its kernel brings the candidates it may be."""

    __slots__ = ()

    @property
    @abstractmethod
    def created(self) -> float:
        """When it was stored, in seconds since the epoch."""

    @property
    @abstractmethod
    def value(self) -> Any:
        """The config as JSON."""

    @abstractmethod
    def read(self, among: tuple[Any, ...]) -> Any:
        """Return the config, or None if it cannot be used, as when it is not among the candidates."""


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
    """An entry with an answer. Until it is verified, its config may be an `Unread`."""

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
    """`stale` has checksum and config of the loaded entries that this look-up found to be of another checksum.

    Each is reported once.
    """

    stale: tuple[tuple[str, Any], ...] = ()


Lookup = Hit[Cfg] | Unchecked[Cfg] | Pending[Cfg] | Miss[Cfg]
Entry = Done[Cfg] | Pending[Cfg]
Checksum = str | None
"""None is the checksum of what a user put: it matches any."""


def answering(entry: Entry[Cfg] | None) -> Done[Cfg] | None:
    """Return what answers by an entry: its own answer, or what a retune is about to replace."""
    return entry.previous if isinstance(entry, Pending) else entry


def find_entry(
    slots: dict[Checksum, Entry[Cfg]], checksum: Checksum, *, answered: bool = False
) -> tuple[Checksum, Entry[Cfg] | None]:
    """Return the entry that is asked first for a checksum, and its slot: what a user put comes before what was tuned.

    What a user put into a store does not come before a tune made here since then. `answered`: only entries
    that have an answer count.
    """
    put, tuned = slots.get(None), slots.get(checksum)
    if answered:
        put, tuned = put if answering(put) else None, tuned if answering(tuned) else None
    if put is not None:
        was_loaded = isinstance(put, Done) and put.provenance.source == "persistent"
        if not (was_loaded and isinstance(tuned, Done) and not tuned.provenance.foreign):
            return None, put
    return checksum, tuned


def is_better(new: Done[Any], old: Done[Any]) -> bool:
    """Tell whether one loaded entry takes the place of another: of this environment first, then the newest."""
    if not isinstance(old.state, ToBeVerified):
        return False
    return (not new.provenance.foreign, _created(new)) > (not old.provenance.foreign, _created(old))


def _created(entry: Entry[Any]) -> float:
    return entry.cfg.created if isinstance(entry, Done) and isinstance(entry.cfg, Unread) else 0.0


def by_age(slots: dict[Checksum, Entry[Cfg]]) -> dict[Checksum, Entry[Cfg]]:
    """Return what was loaded for a key in the order in which it was stored, which is not that of its listing."""
    if len(slots) > 1 and all(isinstance(one, Done) and isinstance(one.cfg, Unread) for one in slots.values()):
        return dict(sorted(slots.items(), key=lambda slot: _created(slot[1])))
    return slots
