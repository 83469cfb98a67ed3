"""Candidates in worker processes, which cannot harm the service."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import anyio
import anyio.lowlevel
import jax.numpy as jnp
import pytest
from support.hostile import Hostile, decorated, hostile_maker, of_tree, slow_start_of
from support.kernels import Bench
from support.near_workers import Scripted
from support.paths import TESTS
from support.tunes import tune_of

from asel import Failed, InvalidRequestError, Invocation, Measured, OutputCheck, Tuner, kernel
from asel.runtime.loop import LoopHandle
from asel.tuning import process_measure as processes
from asel.tuning.strategies import Exhaustive

pytestmark = pytest.mark.timeout(90)


X = jnp.ones(256)


def workers() -> list[int]:
    """Return the worker processes of this process."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                command = (entry / "cmdline").read_bytes()
                parent = (entry / "stat").read_text().rpartition(")")[2].split()[1]
            except OSError:
                continue
            if b"asel/tuning/worker.py" in command and parent == str(os.getpid()):
                found.append(int(entry.name))
    return found


def tune(backend, op, *args, timeout_s=20.0, tuner=None, told=None, **kwargs):
    async def main():
        tuner_ = tuner or Tuner(1, 2, isolation="process")
        allowed = {"candidate_timeout_s": timeout_s, "allow_heuristics": False}
        bench = Bench(tuner=tuner_, allow=allowed, on_event=told)
        async with bench.chain as chain:
            selection = await chain.select(Invocation(op.op_id, args, kwargs), op)
            assert len(workers()) == 1
        return selection.report

    report = anyio.run(main, backend=backend)
    assert workers() == []
    return report


def hostile(*configs: str) -> Hostile:
    op = Hostile()
    op.configs = ("slow", *configs, "fast")
    return op


@pytest.mark.parametrize("real_backend", ["trio"])
def test_worker_processes_report_the_same_as_threads(real_backend):
    """Winners, failures and aliases are the same in processes and threads."""
    op, check = hostile("wrong", "garbage", "fast too"), OutputCheck()
    report = tune(real_backend, op, X, tuner=Tuner(1, 2, isolation="process", check=check))
    slow, wrong, garbage, fast, alias = report.outcomes
    assert report.winner == "fast too"
    assert all(isinstance(o, Measured) for o in (slow, fast, alias))
    assert wrong == Failed("wrong", "check", "OutputMismatch", "output 0 differs by up to 2")
    assert garbage == Failed("garbage", "check", "TypeError", "an output is of type object, which is not an array")
    assert [o.alias_of for o in (slow, fast, alias)] == [None, None, "fast too"]

    here = tune_in_thread(real_backend, op, Tuner(1, 2, check=check))
    assert here.winner == report.winner
    assert [found(o) for o in here.outcomes] == [found(o) for o in report.outcomes]


def found(outcome):
    """Return an outcome without its times."""
    return outcome if isinstance(outcome, Failed) else (outcome.cfg, outcome.how, outcome.alias_of)


def tune_in_thread(backend, op, tuner):
    async def main():
        async with Bench(tuner=tuner).chain as chain:
            return (await chain.select(Invocation("hostile", (X,), {}), op)).report

    return anyio.run(main, backend=backend)


@pytest.mark.parametrize(
    ("real_backend", "fatal", "stage", "code"),
    [
        ("asyncio", "exit", "compile", 3),
        ("trio", "segfault", "compile", -11),
        ("trio", "exit while running", "measure", 3),
    ],
)
def test_a_candidate_that_kills_its_process_costs_one_outcome(real_backend, fatal, stage, code):
    """os._exit and a segmentation fault end the worker; the others are timed in another."""
    report = tune(real_backend, hostile(fatal, "raise", "print"), X)
    assert report.winner == "fast"
    slow, died, raised, printed, fast = report.outcomes
    assert all(isinstance(o, Measured) for o in (slow, printed, fast))
    assert (died.stage, died.error_type) == (stage, "WorkerDied")
    assert f"exit code {code}" in died.message
    assert raised == Failed("raise", "compile", "ZeroDivisionError", "on purpose")


