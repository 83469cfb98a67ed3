"""A warm start: loads the store's records for this machine's devices into memory before the first call."""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from asel.kernels.devices import device_fingerprint, environment
from asel.redaction import redact
from asel.runtime.threads import run_in_thread
from asel.selection.cache import ConfigCache
from asel.selection.cache_entries import Unread
from asel.stores import strict_json
from asel.stores.config_store import StoreQuery
from asel.stores.resilient_store import ResilientStore
from asel.stores.summaries import RecordSummary

__all__ = ["preload"]

logger = logging.getLogger("asel")


async def local_devices() -> Mapping[str, Mapping[str, str]]:
    """Return the software environment of each kind of device that JAX uses by default here, by fingerprint."""
    if _find_devices.cache_info().currsize:
        return _find_devices()
    return await run_in_thread("looking for devices", _find_devices)


@functools.cache
def _find_devices() -> dict[str, Mapping[str, str]]:
    import jax

    return {device_fingerprint(device): environment(device) for device in jax.local_devices()}


@dataclass(frozen=True, slots=True)
class _Listed(Unread):
    """A record's summary, with the store that reads it."""

    summary: RecordSummary
    environment: Mapping[str, str]
    store: ResilientStore[Any]

    @property
    def created(self) -> float:
        return self.summary.created

    @property
    def value(self) -> Any:
        return strict_json.loads(self.summary.cfg_json)

    def read(self, among: tuple[Any, ...]) -> Any:
        query = StoreQuery(self.summary.key, self.summary.checksum, self.environment, among=among)
        stored = self.store.read_summary(self.summary, query)
        return None if stored is None else stored.cfg

    @property
    def is_foreign(self) -> bool:
        """Whether the record was measured in another software environment."""
        return not self.summary.is_user_put and dict(self.summary.environment) != dict(self.environment)


async def preload(cache: ConfigCache[Any], store: ResilientStore[Any]) -> None:
    """Load the records that a store lists within its time limit, as far as memory has room.

    Configs are not decoded yet: the first call of a kernel brings the candidates that this needs. This starts JAX's
    backends.
    """
    if not store.can_list:
        return
    try:
        devices = await local_devices()
    except Exception as error:  # selecting a config will raise it too
        logger.debug("nothing is preloaded, because JAX has no device: %s", redact(error))
        return

    def take(batch: list[RecordSummary]) -> bool:
        has_room = True
        for summary in batch:
            listed = _Listed(summary, devices[summary.key.device], store)
            has_room = cache.load(summary.key, summary.checksum or None, listed, foreign=listed.is_foreign)
        return has_room

    await store.preload(devices, take)
