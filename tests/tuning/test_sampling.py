"""Taking the samples that a strategy plans: quick ones in a series, with the same outcomes as one by one."""

from __future__ import annotations

import threading
import time
from collections import Counter
from types import SimpleNamespace

import anyio
import jax.numpy as jnp
import pytest
from support.tunes import play_on, tune_among, tune_of

from asel import Failed, Measured, Skipped, Tuner
from asel.testing import RecordingSink, ScriptedMeasure
from asel.tuning.jax_measure import JaxMeasure
from asel.tuning.measure import BaseSampler
from asel.tuning.race import Race
from asel.tuning.scoreboard import Scoreboard
from asel.tuning.strategies import Exhaustive, Sample, compile_all

PATIENCE_S = 10.0  # after this a closed gate fails the test; no passing test waits so long


class OnABench(ScriptedMeasure):
    """A scripted measure whose samplers can be sampled in a series."""

    def __init__(self, *args, **script) -> None:
        super().__init__(*args, **script)
        self.series_of: list[list[object]] = []

    async def compile(self, trial):
        return _Seat(self, trial.cfg, await super().compile(trial))

    async def series(self, samplers, taken, left_behind):
        self.series_of.append([sampler.cfg for sampler in samplers])
        for sampler in samplers:
            start = anyio.current_time()
            seconds = await sampler()
            taken.append((seconds, anyio.current_time() - start))


class _Seat(BaseSampler):
    def __init__(self, bench, cfg, sample) -> None:
        self.bench, self.cfg, self._sample = bench, cfg, sample

    async def __call__(self) -> float:
        return await self._sample()


class Nth:
    """A cost that changes with the number of the sample."""

    def __init__(self, **costs) -> None:
        self._costs = costs
        self._seen = Counter()

    def __call__(self, cfg):
        self._seen[cfg] += 1
        costs = self._costs[cfg]
        return costs[min(self._seen[cfg], len(costs)) - 1]


ALIKE = {name: 0.001 + 1e-5 * number for number, name in enumerate("abcdef")}


def samples_of(report) -> dict:
    return {one.cfg: one.samples_s for one in report.outcomes if isinstance(one, Measured)}


# ---------------------------------------------------------------------------------------------
# Which samples are a series.


@pytest.mark.anyio
async def test_a_round_of_quick_candidates_is_one_series():
    """Warm-ups are taken one by one; after them a round is one series, in the order of the plan."""
    measure = OnABench(ALIKE)
    await Tuner(measure=measure).tune(tune_among(*ALIKE))
    assert measure.series_of
    assert all(sorted(series) == sorted(set(series)) for series in measure.series_of)
    assert sorted(measure.series_of[0]) == sorted(ALIKE)
    in_series = [cfg for series in measure.series_of for cfg in series]
    assert measure.sampled[len(ALIKE) :] == in_series


@pytest.mark.anyio
async def test_a_series_has_the_same_result_as_samples_one_by_one():
    """Series change neither the order of samples nor the winner."""
    on_a_bench, alone = OnABench(ALIKE), ScriptedMeasure(ALIKE)
    first = await Tuner(measure=on_a_bench).tune(tune_among(*ALIKE))
    second = await Tuner(measure=alone).tune(tune_among(*ALIKE))
    assert on_a_bench.sampled == alone.sampled
    assert samples_of(first) == samples_of(second)
    assert first.winner == second.winner
    assert [one.measure_s for one in first.outcomes] == pytest.approx([one.measure_s for one in second.outcomes])


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("seconds", "timeout_s", "longest"), [(0.001, 30.0, 6), (0.005, 30.0, 4), (0.011, 30.0, 1), (0.001, 0.03, 3)]
)
async def test_a_series_is_short(seconds, timeout_s, longest):
    """It takes at most 20 ms and a tenth of the candidate timeout, so neither others nor the timeout wait long."""
    measure = OnABench(seconds)
    await Tuner(measure=measure).tune(tune_among(*"abcdef", candidate_timeout_s=timeout_s))
    assert max(map(len, measure.series_of), default=1) == longest


