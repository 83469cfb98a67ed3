"""Selectors with captured telemetry, and span trees written as lines."""

from __future__ import annotations

import anyio

from asel import ConfigCache, ConfigSelectorChain
from asel.testing import CapturedTelemetry
from support.kernels import COSTS, Toy, call, scripted

TOY = Toy()


def chain_of(captured: CapturedTelemetry, cache=None, *, script=None, **chain) -> ConfigSelectorChain:
    tuner, _ = scripted(COSTS, **(script or {}))
    chain.setdefault("tuner", tuner)
    return ConfigSelectorChain(ConfigCache() if cache is None else cache, sinks=captured.sinks, **chain)


async def request(captured, chain, name="request", after_s=0.0, kernel=TOY, inv=None):
    await anyio.sleep(after_s)
    with captured.tracer.start_as_current_span(name):
        return await chain.choose(inv or call(), kernel)


def outlines(captured: CapturedTelemetry) -> list[str]:
    return [tree.outline() for tree in sorted(captured.trees, key=lambda tree: tree.name)]


class Store:
    """A store in memory; each of its answers takes `seconds`."""

    def __init__(self, seconds: float = 0.0, error: Exception | None = None) -> None:
        self.kept: dict = {}
        self.seconds, self.error = seconds, error

    async def get(self, *key):
        await anyio.sleep(self.seconds)
        if self.error is not None:
            raise self.error
        return self.kept.get(key)

    async def put(self, device, op_id, call_key, cfg):
        await anyio.sleep(self.seconds)
        self.kept[device, op_id, call_key] = cfg
