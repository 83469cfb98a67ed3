"""Other libraries' tuners, which only have `autotune`."""

from __future__ import annotations

import math
import threading

import anyio
import jax
import pytest
from support.kernels import BEST, GUESS, Bench, Blocks, Toy, call

from asel import (
    AutotunePolicy,
    ConfigCache,
    ConfigSelectorChain,
    InvalidRequestError,
    Tuner,
)
from asel.tuning.foreign_tuner import as_tuner


class AsyncOnly:
    """A user's own tuner, async."""

    def __init__(self, found=BEST, takes_s: float = 1.0) -> None:
        self._found, self._takes_s = found, takes_s
        self.asked = []
        self.at_once = self.most_at_once = 0

    async def autotune(self, make_fn, args, kwargs, candidates):
        self.asked.append((args, kwargs, tuple(candidates), [make_fn(cfg)(*args, **kwargs) for cfg in candidates]))
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        await anyio.sleep(self._takes_s)
        self.at_once -= 1
        if isinstance(self._found, Exception):
            raise self._found
        return self._found


class SyncOnly:
    """A user's own tuner, blocking, like ejKernel's."""

    def __init__(self, found=BEST) -> None:
        self._found = found
        self.asked = []
        self.threads = []
        self.x64 = []

    def autotune(self, make_fn, args, kwargs, candidates):
        self.threads.append(threading.get_ident())
        self.x64.append(jax.config.jax_enable_x64)
        self.asked.append((args, kwargs, tuple(candidates), [make_fn(cfg)(*args, **kwargs) for cfg in candidates]))
        return self._found


@pytest.mark.anyio
async def test_a_tuner_with_only_an_async_autotune_is_accepted():
    """A selector accepts any object with ejKernel's `autotune`: it gets the call, and returns the answer."""
    tuner, inv = AsyncOnly(), call()
    bench = Bench(tuner=tuner)
    async with bench.chain as chain:
        selection = await chain.select(inv, Toy())
        again = await chain.select(inv, Toy())
    assert (selection.cfg, selection.tier, again.cfg, again.tier) == (BEST, "autotune", BEST, "memory")
    assert tuner.asked == [(inv.args, {}, (Blocks(1), Blocks(2), Blocks(3)), [inv.args[0]] * 3)]
    report = selection.report
    assert (report.winner, report.outcomes, report.seconds) == (BEST, (), pytest.approx(1.0))
    assert (report.key, report.checksum) == (selection.key, selection.checksum)


def test_a_tuner_with_only_a_blocking_autotune_works_in_a_thread(real_backend):
    """A blocking `autotune` does not hold up the event loop."""
    tuner, inv = SyncOnly(), call()

    async def main():
        async with Bench(tuner=tuner).chain as chain:
            selection = await chain.select(inv, Toy())
        assert (selection.cfg, selection.tier) == (BEST, "autotune")
        assert tuner.asked == [(inv.args, {}, (Blocks(1), Blocks(2), Blocks(3)), [inv.args[0]] * 3)]
        assert tuner.threads != [threading.get_ident()]

    anyio.run(main, backend=real_backend)


def test_a_blocking_autotune_runs_with_the_callers_jax_settings(real_backend):
    """JAX's settings are per thread, so the thread a blocking tuner works in gets the caller's."""
    tuner = SyncOnly()

    async def main():
        async with Bench(tuner=tuner).chain as chain:
            with jax.enable_x64(True):
                await chain.choose(call(), Toy())

    anyio.run(main, backend=real_backend)
    assert tuner.x64 == [True]


@pytest.mark.anyio
async def test_a_tuner_with_only_autotune_is_alone_on_its_device():
    """The device lock is also held for tuners that do not know it."""
    tuner = AsyncOnly()
    async with Bench(tuner=tuner).chain as chain, anyio.create_task_group() as tasks:
        tasks.start_soon(chain.choose, call(8), Toy())
        tasks.start_soon(chain.choose, call(16), Toy())
    assert len(tuner.asked) == 2
    assert tuner.most_at_once == 1


@pytest.mark.anyio
async def test_a_tuner_with_only_autotune_ends_with_the_budget():
    """A pending tune always ends: after `tune_budget_s` it has failed, and the heuristic answers."""
    bench = Bench(tuner=AsyncOnly(takes_s=math.inf), allow={"tune_budget_s": 20.0})
    async with bench.chain as chain:
        selection = await chain.select(call(), Toy())
    assert (selection.cfg, selection.tier) == (GUESS, "heuristics")


@pytest.mark.anyio
@pytest.mark.parametrize("found", [None, LookupError("no such tile")])
async def test_a_tuner_that_finds_nothing_has_failed(found):
    """If a user's own tuner returns nothing or raises, the tune has failed: the heuristic answers with the reason."""
    bench = Bench(tuner=AsyncOnly(found))
    async with bench.chain as chain:
        selection = await chain.select(call(), Toy())
    assert (selection.cfg, selection.tier) == (GUESS, "heuristics")
    assert ("no such tile" if found else "found no config") in selection.declined["autotune"]
    assert "autotune_failed" in bench.sink.names


def test_a_tuner_needs_tune_or_autotune():
    """An object with `tune` is used directly; one with neither `tune` nor `autotune` is refused by name."""
    tuner = Tuner()
    assert as_tuner(tuner) is tuner
    with pytest.raises(InvalidRequestError, match=r"tuner=42 .* pass a Tuner"):
        ConfigSelectorChain(ConfigCache(), AutotunePolicy(), tuner=42)