@pytest.mark.anyio
async def test_a_slow_candidate_is_sampled_alone_and_the_others_around_it_together():
    """It ends one series, and another begins after it."""

    class Plan:
        def plan(self, board: Scoreboard):
            yield from compile_all(board)
            yield from [Sample((0, 1, 2, 3, 4))] * 2

    measure = OnABench({"a": 0.001, "b": 0.002, "slow": 0.030, "d": 0.003, "e": 0.004})
    report = await Tuner(0, 1, measure=measure, strategy=Plan()).tune(tune_among("a", "b", "slow", "d", "e"))
    assert measure.series_of == [["a", "b"], ["d", "e"]]
    assert {len(samples) for samples in samples_of(report).values()} == {2}


# ---------------------------------------------------------------------------------------------
# Failures in a series.


class Breaks:
    """A candidate that fails from its third sample on, the first in a series."""

    def __init__(self, cfg, error) -> None:
        self._cfg, self._error, self._seen = cfg, error, 0

    def __call__(self, cfg):
        self._seen += cfg == self._cfg
        return self._error if cfg == self._cfg and self._seen > 2 else None


@pytest.mark.anyio
@pytest.mark.parametrize("bad", list(ALIKE))
@pytest.mark.parametrize("error", [RuntimeError("third time unlucky"), SystemExit(3)])
async def test_a_failure_in_a_series_is_one_outcome(bad, error):
    """Candidates before it keep their samples, and those after it are sampled as usual."""
    measure = OnABench(ALIKE, run_errors=Breaks(bad, error))
    alone = ScriptedMeasure(ALIKE, run_errors=Breaks(bad, error))
    report = await Tuner(measure=measure).tune(tune_among(*ALIKE))
    other = await Tuner(measure=alone).tune(tune_among(*ALIKE))
    failed = [one for one in report.outcomes if isinstance(one, Failed)]
    assert [(one.cfg, one.stage) for one in failed] == [(bad, "measure")]
    assert str(error) in failed[0].message
    assert measure.sampled == alone.sampled
    assert samples_of(report) == samples_of(other)
    assert report.winner == other.winner != bad


@pytest.mark.anyio
async def test_a_hang_in_a_series_times_out():
    """After `candidate_timeout_s`, with the samples before it in the report and the rest sampled after it."""
    measure = OnABench(Nth(**{name: [s, s, 1e9 if name == "c" else s] for name, s in ALIKE.items()}))
    start = anyio.current_time()
    report = await Tuner(measure=measure).tune(tune_among(*ALIKE, candidate_timeout_s=7.0))
    assert report.outcomes[2] == Failed("c", "measure", "TimeoutError", "took longer than 7 s")
    assert sum(isinstance(one, Measured) for one in report.outcomes) == 5
    assert 7.0 < anyio.current_time() - start < 9.0


@pytest.mark.anyio
@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), -1.0, "soon", None])
@pytest.mark.parametrize("in_series", [True, False])
async def test_a_sample_that_is_not_a_duration_is_a_failure_in_a_series_too(seconds, in_series):
    """An invalid value fails only its own candidate."""

    class Odd(OnABench):
        async def series(self, samplers, taken, left_behind):
            await super().series(samplers, taken, left_behind)
            taken[:] = [(seconds if one.cfg == "c" else s, t) for one, (s, t) in zip(samplers, taken, strict=True)]

    class OddAlone(ScriptedMeasure):
        async def compile(self, trial):
            sample = await super().compile(trial)

            async def odd():
                return seconds if trial.cfg == "c" else await sample()

            return odd

    report = await Tuner(measure=Odd(ALIKE) if in_series else OddAlone(ALIKE)).tune(tune_among(*ALIKE))
    assert report.outcomes[2].stage == "measure"
    assert report.outcomes[2].error_type == ("ValueError" if isinstance(seconds, float) else "TypeError")
    assert sum(isinstance(one, Measured) for one in report.outcomes) == 5


