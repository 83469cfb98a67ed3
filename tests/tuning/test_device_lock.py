"""The lock on a device: one holder at a time, in order, and what happens if a thread does not finish."""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from functools import partial

import anyio
import numpy as np
import pytest
from support.tunes import SamplerOf, tune_of

from asel import Failed, Measured, Skipped, Tuner, TuningError
from asel.kernels.devices import default_device
from asel.runtime.threads import run_in_thread
from asel.testing import RecordingSink
from asel.tuning.device_lock import DeviceLock, DeviceStuck, alone_on, default_compile_width, device_lock_for
from asel.tuning.state import TuneState

PATIENCE_S = 10.0  # after this a closed gate fails the test; no passing test waits so long


class Stuck:
    """A real thread that was abandoned, and finishes on request."""

    def __init__(self) -> None:
        self._open = threading.Event()

    def work(self) -> None:
        assert self._open.wait(PATIENCE_S)

    async def leave_behind(self, left_behind: list) -> None:
        with anyio.move_on_after(0):
            await run_in_thread("hanging", self.work, left_behind=left_behind)

    async def come_back(self, left_behind: list) -> None:
        """Let the thread end, and return once the loop knows."""
        back = anyio.Event()
        left_behind[-1].when_done(back.set)
        self._open.set()
        with anyio.fail_after(PATIENCE_S):
            await back.wait()

    def __enter__(self) -> Stuck:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._open.set()


# ---------------------------------------------------------------------------------------------
# Taking turns.


@pytest.mark.anyio
async def test_a_device_has_one_holder_at_a_time_and_everyone_gets_a_turn():
    """The holder is alone on the device, and the device is never idle while a task waits."""
    lock, holding, most, turns = DeviceLock(), 0, 0, []

    async def hold(name: int) -> None:
        nonlocal holding, most
        async with lock.held([]):
            holding += 1
            most = max(most, holding)
            turns.append(name)
            await anyio.sleep(1)
            holding -= 1

    start = anyio.current_time()
    async with anyio.create_task_group() as tasks:
        for name in range(4):
            tasks.start_soon(hold, name)
    assert most == 1
    assert sorted(turns) == [0, 1, 2, 3]
    assert anyio.current_time() - start == pytest.approx(4)


@pytest.mark.anyio
async def test_a_device_is_free_after_an_error():
    """A holder that fails gives the lock back."""
    lock = DeviceLock()
    with pytest.raises(LookupError):
        async with lock.held([]):
            raise LookupError
    with anyio.fail_after(1):
        async with lock.held([]):
            pass


@pytest.mark.anyio
async def test_a_device_is_free_after_its_holder_was_cancelled():
    """A cancelled holder that left no thread behind gives the lock back."""
    lock = DeviceLock()
    with anyio.move_on_after(1):
        async with lock.held([]):
            await anyio.sleep_forever()
    with anyio.fail_after(1):
        async with lock.held([]):
            pass


@pytest.mark.anyio
async def test_a_cancelled_waiter_leaves_the_queue_intact():
    """A waiter that gives up takes no other waiter's turn."""
    lock, turns = DeviceLock(), []

    async def hold(name: str, patience_s: float) -> None:
        with anyio.move_on_after(patience_s):
            async with lock.held([]):
                turns.append(name)
                await anyio.sleep(10)

    async with anyio.create_task_group() as tasks:
        for name, patience_s in [("holder", 60), ("impatient", 5), ("patient", 60)]:
            tasks.start_soon(hold, name, patience_s)
            await anyio.sleep(0.01)
    assert turns == ["holder", "patient"]


@pytest.mark.anyio
async def test_each_device_has_its_own_lock():
    """Equal devices share a lock; different devices do not delay each other."""
    assert device_lock_for("gpu:0") is device_lock_for("gpu:0")
    assert device_lock_for("gpu:0") is not device_lock_for("gpu:1")


def test_each_event_loop_has_its_own_locks(real_backend):
    """A lock that one loop left stuck does not hold up the next loop in the same process."""

    async def get_stuck(stuck: Stuck):
        left_behind = []
        with pytest.raises(TimeoutError):
            async with device_lock_for("gpu:0").held(left_behind):
                await stuck.leave_behind(left_behind)
                raise TimeoutError
        with pytest.raises(DeviceStuck):
            async with device_lock_for("gpu:0").held([]):
                pass

    async def take():
        with anyio.fail_after(PATIENCE_S):
            async with device_lock_for("gpu:0").held([]):
                return "held"

    with Stuck() as stuck:
        anyio.run(get_stuck, stuck, backend=real_backend)
        assert anyio.run(take, backend=real_backend) == "held"


