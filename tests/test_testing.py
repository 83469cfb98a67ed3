"""The tools for our users' tests, checked against the real thing."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import anyio
import anyio.to_thread
import pytest
from support.kernels import BEST, Toy, call
from support.tunes import tune_of

from asel import ConfigCache, ConfigSelectorChain, InvalidRequestError, Tuner, TuningError, device_fingerprint
from asel.testing import FakeDevice, RecordingSink, ReplayMeasure, ScriptedMeasure, run_in_virtual_time, virtual_backend
from asel.tuning.measure import Trial

BACKENDS = ["asyncio", "trio"]


@pytest.mark.anyio
async def test_an_hour_passes_at_once():
    """Virtual time jumps where real time would sleep."""
    real, virtual = time.monotonic(), anyio.current_time()
    await anyio.sleep(3600)
    assert anyio.current_time() - virtual == pytest.approx(3600)
    assert time.monotonic() - real < 5


@pytest.mark.anyio
async def test_time_stands_still_while_tasks_run():
    """Computing takes no virtual time, so what a test measures is exact."""
    before = anyio.current_time()
    for _ in range(100):
        await anyio.lowlevel.checkpoint()
    assert anyio.current_time() == before


async def _story() -> list[tuple[str, float]]:
    """Sleeps, timeouts and wake-ups in an order that depends on nothing but the clock."""
    told, start = [], anyio.current_time()

    def tell(what):
        told.append((what, round(anyio.current_time() - start, 3)))

    async def sleeper(name, seconds):
        await anyio.sleep(seconds)
        tell(name)

    async with anyio.create_task_group() as tasks:
        for name, seconds in (("c", 0.3), ("a", 0.1), ("b", 0.2)):
            tasks.start_soon(sleeper, name, seconds)
        with anyio.move_on_after(0.15):
            await anyio.sleep_forever()
        tell("timeout")
    return told


@pytest.mark.parametrize("backend", BACKENDS)
def test_virtual_and_real_time_give_the_same_events(backend):
    """The fake is verified against the real thing: same events, same order, same moments within the machine's noise."""
    virtual = run_in_virtual_time(_story, backend=backend)
    real = anyio.run(_story, backend=backend)
    assert virtual == [("a", 0.1), ("timeout", 0.15), ("b", 0.2), ("c", 0.3)]
    assert [what for what, _ in real] == [what for what, _ in virtual]
    for (_, expected), (_, measured) in zip(virtual, real, strict=True):
        assert expected <= measured + 0.01 < expected + 5


@pytest.mark.parametrize("backend", BACKENDS)
def test_threads_still_report_to_a_loop_in_virtual_time(backend):
    """If no task sleeps the loop really waits for a thread's result."""
    gate = threading.Event()

    async def main():
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(anyio.to_thread.run_sync, gate.wait)
            gate.set()
        return "done"

    assert run_in_virtual_time(main, backend=backend) == "done"


def test_an_unknown_backend_is_refused():
    """The error lists the valid names."""
    with pytest.raises(InvalidRequestError, match="'asyncio' and 'trio'"):
        virtual_backend("curio")


@pytest.mark.anyio
async def test_a_scripted_measure_follows_its_script():
    """Costs, compile times, failures and hangs follow the script, and requests are recorded."""
    measure = ScriptedMeasure(
        {1: 0.5, 2: 0.25, 3: 1.0, 4: 1.0, 5: 1.0},
        compile_s=2.0,
        compile_errors={3: ValueError("no")},
        run_errors=lambda cfg: KeyError("never") if cfg == 4 else None,
        hangs=[5],
    )
    tuner, start = Tuner(0, 2, measure=measure, strategy="exhaustive"), anyio.current_time()
    assert await tuner.autotune(lambda cfg: None, (), {}, [1, 2, 3, 4, 5]) == 2
    assert measure.compiled == [1, 2, 3, 4, 5]
    assert measure.sampled == [1, 1, 2, 2, 4, 5]
    assert anyio.current_time() - start == pytest.approx(5 * 2.0 + 2 * 0.5 + 2 * 0.25 + 30.0)


@pytest.mark.anyio
async def test_a_fake_device_is_keyed_and_tuned_for_like_a_real_one():
    """Calls with arguments on other hardware have their own keys, and use that platform's variants."""

    class ForGpu(Toy):
        def heuristic_cfg_gpu(self, inv):
            return BEST

    sink = RecordingSink()
    chain = ConfigSelectorChain(ConfigCache(), sinks=[sink])
    b200, v5e = FakeDevice("NVIDIA B200"), FakeDevice("TPU v5e", platform="tpu")
    kernel = ForGpu()
    on_gpu, on_tpu = (chain.choose_nowait(call(8, device), kernel) for device in (b200, v5e))
    assert (on_gpu.m, on_tpu.m) == (3, 1)
    assert [event.device for event in sink.events] == [device_fingerprint(b200), device_fingerprint(v5e)]
    assert device_fingerprint(b200) == "NVIDIA B200|fake"


def test_importing_asel_and_its_testing_tools_does_not_import_jax():
    """JAX is imported on first use."""
    code = "import sys, asel, asel.testing, asel.cli; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.anyio
@pytest.mark.parametrize("strategy", ["race", "exhaustive"])
async def test_recorded_timings_can_be_replayed(strategy):
    """Strategies are compared on recorded timings, without a device and at once."""
    measure = ReplayMeasure({"a": [0.3, 0.31], "b": [0.1, 0.11], "c": [5.0, 5.1]}, seed=1)
    report = await Tuner(1, 3, measure=measure, strategy=strategy).tune(
        tune_of(("a", "b", "c"), lambda cfg: None, (), {})
    )
    assert report.winner == "b"
    assert report.seconds == 0
    assert measure.simulated_s > 5.0
    again = ReplayMeasure(report)
    assert await Tuner(1, 3, measure=again).autotune(lambda cfg: None, (), {}, ["a", "b", "c"]) == "b"
    with pytest.raises(TuningError, match="nothing was recorded of 'd'"):
        await Tuner(measure=again).autotune(lambda cfg: None, (), {}, ["d"])


@pytest.mark.anyio
async def test_a_replay_begins_at_the_same_round_for_all():
    """A recorded round is replayed as a round, so that strategies can compare within it."""
    timings = {"a": [1.0, 2.0, 3.0], "b": [10.0, 20.0, 30.0]}
    for seed in range(5):
        measure = ReplayMeasure(timings, seed)
        a, b = [await measure.compile(Trial(cfg, None, (), {})) for cfg in timings]
        samples = [(await a(), await b()) for _ in range(4)]
        assert all(second == 10 * first for first, second in samples)
        assert sorted(samples[:3]) == [(1.0, 10.0), (2.0, 20.0), (3.0, 30.0)]
        assert samples[3] == samples[0]


@pytest.mark.anyio
async def test_a_report_on_configs_that_cannot_be_hashed_can_be_replayed():
    """Configs may be dicts here, too."""
    configs = [{"m": 1}, {"m": 2}]
    first = ScriptedMeasure(lambda cfg: cfg["m"] / 10)
    report = await Tuner(measure=first).tune(tune_of(tuple(configs), lambda cfg: None, (), {}))
    again = ReplayMeasure(report)
    assert await Tuner(measure=again).autotune(lambda cfg: None, (), {}, configs) == {"m": 1}
