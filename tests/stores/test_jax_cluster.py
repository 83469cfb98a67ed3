"""The store of a `jax.distributed` program: the contract of stores, two ranks in one process, two real ranks."""

from __future__ import annotations

import subprocess
import sys
from contextlib import asynccontextmanager
from itertools import count

import anyio
import pytest
from support.jax_cluster import bench_of, coordination_service
from support.kernels import GUESS, Blocks, Picky, Toy, call
from support.paths import TESTS
from support.redis_server import free_port
from support.store_contract import LAWS, record

from asel import Executor, Invocation, PersistentCache, policy_override
from asel.errors import InvalidRequestError, StoreError
from asel.stores import open_store
from asel.stores.jax_cluster import JaxClusterStore

_names = count()


@pytest.fixture(scope="module")
def clients():
    with coordination_service(2) as clients:
        yield clients


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
def test_contract(law, clients, real_backend):
    """The laws of every store, for the tasks of one rank."""
    location = f"jax://{next(_names)}"
    anyio.run(law, lambda: JaxClusterStore(location, client=clients[0]), backend=real_backend)


@asynccontextmanager
async def two_ranks(clients, *options):
    """Run a selector on each of two ranks. Alone, the first would choose Blocks(2), the second Blocks(3)."""
    location = f"jax://{next(_names)}"
    stores = [JaxClusterStore(location, client=client) for client in clients]
    options = options or ({}, {})
    benches = [bench_of(rank, store, **options[rank]) for rank, store in enumerate(stores)]
    async with benches[0].chain, benches[1].chain:
        yield benches


def test_ranks_have_one_answer_from_one_tune(clients, real_backend):
    """Whether ranks await at the same time or in turn; a call that cannot wait gets the new answer after the await."""

    async def main():
        async with two_ranks(clients) as (first, second):
            assert await first.chain.choose(call(), Toy()) == Blocks(2)
            await second.chain.settled()
            assert second.chain.choose_nowait(call(), Toy()) == GUESS  # the first rank got no other answer there
            await second.chain.settled()
            assert second.chain.choose_nowait(call(), Toy()) == GUESS
            assert await second.chain.choose(call(), Toy()) == Blocks(2)
            assert second.chain.choose_nowait(call(), Toy()) == Blocks(2)

            both = []
            async with anyio.create_task_group() as tasks:
                for bench in (first, second):
                    tasks.start_soon(lambda bench: _append(both, bench.chain.choose(call(9), Toy())), bench)
            assert both[0] == both[1]
            assert first.tunes + second.tunes == 2

    anyio.run(main, backend=real_backend)


async def _append(answers, answer):
    answers.append(await answer)


def test_a_retune_of_all_ranks_is_one_tune(clients, real_backend):
    """The first rank measures again and the others take its result; until then they have the old config."""

    async def main():
        async with two_ranks(clients) as (first, second):
            await second.chain.choose(call(), Toy())
            await first.chain.choose(call(), Toy())
            assert await first.chain.retune(call(), Toy()) == Blocks(2)
            assert second.chain.choose_nowait(call(), Toy()) == Blocks(3)
            assert await second.chain.retune(call(), Toy()) == Blocks(2)
            assert (first.tunes, second.tunes) == (1, 1)

    anyio.run(main, backend=real_backend)


def test_a_tune_that_fails_on_one_rank_fails_on_all(clients, real_backend):
    """Otherwise another rank could tune, and run another program than the rank that failed."""
    broken = {"script": {"compile_errors": lambda cfg: MemoryError("this rank is full")}}

    async def main():
        async with two_ranks(clients, broken, {}) as (first, second):
            with pytest.warns(UserWarning, match="this rank is full"):
                assert await first.chain.choose(call(), Toy()) == GUESS
            with pytest.warns(UserWarning, match="failed in another process"):
                selection = await second.chain.select(call(), Toy())
            assert (selection.cfg, selection.tier, second.tunes) == (GUESS, "heuristics", 0)

    anyio.run(main, backend=real_backend)


