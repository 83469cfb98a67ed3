"""The laws that every store keeps.

A law is an async function of `make_store`, which returns another handle on the same empty store each time it is
called, as another process would have. A store's test runs `LAWS` over its own factory, in real time:

    @pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
    def test_contract(law, real_backend, tmp_path):
        anyio.run(law, lambda: DirectoryStore(tmp_path), backend=real_backend)
"""

from __future__ import annotations

import math
from collections.abc import Callable

import anyio
import pytest

from asel.errors import InvalidRequestError
from asel.kernels.keys import CacheKey
from asel.stores.protocol import Store, optional_method
from asel.stores.records import Record

MakeStore = Callable[[], Store]
LAWS = []
KEY = CacheKey("cpu|test", "matmul@v1", "f32[8,8]")


def law(function):
    LAWS.append(function)
    return function


def record(cfg=1, *, key=KEY, checksum="c1", environment=None, writer="w1") -> Record:
    return Record(
        key=key,
        cfg=cfg,
        checksum=checksum,
        environment={"jax": "0.10.2"} if environment is None else environment,
        report={"outcomes": [{"median_s": 0.25}]},
        created=1234.5,
        seconds=0.125,
        writer=writer,
    )


def flips(text: bytes):
    """Yield a text with each of its bits flipped in turn."""
    for place in range(len(text)):
        for bit in range(8):
            yield text[:place] + bytes([text[place] ^ 1 << bit]) + text[place + 1 :]


async def everything(store: Store, key: CacheKey | None = None) -> list[Record]:
    return [one async for one in store.records(key)]


@law
async def an_empty_store_has_no_records(make_store: MakeStore) -> None:
    """An empty store answers that it has no records."""
    store = make_store()
    assert await store.get(record().address) is None
    assert await everything(store) == []
    assert await everything(store, KEY) == []
    assert not await store.delete(record().address)


@law
async def records_come_back_equal(make_store: MakeStore) -> None:
    """A record keeps every field, and another handle sees it."""
    kept = record({"m": 64, "deep": [[1, 2.5, None, True, "ü\n\0"]]})
    assert await make_store().put(kept) == kept
    assert await make_store().get(kept.address) == kept


@law
async def the_first_writer_wins_and_the_loser_adopts(make_store: MakeStore) -> None:
    """A second put changes nothing, and returns the first record."""
    first, second = record(1), record(2, writer="w2")
    store = make_store()
    await store.put(first)
    assert await make_store().put(second) == first
    assert await store.get(first.address) == first


@law
async def replace_replaces(make_store: MakeStore) -> None:
    """A retune's record replaces the old one."""
    store = make_store()
    await store.put(record(1))
    assert await store.put(record(2), replace=True) == record(2)
    assert await store.get(record().address) == record(2)
    assert await everything(store) == [record(2)]


@law
async def delete_takes_only_what_is_expected(make_store: MakeStore) -> None:
    """Only a record with the expected config is deleted."""
    store = make_store()
    await store.put(record(1))
    assert not await store.delete(record().address, expected=record(2))
    assert await store.get(record().address) == record(1)
    assert await store.delete(record().address, expected=record(1))
    assert await store.get(record().address) is None
    assert not await store.delete(record().address, expected=record(1))
    await store.put(record(3))
    assert await store.delete(record().address)
    assert await everything(store) == await everything(store, KEY) == []


@law
async def addresses_are_kept_apart(make_store: MakeStore) -> None:
    """Each checksum and environment has its own record, and a key finds all of them."""
    store, other = make_store(), KEY._replace(call_key="f32[9,9]")
    mine = [record(1), record(2, checksum="c2"), record(3, environment={"jax": "1"}), record(4, environment={})]
    theirs = [record(5, key=other)]
    for one in mine + theirs:
        await store.put(one)
    assert [await store.get(one.address) for one in mine + theirs] == mine + theirs
    assert sorted(one.cfg for one in await everything(store, KEY)) == [1, 2, 3, 4]
    assert sorted(one.cfg for one in await everything(store)) == [1, 2, 3, 4, 5]
    assert await everything(store, KEY._replace(op_id="unknown")) == []


@law
async def a_scan_gives_every_record_as_a_line(make_store: MakeStore) -> None:
    """The line is the record, and the summary is the line's."""
    store = make_store()
    kept = [record(number, checksum=f"c{number}") for number in range(70)]
    async with anyio.create_task_group() as tasks:
        for one in kept:
            tasks.start_soon(store.put, one)
    lines = [line async for batch in optional_method(store, "scan")() for line in batch]
    assert sorted(line.record().cfg for line in lines) == sorted(one.cfg for one in kept)
    assert all(line.address == line.record().address for line in lines)
    assert {line.text for line in lines} == {one.line() for one in kept}


