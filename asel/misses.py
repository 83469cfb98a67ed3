"""What a call without an answer sets in motion: a read of the store, a tune, or a place in the queue."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Generic

from asel.backlog import Backlog
from asel.cache import ConfigCache, Done, Miss, Pending
from asel.calls import Call, asking, tell
from asel.devices import current_settings, environment
from asel.errors import SelectorClosedError, StoreError
from asel.events import LateTune, PendingJoin
from asel.fanout import FanOut
from asel.jobs import TuneJob
from asel.kernel import Cfg, bind, example_inputs_of
from asel.keys import CacheKey
from asel.outcomes import Measured
from asel.persistence import Sought
from asel.policy import tuning_switched_off
from asel.reading import Reading
from asel.reporting import timings_in
from asel.tuning import Tune, Tuning
from asel.withdrawal import barred

__all__ = ["Misses", "Standing"]

_FROZEN = "the chain is frozen"


@dataclass(slots=True)
class Standing:
    """What its owner has made of a chain, as it is at the moment."""

    forbid_reautotune: bool
    close_grace_s: float
    closed: bool = False
    frozen: bool = False

    def refuse_if_closed(self, key: CacheKey) -> None:
        if self.closed:
            raise SelectorClosedError(f"the chain is closed, so nobody is there to answer for {key.op_id!r}")


class Misses(Generic[Cfg]):
    """Reads, tunes and queues for calls, as far as their policy and the chain's standing allow."""

    def __init__(
        self,
        standing: Standing,
        cache: ConfigCache[Cfg],
        tuning: Tuning[Cfg],
        reading: Reading[Cfg] | None,
        events: FanOut,
    ) -> None:
        self._standing = standing
        self._cache = cache
        self._tuning = tuning
        self._reading = reading
        self._events = events
        self.backlog = Backlog(self._catch_up)

    def why_not_tune(self, call: Call, *, on_purpose: bool = False) -> str | None:
        """Say why the autotune tier declines, or None where it may join a tune or begin one."""
        policy = call.policy
        if not policy.allow_autotune:
            return "autotuning is off"
        if tuning_switched_off():
            return "ASEL_AUTOTUNE is off in the environment"
        if policy.cache_miss_fallback == "heuristics" and not on_purpose:
            return 'skipped, since cache_miss_fallback="heuristics"'
        if call.known.traced:
            return "the arguments are being traced, and nothing is measured with tracers"
        if isinstance(self._cache.peek(call.key, call.checksum), Pending):
            return None
        return self._why_not_begin(call, on_purpose)

    def _why_not_begin(self, call: Call, on_purpose: bool) -> str | None:
        """Say why a tune that is not in flight must not begin."""
        key, checksum = call.key, call.checksum
        if call.known.no_candidates:
            return call.known.no_candidates
        if not on_purpose:
            if call.policy.cache_miss_fallback == "background" and not self._tuning.owns_tunes:
                return "background tuning needs the chain's `async with`"
            if (failed := self._tuning.failure(key, checksum)) is not None:
                return f"the last tune failed ({failed[1]}) and is tried again in {failed[0]:.0f} s"
            if (
                self._standing.forbid_reautotune
                and self._cache.was_cleared(key)
                and self._tuning.has_tuned(key, checksum)
            ):
                return "tuned before and then removed; use retune to tune it again, or forbid_reautotune=False"
        return _FROZEN if self._standing.frozen else None

    def flag_if_late(self, call: Call, why: str) -> str:
        if why is _FROZEN:  # nothing else stood in the way
            tell(self._events, LateTune, call)
        return why

    async def tune(self, call: Call, *, background: bool = False, on_purpose: bool = False) -> Done[Cfg] | None:
        """Return what a tune of this call's key found; None where the caller need not wait for it."""
        while True:
            tune, begun = self._begin(call, background=background, on_purpose=on_purpose)
            call.meet(tune.id, begun)
            if background or (not begun and not on_purpose and call.policy.on_pending == "heuristics"):
                return None
            if not begun:
                tell(self._events, PendingJoin, call, tune_id=tune.id, waiters=tune.waiters + 1)
            if call.waiting_since is None:
                call.waiting_since = self._events.now()
            leaves = not on_purpose and call.policy.on_pending == "heuristics"
            try:
                return await self._tuning.wait(tune, lambda: leaves and tune.elsewhere)  # noqa: B023
            except SelectorClosedError:
                if self._standing.closed or self._tuning.is_ours(tune):
                    raise
                # It was another chain's, over the same cache. Its closing is not ours: begin anew.

    def _begin(self, call: Call, *, background: bool = False, on_purpose: bool = False) -> tuple[Tune[Cfg], bool]:
        make_job = partial(self._job, call, on_purpose)
        return self._tuning.begin(
            self.sought(call), make_job, call.policy, background=background, on_purpose=on_purpose
        )

    def sought(self, call: Call) -> Sought[Cfg]:
        known, exact = call.known, call.policy.match_environment == "exact"
        return Sought(call.key, call.checksum, environment(known.device), exact, known.candidates)

    def _timings(self, call: Call) -> dict[int, Measured[Cfg]]:
        software = environment(call.known.device)
        return timings_in(self._cache.reports(call.key), call.known.candidates, call.objective, software)

    def _job(self, call: Call, on_purpose: bool) -> TuneJob[Cfg]:
        known, inv, policy = call.known, call.inv, call.policy
        return TuneJob(
            candidates=known.candidates,
            make_fn=partial(bind, call.kernel, inv, known.platform),
            args=tuple(inv.args),
            kwargs=dict(inv.kwargs),
            example=example_inputs_of(call.kernel, inv),
            key=call.key,
            checksum=call.checksum,
            objective=call.objective,
            incumbent=known.incumbent,
            groups=known.groups,
            known={} if on_purpose else self._timings(call),
            outcomes=dict(barred(known, self._cache)),
            device=known.device,
            settings=call.settings or current_settings(),
            tune_budget_s=policy.tune_budget_s,
            candidate_timeout_s=policy.candidate_timeout_s,
            grace_s=lambda: self._standing.close_grace_s if self._standing.closed else 0.0,
            emit=self._events,
        )

    def queue(self, call: Call) -> str:
        """Have the loop tune this key, and say so; or say why not."""
        if (why := self.why_not_tune(call)) is not None:
            self.read_later(call)
            return self.flag_if_late(call, why)
        if isinstance(self._cache.peek(call.key, call.checksum), Pending):
            return "a tune is pending, and this call cannot wait"
        if not self.backlog.add(call):
            return "this call cannot wait, and background tuning needs the chain's `async with`"
        return "queued for the background, since this call cannot wait"

    def read_later(self, call: Call) -> None:
        """Have the loop read the store for the next call, where this one could not wait for it."""
        if self._reading is not None and not call.known.traced and not self._reading.has_just_missed(self.sought(call)):
            self.backlog.add(call)

    async def _catch_up(self, call: Call) -> None:
        """Do for a queued call what the persistent and autotune tiers would have done."""
        asking.set(None)  # the call has its answer; what is done here is done for the next one
        try:
            if self._reading is not None and await self._reading.load(self.sought(call)) is not None:
                return
        except StoreError:
            pass  # told by an event already; the tune can do without
        except SelectorClosedError:
            return
        if isinstance(self._cache.peek(call.key, call.checksum), Miss) and self.why_not_tune(call) is None:
            self._begin(call, background=True)
