"""Priority groups: which candidates are tried first, and which not at all."""

from __future__ import annotations

import pytest
from support.kernels import BEST, Bench, Blocks, Toy, call

from asel import Skipped


class Grouped(Toy):
    candidates = tuple(map(Blocks, range(1, 7)))
    ranks = {1: (0, 0), 2: (2, 0), 3: (2, 1), 4: (1, 0), 5: (-1, 0), 6: (1, -1)}

    def candidate_priority(self, cfg, inv):
        return self.ranks[cfg.m]


@pytest.mark.anyio
async def test_higher_groups_go_first_and_a_success_ends_it():
    """Only the highest group and the incumbent are tried; the rest are Skipped with the reason."""
    bench = Bench(costs=lambda cfg: 1.0)
    async with bench.chain as chain:
        report = (await chain.select(call(), Grouped())).report
    assert [cfg.m for cfg in bench.measure.compiled] == [1, 3, 2]  # the incumbent, then by priority
    reasons = {o.cfg.m: o.reason for o in report.outcomes if isinstance(o, Skipped)}
    assert reasons == {
        4: "a group of higher priority had a success",
        5: "the kernel gives it a negative priority",
        6: "the kernel gives it a negative priority",
    }


@pytest.mark.anyio
async def test_a_group_that_fails_gives_way_to_the_next():
    """If no candidate of a group can be measured, the group below is tried; the incumbent alone is not a success."""
    bench = Bench(
        costs=lambda cfg: 1 / cfg.m, script={"compile_errors": lambda cfg: ValueError() if cfg.m in (2, 3) else None}
    )
    async with bench.chain as chain:
        assert await chain.choose(call(), Grouped()) == Blocks(4)
    assert [cfg.m for cfg in bench.measure.compiled] == [1, 3, 2, 4]


@pytest.mark.anyio
async def test_a_priority_alone_orders_one_group():
    """A plain number is a priority: every candidate that is not negative is tried."""

    class Ordered(Toy):
        def candidate_priority(self, cfg, inv):
            return cfg.m if cfg.m != 2 else -1

    bench = Bench()
    async with bench.chain as chain:
        assert await chain.choose(call(), Ordered()) == BEST
    assert [cfg.m for cfg in bench.measure.compiled] == [1, 3]


@pytest.mark.anyio
@pytest.mark.parametrize("wrong", [None, "high", (), (1, 2, 3), (1, "high"), ValueError("no table")])
async def test_invalid_priorities_make_autotune_decline(wrong):
    """A faulty candidate_priority is not the caller's error; stored answers are still given."""

    class Unsure(Toy):
        def candidate_priority(self, cfg, inv):
            if isinstance(wrong, Exception):
                raise wrong
            return wrong

    bench = Bench()
    async with bench.chain as chain:
        selection = await chain.select(call(), Unsure())
        assert selection.tier == "heuristics"
        assert "candidate_priority raised" in selection.declined["autotune"]
        assert await chain.choose(call(), Toy()) == BEST
        assert (await chain.select(call(), Unsure())).tier == "memory"


@pytest.mark.anyio
@pytest.mark.parametrize(("added", "compiled"), [((4,), [1, 2]), ((3, 4), [1, 3, 2])])
async def test_groups_are_tried_in_order_beside_earlier_timings(added, compiled):
    """The earlier winner and added candidates are tried by group, as in a first tune: a success ends it."""

    class Few(Grouped):
        candidates = (Blocks(1), Blocks(2))

    class More(Grouped):
        candidates = (*Few.candidates, *map(Blocks, added))

    bench = Bench(costs=lambda cfg: {1: 0.3, 2: 0.2, 3: 0.1, 4: 0.01}[cfg.m])
    async with bench.chain as chain:
        await chain.choose(call(), Few())
        bench.measure.compiled.clear()
        report = (await chain.select(call(), More())).report
    assert [cfg.m for cfg in bench.measure.compiled] == compiled
    assert report.outcomes[-1] == Skipped(Blocks(4), "a group of higher priority had a success")
    assert report.winner == (Blocks(3) if 3 in added else Blocks(2))
