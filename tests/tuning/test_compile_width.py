"""Tunes take turns: on a device, in lowering, and in the slots for compiling."""

from __future__ import annotations

from contextlib import asynccontextmanager

import anyio
import pytest
from support.kernels import A100, H100, Bench, Toy, call
from support.measures import Lowering, Watched
from support.tunes import tune_among

from asel import (
    InvalidRequestError,
    Tuner,
)
from asel.testing import RecordingSink


@pytest.mark.anyio
async def test_two_tunes_on_one_device_never_sample_at_once():
    """Timings are taken alone: a device has one lock, whichever tune uses it."""
    measure = Watched()
    async with anyio.create_task_group() as tasks:
        for _ in range(3):
            tasks.start_soon(Tuner(warmup=1, iters=2, measure=measure).tune, tune_among("a", "b", device=H100))
    assert measure.most["sampling"] == 1


@pytest.mark.anyio
async def test_two_devices_sample_at_the_same_time():
    """Devices do not wait for each other."""
    measure = Watched()
    async with anyio.create_task_group() as tasks:
        for device in (H100, A100):
            tasks.start_soon(Tuner(warmup=1, iters=2, measure=measure).tune, tune_among("a", "b", device=device))
    assert (measure.most["sampling"], measure.most[H100], measure.most[A100]) == (2, 1, 1)


@pytest.mark.anyio
async def test_selectors_wait_for_each_others_devices():
    """Two selectors in one event loop take turns on a device, too."""
    measure = Watched()
    tuner = Tuner(warmup=0, iters=2, measure=measure)
    async with Bench(tuner=tuner).chain as one, Bench(tuner=tuner).chain as other, anyio.create_task_group() as tasks:
        for chain in (one, other):
            tasks.start_soon(chain.choose, call(8), Toy())
            tasks.start_soon(chain.choose, call(16), Toy())
    assert measure.most[H100] == 1


@pytest.mark.anyio
async def test_a_tuner_without_a_selector_waits_for_its_device_too():
    """`Tuner.autotune` measures on its arguments' device, so it takes turns with the selectors that tune there."""
    measure = Watched()
    tuner = Tuner(warmup=0, iters=2, measure=measure)
    async with Bench(tuner=tuner).chain as chain, anyio.create_task_group() as tasks:
        tasks.start_soon(chain.choose, call(8), Toy())
        tasks.start_soon(tuner.autotune, lambda cfg: print, (H100.array((8, 128)),), {}, ["a", "b", "c"])
    assert measure.most["sampling"] == 1


@pytest.mark.anyio
@pytest.mark.parametrize(("cores", "slots"), [(2, 1), (8, 3)])
async def test_compiling_keeps_to_its_slots(cores, slots, monkeypatch):
    """Any number of tunes leaves the event loop its share of the cores."""
    monkeypatch.setattr("os.cpu_count", lambda: cores)
    measure = Watched()
    async with anyio.create_task_group() as tasks:
        for device in range(8):
            tasks.start_soon(Tuner(warmup=0, iters=1, measure=measure).tune, tune_among("a", "b", device=device))
    assert measure.most["compiling"] == slots


@pytest.mark.anyio
@pytest.mark.parametrize("tunes", [1, 2])
async def test_one_candidate_is_lowered_at_a_time(tunes, monkeypatch):
    """Lowering holds the interpreter, so one candidate of all tunes is lowered at a time, at any compile width."""
    monkeypatch.setattr("os.cpu_count", lambda: 16)  # seven compile slots
    measure = Lowering(compile_s=2.5)
    async with anyio.create_task_group() as tasks:
        for device in range(tunes):
            state = tune_among("a", "b", "c", "d", device=device)
            tasks.start_soon(Tuner(warmup=0, iters=1, measure=measure).tune, state)
    assert measure.most["lowering"] == 1
    assert measure.most["compiling"] > 1, "compiling does not wait for it"


@pytest.mark.anyio
@pytest.mark.parametrize(("facts", "asked", "width"), [({}, None, 3), ({"compile_width": 2}, 5, 2), ({}, 5, 5)])
async def test_the_tuner_or_the_batch_sets_the_compile_width(facts, asked, width, monkeypatch):
    """By default half the cores, less one; a batch uses more, since nothing is served yet; a tuner may set its own."""
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    measure = Watched()
    tune = tune_among(*range(20), compile_width=asked)
    await Tuner(0, 1, measure=measure, strategy="exhaustive", **facts).tune(tune)
    assert measure.most["compiling"] == width


@pytest.mark.parametrize("width", [0, -1])
def test_a_width_of_nothing_is_refused(width):
    with pytest.raises(InvalidRequestError, match=f"compile_width={width}"):
        Tuner(compile_width=width)


@pytest.mark.anyio
async def test_a_candidate_that_waits_for_its_slot_has_not_begun():
    """A candidate's events start when it is lowered: until then it may still be skipped."""
    sink = RecordingSink()
    await Tuner(0, 1, measure=Lowering(compile_s=2.0), compile_width=1).tune(tune_among("a", "b", "c", emit=sink.emit))
    started = [event.start for event in sink.named("candidate_start")]
    assert [start - started[0] for start in started] == [0.0, 3.0, 6.0]


@pytest.mark.anyio
async def test_a_measure_that_takes_turns_lowers_and_compiles_in_one():
    """A worker process does one thing at a time: otherwise a second one would be started to lower in."""

    class Desks(Lowering):
        @asynccontextmanager
        async def turn(self, charge):
            self._now.update(["turn"])
            self.most["turn"] = max(self.most["turn"], self._now["turn"])
            yield self
            self._now.subtract(["turn"])

    measure = Desks()
    async with anyio.create_task_group() as tasks:
        for device in range(3):
            state = tune_among("a", "b", "c", device=device)
            tasks.start_soon(Tuner(0, 1, measure=measure, strategy="exhaustive").tune, state)
    assert measure.most["turn"] == 1


@pytest.mark.anyio
async def test_a_tune_that_is_ready_does_not_wait_for_other_tunes_slots():
    """Once its last candidate is compiled, the queue of other tunes does not delay it."""
    ready_s = {}

    async def tune(name: str, count: int) -> None:
        state = tune_among(*range(count), device=name)
        await Tuner(0, 1, measure=Lowering(compile_s=10.0), strategy="exhaustive", compile_width=1).tune(state)
        ready_s[name] = anyio.current_time() - max(state.steps(index, "compile")[-1][1] for index in range(count))

    async with anyio.create_task_group() as tasks:
        for name, count in {"first": 2, "second": 4, "third": 4, "fourth": 4}.items():
            tasks.start_soon(tune, name, count)
    assert ready_s == {"first": 2.0, "second": 4.0, "third": 4.0, "fourth": 4.0}, "a second for each sample"