@pytest.mark.anyio
async def test_an_error_at_the_end_of_a_series_is_the_last_candidates():
    """An error at the end of a series fails its last candidate; the others keep their samples."""

    class Late(OnABench):
        async def series(self, samplers, taken, left_behind):
            await super().series(samplers, taken, left_behind)
            self.last = samplers[-1].cfg
            raise RuntimeError("its thread was killed")

    measure = Late({"a": 0.001, "b": 0.001, "c": 0.001})
    report = await Tuner(1, 2, measure=measure, strategy=TwoRounds()).tune(tune_among("a", "b", "c"))
    failed = [one.cfg for one in report.outcomes if isinstance(one, Failed)]
    assert len(measure.series_of) == len(failed)
    assert measure.last in failed
    assert report.winner not in failed


@pytest.mark.anyio
async def test_a_budget_that_ends_in_a_series_ends_the_tune():
    """All samples of the series count, and no more are taken after it."""
    measure = OnABench(0.004)
    report = await Tuner(measure=measure).tune(tune_among("a", "b", "c", tune_budget_s=0.050))
    assert not [one for one in report.outcomes if isinstance(one, Skipped)]
    assert sum(map(len, samples_of(report).values())) + 3 == len(measure.sampled) == 12


@pytest.mark.anyio
async def test_a_hang_until_the_budget_is_spent_is_a_failure():
    """The failure in the last series is recorded, although the plan ends there."""
    measure = OnABench(Nth(a=[0.002], b=[0.001, 1e9]))
    sink = RecordingSink()
    state = tune_among("a", "b", candidate_timeout_s=7.0, tune_budget_s=7.0, emit=sink.emit)
    strategy = Race(seed=next(seed for seed in range(99) if _is_second(seed)))
    report = await Tuner(measure=measure, strategy=strategy).tune(state)
    assert measure.series_of == [["a", "b"]]
    assert report.winner == "a"
    assert report.outcomes[1] == Failed("b", "measure", "TimeoutError", "took longer than 7 s")
    (told,) = sink.named("candidate_failed")
    assert told.measured[1] - told.measured[0] > 7.0, "as long as it hung"


def _is_second(seed: int) -> bool:
    """Return whether a race's first round ends with the second of two candidates."""
    rounds = [step.indices for step in play_on(Race(seed=seed), Scoreboard([0, 1]), lambda index: 0.001)]
    return rounds[1] == (0, 1)


@pytest.mark.anyio
async def test_a_tune_cancelled_in_a_series_can_be_resumed():
    """On resuming, every candidate is in the state from before the series."""
    measure, state = OnABench(Nth(**{name: [s, s, s, 9.0, s] for name, s in ALIKE.items()})), tune_among(*ALIKE)
    with anyio.move_on_after(1.0):
        await Tuner(measure=measure).tune(state)
    assert state.report is None
    assert {len(state.board.samples[index]) for index in state.board.alive} == {2}, "incomplete series do not count"
    report = await Tuner(measure=measure).tune(state)
    assert sum(isinstance(one, Measured) for one in report.outcomes) == 6


# ---------------------------------------------------------------------------------------------
# With real threads.


class Kernel:
    """A kernel that fails or hangs only in a series, after tracing, warm-up and first sample."""

    def __init__(self, trouble) -> None:
        self.runs, self._trouble = Counter(), trouble

    def make(self, cfg):
        def fn(x):
            self.runs[cfg] += 1
            if cfg == "bad" and self.runs[cfg] > 4:
                self._trouble()
            return float(x[0])  # needs a value, so it cannot be traced

        return fn


class TwoRounds:
    """A warm-up and a sample of each, then a round in declared order, which puts the bad one in its middle."""

    def plan(self, board: Scoreboard):
        yield from Exhaustive(1).plan(board)
        yield Sample(tuple(board.alive))


