"""The tunes of one chain: how they begin, who carries them, and how each one ends.

An open chain's task group owns its tunes and callers only wait. Without one, a tune runs inside
its first caller, and whoever waits next carries on if that caller is cancelled. Either way the
entry in the cache is the tune, and it is replaced before the waiters are woken: the next caller
finds one or the other.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from functools import partial
from typing import Generic

import anyio
from anyio.abc import TaskGroup

from asel.adapters import Tunes
from asel.cache import ConfigCache, Done, Match, Provenance, without_overlays
from asel.errors import SelectorClosedError, TuningError
from asel.events import AutotuneFailed, AutotuneFinish, AutotuneStart
from asel.fanout import FanOut
from asel.jobs import TuneJob
from asel.keeper import Keeper
from asel.kernel import Cfg
from asel.keys import CacheKey
from asel.memo import Memo
from asel.outcomes import Failed, Measured, Skipped
from asel.pending import Shared
from asel.persistence import Sought
from asel.policy import AutotunePolicy
from asel.redaction import redact
from asel.reporting import timings_in
from asel.stores.protocol import Claim
from asel.threads import Busy

__all__ = ["Tune", "Tuning", "inside_a_tune"]

_inside: ContextVar[str] = ContextVar("asel_inside_a_tune", default="")
inside_a_tune = _inside.get
"""The tune's id, in a tune and in whatever its candidates call: waiting for a tune from there could wait for itself."""

_REMEMBERED = 65_536
# How much longer than its budget a tune may take in another process before this one begins its own.
CLAIM_GRACE_S = 5.0


class TunedElsewhere(TuningError):
    """Another process is at it, and whoever would have to wait for it here does not want to."""


class Tune(Shared[Done[Cfg]]):
    """One tune in flight."""

    def __init__(
        self,
        job: TuneJob[Cfg],
        sought: Sought[Cfg],
        policy: AutotunePolicy,
        started: float,
        chain: object,
        *,
        owned: bool,
        on_purpose: bool,
        background: bool,
    ) -> None:
        super().__init__(job.id)
        self.chain = chain
        self.saving: anyio.CancelScope | None = None
        self.background = background
        self.told = False
        # True iff another process is known to be tuning the key, and this one has not begun to.
        self.elsewhere = False
        self.job = job
        self.sought = sought
        self.policy = policy
        self.owned = owned
        self.on_purpose = on_purpose
        self.started = started


