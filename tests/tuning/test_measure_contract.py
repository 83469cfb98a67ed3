"""The contract of every measure that tuners rely on. In real time, with real threads."""

from __future__ import annotations

import math
import threading
from functools import partial

import anyio
import jax
import jax.numpy as jnp
import pytest
from support.tunes import kinds, tune_among

from asel import (
    Failed,
    Measured,
    Tuner,
)
from asel.testing import ScriptedMeasure
from asel.tuning.jax_measure import JaxMeasure
from asel.tuning.measure import Trial


class ScriptedRig:
    """The scripted measure, with a script of each candidate's behaviour."""

    def __init__(self) -> None:
        self.measure = ScriptedMeasure(
            0.0,
            compile_s=lambda cfg: math.inf if cfg == "slow compile" else 0.0,
            compile_errors={"bad compile": LookupError("no such tile")},
            run_errors={"bad run": LookupError("no such tile")},
            hangs={"slow run"},
        )

    def trial(self, cfg: str) -> Trial:
        return Trial(cfg, print, (), {})

    def close(self) -> None:
        pass


class JaxRig:
    """The JAX measure, with candidates of the same behaviour."""

    def __init__(self) -> None:
        self.measure = JaxMeasure()
        self._gate = threading.Event()

    def trial(self, cfg: str) -> Trial:
        return Trial(cfg, partial(self._run, cfg), (jnp.ones(3),), {})

    def _run(self, cfg: str, x):
        if cfg == "bad compile":
            raise LookupError("no such tile")
        if cfg == "slow compile":
            assert self._gate.wait(10)
        if cfg.endswith("run"):
            return jax.pure_callback(partial(self._called, cfg), x, x)
        return x + 1

    def _called(self, cfg: str, x):
        if cfg == "bad run":
            raise LookupError("no such tile")
        assert self._gate.wait(10)
        return x

    def close(self) -> None:
        self._gate.set()


@pytest.fixture(params=[ScriptedRig, JaxRig])
def rig(request):
    rig = request.param()
    yield rig
    rig.close()


def test_contract_a_sampler_returns_seconds_each_time_it_is_called(rig, real_backend):
    """Compiling gives a function that may be called again and again, each time for one duration."""

    async def main():
        sample = await rig.measure.compile(rig.trial("good"))
        return [await sample() for _ in range(3)]

    samples = anyio.run(main, backend=real_backend)
    assert all(isinstance(seconds, float) and 0 <= seconds < math.inf for seconds in samples)


def test_contract_an_error_is_raised_at_its_stage(rig, real_backend):
    """A candidate that cannot be compiled raises from `compile`; one that cannot run raises from its sampler."""

    async def main():
        with pytest.raises(LookupError, match="no such tile"):
            await rig.measure.compile(rig.trial("bad compile"))
        sample = await rig.measure.compile(rig.trial("bad run"))
        with pytest.raises(Exception, match="no such tile"):
            await sample()

    anyio.run(main, backend=real_backend)


@pytest.mark.parametrize("stage", ["compile", "run"])
def test_contract_every_step_can_be_cancelled(rig, stage, real_backend):
    """Cancelling a step returns at once, however long the candidate would take."""

    async def main():
        step = partial(rig.measure.compile, rig.trial(f"slow {stage}"))
        if stage == "run":
            step = await step()
        with anyio.move_on_after(0) as scope:
            await step()
        return scope.cancelled_caught

    assert anyio.run(main, backend=real_backend)


def test_contract_a_tuner_reports_the_same_outcomes(rig, real_backend):
    """With every measure, the same behaviour becomes the same kind of outcome."""

    async def main():
        cfgs = ("good", "bad compile", "bad run")
        state = tune_among(*cfgs, make_fn=lambda cfg: rig.trial(cfg).fn, args=rig.trial("good").args)
        return await Tuner(warmup=0, iters=1, measure=rig.measure).tune(state)

    report = anyio.run(main, backend=real_backend)
    assert report.winner == "good"
    assert kinds(report.outcomes) == [Measured, Failed, Failed]
    assert [failed.stage for failed in report.outcomes[1:]] == ["compile", "measure"]
