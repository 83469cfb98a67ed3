"""An index of the tunes of each kernel in a store, for learning from other shapes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from time import monotonic

from asel.kernels.keys import CacheKey
from asel.stores.records import Address, environment_digest
from asel.stores.summaries import RecordSummary

__all__ = ["TuneIndex"]

# For each kernel. The model of a search needs tens of tunes, and reading one record takes a tenth of a millisecond.
MAX_TUNES = 64
# How long a listing of the store counts as complete. Other processes' tunes are found by the next listing.
_FRESH_S = 60.0

_Kernel = tuple[str, str, str]


@dataclass(slots=True)
class TuneIndex:
    """The addresses of the newest tunes of each kernel, device and environment."""

    _tunes: dict[_Kernel, dict[Address, float]] = field(default_factory=dict)
    # The time of each device's last complete listing.
    _listed: dict[str, float] = field(default_factory=dict)

    def add(self, summary: RecordSummary) -> None:
        """Note a record; a config that a user put is ignored, because it was not tuned."""
        if summary.is_user_put:
            return
        address = summary.address
        kernel = _kernel_of(summary.key, address.environment)
        tunes = self._tunes.setdefault(kernel, {})
        tunes[address] = summary.created
        if len(tunes) > 2 * MAX_TUNES:
            newest = sorted(tunes, key=tunes.__getitem__)[-MAX_TUNES:]
            self._tunes[kernel] = {address: tunes[address] for address in newest}

    def note_listing(self, device: str) -> None:
        """Note that every record of a device has just been added."""
        self._listed[device] = monotonic()

    def is_fresh(self, device: str) -> bool:
        listed = self._listed.get(device)
        return listed is not None and monotonic() - listed < _FRESH_S

    def newest(self, key: CacheKey, environment: Mapping[str, str], limit: int) -> list[Address]:
        """Return the tunes of a key's kernel, of any version, for other keys, newest first."""
        tunes = self._tunes.get(_kernel_of(key, environment_digest(environment)), {})
        others = [address for address in tunes if address.key != key]
        return sorted(others, key=tunes.__getitem__, reverse=True)[:limit]


def _kernel_of(key: CacheKey, environment: str) -> _Kernel:
    return key.device, key.kernel_name, environment