@pytest.mark.parametrize(("real_backend", "step"), [("asyncio", "spin"), ("trio", "spin while running")])
def test_a_candidate_that_spins_is_killed_on_time(real_backend, step):
    """No thread is left behind, and the device is free: the rest are measured."""
    told = []
    report = tune(real_backend, hostile(step), X, timeout_s=1.5, told=told.append)
    assert report.winner == "fast"
    (failed,) = [event for event in told if event.name == "candidate_failed"]
    start, end = failed.measured or failed.compiled[-1]
    assert 1.5 <= end - start < 3.0
    assert report.outcomes[1].error_type == "TimeoutError"
    assert isinstance(report.outcomes[2], Measured)


def ignored_signals(pid: int) -> int:
    """Return the bit mask of the signals that a process ignores."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1], 16) for line in lines if line.startswith("SigIgn:"))


def test_closing_the_selector_ends_the_workers(real_backend):
    """A tune that is cut short ends its process. Ctrl-C in a terminal is only for the parent."""

    async def main():
        bench = Bench(tuner=Tuner(isolation="process"), allow={"cache_miss_fallback": "background"})
        with anyio.fail_after(30):
            async with bench.chain as chain:
                await chain.choose(Invocation("hostile", (X,), {}), hostile("spin"))
                async with chain.events() as stream:
                    async for event in stream:
                        if event.name == "candidate_start" and event.cfg == "spin":
                            break
                (worker,) = workers()
                assert ignored_signals(worker) & 1 << signal.SIGINT - 1
        assert workers() == []

    anyio.run(main, backend=real_backend)


def test_a_worker_ends_with_the_program():
    """A program that is killed leaves no worker behind: its input ends, and so does it."""
    code = (
        "import anyio, os\n"
        "from asel.tuning.process_measure import ProcessMeasure\n"
        "async def main():\n"
        "    measure = ProcessMeasure()\n"
        "    async with measure.turn():\n"
        "        print(measure._pools.here().workers[0]._process.pid, flush=True)\n"
        "        os._exit(1)\n"
        "anyio.run(main)\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ends_within(10, int(run.stdout))


def ends_within(seconds: float, pid: int) -> bool:
    """Wait for a process that is not our child; kill it if it does not end."""
    stat, deadline = Path(f"/proc/{pid}/stat"), time.monotonic() + seconds
    while time.monotonic() < deadline:
        with suppress(OSError):
            if stat.read_text().rpartition(")")[2].split()[0] != "Z":
                time.sleep(0.02)
                continue
        return True
    os.kill(pid, signal.SIGKILL)
    return False


_SPINS = """
import anyio, functools, numpy as np
from asel import Tuner
from support.hostile import Hostile