@law
async def any_text_is_a_key(make_store: MakeStore) -> None:
    """Names may contain any characters."""
    store = make_store()
    texts = ["", "..", "/", "a/../b", "*", "?[x]", "\0", "ü" * 500, "{x}", "a b\r\nc", "CON"]
    kept = [record(text, key=CacheKey(text, text, text)) for text in texts]
    for one in kept:
        await store.put(one)
    assert [await store.get(one.address) for one in kept] == kept
    assert [await everything(store, one.key) for one in kept] == [[one] for one in kept]


@law
async def an_unstorable_config_changes_nothing(make_store: MakeStore) -> None:
    """A config that JSON cannot represent is the caller's error, and the store is unchanged."""
    store = make_store()
    with pytest.raises(InvalidRequestError, match="cannot be stored"):
        await store.put(record(math.nan))
    assert await store.get(record().address) is None
    assert await store.put(record(1)) == record(1)


@law
async def many_putters_have_one_winner(make_store: MakeStore) -> None:
    """Of fifty concurrent records one is stored, and all fifty callers get it."""
    stores, told = [make_store() for _ in range(5)], []

    async def put(number: int) -> None:
        told.append(await stores[number % 5].put(record(number)))

    async with anyio.create_task_group() as tasks:
        for number in range(50):
            tasks.start_soon(put, number)
    winner = await make_store().get(record().address)
    assert told == [winner] * 50


@law
async def one_at_a_time_holds_a_claim(make_store: MakeStore) -> None:
    """The claim of an address is exclusive, ends with its block, and concerns no other address."""
    address, other = record().address, record(checksum="c2").address
    async with make_store().claim(address) as first:
        assert first.held
        async with make_store().claim(address) as second, make_store().claim(other) as third:
            assert (second.held, second.record, third.held) == (False, None, True)
        assert first.held
    assert not first.held
    async with make_store().claim(address) as fourth:
        assert fourth.held


@law
async def waiters_give_up_after_wait_s(make_store: MakeStore) -> None:
    """A waiter gives up after `wait_s`, holding nothing."""
    address = record().address
    async with make_store().claim(address):
        with anyio.fail_after(10):
            async with make_store().claim(address, wait_s=0.2) as late:
                assert (late.held, late.record) == (False, None)


@law
async def waiters_get_the_record(make_store: MakeStore) -> None:
    """A record ends the wait for the claim on its address, before the claim is released."""
    address, heard = record().address, anyio.Event()

    async def wait() -> None:
        async with make_store().claim(address, wait_s=15) as claim:
            assert (claim.held, claim.record) == (False, record(7))
            heard.set()

    store = make_store()
    async with store.claim(address) as held, anyio.create_task_group() as tasks:
        tasks.start_soon(wait)
        await store.put(record(7), claim=held)
        with anyio.fail_after(10):
            await heard.wait()


@law
async def a_claim_given_back_is_taken_by_one_who_waits(make_store: MakeStore) -> None:
    """Without a record, the claim passes to the next waiter; every waiter gets its turn."""
    address, holding, most = record().address, 0, 0

    async def hold() -> None:
        nonlocal holding, most
        async with make_store().claim(address, wait_s=15) as claim:
            assert claim.held
            holding += 1
            most = max(most, holding)
            await anyio.lowlevel.checkpoint()
            holding -= 1

    with anyio.fail_after(15):
        async with anyio.create_task_group() as tasks:
            for _ in range(6):
                tasks.start_soon(hold)
    assert most == 1


@law
async def the_holder_sees_what_is_there(make_store: MakeStore) -> None:
    """A claim that is acquired after the record was stored comes with that record."""
    store = make_store()
    await store.put(record(1))
    async with store.claim(record().address) as claim:
        assert (claim.held, claim.record) == (True, record(1))


@law
async def a_claim_ends_with_its_block_however_that_ends(make_store: MakeStore) -> None:
    """An error is raised unchanged, a cancellation is not delayed, and both release the claim."""
    address, store = record().address, make_store()
    with pytest.raises(ZeroDivisionError):
        async with store.claim(address):
            raise ZeroDivisionError
    with anyio.CancelScope() as scope:
        async with store.claim(address) as claim:
            assert claim.held
            scope.cancel()
            await anyio.sleep_forever()
    assert scope.cancelled_caught
    async with make_store().claim(address) as claim:
        assert claim.held


@law
async def a_cancelled_waiter_leaves_nothing_behind(make_store: MakeStore) -> None:
    """A cancelled waiter neither holds the claim nor keeps others from it."""
    address, store = record().address, make_store()
    async with store.claim(address):
        with anyio.move_on_after(0.1):
            async with store.claim(address, wait_s=15):
                pytest.fail("two hold it")
    async with make_store().claim(address) as claim:
        assert claim.held


@law
async def a_held_claim_may_replace(make_store: MakeStore) -> None:
    """A retune puts its record while it holds the claim."""
    store = make_store()
    await store.put(record(1))
    async with store.claim(record().address) as claim:
        assert await store.put(record(2), replace=True, claim=claim) == record(2)
    assert await store.get(record().address) == record(2)


@law
async def it_says_where_it_is(make_store: MakeStore) -> None:
    """Its location is readable."""
    assert make_store().location