def test_a_result_that_cannot_be_stored_does_not_answer(clients, real_backend, monkeypatch):
    """It is not stored later either, when the other ranks may have another answer."""

    async def fail(self, *args, **kwargs):
        raise StoreError("it is gone", location=self.location)

    async def main():
        async with two_ranks(clients) as (first, second):
            with monkeypatch.context() as broken, pytest.warns(UserWarning, match="could not agree"):
                broken.setattr(JaxClusterStore, "put", fail)
                assert await first.chain.choose(call(), Toy()) == GUESS
            with pytest.warns(UserWarning, match="failed in another process"):
                assert await second.chain.choose(call(), Toy()) == GUESS
        assert first.sink.named("closed")[0].unsaved == 0

    anyio.run(main, backend=real_backend)


def test_answers_change_only_in_an_await(clients, real_backend):
    """Background tunes and limited waits become waits; no rank withdraws a config by itself."""

    async def main():
        hasty = {"allow": {"cache_miss_fallback": "background", "wait_s": 0.0, "on_pending": "heuristics"}}
        async with two_ranks(clients, hasty, hasty) as (first, second):
            with policy_override(second.chain, cache_miss_fallback="background"):
                assert await second.chain.choose(call(), Toy()) == Blocks(3)
            assert await first.chain.choose(call(), Toy()) == Blocks(3)
            assert not await first.chain.withdraw(call(), Toy(), Blocks(3), ValueError("no"))
            assert first.chain.choose_nowait(call(), Toy()) == Blocks(3)

            kernel = Picky(_3=ValueError("only here"))
            inv = Invocation("picky", (call().args[0],), {})
            first.chain.cache.put(*first.chain.resolve(inv, kernel).key, Blocks(3))
            with pytest.raises(ValueError, match="only here"):
                await Executor(first.chain, jit=False)(kernel, *inv.args)
            assert kernel.ran == [3]

    anyio.run(main, backend=real_backend)


def test_a_users_put_is_the_same_on_all_ranks(clients, real_backend):
    """The n-th put of each rank is the same entry, and the first rank decides its config."""

    async def main():
        location = f"jax://{next(_names)}"
        first, second = (PersistentCache("toy", JaxClusterStore(location, client=client)) for client in clients)
        await first.put("dev", "op", "key", 1)
        await first.put("dev", "op", "key", 2)
        assert await second.get("dev", "op", "key") is None
        await second.put("dev", "op", "key", 3)
        assert await second.get("dev", "op", "key") == 1
        await second.put("dev", "op", "key", 4)
        assert await second.get("dev", "op", "key") == 2
        assert await second.store.delete(record(checksum="", environment={}).address) is False

    anyio.run(main, backend=real_backend)


def test_invalid_set_ups_are_refused(clients):
    """Before the first selection, with the fix."""
    with pytest.raises(InvalidRequestError, match=r"jax\.distributed\.initialize"):
        open_store("jax://")
    with pytest.raises(InvalidRequestError, match="jax://NAME"):
        open_store("jax://a b")
    with pytest.raises(InvalidRequestError, match="persist_autotune"):
        bench_of(0, JaxClusterStore(client=clients[0]), persist_autotune=False)


@pytest.mark.timeout(120)  # two processes load JAX
def test_two_processes_choose_the_same_at_each_point():
    """Real ranks of a real `jax.distributed`, one on asyncio and one on trio."""
    address = f"127.0.0.1:{free_port()}"
    command = [sys.executable, "-W", "ignore", "-m", "support.jax_cluster"]
    ranks = [
        subprocess.Popen([*command, str(rank), "2", address], cwd=TESTS, stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    said = [rank.communicate()[0].split() for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0]
    assert said[0][:-1] == said[1][:-1]
    assert said[0][:3] == ["1", "2", "2"]  # the heuristic, and then what the first rank found
    assert said[0][3] == said[0][4]
    assert sum(int(answers[-1]) for answers in said) == 6  # a tune of three candidates, and a retune