make = lambda cfg: functools.partial(Hostile().run, cfg=cfg)
anyio.run(Tuner(isolation="process").autotune, make, (np.ones(8),), {}, ["say who, and spin"])
"""


def test_a_worker_ends_with_the_program_in_the_middle_of_a_step():
    """A program that is killed while a candidate spins leaves no worker behind, though the worker reads no input."""
    path = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), *filter(None, sys.path)])}
    with subprocess.Popen([sys.executable, "-c", _SPINS], stderr=subprocess.PIPE, text=True, env=path) as program:
        worker = int(program.stderr.readline())
        program.kill()
        assert ends_within(3, worker)


def test_decorated_kernels_and_pytrees_can_be_sent():
    """A `@kernel` is found by its name, and arguments arrive unchanged."""
    tree = {"x": X, "half": jnp.ones(3, jnp.bfloat16)}

    async def main():
        async with Bench(tuner=Tuner(1, 2, isolation="process"), allow={"allow_heuristics": False}).chain as chain:
            assert await chain.choose(Invocation(decorated.op_id, (X,), {}), decorated) == 1
            assert await chain.choose(Invocation(of_tree.op_id, (tree,), {"scale": 2}), of_tree) == "a"

    anyio.run(main)


class Local(Hostile):
    """Its config is of a class that no other process can import."""

    def candidate_cfgs(self, inv):
        class Config:
            pass

        return [Config()]


def refused(what):
    if what == "local config":
        return Local()
    if what == "lambda":
        return kernel(op_id="lambda", configs=[1, 2], heuristic=1)(lambda x, *, cfg: x)

    @kernel(op_id="closure", configs=[1, 2], heuristic=1)
    def closure(x, *, cfg):
        return x * len(what)

    return closure


@pytest.mark.parametrize(
    ("real_backend", "what"), [("asyncio", "closure"), ("trio", "lambda"), ("asyncio", "local config")]
)
def test_a_kernel_that_cannot_be_imported_is_refused(real_backend, what):
    """A closure, a lambda or a local class gets a clear error with the fix."""
    errors = []

    async def main():
        bench = Bench(tuner=Tuner(isolation="process"), on_event=errors.append)
        async with bench.chain as chain:
            one = refused(what)
            await chain.select(Invocation(one.op_id, (X,), {}), one)

    anyio.run(main, backend=real_backend)
    failed = [event for event in errors if event.name == "candidate_failed"]
    assert failed
    assert {event.error_type for event in failed} == {"InvalidRequestError"}
    assert "top level of a module" in failed[0].message


def test_an_importable_factory_is_called_in_the_worker():
    """So that its failure is one outcome. The function that a lambda makes is made here, and then sent."""
    here, tuner = [], Tuner(1, 1, isolation="process")

    async def main():
        async with tuner:
            state = tune_of(("exit", "raise", "fast"), hostile_maker, (X,), {}, factory_is_portable=True)
            made_there = await tuner.tune(state)
            state = tune_of(
                ("fast",), lambda cfg: here.append(cfg) or of_hostile(cfg), (X,), {}, factory_is_portable=True
            )
            return made_there, await tuner.tune(state)

    there, local = anyio.run(main)
    assert [(o.stage, o.error_type) for o in there.outcomes[:2]] == [("compile", "WorkerDied"), ("build", "ValueError")]
    assert "exit code 7" in there.outcomes[0].message
    assert there.winner == local.winner == "fast"
    assert here == ["fast"]


@pytest.mark.parametrize("real_backend", ["trio"])
def test_a_tuner_alone_leaves_no_worker(real_backend):
    """`autotune` without a selector ends its workers; `async with` keeps them for the next tune."""

    async def main():
        tuner = Tuner(1, 2, isolation="process")
        assert await tuner.autotune(lambda cfg: functools.partial(Hostile().run, cfg=cfg), (X,), {}, ["slow", "fast"])
        assert workers() == []
        async with tuner:
            await tuner.measure(functools.partial(Hostile().run, cfg="fast"), X)
            assert len(workers()) == 1
        assert workers() == []

    anyio.run(main, backend=real_backend)


def test_isolation_is_one_of_two():
    """A third kind is refused by name."""
    with pytest.raises(InvalidRequestError, match="isolation='docker'"):
        Tuner(isolation="docker")


@pytest.mark.parametrize(
    ("real_backend", "strike"),
    [("trio", signal.SIGKILL), ("asyncio", signal.SIGSTOP)],
    ids=["died", "mute"],
)
def test_a_worker_that_died_or_stopped_while_idle_is_replaced(real_backend, strike, monkeypatch):
    """Between two tunes a worker may be killed or stopped; the next tune starts another, and no candidate fails."""
    monkeypatch.setattr("asel.tuning.process_measure._ANSWER_TIMEOUT_S", 0.5)

    async def main():
        async with Bench(tuner=Tuner(1, 2, isolation="process")).chain as chain:
            await chain.choose(Invocation("hostile", (X,), {}), hostile())
            (struck,) = workers()
            os.kill(struck, strike)
            while strike == signal.SIGKILL and workers():
                await anyio.lowlevel.checkpoint()
            with anyio.fail_after(15):
                report = (await chain.select(Invocation("hostile", (jnp.ones(512),), {}), hostile())).report
            assert struck not in workers()
            return report

    outcomes = anyio.run(main, backend=real_backend).outcomes
    assert [type(o) for o in outcomes] == [Measured, Measured], outcomes


@pytest.mark.parametrize("real_backend", ["trio"])
def test_two_tunes_of_one_tuner_do_not_end_each_others_workers(real_backend):
    """The workers end with the last tune that uses them."""
    winners = []

    async def main():
        tuner = Tuner(1, 2, isolation="process")

        async def tune_alone(configs):
            make = lambda cfg: functools.partial(Hostile().run, cfg=cfg)  # noqa: E731
            winners.append(await tuner.autotune(make, (X,), {}, configs))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(tune_alone, ["fast"])
            tasks.start_soon(tune_alone, ["slow", "fast"])

    anyio.run(main, backend=real_backend)
    assert winners == ["fast", "fast"]
    assert workers() == []


def test_each_event_loop_has_workers_of_its_own(monkeypatch):
    """A worker's pipes belong to the loop that started it; its last user in that loop ends it."""
    both, ended = threading.Barrier(2), []

    class Piped(Scripted):
        """A worker that is used in one loop only."""

        def __init__(self):
            super().__init__()
            self.loop = LoopHandle()

        async def ask(self, *request):
            assert self.loop.is_running_here()
            return await super().ask(*request)

        async def end(self, *patience):
            assert self.loop.is_running_here()
            ended.append(self.loop.native)

    async def start():
        return Piped()

    monkeypatch.setattr(processes._WorkerProcess, "start", start)
    tuner = Tuner(0, 1, isolation="process")

    async def main():
        async with tuner:
            await anyio.to_thread.run_sync(both.wait, 10)
            report = await tuner.tune(tune_of(("slow", "fast"), of_hostile, (1,), {}))
            await anyio.to_thread.run_sync(both.wait, 10)
            assert [type(outcome) for outcome in report.outcomes] == [Measured] * 2

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(lambda backend: anyio.run(main, backend=backend), ("asyncio", "trio")))
    assert len(set(ended)) == 2