@pytest.mark.parametrize(("cores", "slots"), [(None, 1), (1, 1), (2, 1), (4, 1), (6, 2), (16, 7)])
def test_compiling_leaves_cores_to_the_loop(cores, slots, monkeypatch):
    """At most `cores // 2 - 1` candidates compile at once, and always one."""
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    assert default_compile_width() == slots


# ---------------------------------------------------------------------------------------------
# Stuck.


def test_a_stuck_device_refuses_newcomers_until_its_thread_is_back(real_backend):
    """While an abandoned thread runs on the device, no other task may use it; afterwards any may."""

    async def main():
        with Stuck() as stuck:
            lock, left_behind = DeviceLock(), []
            async with lock.held(left_behind):
                await stuck.leave_behind(left_behind)
            for _ in range(2):
                with pytest.raises(DeviceStuck):
                    async with lock.held([]):
                        pytest.fail("ran beside a busy thread")

            await stuck.come_back(left_behind)
            with anyio.fail_after(PATIENCE_S):
                async with lock.held([]):
                    pass

    anyio.run(main, backend=real_backend)


def test_waiters_learn_that_the_device_is_stuck(real_backend):
    """A stuck lock may never be free, so its waiters fail instead of waiting on."""

    async def main():
        lock, left_behind, told = DeviceLock(), [], []
        asking = anyio.Event()

        async def wait(name: str) -> None:
            asking.set()
            try:
                async with lock.held([]):
                    pytest.fail("ran beside a busy thread")
            except DeviceStuck:
                told.append(name)

        with Stuck() as stuck, anyio.fail_after(PATIENCE_S):
            async with anyio.create_task_group() as tasks, lock.held(left_behind):
                for name in ("first", "second"):
                    asking = anyio.Event()
                    tasks.start_soon(wait, name)
                    await asking.wait()
                await stuck.leave_behind(left_behind)
            assert sorted(told) == ["first", "second"]
            assert left_behind[0].alive  # the waiters failed while the thread was still busy

    anyio.run(main, backend=real_backend)


def test_a_device_waits_for_the_last_of_its_threads(real_backend):
    """A holder may leave several threads behind; the lock is free when the last one has finished."""

    async def main():
        lock, left_behind = DeviceLock(), []
        with Stuck() as one, Stuck() as other:
            async with lock.held(left_behind):
                await one.leave_behind(left_behind)
                await other.leave_behind(left_behind)
            await other.come_back(left_behind)
            with pytest.raises(DeviceStuck):
                async with lock.held([]):
                    pytest.fail("ran beside a busy thread")
            left_behind.reverse()
            await one.come_back(left_behind)
            with anyio.fail_after(PATIENCE_S):
                async with lock.held([]):
                    pass

    anyio.run(main, backend=real_backend)


def test_a_device_is_free_if_its_thread_came_back_before_its_holder_left(real_backend):
    """Only threads that are still busy hold a lock."""

    async def main():
        lock, left_behind = DeviceLock(), []
        with Stuck() as stuck, anyio.fail_after(PATIENCE_S):
            async with lock.held(left_behind):
                await stuck.leave_behind(left_behind)
                await stuck.come_back(left_behind)
            async with lock.held([]):
                pass

    anyio.run(main, backend=real_backend)


class Left:
    """An abandoned thread in virtual time, which finishes at a given time."""

    def __init__(self, tasks, back_at: float) -> None:
        self._tasks, self._back_at = tasks, back_at

    @property
    def alive(self) -> bool:
        return anyio.current_time() < self._back_at

    def when_done(self, callback) -> None:
        self._tasks.start_soon(self._tell, callback)

    async def _tell(self, callback) -> None:
        await anyio.sleep(self._back_at - anyio.current_time())
        callback()


@pytest.mark.anyio
@pytest.mark.parametrize("end", ["timed out", "cancelled"])
@pytest.mark.parametrize("back_s", [3, 100])
async def test_a_device_is_stuck_at_once_after_a_timeout_and_else_when_patience_ends(end, back_s):
    """A thread that timed out may never finish; one that was cancelled has until its patience ends."""
    lock, start = DeviceLock(), anyio.current_time()
    async with anyio.create_task_group() as tasks:
        with anyio.move_on_after(1 if end == "cancelled" else 100), suppress(TimeoutError):
            async with lock.held([Left(tasks, start + back_s)], patience_s=5):
                with anyio.fail_after(1 if end == "timed out" else 100):
                    await anyio.sleep_forever()
        try:
            async with lock.held([]):
                found = "free"
        except DeviceStuck:
            found = "stuck"
        seen = (found, anyio.current_time() - start)
        tasks.cancel_scope.cancel()
    expected = ("stuck", 1) if end == "timed out" else ("free", 3) if back_s == 3 else ("stuck", 5)
    assert seen == (expected[0], pytest.approx(expected[1]))


