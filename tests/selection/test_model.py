"""Random callers, delays, cancellations, failures and closes, checked against invariants.

A scenario is a list of steps at random moments of virtual time. Every caller must be answered or
refused as its policy allows; no key has two concurrent tunes or is tuned again needlessly; and at the
end nothing is pending.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import anyio
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from support.kernels import Bench, Blocks, Toy, call

from asel import NoConfigError, SelectorClosedError, TuningError, policy_override
from asel.testing import run_in_virtual_time

POSSIBLE = (*Toy.candidates, Blocks(99))  # a candidate may break in mid-tune, and a user may put another
STEPS_EACH = 60
EXAMPLES = 90  # times two backends and sixty steps: more than 10,000


@dataclass(frozen=True)
class Step:
    """The next action, and its delay after the one before."""

    action: str
    after_s: float
    size: int
    patience_s: float | None
    fallback: str


steps = st.builds(
    Step,
    action=st.sampled_from(["choose"] * 8 + ["nowait", "nowait", "retune", "put", "clear", "break", "mend"]),
    after_s=st.sampled_from([0.0, 0.0, 0.05, 0.3, 1.0, 5.0]),
    size=st.sampled_from([8, 16, 32]),
    patience_s=st.sampled_from([None, None, 0.0, 0.1, 0.35, 2.0]),
    fallback=st.sampled_from(["autotune", "autotune", "autotune", "background", "heuristics"]),
)


class Scenario:
    def __init__(self, plan: list[Step], is_open: bool, allow_heuristics: bool, stored: bool) -> None:
        self.plan = plan
        self.is_open = is_open
        self.allow_heuristics = allow_heuristics
        self.broken = False
        self.bench = Bench(
            script={"run_errors": lambda cfg: ValueError("broken") if self.broken else None},
            allow={"allow_heuristics": allow_heuristics, "retry_after_s": 3.0},
            forbid_reautotune=False,
            persistent=_SlowStore() if stored else None,
            on_event=self.watch,
        )
        self.kernel = Toy()
        self.in_flight: Counter[str] = Counter()
        self.excuses: Counter[str] = Counter()  # reasons for a key to be tuned once more
        self.asked = self.settled = self.at_once = 0

    def watch(self, event) -> None:
        if event.name == "autotune_start":
            self.in_flight[event.key] += 1
            self.at_once = max(self.at_once, self.in_flight[event.key])
        elif event.name in ("autotune_finish", "autotune_failed"):
            self.in_flight[event.key] -= 1
            self.excuses[event.key] += event.name == "autotune_failed"

    async def run(self) -> None:
        async with anyio.create_task_group() as tasks:
            if self.is_open:
                async with self.bench.chain:
                    await self.play(tasks)
            else:
                await self.play(tasks)
        assert self.settled == self.asked, "a waiter was lost"
        assert self.at_once <= 1, "two tunes of one key at once"
        assert self.bench.cache.pending() == []
        if self.is_open:
            starts = Counter(event.key for event in self.bench.sink.named("autotune_start"))
            for key, count in starts.items():
                assert count <= 1 + self.excuses[key], "a tune too many"

    async def play(self, tasks) -> None:
        for step in self.plan:
            await anyio.sleep(step.after_s)
            self.take(step, tasks)
        if self.is_open and len(self.plan) % 2:
            return  # close in the middle of it all
        await anyio.sleep(60)
        await self.bench.chain.settled()
        assert self.bench.cache.pending() == []
        assert not any(self.in_flight.values()) or not self.is_open

    def take(self, step: Step, tasks) -> None:
        cache = self.bench.cache
        key = self.bench.chain._keys.resolve(call(step.size), self.kernel).key
        match step.action:
            case "choose" | "retune":
                self.asked += 1
                self.excuses[key] += step.action == "retune"
                tasks.start_soon(self.ask, step)
            case "nowait":
                try:
                    cfg = self.bench.chain.choose_nowait(call(step.size), self.kernel)
                except NoConfigError:
                    assert not self.allow_heuristics
                else:
                    assert cfg in POSSIBLE
            case "put":
                cache.put(*key, Blocks(99))
            case "clear":
                cache.clear()
                for size in (8, 16, 32):
                    self.excuses[self.bench.chain._keys.resolve(call(size), self.kernel).key] += 1
            case "break" | "mend":
                self.broken = step.action == "break"

    async def ask(self, step: Step) -> None:
        chain = self.bench.chain
        ask = chain.choose if step.action == "choose" else chain.retune
        try:
            with (
                anyio.move_on_after(step.patience_s) as patience,
                policy_override(chain, cache_miss_fallback=step.fallback),
            ):
                assert await ask(call(step.size), self.kernel) in POSSIBLE
            assert step.patience_s is not None or not patience.cancelled_caught
        except SelectorClosedError:
            assert self.is_open
        except TuningError:
            assert not self.allow_heuristics or step.action == "retune"
        except NoConfigError:
            assert not self.allow_heuristics
        finally:
            self.settled += 1


class _SlowStore:
    async def get(self, *key):
        await anyio.sleep(0.07)
        return  # so that every miss goes on to the tuner

    async def put(self, *key_and_cfg):
        await anyio.sleep(0.07)


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
@pytest.mark.timeout(120)
@given(
    plan=st.lists(steps, min_size=STEPS_EACH, max_size=STEPS_EACH + 1),
    is_open=st.booleans(),
    allow_heuristics=st.booleans(),
    stored=st.booleans(),
)
@settings(
    max_examples=EXAMPLES,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    # Sixty steps shrink slowly; the blob replays a failure, and a shorter plan is then found by hand.
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    print_blob=True,
)
def test_every_wait_ends_and_no_key_is_tuned_twice(backend, plan, is_open, allow_heuristics, stored):
    """No hang, no lost waiter, no second tune, no stale pending entry."""
    scenario = Scenario(plan, is_open, allow_heuristics, stored)
    run_in_virtual_time(scenario.run, backend=backend)