@pytest.mark.timeout(60)  # two workers load JAX, one after the other
@pytest.mark.parametrize("real_backend", ["trio"])  # seconds of real spinning, which do not depend on the backend
def test_waiting_for_another_tunes_worker_is_free(real_backend, monkeypatch):
    """Two tunes share a worker: while a candidate of one spins, those of the other wait without timing out."""
    monkeypatch.setattr("asel.tuning.process_measure._MAX_WORKERS", 1)
    reports = {}

    async def main():
        tuner = Tuner(1, 2, isolation="process")

        async def tune_one(name, timeout_s, configs, emit=lambda event: None):
            make = lambda cfg: functools.partial(Hostile().run, cfg=cfg)  # noqa: E731
            state = tune_of(configs, make, (X,), {}, incumbent=0, candidate_timeout_s=timeout_s, emit=emit)
            reports[name] = await tuner.tune(state)

        async with anyio.create_task_group() as tasks:

            def start_the_other(event) -> None:
                if event.name == "candidate_start" and event.index == 2:
                    # Longer than a busy machine takes to start a worker, and shorter than the other's candidate spins.
                    tasks.start_soon(tune_one, "patient", 3.5, ("slow", "print", "fast"))

            await tune_one("hung", 5.0, ("slow", "spin while running", "fast"), start_the_other)

    anyio.run(main, backend=real_backend)
    assert [type(o) for o in reports["patient"].outcomes] == [Measured] * 3, reports["patient"].outcomes
    assert reports["patient"].seconds > 3.5, "it waited for longer than a candidate may take"
    assert [type(o) for o in reports["hung"].outcomes] == [Measured, Failed, Measured]