# ---------------------------------------------------------------------------------------------
# In a tuner.


class HangingMeasure:
    """Takes no time for any candidate, except that the named one hangs in a real thread at the named stage."""

    def __init__(self, hanging: str | None, stage: str) -> None:
        self._hanging, self._stage = hanging, stage
        self.stuck = Stuck()
        self.hangs = anyio.Event()

    async def compile(self, trial):
        hangs = trial.cfg == self._hanging
        if hangs and self._stage == "compile":
            await self._hang("compiling", trial)

        async def sample() -> float:
            if hangs and self._stage == "measure":
                await self._hang("measuring", trial)
            return 0.001

        return sample

    async def _hang(self, what: str, trial) -> None:
        self.hangs.set()
        await run_in_thread(what, self.stuck.work, left_behind=trial.left_behind)


async def cancel_once_it_hangs(measure: HangingMeasure, fn, *args) -> None:
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(fn, *args)
        with anyio.fail_after(PATIENCE_S):
            await measure.hangs.wait()
        tasks.cancel_scope.cancel()


def tunes_of(*candidates: str, **facts) -> TuneState:
    return tune_of(candidates, device="gpu:0", **facts)


def kinds(outcomes) -> list[type]:
    return [type(outcome) for outcome in outcomes]


def test_a_candidate_that_hangs_on_the_device_has_the_rest_skipped(real_backend):
    """Candidates that cannot be timed alone are skipped, the best so far wins, and the lock recovers."""

    async def main():
        measure, sink = HangingMeasure("hangs", "measure"), RecordingSink()
        with measure.stuck:
            tuner = Tuner(warmup=0, iters=1, measure=measure, strategy="exhaustive")
            state = tunes_of("good", "hangs", "late", "later", candidate_timeout_s=0.05, emit=sink.emit)
            report = await tuner.tune(state)
            assert report.winner == "good"
            assert kinds(report.outcomes) == [Measured, Failed, Skipped, Skipped]
            assert report.outcomes[1] == Failed(
                "hangs", "measure", "TimeoutError", "took longer than 0.05 s; its thread is still busy"
            )
            assert report.outcomes[2].reason == "an abandoned candidate still occupies the device"
            assert sink.named("candidate_failed")[0].still_busy
            assert [event.index for event in sink.named("candidate_skipped")] == [2, 3]
            assert [busy.what for busy in state.left_behind] == ["measuring"]

            await measure.stuck.come_back(state.left_behind)
            again = await tuner.tune(tunes_of("late", "later"))
            assert kinds(again.outcomes) == [Measured, Measured]

    anyio.run(main, backend=real_backend)


def test_an_unchecked_candidate_is_not_timed(real_backend):
    """If a check hangs on the device, the others are skipped at once, and not only after their timeouts."""

    class Checked(HangingMeasure):
        async def compile(self, trial):
            sample = await super().compile(trial)
            return SamplerOf(sample, outputs=partial(self._outputs, trial))

        async def _outputs(self, trial):
            if trial.cfg == "hangs":
                await self._hang("checking", trial)
            return [np.ones(3)]

    async def main():
        measure = Checked("hangs", "outputs")
        with measure.stuck, pytest.raises(TuningError) as caught:
            state = tunes_of("good", "hangs", "late", incumbent=0, candidate_timeout_s=0.05)
            await Tuner(warmup=0, iters=1, measure=measure, check=True).tune(state)
        good, hung, late = caught.value.outcomes
        assert (hung.stage, hung.error_type) == ("check", "TimeoutError")
        assert good.reason == "an abandoned candidate still occupies the device"
        assert late.reason == f"{good.reason}, so it was not checked"

    anyio.run(main, backend=real_backend)


def test_a_candidate_that_hangs_while_compiling_harms_no_other(real_backend):
    """Compiling does not occupy the device, so a compiler that hangs costs its own candidate alone."""

    async def main():
        measure = HangingMeasure("hangs", "compile")
        with measure.stuck:
            state = tunes_of("good", "hangs", "late", candidate_timeout_s=0.05)
            report = await Tuner(warmup=0, iters=1, measure=measure).tune(state)
            assert kinds(report.outcomes) == [Measured, Failed, Measured]
            assert (report.outcomes[1].stage, report.outcomes[1].error_type) == ("compile", "TimeoutError")
            assert [(busy.what, busy.alive) for busy in state.left_behind] == [("compiling", True)]

    anyio.run(main, backend=real_backend)


