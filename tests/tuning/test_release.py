"""Candidates are released when they are no longer needed, in a thread, without waiting."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import anyio
import pytest
from support.tunes import SamplerOf, tune_among

from asel import (
    Tuner,
    TuningError,
)
from asel.testing import ScriptedMeasure
from asel.tuning import state


class Clingy(ScriptedMeasure):
    """Samplers that record their release, which raises `error` if given."""

    def __init__(self, *args, error=None, **script) -> None:
        super().__init__(*args, **script)
        self.released, self._error = [], error

    async def compile(self, trial):
        sample = await super().compile(trial)

        def release() -> None:
            self.released.append((trial.cfg, threading.current_thread()))
            if self._error is not None:
                raise self._error

        return SamplerOf(sample, release=release)


def eventually(count, expected: int) -> bool:
    """Wait until the releasing thread has ended."""
    deadline = time.monotonic() + 10
    while count() < expected and time.monotonic() < deadline:
        time.sleep(0.001)
    return count() == expected


@pytest.mark.parametrize("error", [None, OSError("busy")])
def test_every_candidate_is_released_in_a_thread(real_backend, error, caplog):
    """Losers, failures and the winner, and never on the loop; errors are only logged."""
    costs = {"fast": 0.001, "second": 0.0011, "slow": 0.05, "broken": 0.001}
    measure = Clingy(costs, error=error, run_errors={"broken": ValueError("no")})
    report = anyio.run(Tuner(measure=measure).tune, tune_among(*costs, incumbent=0), backend=real_backend)
    assert report.winner == "fast"
    assert eventually(lambda: len(measure.released), 4)
    assert sorted(cfg for cfg, _ in measure.released) == sorted(costs)
    assert threading.main_thread() not in {thread for _, thread in measure.released}
    assert eventually(lambda: len(caplog.records), 0 if error is None else 4)


def test_releases_leave_other_threads_as_much_time_as_they_took(real_backend, monkeypatch):
    """Each release holds the interpreter for milliseconds, and a tune releases many in a row."""
    clock, slept = [0.0], []

    class Slow(ScriptedMeasure):
        async def compile(self, trial):
            def release() -> None:
                clock[0] += trial.cfg

            return SamplerOf(await super().compile(trial), release=release)

    monkeypatch.setattr(state, "time", SimpleNamespace(perf_counter=lambda: clock[0], sleep=slept.append))
    costs = {1.0: 0.001, 2.0: 0.05, 4.0: 0.06}
    anyio.run(Tuner(measure=Slow(costs)).tune, tune_among(*costs, incumbent=0), backend=real_backend)
    assert eventually(lambda: len(slept), 3)
    assert sorted(slept) == [1.0, 2.0, 4.0]


def test_a_group_is_released_before_the_next_is_compiled(real_backend):
    """Failed candidates hold no memory that the next group may need."""
    order = []

    class Ordered(Clingy):
        async def compile(self, trial):
            if trial.cfg == "next":
                await anyio.to_thread.run_sync(eventually, lambda: len(self.released), 2)
            order.append((trial.cfg, [cfg for cfg, _ in self.released]))
            return await super().compile(trial)

    measure = Ordered(run_errors={"broken": ValueError("no"), "too": ValueError("no")})
    state = tune_among("broken", "too", "next", groups=((2, 0), (2, 0), (1, 0)))
    assert anyio.run(Tuner(measure=measure).tune, state, backend=real_backend).winner == "next"
    assert [(cfg, sorted(released)) for cfg, released in order] == [
        ("broken", []),
        ("too", []),
        ("next", ["broken", "too"]),
    ]


def test_a_report_survives_a_release_that_gets_no_thread(real_backend, monkeypatch, caplog):
    """That is logged, and the report is returned."""

    def refuse(what, work):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("asel.tuning.state.leave_to_thread", refuse)
    report = anyio.run(Tuner(measure=Clingy({"a": 0.02, "b": 0.01})).tune, tune_among("a", "b"), backend=real_backend)
    assert report.winner == "b"
    assert [record.message for record in caplog.records] == ["candidates could not be released"]


def test_a_failed_tune_releases_everything(real_backend):
    """If all candidates fail there is no report, and nothing is kept."""
    measure = Clingy(run_errors=lambda cfg: ValueError("no"))
    with pytest.raises(TuningError):
        anyio.run(Tuner(measure=measure).tune, tune_among("a", "b"), backend=real_backend)
    assert eventually(lambda: len(measure.released), 2)
    assert sorted(cfg for cfg, _ in measure.released) == ["a", "b"]