class Tuning(Generic[Cfg]):
    """Begins, carries and ends tunes."""

    def __init__(
        self,
        cache: ConfigCache[Cfg],
        tuner: Tunes[Cfg],
        keeper: Keeper[Cfg] | None,
        events: FanOut,
    ) -> None:
        self._cache = cache
        self._tuner = tuner
        self._keeper = keeper
        self._events = events
        self._tasks: TaskGroup | None = None
        self._running: dict[Tune[Cfg], None] = {}
        self._left_behind: list[Busy] = []
        # What this chain has tuned, and which keys must wait until when: by key and checksum.
        self._tuned: Memo[bool] = Memo(_REMEMBERED)
        self._failures: Memo[tuple[float, str]] = Memo(_REMEMBERED)

    # Who carries.

    def open(self, tasks: TaskGroup) -> None:
        self._tasks = tasks

    @property
    def owns_tunes(self) -> bool:
        return self._tasks is not None

    def begin(
        self,
        sought: Sought[Cfg],
        make_job: Callable[[], TuneJob[Cfg]],
        policy: AutotunePolicy,
        *,
        background: bool = False,
        on_purpose: bool = False,
    ) -> tuple[Tune[Cfg], bool]:
        """Return the tune in flight for a key, and whether it was begun just now."""

        def make() -> Tune[Cfg]:
            return Tune(
                make_job(),
                sought,
                policy,
                self._events.now(),
                self,
                owned=self.owns_tunes,
                on_purpose=on_purpose,
                background=background,
            )

        pending, begun = self._cache.begin(sought.key, sought.checksum, make)
        tune: Tune[Cfg] = pending  # type: ignore[assignment]
        tune.on_purpose |= on_purpose
        if begun:
            self._running[tune] = None
            if self._tasks is not None:
                self._tasks.start_soon(self._run, tune, name=f"asel tune of {sought.key.op_id}")
            if self._keeper is None:
                self._tell_start(tune)
        return tune, begun

    def _tell_start(self, tune: Tune[Cfg]) -> None:
        if tune.told:  # whoever carries on does not begin
            return
        tune.told = True
        self._events(
            AutotuneStart(
                key=tune.job.key,
                start=tune.started,
                end=tune.started,
                tune_id=tune.id,
                candidates=len(tune.job.candidates),
                objective=tune.job.objective,
                background=tune.background,
            )
        )

    def is_ours(self, tune: Tune[Cfg]) -> bool:
        return tune.chain is self

    def wait(self, tune: Tune[Cfg], leave: Callable[[], bool] = lambda: False) -> Awaitable[Done[Cfg] | None]:
        """Return what a tune found; None where `leave` says that the caller need not wait.

        Raises:
            TuningError: nothing could be measured.
            SelectorClosedError: its chain was closed.
        """
        if tune.owned:
            return tune.wait(leave)
        return tune.carry(partial(self._run, tune), partial(self._abandon, tune))

    async def settled(self) -> None:
        """Return once no tune is in flight."""
        while not self.is_idle:
            await next(tune for tune in self._running if tune.owned).until_ended()

    @property
    def in_flight(self) -> list[Tune[Cfg]]:
        return list(self._running)

    @property
    def is_idle(self) -> bool:
        return not any(tune.owned for tune in self._running)

    # How it goes.

    async def _run(self, tune: Tune[Cfg]) -> None:
        token = _inside.set(tune.id)
        try:
            with without_overlays():
                done = await (self._find(tune) if self._keeper is None else self._find_for_all(tune, self._keeper))
        except TunedElsewhere as error:
            self._break_off(tune, "TunedElsewhere", str(error))
            tune.fail(error)
        except Exception as error:
            self._fail(tune, error)
        except BaseException:
            if tune.owned:  # nobody will carry on
                self._close(tune)
            raise
        else:
            self._succeed(tune, done)
        finally:
            _inside.reset(token)
            self._left_behind = [thread for thread in (*self._left_behind, *tune.job.left_behind) if thread.alive]

    async def _find(self, tune: Tune[Cfg]) -> Done[Cfg]:
        report = await self._tuner.tune(tune.job)
        return Done(report.winner, Match(), Provenance("autotune", report))

    async def _find_for_all(self, tune: Tune[Cfg], keeper: Keeper[Cfg]) -> Done[Cfg]:
        """Tune on behalf of every process that shares the store, or take what another of them found."""
        job, policy, sought = tune.job, tune.policy, tune.sought
        wait_s = policy.tune_budget_s + CLAIM_GRACE_S if policy.wait_s is None else policy.wait_s
        leaves = policy.on_pending == "heuristics" and not tune.owned
        note = partial(self._note_elsewhere, tune)
        async with keeper.claim(sought, 0.0 if leaves else wait_s, note, anew=tune.on_purpose) as claim:
            if not tune.on_purpose:
                if (stored := keeper.found_by(claim, sought)) is not None:
                    return Done(stored.cfg, Match(), Provenance("persistent", stored.report))
                if leaves and tune.elsewhere:
                    raise TunedElsewhere(f"another process is tuning {job.key.op_id!r}", key=job.key)
                known = timings_in(await keeper.reports(sought), job.candidates, job.objective, sought.environment)
                job.known = {**known, **job.known}
            tune.elsewhere = False
            self._tell_start(tune)
            done = await self._find(tune)
            return await self._keep(tune, keeper, done, claim)

    def _note_elsewhere(self, tune: Tune[Cfg]) -> None:
        tune.elsewhere = True
        tune.wake()

    async def _keep(self, tune: Tune[Cfg], keeper: Keeper[Cfg], done: Done[Cfg], claim: Claim) -> Done[Cfg]:
        """Store what was found; where another writer was first, adopt what it found."""
        report = done.provenance.report
        assert report is not None
        tune.saving = anyio.CancelScope()
        stored = await keeper.keep(report, replace=tune.on_purpose, claim=claim, scope=tune.saving)
        if stored is not None:
            await keeper.catch_up()
        if stored is None or not stored.adopted:
            return done
        return Done(stored.cfg, Match(), Provenance("autotune", report))

    # How it ends: each of these is one step, with no await in it.

    def _succeed(self, tune: Tune[Cfg], done: Done[Cfg]) -> None:
        if tune.ended:  # the chain was closed while the result was being stored
            return
        job = tune.job
        self._end(tune, done)
        if done.provenance.source == "autotune":
            self._tuned.put((job.key, job.checksum), True)
            self._tell_finish(tune, done)
        tune.succeed(done)

    def _tell_finish(self, tune: Tune[Cfg], done: Done[Cfg]) -> None:
        job, outcomes = tune.job, list(tune.job.outcomes.values())
        self._events(
            AutotuneFinish(
                key=job.key,
                start=tune.started,
                end=self._events.now(),
                tune_id=job.id,
                cfg=done.cfg,
                measured=sum(isinstance(outcome, Measured) for outcome in outcomes),
                failed=sum(isinstance(outcome, Failed) for outcome in outcomes),
                skipped=sum(isinstance(outcome, Skipped) for outcome in outcomes),
                margin=None if done.provenance.report is None else done.provenance.report.margin,
                waiters=tune.waiters,
            )
        )

    def _fail(self, tune: Tune[Cfg], error: Exception) -> None:
        if tune.ended:
            return
        job = tune.job
        if not isinstance(error, TuningError):
            wrapped = TuningError(
                f"tuning {job.key.op_id!r} broke off: {type(error).__name__}: {redact(error)}",
                key=job.key,
                outcomes=tuple(job.outcomes.values()),
            )
            wrapped.__cause__ = error
            error = wrapped
        retry_at = self._events.now() + tune.policy.retry_after_s
        self._failures.put((job.key, job.checksum), (retry_at, str(error)))
        self._end(tune, None)
        self._tell_failed(tune, _what_went_wrong(error), str(error), retry_at)
        tune.fail(error)

    def _close(self, tune: Tune[Cfg]) -> None:
        if not tune.ended:
            message = f"the chain was closed while {tune.job.key.op_id!r} was being tuned"
            self._break_off(tune, "SelectorClosedError", message)
            tune.fail(SelectorClosedError(message))

    def _abandon(self, tune: Tune[Cfg]) -> None:
        self._break_off(tune, "Cancelled", "the last caller to wait for it was cancelled")

    def _break_off(self, tune: Tune[Cfg], error_type: str, message: str) -> None:
        """End a tune that did not fail: nothing keeps the next caller from beginning it again."""
        self._end(tune, None)
        self._tell_failed(tune, error_type, message, None)

    def _tell_failed(self, tune: Tune[Cfg], error_type: str, message: str, retry_at: float | None) -> None:
        self._events(
            AutotuneFailed(
                key=tune.job.key,
                start=tune.started,
                end=self._events.now(),
                tune_id=tune.id,
                error_type=error_type,
                message=message,
                retry_at=retry_at,
            )
        )

    def _end(self, tune: Tune[Cfg], done: Done[Cfg] | None) -> None:
        job = tune.job
        self._cache.finish(job.key, job.checksum, tune, done, replace_put=tune.on_purpose)
        self._running.pop(tune, None)

    def close(self, grace_s: float) -> int:
        """Wake every waiter with SelectorClosedError; return how many tunes that cut short."""
        self._tasks = None
        running = list(self._running)
        for tune in running:
            if tune.saving is not None:
                tune.saving.deadline = min(tune.saving.deadline, anyio.current_time() + grace_s)
            self._close(tune)
        return len(running)

    def shift_clock(self, by_s: float) -> None:
        """Carry what is remembered in moments over to a clock that is ahead by so many seconds."""
        self._failures.replace_all(lambda failed: (failed[0] + by_s, failed[1]))

    def still_busy(self) -> tuple[str, ...]:
        """Name the steps whose threads have not come back."""
        return tuple(dict.fromkeys(thread.what for thread in self._left_behind if thread.alive))

    # What it remembers.

    def has_tuned(self, key: CacheKey, checksum: str) -> bool:
        return self._tuned.get((key, checksum)) is not None

    def failure(self, key: CacheKey, checksum: str) -> tuple[float, str] | None:
        """Return how long a failed key has to wait yet, and why it failed; None if it may be tuned."""
        failed = self._failures.get((key, checksum))
        if failed is None or failed[0] <= self._events.now():
            return None
        return failed[0] - self._events.now(), failed[1]


def _what_went_wrong(error: TuningError) -> str:
    """Name the error behind a failed tune: what all candidates failed with, where that is one and the same."""
    cause = error.__cause__
    if cause is not None and not isinstance(cause, ExceptionGroup):
        return type(cause).__name__
    kinds = {outcome.error_type for outcome in error.outcomes if isinstance(outcome, Failed)}
    return kinds.pop() if len(kinds) == 1 else type(error).__name__