def test_a_tune_that_finds_its_device_stuck_says_so(real_backend):
    """A tune whose every candidate was skipped is a TuningError with those outcomes and no cause."""

    async def main():
        measure = HangingMeasure("hangs", "measure")
        with measure.stuck:
            tuner = Tuner(warmup=0, iters=1, measure=measure)
            with pytest.raises(TuningError):
                await tuner.tune(tunes_of("hangs", candidate_timeout_s=0.05))
            with pytest.raises(TuningError, match="0 failed, 2 were skipped") as caught:
                await tuner.tune(tunes_of("late", "later"))
            assert kinds(caught.value.outcomes) == [Skipped, Skipped]
            assert caught.value.__cause__ is None

    anyio.run(main, backend=real_backend)


def test_a_measurement_that_finds_its_device_stuck_says_so(real_backend):
    """`Tuner.measure` raises TuningError whenever there is no measurement, even if it could not try."""

    async def main():
        hangs = HangingMeasure(None, "measure")  # `Tuner.measure` has no config
        with hangs.stuck:
            tuner = Tuner(warmup=0, iters=1, measure=hangs)
            with pytest.raises(TuningError, match="its thread is still busy"):
                await tuner.tune(tune_of((None,), len, (), {}, device=default_device(), candidate_timeout_s=0.05))
            with pytest.raises(TuningError) as caught:
                await tuner.measure(len, "abc")
            assert kinds(caught.value.outcomes) == [Skipped]

    anyio.run(main, backend=real_backend)


def test_a_cancelled_tune_knows_the_threads_it_left_behind(real_backend):
    """A cancelled tune's state names the thread it left behind; after its timeout the device is stuck."""

    async def main():
        measure = HangingMeasure("hangs", "measure")
        with measure.stuck:
            state = tunes_of("hangs", candidate_timeout_s=0.05)
            await cancel_once_it_hangs(measure, Tuner(warmup=0, iters=1, measure=measure).tune, state)
            assert state.outcomes == {}
            assert [busy.what for busy in state.left_behind] == ["measuring"]
            with pytest.raises(DeviceStuck):
                async with device_lock_for("gpu:0").held([]):
                    pytest.fail("ran beside a busy thread")
            await measure.stuck.come_back(state.left_behind)
            async with device_lock_for("gpu:0").held([]):
                pass

    anyio.run(main, backend=real_backend)


@pytest.mark.parametrize("who", ["the same state", "another tune"])
def test_the_tune_after_a_cancelled_one_waits_for_its_thread(real_backend, who):
    """Until its timeout is over, a thread does not count as hanging: the next tune waits until it has finished."""

    async def main():
        measure = HangingMeasure("hangs", "measure")
        with measure.stuck:
            state = tunes_of("hangs", "late")
            tuner = Tuner(warmup=0, iters=1, measure=measure, strategy="exhaustive")
            await cancel_once_it_hangs(measure, tuner.tune, state)
            reports = []

            async def tune_next() -> None:
                reports.append(await tuner.tune(state if who == "the same state" else tunes_of("one", "other")))

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(tune_next)
                await anyio.wait_all_tasks_blocked()
                assert reports == []
                await measure.stuck.come_back(state.left_behind)
            assert kinds(reports[0].outcomes) == [Measured, Measured]

    anyio.run(main, backend=real_backend)


@pytest.mark.anyio
async def test_a_call_over_devices_is_alone_on_all_of_them():
    """Two calls that share a device take turns, in whatever order they list their devices."""
    busy, most = 0, 0

    async def hold(*devices) -> None:
        nonlocal busy, most
        async with alone_on(devices, []):
            busy += 1
            most = max(most, busy)
            await anyio.sleep(1)
            busy -= 1

    start = anyio.current_time()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(hold, "gpu:0", "gpu:1")
        tasks.start_soon(hold, "gpu:1", "gpu:0")
        tasks.start_soon(hold, "gpu:1")
    assert most == 1
    assert anyio.current_time() - start == pytest.approx(3)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(hold, "gpu:0", "gpu:1")
        tasks.start_soon(hold, "gpu:2")
    assert anyio.current_time() - start == pytest.approx(4)