@pytest.mark.parametrize("real_backend", ["asyncio"])
def test_compiling_in_another_worker_is_a_step_like_any_other(real_backend, monkeypatch, tmp_path):
    """A candidate that hangs while it is compiled in another worker times out, and the tune is charged for it."""
    monkeypatch.setenv("ASEL_TEST_MARKER", str(tmp_path / "compiled once"))
    configs = ("slow", "exit while running", "spin when compiled again", "fast")
    make = lambda cfg: functools.partial(Hostile().run, cfg=cfg)  # noqa: E731
    state = tune_of(configs, make, (X,), {}, incumbent=0, candidate_timeout_s=1.5)
    report = anyio.run(Tuner(1, 2, isolation="process").tune, state, backend=real_backend)
    assert [type(o) for o in report.outcomes] == [Measured, Failed, Failed, Measured]
    assert report.outcomes[2] == Failed(configs[2], "measure", "TimeoutError", "took longer than 1.5 s")
    assert state.budget.spent_s > 1.5


@pytest.mark.parametrize("real_backend", ["trio"])
def test_a_warm_candidate_is_warmed_up_in_another_worker(real_backend):
    """The first run in a process is not measured, also in a second process: the candidate is run once before."""
    state = tune_of(("a",), slow_start_of, (X,), {})

    class Interrupted(Exhaustive):
        def plan(self, board):
            for step in super().plan(board):
                if board.measured and not scope.cancel_called:
                    scope.cancel()
                yield step

    async def main():
        nonlocal scope
        tuner = Tuner(isolation="process", strategy=Interrupted())
        with anyio.CancelScope() as scope:
            await tuner.tune(state)
        assert workers() == []
        assert len(state.board.samples[0]) == 1
        return await tuner.tune(state)

    scope = None
    report = anyio.run(main, backend=real_backend)
    assert len(report.best.samples_s) == 3
    assert max(report.best.samples_s) < 0.1


def test_a_worker_that_says_hello_has_jax_and_its_devices():
    """Importing JAX is part of starting a worker, and not of a candidate's timeout."""
    code = (
        "import sys; from asel.tuning.worker import _RequestHandler\n"
        "assert 'jax' not in sys.modules\n"
        "_RequestHandler().answer(('hello', 0, 0, [], []), [])\n"
        "import jax._src.xla_bridge as bridge\n"
        "assert bridge.backends_are_initialized() and 'asel.tuning.jax_measure' in sys.modules\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize("real_backend", ["asyncio"])
def test_arguments_are_packed_off_the_loop(real_backend, monkeypatch):
    """Pickling large arguments takes long, and must not block the loop."""
    threads, packed = [], processes._packed

    def watched(trial):
        threads.append(threading.current_thread())
        return packed(trial)

    monkeypatch.setattr(processes, "_packed", watched)
    large = jnp.arange(1 << 12, dtype=jnp.float32)
    report = tune(real_backend, hostile(), large, tuner=Tuner(1, 2, isolation="process", check=True))
    assert report.winner == "fast"
    assert len(threads) == 2
    assert threading.main_thread() not in threads


_PROGRAM = """
import anyio, jax.numpy as jnp
from asel import Tuner, TuningError
from support.hostile import of_config
from support.near_workers import Near, Scripted
from support.tunes import tune_of

print("the program runs", flush=True)

class Here:
    def __init__(self, cfg):
        self.cfg = cfg
    def __call__(self, x):
        return x * self.cfg

async def main():
    async with Tuner(1, 1, isolation="process") as tuner:
        print(await tuner.autotune(of_config, (jnp.ones(8),), {}, [1, 2000]))
        try:
            await tuner.autotune(Here, (jnp.ones(8),), {}, [1, 2])
        except TuningError as error:
            print(error.outcomes[0].message)

anyio.run(main)
"""


def test_a_worker_never_runs_the_program_itself(tmp_path):
    """A script without a `__main__` guard is not run again, and kernels that it defines are refused."""
    script = tmp_path / "program.py"
    script.write_text(_PROGRAM)
    path = {**os.environ, "PYTHONPATH": str(TESTS)}
    ran = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False, env=path)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines()[:2] == ["the program runs", "1"]
    assert ran.stdout.count("the program runs") == 1
    assert "defined in __main__, which a worker does not run" in ran.stdout


def of_hostile(cfg):
    return functools.partial(Hostile().run, cfg=cfg)