@pytest.fixture
def _slow_is_quick(monkeypatch):
    """Make a series of all candidates, even on a slow machine."""
    monkeypatch.setattr("asel.tuning.sampling._SERIES_S", 1e6)
    monkeypatch.setattr("asel.tuning.sampling._SERIES_SHARE", 1e6)


class Watched(JaxMeasure):
    def __init__(self) -> None:
        super().__init__()
        self.series_of: list[list[object]] = []

    async def series(self, samplers, taken, left_behind):
        self.series_of.append([sampler.trial.cfg for sampler in samplers])
        await super().series(samplers, taken, left_behind)


def tuned(backend, kernel, **facts):
    state = tune_of(("one", "bad", "two", "three"), kernel.make, (jnp.ones(3),), {}, **facts)
    measure = Watched()
    report = anyio.run(Tuner(measure=measure, strategy=TwoRounds()).tune, state, backend=backend)
    assert measure.series_of[0] == ["one", "bad", "two", "three"]
    return report, state


@pytest.mark.usefixtures("_slow_is_quick")
def test_a_hang_in_a_real_series_is_named(real_backend):
    """The abandoned thread is named after the hanging candidate; the others keep their samples."""
    release = threading.Event()
    kernel = Kernel(lambda: release.wait(PATIENCE_S))
    start = time.monotonic()
    try:
        report, state = tuned(real_backend, kernel, candidate_timeout_s=0.5)
        assert time.monotonic() - start < PATIENCE_S / 2
        (busy,) = state.left_behind
        assert (busy.what, busy.alive) == ("measuring 'bad'", True)
        failed = report.outcomes[1]
        assert (failed.stage, failed.error_type) == ("measure", "TimeoutError")
        assert failed.message.endswith("its thread is still busy")
        assert sum(isinstance(one, Measured) for one in report.outcomes) == 3
    finally:
        release.set()


def test_an_abandoned_thread_takes_no_further_samples(real_backend):
    """The device lock is held until the thread finishes, at the end of its current sample."""
    entered, release, sampled = threading.Event(), threading.Event(), []

    def hang() -> float:
        entered.set()
        assert release.wait(PATIENCE_S)
        return 0.0

    trial = SimpleNamespace(grace_s=0.0)
    steps = {"quick": lambda: 0.5, "hangs": hang, "next": lambda: sampled.append("next")}
    samplers = [
        SimpleNamespace(what=name, trial=trial, timing=SimpleNamespace(sample=do)) for name, do in steps.items()
    ]
    taken, left_behind = [], []

    async def cancelled() -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(JaxMeasure().series, samplers, taken, left_behind)
            assert await anyio.to_thread.run_sync(entered.wait, PATIENCE_S)
            tasks.cancel_scope.cancel()

    anyio.run(cancelled, backend=real_backend)
    (busy,) = left_behind
    assert (busy.what, busy.alive) == ("hangs", True)
    assert [seconds for seconds, _ in taken] == [0.5]
    release.set()
    until = time.monotonic() + PATIENCE_S
    while busy.alive and time.monotonic() < until:
        time.sleep(0.01)
    assert not busy.alive
    assert sampled == []


@pytest.mark.usefixtures("_slow_is_quick")
@pytest.mark.parametrize("error", [LookupError("lost"), SystemExit(3), KeyboardInterrupt("no")])
def test_an_error_in_a_real_series_is_its_candidates_own(real_backend, error):
    """Even SystemExit neither ends the program nor fails another candidate."""

    def trouble() -> None:
        raise error

    report, state = tuned(real_backend, Kernel(trouble))
    failed = report.outcomes[1]
    assert (failed.cfg, failed.stage) == ("bad", "measure")
    assert str(error) in failed.message
    assert "bad" in failed.message or isinstance(error, LookupError)
    assert not state.left_behind
    assert sum(isinstance(one, Measured) for one in report.outcomes) == 3
