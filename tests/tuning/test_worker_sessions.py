"""The messages to workers, their order, and who is charged for them. The workers are in this process."""

from __future__ import annotations

import functools

import anyio
import anyio.lowlevel
import jax.numpy as jnp
import pytest
from support.hostile import Hostile
from support.near_workers import Near, Scripted, until_nothing_is_kept
from support.tunes import tune_of

from asel import Failed, Measured, Skipped, Tuner
from asel.tuning import process_measure as processes
from asel.tuning.program import Program
from asel.tuning.strategies import Sample, compile_all

pytestmark = pytest.mark.timeout(90)


X = jnp.ones(256)


def of_hostile(cfg):
    return functools.partial(Hostile().run, cfg=cfg)


@pytest.fixture
def near(monkeypatch):
    """Workers inside this process, in the order of their starts; one config ends the first worker."""
    started = []

    async def start():
        started.append(Near(None if started else "wrong too"))
        return started[-1]

    monkeypatch.setattr(processes._WorkerProcess, "start", start)
    return started


def test_arguments_are_sent_once_to_each_worker_and_forgotten_with_their_tune(real_backend, near, monkeypatch):
    """A worker is told when a tune ends, and forgets its arguments and all its candidates."""
    compile = Program.compile

    def fragile(program):
        if program._trial.cfg == "wrong":
            raise ZeroDivisionError("on purpose")
        compile(program)

    monkeypatch.setattr(Program, "compile", fragile)
    configs = ("slow", "raise", "wrong", "wrong too", "fast", "fast too")

    async def main():
        async with Tuner(1, 2, isolation="process", strategy="exhaustive") as tuner:
            report = await tuner.tune(tune_of(configs, of_hostile, (X,), {}, incumbent=0))
            assert [type(o) for o in report.outcomes] == [Measured, Failed, Failed, Failed, Measured, Measured]
            assert report.outcomes[5].alias_of == "fast"
            lost, worker = near
            assert (lost.alive, lost.arguments_sent, worker.arguments_sent) == (False, 1, 1)
            await until_nothing_is_kept(worker)

            report = await tuner.tune(tune_of(configs, of_hostile, (X,), {}, incumbent=0))
            assert [type(o) for o in report.outcomes] == [Measured, Failed, Failed, Measured, Measured, Measured]
            assert worker.arguments_sent == 2
            await until_nothing_is_kept(worker)
            assert near == [lost, worker]

    anyio.run(main, backend=real_backend)


@pytest.mark.anyio
async def test_a_worker_gets_a_tunes_arguments_once_and_is_told_when_it_ends():
    """Each worker gets them with the first candidate, and again with the first candidate after the tune ended."""
    worker, one, other = Scripted(), processes._PackedArguments([b"one"]), processes._PackedArguments([b"o", b"ther"])

    async def asked(candidate, arguments, worker=worker):
        before = len(worker.sent)
        await worker.ensure_arguments(arguments)
        await worker.ask("lower", candidate, [b"candidate"], arguments.number)
        return [(header[0], payload, *header[3:]) for header, payload in worker.sent[before:]]

    lower = ("lower", [b"candidate"], [], [])
    assert await asked(1, one) == [("arguments", [b"one"], [], []), lower]
    assert await asked(2, one) == [lower]
    assert await asked(3, other) == [("arguments", [b"o", b"ther"], [], []), lower]
    worker.forget(1)
    assert await asked(4, one) == [("lower", [b"candidate"], [1], [])]
    worker.end_tune(one)
    worker.end_tune(one)
    assert await asked(5, other) == [("lower", [b"candidate"], [], [one.number])]
    assert await asked(6, one) == [("arguments", [b"one"], [], []), lower]
    assert await asked(7, one, Scripted()) == [("arguments", [b"one"], [], []), lower]


@pytest.fixture
def scripted(monkeypatch):
    """Workers that take five seconds to start, and 0.7 for each step; no threads, for a virtual clock."""
    started = []

    async def start():
        await anyio.sleep(5.0)
        started.append(Scripted())
        started[-1].step_s = 0.7
        return started[-1]

    async def at_once(what, work, **options):
        return work()

    monkeypatch.setattr(processes._WorkerProcess, "start", start)
    monkeypatch.setattr(processes, "run_in_thread", at_once)
    return started


@pytest.mark.anyio
@pytest.mark.parametrize(("budget_s", "tried"), [(60.0, 3), (4.0, 1)])
async def test_starting_a_worker_is_charged_to_the_tune_and_to_no_candidate(scripted, budget_s, tried):
    """It takes longer than a candidate's timeout, which does not apply; but it counts for the budget."""
    facts = {"incumbent": 0, "candidate_timeout_s": 1.5, "tune_budget_s": budget_s}
    state = tune_of(("slow", "print", "fast"), of_hostile, (1,), {}, **facts)
    report = await Tuner(0, 1, isolation="process", strategy="exhaustive").tune(state)
    assert [type(o) for o in report.outcomes] == [Measured] * tried + [Skipped] * (3 - tried)
    assert report.outcomes[0].compile_s == pytest.approx(1.4)
    assert state.budget.spent_s == pytest.approx(5.0 + tried * 3 * 0.7)


@pytest.mark.anyio
async def test_each_step_in_another_worker_has_its_own_timeout(scripted):
    """The second candidate kills the worker: warm candidates are lowered, compiled and run again."""

    class Twice:
        def plan(self, board):
            yield from compile_all(board)
            for index in (0, 2, 1, 0, 2):
                if index == 1:
                    scripted[0].fatal = "sample"
                yield Sample((index,))

    facts = {"incumbent": 0, "candidate_timeout_s": 1.5}
    state = tune_of(("slow", "print", "fast"), of_hostile, (1,), {}, **facts)
    report = await Tuner(0, 1, isolation="process", strategy=Twice()).tune(state)
    assert [type(o) for o in report.outcomes] == [Measured, Failed, Measured]
    assert [len(o.samples_s) for o in (report.outcomes[0], report.outcomes[2])] == [2, 2]
    assert [request[0] for request, _ in scripted[1].sent if request[0] != "hello"] == [
        "arguments",
        *("lower", "compile", "sample", "sample"),
        *("lower", "compile", "sample", "sample"),
    ]
    assert state.budget.spent_s == pytest.approx(2 * 5.0 + (3 * 2 + 3 + 2 * 4) * 0.7)


def test_one_tuner_works_in_one_loop_after_the_other(near):
    """A tuner keeps its workers per event loop, and drops them with the loop."""
    tuner = Tuner(1, 1, isolation="process")
    for backend in ("asyncio", "trio", "asyncio"):
        assert anyio.run(tuner.autotune, of_hostile, (X,), {}, ["slow", "fast"], backend=backend) == "fast"
    assert [worker.alive for worker in near] == [False] * 3
