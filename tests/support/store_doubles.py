"""Stores in memory for selectors under test: a scripted one, and the simplest ones that asel accepts."""

from __future__ import annotations

from contextlib import asynccontextmanager

import anyio

from asel import (
    PersistentCache,
)
from asel.stores.config_store import ConfigStoreDefaults, Stored
from asel.stores.protocol import Claim
from support.kernels import Bench, Blocks


class Place(ConfigStoreDefaults):
    """A `ConfigStore` in memory. Operations named in `broken` fail, and those in `hung` never return."""

    has_claims = True

    def __init__(self) -> None:
        self.kept = {}
        self.broken = set()
        self.hung = set()
        self.asked = []
        self.claimed_elsewhere = None
        self.held = 0
        self.listeners = []

    async def _answer(self, operation):
        self.asked.append(operation)
        if operation in self.hung:
            await anyio.sleep_forever()
        if operation in self.broken:
            raise OSError(f"{operation} is broken")

    async def find(self, query):
        await self._answer("get")
        return self.kept.get((query.key, query.checksum))

    async def keep(self, report, *, replace, claim=None):
        await self._answer("put")
        first = self.kept.get((report.key, report.checksum))
        if first is not None and not replace:
            return Stored(first.cfg, first.report, adopted=True, conflict="key_out_of_sync")
        self.kept[report.key, report.checksum] = Stored(report.winner, report)
        return self.kept[report.key, report.checksum]

    @asynccontextmanager
    async def claim(self, query, wait_s, anew):
        await self._answer("claim")
        if self.claimed_elsewhere is None:
            self.held += 1
            try:
                yield Claim(held=True)
            finally:
                self.held -= 1
            return
        with anyio.move_on_after(wait_s):
            await self.claimed_elsewhere.wait()
            stored = None if anew else await self.find(query)
            yield Claim(held=stored is None, record=stored)
            return
        yield Claim()

    def read(self, record, query):
        return record

    async def reports(self, query):
        await self._answer("get")
        return [stored.report for (key, _), stored in self.kept.items() if key == query.key]

    @asynccontextmanager
    async def rejections_to(self, listener):
        self.listeners.append(listener)
        try:
            yield
        finally:
            self.listeners.remove(listener)


def bench_over(place, **options) -> Bench:
    return Bench(persistent=place, **options)


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
    """A simple cache of a user's: get and put, no checksums."""

    def __init__(self) -> None:
        self.data = {}

    async def get(self, device, op_id, call_key):
        return self.data.get((device, op_id, call_key))

    async def put(self, device, op_id, call_key, cfg):
        self.data[device, op_id, call_key] = cfg


class Removing(Place):
    """A store that can also remove records."""

    can_withdraw = True

    def __init__(self) -> None:
        super().__init__()
        self.removed = []

    async def withdraw(self, stored):
        await self._answer("delete")
        for address, kept in list(self.kept.items()):
            if kept is stored:
                del self.kept[address]
                self.removed.append(stored.cfg)
                return True
        return False

    @property
    def configs(self):
        return [stored.cfg for stored in self.kept.values()]


def directory(path, **options) -> PersistentCache:
    return PersistentCache("toy", path, cfg_type=Blocks, **options)
